r"""Pair-weight kernel in Triton: statistics and gradients of :mod:`compopt.kernel.local`, in tiles.

The forward pass is one product ``S = X Y^T`` whose tiles stay in registers: each tile is masked, exponentiated for the
anchors of both sides and summed, and only the sums are written. The gradients recompute ``S`` in waves of rows, write
the coefficients ``A`` of a wave to one buffer, and multiply: ``A Y`` and ``A^T X``. These are four products, with
memory ``O(wave x Q)``; ``chunk_size`` is the number of rows of a wave.

Each tile subtracts its own maxima from the exponents, since with the constant 1 ``exp((s_ij - 1) / tau_i)`` underflows
in float32 for ``tau`` below 0.02. If :func:`~compopt.kernel.pairs.is_uniform`, one exponential without a maximum is
used for both sides.

Calls that the kernels do not support use plain torch: :func:`compopt.tiles.choice.reason_for_torch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from compopt.kernel.blocks import MASKED, Extra
from compopt.kernel.distributed import GatheredPairs, RowBlock, weight_factor
from compopt.kernel.local import Pairs
from compopt.kernel.pairs import SPREAD_ANCHORS, PairOptions, PairStatistics, Sums, scale_of
from compopt.tiles import sweep
from compopt.tiles.sweep import Anchors, AnchorSums, Operands, ranked

# Keys of samples are >= 0. Negative keys: of further candidates, of the batch's candidates in a column of keys for
# further ones, and of rows without further candidates.
FURTHER, INSIDE, WITHOUT = -1, -2, -3

Key = tuple[Tensor, Tensor]


def unknown_option(options: PairOptions) -> str | None:
    """Return an option of a call that the kernels do not support, or ``None``."""
    if options.held:
        return "momentum_features="
    return None if options.policy is None else "pairs="


class FusedPairs(Pairs):
    """All pairs of one batch, in tiles; see :class:`~compopt.kernel.local.Pairs` for the arguments.

    ``options.precision`` is the precision of the products.
    """

    def _sweep(self) -> None:
        self.symmetric = self.unimodal and self.shape[0] == self.shape[1]  # A + A^T in one product, for any tau
        scale = scale_of(self.tau, self.x, self.batch, self.directions)
        self._scale = scale if isinstance(scale, Tensor) else self.x.new_full((self.batch, self.directions), scale)
        rows = Anchors(self._by_row(self._scale, slice(0, self.shape[0]))[:, 0])
        columns = Anchors(self._by_column(self._scale, 1.0)) if self._columns_are_anchors else None
        shared = 1 / self.tau if self.uniform and isinstance(self.tau, float) else None
        own, others = ((0, 1), (0, 1)) if self.unimodal else ((0,), (1,))
        keys = _keys(self, own, slice(0, self.shape[0]), others, self.extra, self.shape[1])
        self._operands = _operands(self, shared, self.x, self.y, keys, rows, columns)
        sides = [side for side in sweep.sums(self._operands) if side is not None]
        self._tops = [side.top for side in sides]
        self.sides = [_as_sums(sides[0], rows.scale, self.shape[0])]
        if columns is not None:  # further candidates are not anchors
            self.sides.append(_as_sums(sides[1], columns.scale, self.batch))
        self._collect(self._excluded_by_side(sides))

    def _excluded_by_side(self, sides: Sequence[AnchorSums]) -> Tensor | None:
        """Return the numbers of candidates that are not negatives, by matrix row and by matrix column, ``(2, Q)``."""
        if not self._operands.counted:
            return None
        excluded = self.x.new_zeros(2, self.shape[1])
        for row, (side, candidates) in enumerate(zip(sides, reversed(self.shape), strict=False)):
            assert side.number is not None
            excluded[row, : len(side.number)] = candidates - side.number
        return excluded

    def _products(self, factor: Tensor) -> tuple[Tensor, Tensor | None]:
        o, rows = self._operands, self.shape[0]
        assert o.rows is not None
        by_row = o.rows._replace(factor=self._by_row(factor, slice(0, rows))[:, 0].contiguous(), top=self._tops[0])
        by_column = by_row if self.symmetric else o.columns
        if by_column is not None:
            by_column = by_column._replace(factor=self._by_column(factor, 0.0).contiguous(), top=self._tops[-1])
        o = replace(o, rows=by_row, columns=by_column)
        of_rows, of_columns = sweep.products(o, transposed=not self.symmetric)
        inside = len(of_columns) if self.extra is None else len(of_columns) - len(self.extra.features)
        if self.unimodal:
            of_columns[:rows] += of_rows
            gradient = of_columns[:inside].view_as(self.z)
        else:
            gradient = torch.stack([of_rows, of_columns[:inside]])
        return gradient, None if self.extra is None else of_columns[inside:]


class FusedRowBlock(RowBlock):
    """Block of this rank's features along the rows, in tiles; see :class:`~compopt.kernel.distributed.RowBlock`.

    Args:
        o: the operands, without anchors along the columns: :meth:`gradient` receives their temperatures.
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
        return _as_sums(side, scale, len(scale))

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
            o = replace(o, columns=Anchors(columns["scale"], None, factor, top).contiguous())
        return sweep.products(o, transposed=False)[0]


