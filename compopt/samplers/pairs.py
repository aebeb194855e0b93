r"""Losses of batches and weights of pairs of samples: the equations behind the choice of batches.

With ``s_kl = <z1_k, z2_l>`` of L2-normalised features, the loss of a batch ``I`` of ``B`` samples is that of InfoNCE in
both directions; by Jensen's inequality it is at least a sum over the pairs of the batch:

.. math::
    L(I) = \frac1{2B} \sum_{k \in I} \log\bigl(1 + \textstyle\sum_{l \ne k} e^{(s_{kl} - s_{kk})/\tau}\bigr)
                                   + \log\bigl(1 + \sum_{l \ne k} e^{(s_{lk} - s_{kk})/\tau}\bigr)
         \ge \frac1{2B(B-1)} \sum_{k < l \in I} w_{kl}, \qquad w_{kl} = c_{kl} + c_{lk},

    c_{kl} = \log\bigl(1 + (B-1) e^{(s_{kl} - s_{kk})/\tau}\bigr) + \log\bigl(1 + (B-1) e^{(s_{lk} - s_{kk})/\tau}\bigr)

(Cho et al., Mini-Batch Optimization of Contrastive Loss, eq. 2 and 5, appendix C.1; the paper's loss is twice ``L``).
Samples with equal labels are not each other's negatives: such a pair adds nothing to either side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def batch_losses(
    z1: Tensor, z2: Tensor, tau: float, labels: Tensor | None = None, absent: Tensor | None = None
) -> Tensor:
    """Losses ``L`` of many batches, in nats: ``(k,)``.

    Args:
        z1, z2: normalised features, ``(k, B, d)``.
        tau: temperature.
        labels: ``(k, B)``; equal ones within a batch are no negatives.
        absent: ``(k, B)``; samples that are neither anchors nor negatives. A batch of such alone has loss 0.
    """
    s = z1 @ z2.mT  # (k, B, B)
    own = s.diagonal(dim1=1, dim2=2)
    if labels is not None:
        s = s.masked_fill(_twins(labels), -math.inf)
    if absent is not None:
        pairs = absent[:, :, None] | absent[:, None, :]
        s = s.masked_fill(pairs & ~torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device), -math.inf)
    rows = torch.logsumexp((s - own[:, :, None]) / tau, dim=2)  # anchors z1; the positive is the 1 in the logarithm
    columns = torch.logsumexp((s - own[:, None, :]) / tau, dim=1)
    if absent is None:
        return (rows + columns).mean(1) / 2
    return (rows + columns).sum(1) / (~absent).sum(1).clamp(min=1) / 2  # an absent sample's own terms are log 1


def edge_weights(z1: Tensor, z2: Tensor, tau: float, batch_size: int, labels: Tensor | None = None) -> Tensor:
    """Edge weights ``w``: ``(m, m)``, symmetric, with a diagonal of 0.

    Args:
        z1, z2: normalised features, ``(m, d)``.
        tau: temperature.
        batch_size: ``B >= 2``.
        labels: ``(m,)``; ``w_kl = 0`` where they are equal.
    """
    s = z1 @ z2.T
    own, others = s.diagonal()[:, None], math.log(batch_size - 1)
    zero = s.new_zeros(())
    c = torch.logaddexp((s - own) / tau + others, zero)  # anchor z1_k, candidate z2_l
    c += torch.logaddexp((s.T - own) / tau + others, zero)  # anchor z2_k, candidate z1_l
    if labels is not None:
        c.masked_fill_(_twins(labels), 0.0)
    return (c + c.T).fill_diagonal_(0.0)


def normalized_affinity(weights: Tensor) -> Tensor:
    r"""``D^{-1/2} A D^{-1/2}`` with the affinity ``A = exp(w)`` off the diagonal and ``D`` its row sums: ``(m, m)``.

    Everything stays in the log domain: ``exp(w)`` leaves float32 at small temperatures, while the entries of the
    result are at most 1 and those of isolated samples do not vanish.

    References:
        Ng, Jordan and Weiss, On Spectral Clustering, NeurIPS 2001, steps 1 and 2.
    """
    log_a = weights.clone().fill_diagonal_(-math.inf)
    half = torch.logsumexp(log_a, dim=1) / 2
    return torch.exp(log_a - half[:, None] - half)


def _twins(labels: Tensor) -> Tensor:
    """True where two different samples have one label, ``(..., B, B)``."""
    equal = labels[..., :, None] == labels[..., None, :]
    return equal & ~torch.eye(labels.shape[-1], dtype=torch.bool, device=labels.device)
