r"""Matrix of similarities ``S = X Y^T`` in waves of rows: sums of its anchors, and products with its coefficients.

Anchors are along the rows, along the columns, or along both axes. The sum of an anchor ``i`` is
``sum_j exp(s_ij / tau_i)`` over its candidates ``j`` along the other axis. A row and a column with equal values of any
key are not a pair, and are left out.

A wave is computed in plain torch, in any dtype on any device (``torch_sums``, ``torch_coefficients``), or in tiles by
the kernels of :mod:`compopt.kernel.triton.language` (``triton_sums``, ``triton_coefficients``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compopt.kernel.triton.choice import tf32_allowed

# Exponent of excluded pairs, and maximum of an anchor without candidates. Finite, so that differences are 0, not NaN.
NO_PAIR = -1e30
# Entries of a wave of rows. In Triton the buffer of coefficients needs 1 GiB in float32. Plain torch holds several
# matrices per wave, and small ones are faster on a CPU.
WAVE_ENTRIES, TORCH_WAVE_ENTRIES, CPU_WAVE_ENTRIES = 2**28, 2**25, 2**21
ROWS_MULTIPLE = 128  # of which the rows of a wave are a multiple, so that every wave begins at an aligned address


class Anchors(NamedTuple):
    """Anchors along one axis of the matrix.

    Attributes:
        scale: ``1 / tau_i``, ``(P,)`` float32 (float64 with features in float64).
        factor: factor of the coefficients ``factor_i exp(z_ij - top_i)``, ``(P,)``; ``None``: no coefficients.
        top: number subtracted from the exponents of the coefficients, ``(P,)``; ``None``: 0.
    """

    scale: Tensor
    factor: Tensor | None = None
    top: Tensor | None = None


class AnchorSums(NamedTuple):
    """Sums of the anchors along one axis, ``(P,)`` each, or ``(parts, P)`` over parts of their candidates.

    Attributes:
        total: sum of ``exp(z_ij - top_i)`` over the candidates, with the exponent ``z_ij = s_ij / tau_i``.
        top: largest exponent, :data:`NO_PAIR` without candidates; ``None``: 0.
        dot: sum of ``s_ij exp(z_ij - top_i)``, or ``None``.
        number: number of candidates, or ``None``.
    """

    total: Tensor
    top: Tensor | None
    dot: Tensor | None
    number: Tensor | None

    def merged(self) -> AnchorSums:
        """Add up the parts, ``(parts, P) -> (P,)``, always in the same order."""
        total, top, dot, number = self
        if top is not None:
            shrink = torch.exp(top - top.amax(0))
            total, top = total * shrink, top.amax(0)
            dot = None if dot is None else dot * shrink
        more = [None if parts is None else parts.sum(0) for parts in (dot, number)]
        return AnchorSums(total.sum(0), top, *more)

    @classmethod
    def together(cls, parts: Sequence[AnchorSums], make: Callable[..., Tensor]) -> AnchorSums:
        """Join sums of different anchors (``make=torch.cat``), or parts of the same anchors (``torch.stack``)."""
        fields: list[Any] = [None if values[0] is None else make(values) for values in zip(*parts, strict=True)]
        return cls(*fields)

    def log_total(self) -> Tensor:
        """Return ``log sum_j exp(z_ij)``; ``-inf`` without candidates."""
        log_total = self.total.log()
        return log_total if self.top is None else log_total + self.top


@dataclass(frozen=True)
class Operands:
    """Matrix of similarities with its anchors and pairs, the arguments of a sweep.

    Attributes:
        x, y: features along the rows ``(P, d)`` and along the columns ``(Q, d)``, contiguous, of one dtype: float64,
            float32 or, for products in bf16, bfloat16.
        row_keys, column_keys: keys that exclude pairs, ``(k, P)`` and ``(k, Q)`` int32; see :func:`ranked`.
        rows, columns: the anchors along each axis; ``None``: no anchors.
        shared: ``1 / tau`` of all anchors, if it is so small that no maximum must be subtracted; otherwise ``None``.
        moments, counted: also compute ``dot``; also count the candidates.
        precision: precision of the product in Triton, one of ``choice.PRECISIONS``; ``None``: use plain torch.
        wave: number of rows per wave; ``None``: so many that a wave has :data:`WAVE_ENTRIES`, in plain torch fewer.
    """

    x: Tensor
    y: Tensor
    row_keys: Tensor
    column_keys: Tensor
    rows: Anchors | None = None
    columns: Anchors | None = None
    shared: float | None = None
    moments: bool = False
    counted: bool = False
    precision: str | None = None
    wave: int | None = None

    def waves(self) -> Iterator[slice]:
        """Yield slices of rows that are computed together."""
        entries = WAVE_ENTRIES
        if self.precision is None:
            entries = CPU_WAVE_ENTRIES if self.x.device.type == "cpu" else TORCH_WAVE_ENTRIES
        step = self.wave or max(1, entries // max(1, len(self.y)) // ROWS_MULTIPLE) * ROWS_MULTIPLE
        for start in range(0, len(self.x), step):
            yield slice(start, min(start + step, len(self.x)))

    def part(self, wave: slice) -> Operands:
        """Return the operands of some of the rows."""
        rows = None if self.rows is None else Anchors._make(each if each is None else each[wave] for each in self.rows)
        return replace(self, x=self.x[wave], rows=rows, row_keys=self.row_keys[:, wave])


def ranked(keys: Tensor) -> Tensor:
    """Return int32 keys, ``(..., B)``, that are equal if the given ones are, without a host sync.

    Narrow keys need fewer registers in the kernels.
    """
    ordered, order = keys.sort()
    new = torch.diff(ordered, prepend=ordered[..., :1]) != 0
    return torch.empty_like(order, dtype=torch.int32).scatter_(-1, order, new.cumsum(-1, dtype=torch.int32))


def torch_sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return sums of the anchors along the rows and along the columns, in one part, ``(1, P)`` and ``(1, Q)``."""
    s, excluded = o.x @ o.y.T, _excluded_mask(o)
    sides = ((o.rows, 1), (o.columns, 0))
    rows, columns = (None if anchors is None else _side_sums(o, s, excluded, anchors, dim) for anchors, dim in sides)
    return rows, columns