class FusedGatheredPairs(GatheredPairs):
    """Anchors of one rank against all candidates, in tiles; see :class:`~compopt.kernel.distributed.GatheredPairs`.

    Plain torch computes the gradients of further candidates, which are along the rows of a separate block.
    """

    def _block_of(self, direction: int) -> RowBlock:
        x = self._z[direction]
        if not len(x):  # a rank without samples
            return super()._block_of(direction)
        extra, y = self.extra if direction == 0 else None, self._candidates(direction)
        keys = _keys(self, (direction,), self._own, self._others(direction), extra, len(y))
        rows = Anchors(self._scale[self._own, direction]) if direction < self.directions else None
        shared = None if self._uniform is None else 1 / self._uniform
        return FusedRowBlock(_operands(self, shared, x, y, keys, rows, None))


def _operands(
    pairs: PairStatistics,
    shared: float | None,
    x: Tensor,
    y: Tensor,
    keys: Sequence[Key],
    rows: Anchors | None,
    columns: Anchors | None,
) -> Operands:
    """Return the operands of the kernels; ``shared`` is the ``1 / tau`` of all anchors if no maximum is needed."""
    options = pairs.options
    dtype = torch.bfloat16 if options.precision == "bf16" else x.dtype
    return Operands(
        x.to(dtype).contiguous(),
        y.to(dtype).contiguous(),
        None if rows is None else rows.contiguous(),
        None if columns is None else columns.contiguous(),
        torch.stack([row for row, _ in keys]),
        torch.stack([column for _, column in keys]),
        shared=shared,
        inside=len(y),
        moments=pairs.moments,
        counted=not pairs.distinct,
        precision=options.precision,
        wave=options.chunk_size,
    )


def _as_sums(side: AnchorSums, scale: Tensor, anchors: int) -> Sums:
    """Convert sums of the kernels: relative to a maximum of ``s_ij``, with squares of the first anchors only."""
    shift = None if side.top is None else torch.where(side.total == 0, MASKED, side.top / scale)
    return Sums(side.total, side.squares[: min(anchors, SPREAD_ANCHORS)], True, shift, side.dot)


def _keys(
    pairs: PairStatistics, views: Sequence[int], rows: slice, others: Sequence[int], extra: Extra | None, width: int
) -> list[Key]:
    """Return keys of some matrix rows and of all columns; pairs with equal keys are excluded.

    Args:
        pairs: statistics, with the keys of samples.
        views: views along the rows, one after the other.
        rows: slice of the samples along the rows.
        others: views along the columns; the remaining columns are further candidates.
        extra: the further candidates.
        width: number of columns.
    """
    named = zip(pairs.names(views), pairs.names(others), strict=True)
    keys = [ranked(row[rows], column) for row, column in named]
    height = len(keys[0][0])
    keys = [(row, pad(column, (0, width - len(column)), value=FURTHER)) for row, column in keys]
    if extra is None:
        return keys
    positive, inside = extra.positive[rows], width - len(extra.everyone)
    below = (0, height - len(positive))  # rows of the other views, for which further candidates are not candidates
    if extra.positions is not None:
        row, column = ranked(positive, extra.positions)
        keys.append((pad(row, below, value=FURTHER), pad(column, (inside, 0), value=INSIDE)))
    if below[1]:
        row, column = torch.zeros_like(positive, dtype=torch.int32), positive.new_full((inside,), INSIDE).int()
        keys.append((pad(row, below, value=WITHOUT), pad(column, (0, width - inside), value=WITHOUT)))
    return keys
