"""Losses of papers that are policies of pairs, transcribed in float64; autograd gives their gradients.

``s`` is the matrix of similarities of anchors and candidates, with the positives on its diagonal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """All similarities of the rows of two matrices."""
    return torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T


def split(s: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal, and the other entries of each row."""
    n = len(s)
    return s.diagonal(), s[~torch.eye(n, s.shape[1], dtype=torch.bool)].view(n, -1)


def debiased(s: Tensor, tau: float, prior: float) -> Tensor:
    """Chuang et al., 2020, eq. 8 with M = 1, as in the authors' code (main.py, criterion)."""
    own, others = split(s)
    pos, neg, count = torch.exp(own / tau), torch.exp(others / tau).sum(1), others.shape[1]
    ng = (-prior * count * pos + neg) / (1 - prior)
    ng = torch.clamp(ng, min=count * math.e ** (-1 / tau))
    return (-torch.log(pos / (pos + ng))).mean()


def hard(s: Tensor, tau: float, prior: float, beta: float) -> Tensor:
    """Robinson et al., 2021, as in the authors' code: estimator "hard", with the gradient through the weights."""
    own, others = split(s)
    pos, neg, count = torch.exp(own / tau), torch.exp(others / tau), others.shape[1]
    imp = (beta * neg.log()).exp()
    reweighted = (imp * neg).sum(1) / imp.mean(1)
    ng = (-prior * count * pos + reweighted) / (1 - prior)
    ng = torch.clamp(ng, min=count * math.e ** (-1 / tau))
    return (-torch.log(pos / (pos + ng))).mean()


def hardness_weighted(s: Tensor, tau: float, alpha: float) -> Tensor:
    """Lan et al. (LLaVE), 2025, eq. 5: negatives' logits grow by alpha stop(s)."""
    own, others = split(s)
    logits = others / tau + alpha * others.detach()
    return -(own / tau - torch.cat([own[:, None] / tau, logits], 1).logsumexp(1)).mean()


def false_negatives_masked(s: Tensor, seen: Tensor, tau: float, margin: float, more: Tensor | None = None) -> Tensor:
    """Solatorio (GISTEmbed), 2024, and Qwen3 Embedding, 2025, eq. 1: similarities above the positive's are left out.

    ``more``: pairs of further similarities and what is seen of them, ``(2, B, M)``.
    """
    limit = seen.diagonal()[:, None] + margin
    found = (seen > limit) & ~torch.eye(len(s), dtype=torch.bool)
    columns = [s.masked_fill(found, -torch.inf)]
    if more is not None:
        columns.append(more[0].masked_fill(more[1] > limit, -torch.inf))
    scores = torch.cat(columns, dim=1) / tau
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(s)))


def supervised(features: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Khosla et al. (SupCon), 2020, eq. 2: the sum over positives outside of the logarithm; all rows are anchors."""
    s = cosines(features, features) / tau
    itself = torch.eye(len(s), dtype=torch.bool)
    log_prob = s - s.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels) & ~itself
    return -((log_prob * positive).sum(1) / positive.sum(1)).mean()


def supervised_inside(features: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Eq. 3 of the same: the mean over positives inside of the logarithm."""
    s = cosines(features, features) / tau
    itself = torch.eye(len(s), dtype=torch.bool)
    log_prob = s - s.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels) & ~itself
    return -(log_prob.masked_fill(~positive, -torch.inf).logsumexp(1) - positive.sum(1).double().log()).mean()


def soft_targets(s: Tensor, weights: Tensor, tau: float) -> Tensor:
    """Cross-entropy of candidates against soft targets, whose rows sum to one."""
    return torch.nn.functional.cross_entropy(s / tau, weights)


def expected(
    anchors: Tensor,
    candidates: Tensor,
    weights: Tensor,
    tau: float,
    extra: Tensor | None = None,
    barred: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of each anchor against weights of its candidates, ``(P,)``; further candidates have the weight 0.

    Args:
        anchors: unit features, ``(P, d)``.
        candidates: the same, ``(Q, d)``.
        weights: ``(P, Q)``, of any sum per anchor; NaN where there is no pair.
        extra: further candidates, ``(M, d)``.
        barred: which of them an anchor does not have, ``(P, M)``.
    """
    none = weights.isnan()
    s, t = (anchors @ candidates.T / tau).masked_fill(none, -torch.inf), weights.masked_fill(none, 0)
    t = t / t.sum(1, keepdim=True)
    every = [s]
    if extra is not None:
        every.append((anchors @ extra.T / tau).masked_fill(barred, -torch.inf))
    return torch.cat(every, 1).logsumexp(1) - (t * s.masked_fill(none, 0)).sum(1)
