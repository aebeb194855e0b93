r"""Operands of a sweep over a matrix of similarities ``S = X Y^T``, and the sums that it returns.

Anchors are along the rows, along the columns, or along both axes. An anchor ``i`` has the sum

.. math:: \sum_{j \in N_i} e^{s_{ij} (1/\tau_i + \beta_j)}

over its candidates ``N_i``, along the other axis. A pair of a row and a column is left out if their keys are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Exponent of what is no pair, and maximum of an anchor without candidates. Finite: the difference of two is 0, not NaN.
NO_PAIR = -1e30
# Entries of the matrix that a wave of rows has. In Triton the buffer of coefficients takes 1 GiB in float32. In
# plain torch there are several matrices of a wave, and small ones are faster on a CPU.
WAVE_ENTRIES = 2**28
TORCH_WAVE_ENTRIES, CPU_WAVE_ENTRIES = 2**25, 2**21
# Rows of a wave are a multiple of this, so that the rows of each begin at an aligned address.
ROWS_MULTIPLE = 128


class Anchors(NamedTuple):
    """Anchors along one axis of the matrix.

    Attributes:
        scale: ``1 / tau_i``, ``(P,)`` float32 (float64 with features in float64).
        threshold: similarity above which a candidate is left out, ``(P,)``; ``None``: there is none.
    """

    scale: Tensor
    threshold: Tensor | None = None

    def part(self, anchors: slice) -> Anchors:
        """Some of the anchors."""
        return Anchors(self.scale[anchors], None if self.threshold is None else self.threshold[anchors])

    def contiguous(self) -> Anchors:
        """The same in memory without gaps, which the kernels read."""
        return Anchors(self.scale.contiguous(), None if self.threshold is None else self.threshold.contiguous())


class AnchorSums(NamedTuple):
    """Sums of the anchors along one axis, ``(P,)`` each; of several parts of their candidates ``(parts, P)``.

    Attributes:
        total: sum of ``exp(z_ij - top_i)`` over the candidates, ``z_ij`` being the exponent.
        squares: sum of ``exp(z_ij - top_i)^2``.
        top: largest exponent, :data:`NO_PAIR` without candidates; ``None``: 0.
        dot: sum of ``s_ij exp(z_ij - top_i)``, or ``None``.
        number: of candidates, or ``None``.
    """

    total: Tensor
    squares: Tensor
    top: Tensor | None
    dot: Tensor | None
    number: Tensor | None

    def merged(self) -> AnchorSums:
        """Add up the parts, ``(parts, P) -> (P,)``, always in the same order."""
        total, squares, top, dot, number = self
        if top is not None:
            shrink = torch.exp(top - top.amax(0))
            total, squares, top = total * shrink, squares * shrink.square(), top.amax(0)
            dot = None if dot is None else dot * shrink
        more = [None if parts is None else parts.sum(0) for parts in (dot, number)]
        return AnchorSums(total.sum(0), squares.sum(0), top, *more)

    @classmethod
    def together(cls, parts: Sequence[AnchorSums], make: Callable[..., Tensor]) -> AnchorSums:
        """``make=torch.cat``: the sums of different anchors; ``torch.stack``: parts of the sums of the same anchors."""
        fields: list[Any] = [None if values[0] is None else make(values) for values in zip(*parts, strict=True)]
        return cls(*fields)

    def log_total(self) -> Tensor:
        """``log sum_j exp(z_ij)``; ``-inf`` without candidates."""
        log_total = self.total.log()
        return log_total if self.top is None else log_total + self.top


class Weights(NamedTuple):
    """Factors from the exponentials of the anchors of one axis to coefficients, ``factor_i exp(z_ij - top_i)``.

    Attributes:
        factor: ``(P,)``.
        top: subtracted from the exponent, ``(P,)``; ``None``: nothing is.
    """

    factor: Tensor
    top: Tensor | None

    def part(self, anchors: slice) -> Weights:
        """Weights of some anchors."""
        return Weights(self.factor[anchors], None if self.top is None else self.top[anchors])


@dataclass(frozen=True)
class Operands:
    """A matrix of similarities, its anchors and its pairs.

    Attributes:
        x, y: features along the rows ``(P, d)`` and along the columns ``(Q, d)``, contiguous, of one dtype: float64,
            float32 or, for products in bf16, bfloat16.
        rows, columns: the anchors along each axis; ``None``: there are none.
        row_keys, column_keys: ``(k, P)`` and ``(k, Q)`` int32; a row and a column with equal keys are no pair.
            See :func:`ranked`.
        within: the last key has the opposite meaning: a row and a column with different keys are no pair.
        shared: ``1 / tau`` of all anchors, so small that no maximum need be subtracted; ``None``: there is none.
        strengths: ``beta`` of the candidates of the batch, and of the further ones among the columns.
        inside: how many columns are of the batch, the first ones.
        spared: further columns have no threshold.
        moments: also sum ``s_ij``, weighted.
        counted: also count the candidates.
        precision: of the product in Triton, ``"tf32"``, ``"bf16"``, ``"tf32x3"`` or ``"ieee"``; ``None``: plain torch.
        wave: rows that are swept together, or ``None``: as many as have :data:`WAVE_ENTRIES`, in plain torch fewer.
    """

    x: Tensor
    y: Tensor
    rows: Anchors | None
    columns: Anchors | None
    row_keys: Tensor
    column_keys: Tensor
    within: bool = False
    shared: float | None = None
    strengths: tuple[float, float] = (0.0, 0.0)
    inside: int = 0
    spared: bool = False
    moments: bool = False
    counted: bool = False
    precision: str | None = None
    wave: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(P, Q)``."""
        return len(self.x), len(self.y)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of sums and gradients."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    def waves(self) -> Iterator[slice]:
        """Rows that are swept together, one part after the other."""
        rows, columns = self.shape
        entries = WAVE_ENTRIES
        if self.precision is None:
            entries = CPU_WAVE_ENTRIES if self.x.device.type == "cpu" else TORCH_WAVE_ENTRIES
        step = self.wave or max(1, entries // max(1, columns) // ROWS_MULTIPLE) * ROWS_MULTIPLE
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))


def ranked(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 keys >= 0 that are equal where the given ones are, ``(P,)`` and ``(Q,)``, without a host sync.

    Narrow keys keep registers of the kernels free, and numbers below 0 stay free for what has no key.
    """
    ordered, order = torch.cat([rows, columns]).sort()
    new = torch.diff(ordered, prepend=ordered[:1]) != 0
    keys = torch.empty_like(order, dtype=torch.int32).scatter_(0, order, new.cumsum(0, dtype=torch.int32))
    return keys[: len(rows)], keys[len(rows) :]
