"""Streaming log-sum-exp over blocks of a similarity matrix, for row anchors and column anchors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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


class OnlineLogSumExp:
    """Sums over candidates for the anchors of one side, against a maximum that may still grow.

    ``norms`` holds ``sqrt(sum exp^2)`` of the first anchors only: for a metric, not worth a full sweep.
    """

    def __init__(self, scale: Tensor, moments: bool) -> None:
        self.scale = scale  # 1 / tau per anchor
        self.total = scale.new_zeros(len(scale))
        self.norms = scale.new_zeros(len(scale[:SPREAD_ANCHORS]))
        self.dot = scale.new_zeros(len(scale)) if moments else None
        self.shift: Tensor | None = None

    def add_rows(self, block: Block) -> None:
        """Anchors ``start`` to ``stop`` have met all their candidates in this block."""
        own, side = slice(block.start, block.stop), block.rows
        torch.sum(side.exp, 1, out=self.total[own])
        if block.start < SPREAD_ANCHORS:
            first = self.norms[own]
            torch.linalg.vector_norm(side.exp[: len(first)], dim=1, out=first)
        if side.shift is not None:
            self.shift = torch.empty_like(self.total) if self.shift is None else self.shift
            self.shift[own] = side.shift
        if self.dot is not None and side.dot is not None:
            self.dot[own] = side.dot

    def add_columns(self, side: Exponentials) -> None:
        """All anchors have met some more candidates."""
        if self.shift is not None and side.shift is not None:
            shrink = ((self.shift - side.shift) * self.scale).exp_()
            self.total *= shrink
            self.norms *= shrink[:SPREAD_ANCHORS]
            if self.dot is not None:
                self.dot *= shrink
        self.shift = side.shift
        self.total += side.exp.sum(0)
        norms = torch.linalg.vector_norm(side.exp[:, :SPREAD_ANCHORS], dim=0)
        torch.hypot(self.norms, norms, out=self.norms)
        if self.dot is not None and side.dot is not None:
            self.dot += side.dot

    def effective(self) -> Tensor:
        """``(sum w)^2 / sum w^2`` of the first anchors."""
        return (self.total[:SPREAD_ANCHORS] / self.norms).square()

    def log_total(self) -> Tensor:
        """``log sum_j exp(s_ij / tau_i)``."""
        log_total = self.total.log()
        return log_total if self.shift is None else log_total + self.shift * self.scale
