"""Sums of exponentials over blocks of a similarity matrix, for row anchors and column anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Stands for "not a pair" among similarities. Finite, so that 0 * MASKED is 0 and not NaN; far below any s / tau.
MASKED = -1e30


class Exponentials(NamedTuple):
    """One block of ``exp((s_ij - shift_i) / tau_i)`` seen by the anchors of one side (matrix rows or columns).

    ``dot`` is the sum of ``s_ij exp(...)`` over the block's candidates, or ``None``.
    """

    exp: Tensor
    shift: Tensor | None
    dot: Tensor | None


class Block(NamedTuple):
    """Matrix rows ``start`` to ``stop``; ``columns`` is ``None`` where columns are no anchors (unimodal)."""

    start: int
    stop: int
    rows: Exponentials
    columns: Exponentials | None


# Anchors per side over which the effective number of negatives is measured.
SPREAD_ANCHORS = 128


class Sums(NamedTuple):
    """Sums of ``exp((s_ij - shift_i) / tau_i)`` over the candidates of some anchors.

    Attributes:
        total: the sum, ``(P,)``.
        norms: ``sqrt(sum exp^2)`` of the first anchors only: for a metric, not worth a full sweep.
        shift, dot: as of :class:`Exponentials`.
    """

    total: Tensor
    norms: Tensor
    shift: Tensor | None
    dot: Tensor | None

    @classmethod
    def over(cls, side: Exponentials, dim: int, start: int = 0) -> Sums:
        """Over one axis of a block, whose first anchor has the number ``start``."""
        spread = min(max(0, SPREAD_ANCHORS - start), side.exp.shape[1 - dim])
        norms = torch.linalg.vector_norm(side.exp.narrow(1 - dim, 0, spread), dim=dim)
        return cls(side.exp.sum(dim), norms, side.shift, side.dot)

    def merged(self, more: Sums, scale: Tensor | float) -> Sums:
        """The same anchors have met some more candidates, against a maximum that may have grown."""
        total, norms, dot = self.total, self.norms, self.dot
        if self.shift is not None and more.shift is not None:
            shrink = (self.shift - more.shift).mul_(scale).exp_()
            total, norms = total * shrink, norms * shrink[:SPREAD_ANCHORS]
            dot = None if dot is None else dot * shrink
        dot = None if dot is None or more.dot is None else dot + more.dot
        return Sums(total + more.total, torch.hypot(norms, more.norms), more.shift, dot)

    def log_total(self, scale: Tensor | float) -> Tensor:
        """``log sum_j exp(s_ij / tau_i)``."""
        log_total = self.total.log()
        return log_total if self.shift is None else log_total + self.shift * scale

    def effective(self) -> Tensor:
        """``(sum w)^2 / sum w^2`` of the first anchors; NaN of those without candidates."""
        first = slice(len(self.norms))
        number = (self.total[first] / self.norms).square()
        return number if self.shift is None else number.masked_fill(self.shift[first] <= MASKED, torch.nan)


def joined(parts: Sequence[Sums]) -> Sums:
    """Sums of different anchors, in their order."""
    if len(parts) == 1:
        return parts[0]
    total, norms, shift, dot = zip(*parts, strict=True)
    return Sums(
        torch.cat(total),
        torch.cat(norms),
        None if shift[0] is None else torch.cat(shift),
        None if dot[0] is None else torch.cat(dot),
    )
