"""Ordered SGD: keep the random batches with the highest loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt.checks import values
from compopt.estimator.options import takes_options
from compopt.samplers.base import BankOptions, BankSampler, same_label_pairs

# Elements in the similarity matrices of one piece of candidates
PIECE = 1 << 20


class OrderedBatchSampler(BankSampler):
    r"""Ordered SGD: select, per epoch, the ``keep`` of ``candidates`` random batches with the highest loss.

    Example:
        >>> import torch, compopt
        >>> sampler = compopt.samplers.OrderedBatchSampler(n=64, batch_size=8, candidates=20, keep=4)
        >>> sampler.observe(torch.arange(64), *torch.randn(2, 64, 16).unbind())
        >>> len(list(sampler)), sampler.metrics["kept_loss"] > sampler.metrics["candidate_loss"]
        (4, True)

    .. math::
        L(I) = \frac1{2B} \sum_{k \in I} \log \sum_{l \in I} e^{(s_{kl} - s_{kk})/\tau}
                                       + \log \sum_{l \in I} e^{(s_{lk} - s_{kk})/\tau}

    with the similarities ``s_kl = <z1_k, z2_l>`` of the bank's features; the paper's loss is twice this. Candidates are
    consecutive blocks of random permutations of the data. Duplicates of a batch are selected only if there are fewer
    than ``keep`` different batches. The order of the selected batches is random.

    *An epoch consists of ``keep`` batches*, not of the whole data set: at most a share ``keep B / n`` of the samples.
    :attr:`coverage` is the share in this epoch and :attr:`total_coverage` that in all epochs so far. Samples that are
    never in a hard batch are trained less, and their features in the bank are old. Until all samples were observed, an
    epoch has ``keep`` random batches, beginning with samples that were not observed. Samples without finite features
    are ignored in the loss of a batch.

    The paper averages the gradients of the ``keep`` batches into one step, whereas a loop over this sampler performs a
    step per batch. For the paper's step, accumulate the gradients of one epoch and divide each loss by ``keep``.

    Cost: ``2 candidates B^2 d`` operations, linear in ``candidates``, and a permutation of n; 0.1 s for 1,500 batches
    of 32 on one core. Memory: the bank, ``4 n d`` bytes in half precision.

    Args:
        n, batch_size, labels: see :class:`~compopt.samplers.BankSampler`.
        candidates: random batches per epoch, ``k``.
        keep: selected batches per epoch, ``q <= k``.
        tau: temperature of the loss.
        seed: seed of the candidates, together with the epoch.
        **options: ``dtype``, ``offload``, ``process_group``, see
            :class:`~compopt.samplers.BankSampler`.

    State, communication, metrics: see :class:`~compopt.samplers.SpectralBatchSampler`; also ``coverage``,
    ``kept_loss`` and ``candidate_loss``, the mean losses of the latest plan's batches and of its candidates in nats.

    Raises:
        ValueError: ``keep`` exceeds ``candidates`` or the number of different batches.
        ValueError, TypeError, RuntimeError: see :class:`~compopt.samplers.BankSampler`, also for warnings.

    References:
        Kawaguchi and Lu, Ordered SGD, AISTATS 2020. Cho et al., Mini-Batch Optimization of Contrastive Loss, section
        5.2, appendix C.3 (B = 32, k = 1500, q = 150).
    """

    @takes_options(BankSampler, BankOptions)
    def __init__(
        self,
        n: int,
        batch_size: int,
        candidates: int = 1500,
        keep: int = 150,
        tau: float = 0.1,
        seed: int = 0,
        labels: Tensor | None = None,
        **options: Unpack[BankOptions],
    ) -> None:
        self.candidates, self.keep = checks.positive_int("candidates", candidates), checks.positive_int("keep", keep)
        if self.keep > self.candidates:
            raise ValueError(f"keep must be at most candidates={candidates}, got {keep}")
        super().__init__(n, batch_size, tau, seed, labels, **options)
        if self.keep > math.comb(self.n, self.batch_size):
            raise ValueError(
                f"keep must be at most the {math.comb(self.n, self.batch_size)} batches of {batch_size} that n={n} "
                f"samples have, got {keep}"
            )
        self._covered = torch.zeros(self.n, dtype=torch.bool, device="cpu")

    def __len__(self) -> int:
        return self.keep

    @property
    def coverage(self) -> float:
        """Share of the samples that are in this epoch's batches; 0 before the first epoch."""
        plan = self._plans.get(self.epoch)
        return 0.0 if plan is None else len(plan.unique()) / self.n

    @property
    def total_coverage(self) -> float:
        """Share of the samples that were in a batch of any epoch so far, including this one."""
        return float(self._covered.double().mean())

    def _begin(self) -> Tensor:
        plan = super()._begin()
        self._covered[plan] = True
        self.metrics["coverage"] = self.coverage
        return plan

    def work(self, epoch: int) -> list[Tensor]:
        """Return the candidates of an epoch in pieces of several batches, ``(k, B)`` data-set positions each."""
        size = max(1, PIECE // (self.batch_size * max(self.batch_size, 128)))
        return list(self.random_batches(self.candidates, epoch).split(size))

    def do(self, piece: Tensor) -> Tensor:
        """Return the losses of the candidates ``(k, B)``, in nats, ``(k,)``."""
        z1, z2, labels = self.read(piece)
        absent = ~self.bank.seen[piece.to(z1.device)]
        return batch_losses(z1, z2, self.tau, labels, absent if bool(absent.any()) else None).cpu()

    def assemble(self, epoch: int, pieces: list[Tensor], results: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        batches, losses = torch.cat(pieces), torch.cat(results)
        chosen = highest(batches, losses, self.keep)
        metrics = {"kept_loss": float(losses[chosen].mean()), "candidate_loss": float(losses.mean())}
        return batches[chosen].flatten(), metrics

    def config(self) -> dict[str, Any]:
        return {"kind": "ordered", **super().config(), "candidates": self.candidates, "keep": self.keep}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "covered": self._covered.clone()}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        super().check_state(state_dict)
        values.entries("state_dict", state_dict, ("covered",))
        values.tensors(type(self).__name__, {"covered": state_dict["covered"]}, {"covered": self._covered})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._covered = state_dict["covered"].to("cpu", copy=True)


def highest(batches: Tensor, losses: Tensor, keep: int) -> Tensor:
    """Return the positions of the ``keep`` batches (k, B) with the highest ``losses`` (k,), ascending.

    A batch is selected twice only if there are fewer than ``keep`` different batches.
    """
    _, first = np.unique(batches.sort(dim=1).values.numpy(), axis=0, return_index=True)
    again = np.ones(len(batches), dtype=bool)
    again[first] = False
    order = np.lexsort((-losses.numpy(), again))  # the last key is the primary one
    return torch.from_numpy(np.sort(order[:keep]))


def batch_losses(
    z1: Tensor, z2: Tensor, tau: float, labels: Tensor | None = None, absent: Tensor | None = None
) -> Tensor:
    """Return the losses ``L`` of batches of normalised features ``(k, B, d)``, in nats, ``(k,)``.

    Samples with equal ``labels`` (k, B) are not each other's negatives. ``absent`` samples (k, B) are neither anchors
    nor negatives; a batch of only absent samples has loss 0.
    """
    s = z1 @ z2.mT  # (k, B, B)
    own = s.diagonal(dim1=1, dim2=2)
    if labels is not None:
        s = s.masked_fill(same_label_pairs(labels), -math.inf)
    if absent is not None:
        pairs = absent[:, :, None] | absent[:, None, :]
        s = s.masked_fill(pairs & ~torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device), -math.inf)
    rows = torch.logsumexp((s - own[:, :, None]) / tau, dim=2)  # anchors z1; the positive contributes exp(0) = 1
    columns = torch.logsumexp((s - own[:, None, :]) / tau, dim=1)
    if absent is None:
        return (rows + columns).mean(1) / 2
    return (rows + columns).sum(1) / (~absent).sum(1).clamp(min=1) / 2  # the terms of absent samples are log 1 = 0
