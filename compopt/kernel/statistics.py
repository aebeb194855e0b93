"""What the estimators know of a batch: a few numbers per anchor, wherever its pairs were computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.kernel.log_sum_exp import OnlineLogSumExp

# Stands for "not a pair" among similarities. Finite, so that 0 * MASKED is 0 and not NaN; far below any s / tau.
MASKED = -1e30
# Above this 1/tau, exp(s/tau) of a unit-norm pair nears the range of float32 and a maximum must be subtracted.
MAX_UNSHIFTED_SCALE = 40.0


class PairStatistics(ABC):
    """Statistics of all anchors of the (global) batch, ``(B, A)`` each, a column per direction that has anchors.

    Attributes:
        directions: ``A``: 2 (both modalities or views are anchors), or 1 (``z1`` alone is).
        keys: int64 tensors ``(B,)``; two samples equal in any of them are not each other's negatives. The first
            is the data-set index.
        distinct: known on the host: an anchor's own sample is the only candidate that is no negative of it.
        negatives: the least ``|N_i|``, where the host knows it; else ``None``.
        positive: ``s_ii``.
        count: ``|N_i|`` as float; 0 where an anchor has no negatives.
        log_count: ``log |N_i|`` (of 1 where there are none).
        log_sum: ``log sum_{j in N_i} exp(h_ij / tau_i)``; 0 where there are none.
        mean_h: mean of ``h_ij`` under the batch softmax, or ``None``.
        sides: running sums of the anchors that this process swept.
    """

    directions: int
    keys: Sequence[Tensor]
    distinct: bool
    unimodal: bool
    negatives: int | None
    positive: Tensor
    count: Tensor
    log_count: Tensor
    log_sum: Tensor
    mean_h: Tensor | None
    sides: list[OnlineLogSumExp]

    @abstractmethod
    def gradients(
        self, alpha: Tensor, coefficient: Tensor, positive_weight: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        r"""``sum over directions, anchors i of coefficient_i (sum_j w_ij grad s_ij - p_i grad s_ii)``, weights held.

        Consumes what the sweep kept: call it once.

        Args:
            alpha: log-normalizers, ``(B, A)``.
            coefficient: factor of each anchor, broadcastable to ``(B, A)``.
            positive_weight: ``p_i``, the weight of each anchor's positive, ``(B, A)``; ``None``: ``sum_j w_ij``.

        Returns:
            Gradients with respect to this process's ``z1`` and ``z2``, and to its further candidates if there are any.
        """

    @abstractmethod
    def release(self) -> None:
        """Give back what only :meth:`gradients` needs, where somebody else gives the gradients."""

    @property
    def log_ghat(self) -> Tensor:
        """``log ghat_i``, the batch estimate of the inner function, ``(B, A)``."""
        return self.log_sum - self.log_count

    def sum_weights(self, alpha: Tensor) -> Tensor:
        """``sum_j w_ij``, ``(B, A)``."""
        return self.real((self.log_ghat - alpha).exp())

    def pull(self, alpha: Tensor, coefficient: Tensor, positive_weight: Tensor | None) -> Tensor:
        """What pulls the two sides of each positive together, over the anchors of all directions, ``(B, 1)``."""
        weight = self.sum_weights(alpha) if positive_weight is None else positive_weight
        return (coefficient * weight).sum(1, keepdim=True)

    def real(self, per_anchor: Tensor) -> Tensor:
        """Zero for anchors without negatives, which labels and index2 can leave."""
        return per_anchor if self.distinct else torch.where(self.count > 0, per_anchor, 0)

    def _count_negatives(self, candidates: Sequence[int], excluded: Tensor | None, like: Tensor, batch: int) -> None:
        """Fill ``count`` and ``log_count`` from candidates by direction, and those excluded, ``(B, A)``."""
        if excluded is None:
            own = 2 if self.unimodal else 1
            self.negatives = min(candidates) - own
            self.count = _by_direction([number - own for number in candidates], like).expand(batch, len(candidates))
        else:
            self.negatives, self.count = None, _by_direction(candidates, like) - excluded
        self.log_count = self.count.clamp(min=1).log()


def _by_direction(numbers: Sequence[int], like: Tensor) -> Tensor:
    """One value, or one per direction; made on the device, which a copy would wait for."""
    values = [like.new_full((), float(number)) for number in numbers]
    return values[0] if len(set(numbers)) == 1 else torch.stack(values)


def is_uniform(tau: float | Tensor, bounded: bool, moments: bool) -> bool:
    """Whether one exponential without any shift serves the anchors of both directions."""
    return isinstance(tau, float) and bounded and 1 / tau <= MAX_UNSHIFTED_SCALE and not moments


def scale_of(tau: float | Tensor, like: Tensor, batch: int, directions: int = 2) -> Tensor:
    """``1 / tau`` of every anchor, ``(B, A)``."""
    if isinstance(tau, float):
        return like.new_full((1, 1), 1 / tau).expand(batch, directions)
    return tau.to(like.dtype).reciprocal().expand(batch, directions)


def same_sample(rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """Where any of the keys of a row equals that of a column: not a pair of anchor and negative."""
    same: Tensor | None = None
    for row, column in zip(rows, columns, strict=True):
        equal = row[:, None] == column[None, :]
        same = equal if same is None else same.logical_or_(equal)
    assert same is not None
    return same


@dataclass(frozen=True)
class Extra:
    """Further candidates of the anchors of direction 1, beside the batch's features.

    Attributes:
        features: ``(M, d)``, no graph; of this process.
        everyone: those of all ranks, in the order of the ranks; with one process the same.
        positive: positions of the anchors' own positives, ``(B,)``, of all ranks.
        positions: of ``everyone``, in the second modality, ``(M,)`` int64; ``None``: none of them is a positive.
        own: where this process's are among all.
    """

    features: Tensor
    everyone: Tensor
    positive: Tensor
    positions: Tensor | None
    own: slice

    def same(self, anchors: slice, candidates: slice = slice(None)) -> Tensor:
        """Which of the candidates are positives of which anchors, ``(anchors, candidates)``."""
        positive = self.positive[anchors, None]
        if self.positions is None:
            return torch.zeros(len(positive), len(self.everyone[candidates]), dtype=torch.bool, device=positive.device)
        return positive == self.positions[None, candidates]