def torch_coefficients(o: Operands, out: Tensor) -> None:
    """Write ``A_ij``, the sum of the coefficients of a pair from the anchors of both axes, ``(P, Q)``."""
    s, excluded = o.x @ o.y.T, _excluded_mask(o)
    out.zero_()
    for anchors, dim in ((o.rows, 1), (o.columns, 0)):
        if anchors is not None and anchors.factor is not None:
            z = s * anchors.scale.unsqueeze(dim)
            if anchors.top is not None:
                z.sub_(anchors.top.unsqueeze(dim))
            out += z.exp_().mul_(anchors.factor.unsqueeze(dim)).masked_fill_(excluded, 0)


def _excluded_mask(o: Operands) -> Tensor:
    """Return a mask that is True if a row and a column are not a pair, ``(P, Q)``."""
    return (o.row_keys[:, :, None] == o.column_keys[:, None, :]).any(0)


def _side_sums(o: Operands, s: Tensor, excluded: Tensor, anchors: Anchors, dim: int) -> AnchorSums:
    """Return sums of the anchors of one axis; ``dim`` is the axis of the candidates."""
    z = (s * anchors.scale.unsqueeze(dim)).masked_fill_(excluded, NO_PAIR)
    top = None if o.shared is not None else z.amax(dim)
    e = (z if top is None else z.sub_(top.unsqueeze(dim))).exp_().masked_fill_(excluded, 0)
    dot = (e * s).masked_fill_(excluded, 0).sum(dim)[None] if o.moments else None  # s may be NaN for excluded pairs
    number = (~excluded).sum(dim, dtype=s.dtype)[None] if o.counted else None
    return AnchorSums(e.sum(dim)[None], None if top is None else top[None], dot, number)


# Shape of a tile, and pipelining options of its product. One tile for each precision and kernel, so that sums are added
# in the same order in every run. Wide tiles are for kernels that compile for every target without spilled registers,
# narrow tiles for the others (benchmarks/results/fused.md).
TILE = ("BM", "BN", "BK", "num_warps", "num_stages")
WIDE = {"bf16": (128, 128, 64, 8, 3), "tf32": (128, 128, 32, 8, 3)}
NARROW = {"bf16": (128, 64, 64, 8, 3), "tf32": (128, 64, 32, 8, 3)}
SMALL = {"tf32x3": (64, 64, 32, 4, 2), "ieee": (32, 32, 32, 4, 2)}


def tile_of(precision: str, maxima: bool) -> dict[str, int]:
    """Return the tile of a kernel, which may compute the maximum of each anchor."""
    return dict(zip(TILE, {**(NARROW if maxima else WIDE), **SMALL}[precision], strict=True))


