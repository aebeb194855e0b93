r"""Matrix of similarities ``S = X Y^T`` in waves of rows: sums of its anchors, and products with its coefficients.

Anchors are along the rows, along the columns, or along both axes. The sum of an anchor ``i`` is

.. math:: \sum_{j \in N_i} e^{s_{ij} (1/\tau_i + \beta_j)}

over its candidates ``N_i`` along the other axis. A pair of a row and a column is left out if their keys are equal.

A wave is computed in plain torch, in any dtype on any device (``torch_sums``, ``torch_coefficients``), or in tiles by
the kernels of :mod:`compopt.tiles.language` (``triton_sums``, ``triton_coefficients``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compopt.tiles.choice import tf32_allowed

# Exponent of excluded pairs, and maximum of an anchor without candidates. Finite, so that differences are 0, not NaN.
NO_PAIR = -1e30
# Entries of a wave of rows. In Triton the buffer of coefficients needs 1 GiB in float32. Plain torch holds several
# matrices per wave, and small ones are faster on a CPU.
WAVE_ENTRIES = 2**28
TORCH_WAVE_ENTRIES, CPU_WAVE_ENTRIES = 2**25, 2**21
# The number of rows of a wave is a multiple of this number, so that every wave begins at an aligned address.
ROWS_MULTIPLE = 128


class Anchors(NamedTuple):
    """Anchors along one axis of the matrix.

    Attributes:
        scale: ``1 / tau_i``, ``(P,)`` float32 (float64 with features in float64).
        threshold: similarity above which a candidate is left out, ``(P,)``; ``None``: no candidate is.
        factor: factor of the coefficients ``factor_i exp(z_ij - top_i)``, ``(P,)``; ``None``: no coefficients.
        top: number subtracted from the exponents of the coefficients, ``(P,)``; ``None``: 0.
    """

    scale: Tensor
    threshold: Tensor | None = None
    factor: Tensor | None = None
    top: Tensor | None = None

    def part(self, anchors: slice) -> Anchors:
        """Return some of the anchors."""
        return Anchors(self.scale[anchors], *(None if value is None else value[anchors] for value in self[1:]))

    def contiguous(self) -> Anchors:
        """Return a contiguous copy, which the kernels require."""
        return Anchors(self.scale.contiguous(), *(None if value is None else value.contiguous() for value in self[1:]))


class AnchorSums(NamedTuple):
    """Sums of the anchors along one axis, ``(P,)`` each, or ``(parts, P)`` for several parts of their candidates.

    Attributes:
        total: sum of ``exp(z_ij - top_i)`` over the candidates, with the exponent ``z_ij``.
        squares: sum of ``exp(z_ij - top_i)^2``.
        top: largest exponent, :data:`NO_PAIR` without candidates; ``None``: 0.
        dot: sum of ``s_ij exp(z_ij - top_i)``, or ``None``.
        number: number of candidates, or ``None``.
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
        rows, columns: the anchors along each axis; ``None``: no anchors.
        row_keys, column_keys: ``(k, P)`` and ``(k, Q)`` int32; a row and a column with equal values of any key are not
            a pair. See :func:`ranked`.
        within: the last key has the opposite meaning: a row and a column with different values are not a pair.
        shared: ``1 / tau`` of all anchors, if it is so small that no maximum must be subtracted; otherwise ``None``.
        strengths: ``beta`` of the candidates of the batch, and of the further candidates among the columns.
        inside: number of columns of the batch, which come first.
        spared: thresholds do not apply to further candidates.
        moments: also compute ``dot``.
        counted: also count the candidates.
        precision: precision of the product in Triton, ``"tf32"``, ``"bf16"``, ``"tf32x3"`` or ``"ieee"``; ``None``: use
            plain torch.
        wave: number of rows per wave; ``None``: so many that a wave has :data:`WAVE_ENTRIES`, in plain torch fewer.
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
        """Shape of the matrix, ``(P, Q)``."""
        return len(self.x), len(self.y)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of sums and gradients."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    def waves(self) -> Iterator[slice]:
        """Yield slices of rows that are computed together."""
        rows, columns = self.shape
        entries = WAVE_ENTRIES
        if self.precision is None:
            entries = CPU_WAVE_ENTRIES if self.x.device.type == "cpu" else TORCH_WAVE_ENTRIES
        step = self.wave or max(1, entries // max(1, columns) // ROWS_MULTIPLE) * ROWS_MULTIPLE
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def part(self, wave: slice) -> Operands:
        """Return the operands of some of the rows."""
        rows = None if self.rows is None else self.rows.part(wave)
        return replace(self, x=self.x[wave], rows=rows, row_keys=self.row_keys[:, wave])


def ranked(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 keys >= 0 that are equal if the given keys are, ``(P,)`` and ``(Q,)``, without a host sync.

    Narrow keys need fewer registers in the kernels, and negative numbers remain available for entries without a key.
    """
    ordered, order = torch.cat([rows, columns]).sort()
    new = torch.diff(ordered, prepend=ordered[:1]) != 0
    keys = torch.empty_like(order, dtype=torch.int32).scatter_(0, order, new.cumsum(0, dtype=torch.int32))
    return keys[: len(rows)], keys[len(rows) :]


# -- a wave in plain torch ---------------------------------------------------------------------------------------------


def torch_sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return sums of the anchors along the rows and along the columns, in one part, ``(1, P)`` and ``(1, Q)``."""
    s, apart = o.x @ o.y.T, _apart(o)
    rows = None if o.rows is None else _side_sums(o, s, apart, o.rows, 1)
    columns = None if o.columns is None else _side_sums(o, s, apart, o.columns, 0)
    return rows, columns


def torch_coefficients(o: Operands, out: Tensor) -> None:
    """Write ``A_ij``, the sum of the coefficients of a pair from the anchors of both axes, ``(P, Q)``."""
    s, apart = o.x @ o.y.T, _apart(o)
    out.zero_()
    for anchors, dim in ((o.rows, 1), (o.columns, 0)):
        if anchors is not None and anchors.factor is not None:
            z, skipped = _exponents(o, s, apart, anchors, dim)
            if anchors.top is not None:
                z.sub_(anchors.top.unsqueeze(dim))
            out += z.exp_().mul_(anchors.factor.unsqueeze(dim)).masked_fill_(skipped, 0)


def _apart(o: Operands) -> Tensor:
    """Return a mask that is True if a row and a column are not a pair, ``(P, Q)``."""
    count = len(o.row_keys) - o.within
    apart = (o.row_keys[:count, :, None] == o.column_keys[:count, None, :]).any(0)
    return apart | (o.row_keys[-1, :, None] != o.column_keys[-1]) if o.within else apart


def _exponents(o: Operands, s: Tensor, apart: Tensor, anchors: Anchors, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``s_ij (1 / tau_i + beta_j)``, and the mask of excluded pairs; ``dim`` is the axis of the candidates."""
    further = torch.arange(s.shape[dim], device=s.device) >= o.inside if dim == 1 else s.new_zeros(len(s)).bool()
    if anchors.threshold is not None:
        found = s > anchors.threshold.unsqueeze(dim)
        apart = apart | (found & ~further.unsqueeze(1 - dim) if o.spared else found)
    scale = anchors.scale.unsqueeze(dim)
    if any(o.strengths):
        beta = torch.where(further, o.strengths[1], o.strengths[0]).to(s.dtype)
        scale = scale + beta.unsqueeze(1 - dim)
    return s * scale, apart


def _side_sums(o: Operands, s: Tensor, apart: Tensor, anchors: Anchors, dim: int) -> AnchorSums:
    z, apart = _exponents(o, s, apart, anchors, dim)
    z.masked_fill_(apart, NO_PAIR)
    top = None if o.shared is not None else z.amax(dim)
    e = (z if top is None else z.sub_(top.unsqueeze(dim))).exp_().masked_fill_(apart, 0)
    dot = (e * s).masked_fill_(apart, 0).sum(dim)[None] if o.moments else None  # s may be NaN for excluded pairs
    number = (~apart).sum(dim, dtype=s.dtype)[None] if o.counted else None
    return AnchorSums(e.sum(dim)[None], e.square().sum(dim)[None], None if top is None else top[None], dot, number)


# -- a wave in Triton --------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Shape of a tile, and pipelining options of its product."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


# One tile for each precision and kernel, so that sums are added in the same order in every run. Wide tiles are for
# kernels that compile for every target without spilled registers, narrow tiles for the others
# (benchmarks/results/fused.md).
WIDE = {"bf16": Tile(128, 128, 64, 8, 3), "tf32": Tile(128, 128, 32, 8, 3)}
NARROW = {"bf16": Tile(128, 64, 64, 8, 3), "tf32": Tile(128, 64, 32, 8, 3)}
SMALL = {"tf32x3": Tile(64, 64, 32, 4, 2), "ieee": Tile(32, 32, 32, 4, 2)}
GROUP = 8  # rows of tiles that share columns in the cache


def tile_of(precision: str, maxima: bool, policy: bool) -> Tile:
    """Return the tile of a kernel.

    Args:
        precision: precision of the product.
        maxima: the kernel computes the maximum of each anchor.
        policy: the kernel uses thresholds or strengths.
    """
    return {**(NARROW if maxima or policy else WIDE), **SMALL}[precision]


def constants(o: Operands, tile: Tile) -> dict[str, Any]:
    """Return the compile-time constants and the launch options of both kernels."""
    return {
        "ROWS": o.rows is not None,
        "COLUMNS": o.columns is not None,
        "KEYS": len(o.row_keys) - o.within,
        "WITHIN": o.within,
        "SHIFTED": o.shared is None,
        "THRESHOLD": _has_threshold(o),
        "SPARED": o.spared,
        "HARD": any(o.strengths),
        "EVEN": o.x.shape[1] % tile.BK == 0,
        "PRECISION": "ieee" if o.precision == "bf16" else o.precision,
        "UPCAST": o.precision == "bf16" and not o.x.is_cuda,
        **{"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": GROUP},
        **{"num_warps": tile.warps, "num_stages": tile.stages},
    }


def _has_threshold(o: Operands) -> bool:
    return any(anchors is not None and anchors.threshold is not None for anchors in (o.rows, o.columns))


def _tile(o: Operands, maxima: bool) -> tuple[Tile, int, int]:
    """Return the tile of a kernel, and the numbers of tiles down and across."""
    tile = tile_of(o.precision or "ieee", maxima, policy=_has_threshold(o) or any(o.strengths))
    return tile, -(-len(o.x) // tile.BM), -(-len(o.y) // tile.BN)


def triton_sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return sums of the anchors along the rows and along the columns, one part per tile."""
    from compopt.tiles import language

    tile, down, across = _tile(o, maxima=o.shared is None)
    (rows, columns), planes = o.shape, 2 + (o.shared is None) + o.moments + o.counted
    by_row = o.x.new_empty(planes * (o.rows is not None), across, rows, dtype=torch.float32)
    by_column = o.x.new_empty(planes * (o.columns is not None), down, columns, dtype=torch.float32)
    with torch.cuda.device_of(o.x):
        language.sums[(down * across,)](
            *(*_features(o), by_row, by_column, *_sizes(o), across * rows, down * columns, *_numbers(o)),
            **{**constants(o, tile), "MOMENTS": o.moments, "COUNTED": o.counted},
        )
    return _read(o, by_row), _read(o, by_column)


def triton_coefficients(o: Operands, out: Tensor) -> None:
    """Write ``A_ij``, ``(P, Q)``; all anchors must have factors."""
    from compopt.tiles import language

    tile, down, across = _tile(o, maxima=False)
    weights = [_given(o, name) for name in ("factor", "top")]
    with torch.cuda.device_of(o.x):
        language.coefficients[(down * across,)](
            *(*_features(o), *weights[0], *weights[1], out, *_sizes(o), out.stride(0), *_numbers(o)),
            **constants(o, tile),
        )


def _given(o: Operands, name: str) -> list[Tensor]:
    """Return a field of the anchors along the rows and along the columns; an empty tensor replaces ``None``."""
    values = [None if anchors is None else getattr(anchors, name) for anchors in (o.rows, o.columns)]
    return [o.x.new_empty(0, dtype=torch.float32) if value is None else value for value in values]


def _features(o: Operands) -> list[Tensor]:
    """Return features, keys, scales and thresholds, in the order of the kernels' arguments."""
    return [o.x, o.y, o.row_keys, o.column_keys, *_given(o, "scale"), *_given(o, "threshold")]


def _sizes(o: Operands) -> list[int]:
    return [*o.shape, o.x.shape[1], o.inside, o.row_keys.stride(0), o.column_keys.stride(0)]


def _numbers(o: Operands) -> list[float]:
    return [0.0 if o.shared is None else o.shared, *o.strengths]


def _read(o: Operands, written: Tensor) -> AnchorSums | None:
    """Return the planes that a kernel wrote, ``(tiles, anchors)`` each, as named sums."""
    if not len(written):
        return None
    total, squares, *rest = written
    top, dot, number = (rest.pop(0) if there else None for there in (o.shared is None, o.moments, o.counted))
    return AnchorSums(total, squares, top, dot, number)


# -- all waves ---------------------------------------------------------------------------------------------------------


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
    """Return ``A Y``, ``(P, d)``, and ``A^T X``, ``(Q, d)``.

    ``A_ij = f_i exp(z_ij - top_i) + f_j exp(z_ji - top_j)``. ``A`` is computed from a recomputed ``S``, wave by wave,
    in one buffer ``(wave, Q)`` of the dtype of the features, and used in two ordinary products.

    Args:
        o: operands of the sweep, with the factors ``f`` of the anchors; anchors without factors do not contribute to
            ``A``.
        transposed: compute ``A^T X``; otherwise zeros are returned for it.
    """
    rows, columns = (None if side is None or side.factor is None else side for side in (o.rows, o.columns))
    o = replace(o, rows=rows, columns=columns)
    one_wave = torch_coefficients if o.precision is None else triton_coefficients
    of_rows, of_columns = (z.new_zeros(z.shape, dtype=o.dtype) for z in (o.x, o.y))
    buffer: Tensor | None = None
    with tf32_allowed() if o.precision == "tf32" and o.x.is_cuda else contextlib.nullcontext():
        for wave in o.waves():
            if buffer is None:
                width = -(-len(o.y) // 16) * 16  # aligns the rows for the kernel and for the products
                buffer = o.x.new_empty(wave.stop - wave.start, width)[:, : len(o.y)]
            a = buffer[: wave.stop - wave.start]
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


def log_sums(x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any]) -> Tensor:
    """Return ``log sum_j exp(scale_i s_ij)`` for the anchors of both axes, ``(B, 2)``, differentiable once.

    Args:
        x, y: features along the rows and along the columns, ``(B, d)``, float32 or float64.
        scale: ``1 / tau_i`` of the anchors along the rows and along the columns, ``(B, 2)``.
        facts: fields of :class:`Operands` other than features and anchors.
    """
    return _LogSums.apply(x, y, scale, facts)


class _LogSums(torch.autograd.Function):
    """Autograd function of the sums, which stores the features and a few numbers per anchor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any]) -> Tensor:
        low = torch.bfloat16 if facts["precision"] == "bf16" else x.dtype
        x, y, ctx.facts = x.to(low), y.to(low), facts
        rows, columns = (Anchors(of_side).contiguous() for of_side in scale.unbind(1))
        with torch.autocast(x.device.type, enabled=False):
            found = sums(Operands(x, y, rows, columns, moments=ctx.needs_input_grad[2], **facts))
        sides = [side for side in found if side is not None]
        log_sums = torch.stack([side.log_total() for side in sides], dim=1)
        means = [torch.where(side.total == 0, 0, side.dot / side.total) for side in sides if side.dot is not None]
        ctx.save_for_backward(x, y, scale, log_sums, *means)
        return log_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # in a backward pass: with create_graph=True, and only then
            raise RuntimeError("contrastive_sums is differentiable once; call backward() without create_graph=True")
        x, y, scale, log_sums, *means = ctx.saved_tensors
        of_scale = grad * torch.stack(means, dim=1) if means else None
        if not any(ctx.needs_input_grad[:2]):
            return None, None, of_scale, None
        sides = zip(scale.unbind(1), (grad * scale).unbind(1), log_sums.unbind(1), strict=True)
        rows, columns = (Anchors(of_side, None, factor, top).contiguous() for of_side, factor, top in sides)
        operands, transposed = Operands(x, y, rows, columns, **ctx.facts), ctx.needs_input_grad[1]
        with torch.autocast(x.device.type, enabled=False):  # autocast may be enabled around backward()
            of_x, of_y = products(operands, transposed)
        return of_x, of_y if transposed else None, of_scale, None
