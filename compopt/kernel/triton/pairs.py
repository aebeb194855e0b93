r"""Statistics and gradients of the pairs of a batch, of one rank or of several, by the kernels in Triton.

The forward pass is one product ``S = X Y^T`` whose tiles stay in registers: each tile is masked, exponentiated for the
anchors of both sides and summed, and only the sums are written. The gradients recompute ``S`` in waves of rows, write
the coefficients ``A`` of a wave to one buffer, and multiply: ``A Y`` and ``A^T X``. These are four products, with
memory ``O(wave x Q)``; ``chunk_size`` is the number of rows of a wave.

Each tile subtracts its own maxima from the exponents, since with the constant 1 ``exp((s_ij - 1) / tau_i)`` underflows
in float32 for ``tau`` below 0.02. If :func:`~compopt.kernel.pairs.is_uniform`, one exponential without a maximum is
used for both sides.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from compopt.kernel.blocks import MASKED
from compopt.kernel.distributed import GatheredPairs, RowBlock, weight_factor
from compopt.kernel.local import Pairs
from compopt.kernel.pairs import SPREAD_ANCHORS, PairOptions, PairStatistics, Sums, scale_of
from compopt.kernel.triton import sweep
from compopt.kernel.triton.sweep import Anchors, AnchorSums, Operands, ranked


def unsupported(options: PairOptions) -> str | None:
    """Return an argument of a call that the kernels do not support, or ``None``."""
    given = {"momentum_features=": options.held, "extra=": options.extra, "pairs=": options.policy}
    return next((name for name, value in given.items() if value), None)


class FusedPairs(Pairs):
    """All pairs of one batch, in tiles; see :class:`~compopt.kernel.local.Pairs` for the arguments."""

    def _sweep(self) -> None:
        scale = scale_of(self.tau, self.x, self.batch, self.directions)
        self._scale = scale if isinstance(scale, Tensor) else self.x.new_full((self.batch, self.directions), scale)
        rows = Anchors(self._by_row(self._scale, slice(0, self.shape[0]))[:, 0])
        columns = Anchors(self._by_column(self._scale, 1.0)) if self._columns_are_anchors else None
        shared = 1 / self.tau if self.uniform and isinstance(self.tau, float) else None
        o = _operands(self, self.x, self.y, slice(0, self.shape[0]))
        self._operands = replace(o, rows=rows, columns=columns, shared=shared)
        sides = [side for side in sweep.sums(self._operands) if side is not None]
        self._tops = [side.top for side in sides]
        scales = [anchors.scale for anchors in (rows, columns) if anchors is not None]
        self.sides = [_as_sums(side, scale) for side, scale in zip(sides, scales, strict=True)]
        # candidates that are not negatives; with one direction the second row is not used
        numbers = [side.number for side in (sides[0], sides[-1]) if side.number is not None]
        self._collect(self.shape[1] - torch.stack(numbers) if numbers else None)

    def _products(self, factor: Tensor) -> tuple[Tensor, Tensor | None]:
        o = self._operands
        assert o.rows is not None
        rows = o.rows._replace(factor=self._by_row(factor, slice(0, self.shape[0]))[:, 0], top=self._tops[0])
        columns = rows if self.unimodal else o.columns  # A + A^T in one product
        if columns is not None:
            columns = columns._replace(factor=self._by_column(factor, 0.0), top=self._tops[-1])
        of_rows, of_columns = sweep.products(replace(o, rows=rows, columns=columns), transposed=not self.unimodal)
        return of_rows.view_as(self.z) if self.unimodal else torch.stack([of_rows, of_columns]), None


class FusedRowBlock(RowBlock):
    """Block of this rank's features along the rows, in tiles; see :class:`~compopt.kernel.distributed.RowBlock`.

    ``o`` has no anchors along the columns: :meth:`gradient` receives their temperatures.
    """

    def __init__(self, o: Operands) -> None:
        self._operands = o
        scale = None if o.rows is None else o.rows.scale
        super().__init__(o.x, o.y, scale, None, PairOptions(True), lambda s, part: None)

    def _sweep(self, scale: Tensor) -> Sums:
        (side, _) = sweep.sums(self._operands)
        assert side is not None
        self._top = side.top
        self.excluded = None if side.number is None else len(self.y) - side.number
        return _as_sums(side, scale)

    def gradient(self, own: dict[str, Tensor], columns: dict[str, Tensor] | None) -> Tensor:
        o = self._operands
        if o.rows is not None and self.sums is not None:
            shift = 0.0 if self.sums.shift is None else self.sums.shift
            o = replace(o, rows=o.rows._replace(factor=weight_factor(own, shift), top=self._top))
        if columns is not None:
            factor, top = columns["coefficient"], None
            if o.shared is None:
                top = columns["positive"] * columns["scale"] + columns["alpha"] + columns["log_count"]
            else:
                factor = weight_factor(columns, 0.0)
            o = replace(o, columns=Anchors(columns["scale"], factor, top))
        return sweep.products(o, transposed=False)[0]


class FusedGatheredPairs(GatheredPairs):
    """Anchors of one rank against all candidates, in tiles; see :class:`~compopt.kernel.distributed.GatheredPairs`."""

    def _block_of(self, direction: int) -> RowBlock:
        x, y = self._z[direction], self._candidates(direction)
        if not len(x):  # a rank without samples
            return super()._block_of(direction)
        rows = Anchors(self._scale[self._own, direction]) if direction < self.directions else None
        shared = None if self._uniform is None else 1 / self._uniform
        return FusedRowBlock(replace(_operands(self, x, y, self._own), rows=rows, shared=shared))


def _operands(pairs: PairStatistics, x: Tensor, y: Tensor, rows: slice) -> Operands:
    """Return the operands of the kernels, without anchors; the keys of ``x`` are a slice of those of ``y``."""
    precision, wave = pairs.options.precision, pairs.options.chunk_size
    dtype = torch.bfloat16 if precision == "bf16" else x.dtype
    keys = ranked(torch.stack([*pairs.names((0, 1) if pairs.unimodal else (0,))]))
    x, y, own = x.to(dtype).contiguous(), y.to(dtype).contiguous(), keys[:, rows].clone()  # at an aligned address
    return Operands(x, y, own, keys, moments=pairs.moments, counted=not pairs.distinct, precision=precision, wave=wave)


def _as_sums(side: AnchorSums, scale: Tensor) -> Sums:
    """Convert sums of the kernels: relative to a maximum of ``s_ij``, with squares of the first anchors only."""
    shift = None if side.top is None else torch.where(side.total == 0, MASKED, side.top / scale)
    return Sums(side.total, side.squares[:SPREAD_ANCHORS], True, shift, side.dot)