def triton_sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return sums of the anchors along the rows and along the columns, one part per tile."""
    from compopt.kernel.triton import language

    arguments, down, across = _arguments(o, maxima=o.shared is None)
    there = (True, o.shared is None, o.moments, o.counted)  # fields of the sums
    by_row = o.x.new_empty(sum(there) * (o.rows is not None), across, len(o.x), dtype=torch.float32)
    by_column = o.x.new_empty(sum(there) * (o.columns is not None), down, len(o.y), dtype=torch.float32)
    arguments |= {"row_out": by_row, "column_out": by_column, "MOMENTS": o.moments, "COUNTED": o.counted}
    with torch.cuda.device_of(o.x):
        language.sums[(down * across,)](**arguments, row_plane=by_row.stride(0), column_plane=by_column.stride(0))
    return _read(there, by_row), _read(there, by_column)


def triton_coefficients(o: Operands, out: Tensor) -> None:
    """Write ``A_ij``, ``(P, Q)``; all anchors must have factors."""
    from compopt.kernel.triton import language

    arguments, down, across = _arguments(o, maxima=False)
    arguments |= {**_by_axis(o, "factor"), **_by_axis(o, "top"), "out": out, "out_stride": out.stride(0)}
    with torch.cuda.device_of(o.x):
        language.coefficients[(down * across,)](**arguments)


def _arguments(o: Operands, maxima: bool) -> tuple[dict[str, Any], int, int]:
    """Return the arguments that both kernels have, by name, and the numbers of tiles down and across."""
    tile, (P, d), Q, low = tile_of(o.precision or "ieee", maxima), o.x.shape, len(o.y), o.precision == "bf16"
    given: dict[str, Any] = {"x": o.x, "y": o.y, "row_keys": o.row_keys, "column_keys": o.column_keys}
    given |= {"P": P, "Q": Q, "d": d, "row_stride": o.row_keys.stride(0), "column_stride": o.column_keys.stride(0)}
    given |= {"KEYS": len(o.row_keys), "ROWS": o.rows is not None, "COLUMNS": o.columns is not None, **tile}
    given |= {"shared": o.shared or 0.0, "SHIFTED": o.shared is None, "EVEN": d % tile["BK"] == 0}
    given |= {"PRECISION": "ieee" if low else o.precision, "UPCAST": low and not o.x.is_cuda, **_by_axis(o, "scale")}
    return given, -(-P // tile["BM"]), -(-Q // tile["BN"])


def _by_axis(o: Operands, name: str) -> dict[str, Tensor]:
    """Return a field of the anchors along the rows and along the columns; an empty tensor replaces ``None``."""
    values = {f"{axis}_{name}": getattr(getattr(o, f"{axis}s"), name, None) for axis in ("row", "column")}
    empty = o.x.new_empty(0, dtype=torch.float32)
    return {axis: empty if value is None else value.contiguous() for axis, value in values.items()}


def _read(there: Sequence[bool], written: Tensor) -> AnchorSums | None:
    """Return the planes that a kernel wrote, ``(tiles, anchors)`` each, as named sums."""
    planes = iter(written)
    return AnchorSums._make(next(planes) if each else None for each in there) if len(written) else None


def sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return the sums of the anchors along the rows ``(P,)`` and along the columns ``(Q,)``.

    Memory in addition to the operands, for one wave at a time: in torch some matrices ``(wave, Q)``; in Triton a few
    sums per tile and anchor. The result is deterministic, since there are no atomic additions.
    """
    one_wave = torch_sums if o.precision is None else triton_sums
    rows: list[AnchorSums] = []
    columns: AnchorSums | None = None
    for wave in o.waves():
        of_rows, of_columns = one_wave(o.part(wave))
        if of_rows is not None:
            rows.append(of_rows.merged())
        if of_columns is not None:
            more = of_columns.merged()
            columns = more if columns is None else AnchorSums.together([columns, more], torch.stack).merged()
    return AnchorSums.together(rows, torch.cat) if rows else None, columns


def products(o: Operands, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return ``A Y``, ``(P, d)``, and ``A^T X``, ``(Q, d)``, in float64 for features in float64, else in float32.

    ``A_ij = f_i exp(z_ij - top_i) + f_j exp(z_ji - top_j)``. ``A`` is computed from a recomputed ``S``, wave by wave,
    in one buffer ``(wave, Q)`` of the dtype of the features, and used in two ordinary products. Anchors without factors
    ``f`` do not contribute to it. ``A^T X`` is zero unless ``transposed``.
    """
    rows, columns = (None if side is None or side.factor is None else side for side in (o.rows, o.columns))
    o = replace(o, rows=rows, columns=columns)
    one_wave = torch_coefficients if o.precision is None else triton_coefficients
    dtype = torch.promote_types(o.x.dtype, torch.float32)
    of_rows, of_columns = (z.new_zeros(z.shape, dtype=dtype) for z in (o.x, o.y))
    waves, width = list(o.waves()), -(-len(o.y) // 16) * 16  # aligns the rows for the kernel and for the products
    buffer = o.x.new_empty(waves[0].stop, width)
    with tf32_allowed() if o.precision == "tf32" and o.x.is_cuda else contextlib.nullcontext():
        for wave in waves:
            a = buffer[: wave.stop - wave.start, : len(o.y)]
            one_wave(o.part(wave), a)
            _add_product(of_rows[wave], a, o.y)
            if transposed:
                _add_product(of_columns, a.T, o.x[wave])
    return of_rows, of_columns


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a b`` to ``into``; a product in bfloat16 is added in float32."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into.add_(a @ b)
