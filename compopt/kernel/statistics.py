"""What the estimators know of a batch: a few numbers per anchor, wherever its pairs were computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compopt.functional import Scalar, log
from compopt.kernel.log_sum_exp import Sums

# Above this 1/tau, exp(s/tau) of a unit-norm pair nears the range of float32 and a maximum must be subtracted.
MAX_UNSHIFTED_SCALE = 40.0


class PairStatistics(ABC):
    """Statistics of all anchors of the (global) batch, ``(B, A)`` each, a column per direction that has anchors.

    Attributes:
        directions: ``A``: 2 (both modalities or views are anchors), or 1 (``z1`` alone is).
        keys: int64 tensors ``(B,)``; two samples equal in any of them are not each other's negatives. The first
            is the data-set index.
        distinct: known on the host: an anchor's own sample is the only candidate that is no negative of it.
        negatives: the least ``|N_i|`` where only an anchor's own sample is excluded; keys may leave fewer.
        positive: ``s_ii``.
        count: ``|N_i|`` as float; 0 where an anchor has no negatives. A number where it is one for all, known on the
            host.
        log_count: ``log |N_i|`` (of 1 where there are none).
        log_sum: ``log sum_{j in N_i} exp(h_ij / tau_i)``; 0 where there are none.
        mean_h: mean of ``h_ij`` under the batch softmax, or ``None``.
        sides: sums of the anchors that this process swept.
    """

    directions: int
    keys: Sequence[Tensor]
    distinct: bool
    unimodal: bool
    negatives: int
    positive: Tensor
    count: Scalar
    log_count: Scalar
    log_sum: Tensor
    mean_h: Tensor | None
    sides: list[Sums]

    @abstractmethod
    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        r"""``sum over directions, anchors i of coefficient_i (sum_j w_ij grad s_ij - p_i grad s_ii)``, weights held.

        Consumes what the sweep kept: call it once.

        Args:
            alpha: log-normalizers, ``(B, A)``.
            coefficient: factor of each anchor, a number or broadcastable to ``(B, A)``.
            positive_weight: ``p_i``, the weight of each anchor's positive, the same.

        Returns:
            Gradients with respect to this process's ``z1`` and ``z2``, ``(2, b, d)``, and to its further candidates,
            ``(M, d)``, if there are any.
        """

    @abstractmethod
    def release(self) -> None:
        """Give back what only :meth:`gradients` needs: it does so itself, unless somebody else gives the gradients."""

    @cached_property
    def log_ghat(self) -> Tensor:
        """``log ghat_i``, the batch estimate of the inner function, ``(B, A)``."""
        return self.log_sum - self.log_count

    def sum_weights(self, alpha: Tensor) -> Tensor:
        """``sum_j w_ij``, ``(B, A)``."""
        return self.real((self.log_ghat - alpha).exp())

    def real(self, per_anchor: Tensor) -> Tensor:
        """Zero for anchors without negatives, which labels and index2 can leave."""
        if isinstance(self.count, float):
            return per_anchor
        return torch.where(self.count > 0, per_anchor, 0)

    def factor(self, value: Scalar) -> Scalar:
        """A factor of each anchor, zero for those without negatives; still a number where there are no such anchors."""
        if isinstance(self.count, float):
            return value
        value = value if isinstance(value, Tensor) else self.positive.new_full((), value)
        return torch.where(self.count > 0, value, 0)

    def of_other_view(self, per_anchor: Tensor) -> Tensor:
        """Unimodal: a view without negatives (further candidates are the other's alone) has what the other has."""
        if isinstance(self.count, float):
            return per_anchor
        return torch.where(self.count > 0, per_anchor, per_anchor.flip(1))

    @property
    def divisor(self) -> Scalar:
        """``|N_i|`` of a mean over negatives, 1 where there are none."""
        return max(1.0, self.count) if isinstance(self.count, float) else self.count.clamp(min=1)

    def _count_negatives(self, candidates: Sequence[int], excluded: Tensor | None, like: Tensor) -> None:
        """Fill ``count`` and ``log_count`` from candidates by direction, and those excluded, ``(B, A)``."""
        own = 2 if self.unimodal else 1
        self.negatives = min(candidates) - own
        numbers = [number - (own if excluded is None else 0) for number in candidates]
        count: Scalar = float(numbers[0])
        if len(set(numbers)) > 1:  # made on the device, which a copy would wait for
            count = torch.stack([like.new_full((), float(number)) for number in numbers]).expand_as(like)
        self.count = count if excluded is None else count - excluded
        self.log_count = log(self.divisor)


def is_uniform(tau: float | Tensor, bounded: bool, moments: bool) -> bool:
    """Whether one exponential without any shift serves the anchors of both directions."""
    return isinstance(tau, float) and bounded and 1 / tau <= MAX_UNSHIFTED_SCALE and not moments


def scale_of(tau: float | Tensor, like: Tensor, batch: int, directions: int = 2) -> float | Tensor:
    """``1 / tau`` of every anchor: a number, or ``(B, A)``."""
    if isinstance(tau, float):
        return 1 / tau
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
