r"""A matrix of similarities ``S = X Y^T`` in waves of rows: sums of its anchors, products of its coefficients.

Anchors are along the rows, along the columns, or along both axes. An anchor ``i`` has the sum

.. math:: \sum_{j \in N_i} e^{s_{ij} (1/\tau_i + \beta_j)}

over its candidates ``N_i``, along the other axis. A pair of a row and a column is left out if their keys are equal.

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
        factor: takes exponentials to coefficients ``factor_i exp(z_ij - top_i)``, ``(P,)``; ``None``: they have none.
        top: subtracted from the exponent there, ``(P,)``; ``None``: nothing is.
    """

    scale: Tensor
    threshold: Tensor | None = None
    factor: Tensor | None = None
    top: Tensor | None = None

    def part(self, anchors: slice) -> Anchors:
        """Some of the anchors."""
        return Anchors(self.scale[anchors], *(None if value is None else value[anchors] for value in self[1:]))

    def contiguous(self) -> Anchors:
        """The same in memory without gaps, which the kernels read."""
        return Anchors(self.scale.contiguous(), *(None if value is None else value.contiguous() for value in self[1:]))


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

    def part(self, wave: slice) -> Operands:
        """Some of the rows."""
        rows = None if self.rows is None else self.rows.part(wave)
        return replace(self, x=self.x[wave], rows=rows, row_keys=self.row_keys[:, wave])


def ranked(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 keys >= 0 that are equal where the given ones are, ``(P,)`` and ``(Q,)``, without a host sync.

    Narrow keys keep registers of the kernels free, and numbers below 0 stay free for what has no key.
    """
    ordered, order = torch.cat([rows, columns]).sort()
    new = torch.diff(ordered, prepend=ordered[:1]) != 0
    keys = torch.empty_like(order, dtype=torch.int32).scatter_(0, order, new.cumsum(0, dtype=torch.int32))
    return keys[: len(rows)], keys[len(rows) :]


# -- a wave in plain torch ---------------------------------------------------------------------------------------------


def torch_sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return sums of the anchors along the rows, and of those along the columns, of one part each, ``(1, P)``."""
    s, apart = o.x @ o.y.T, _apart(o)
    rows = None if o.rows is None else _side_sums(o, s, apart, o.rows, 1)
    columns = None if o.columns is None else _side_sums(o, s, apart, o.columns, 0)
    return rows, columns


def torch_coefficients(o: Operands, out: Tensor) -> None:
    """Write ``A_ij``, the sum of what the anchors of both axes give to a pair, ``(P, Q)``."""
    s, apart = o.x @ o.y.T, _apart(o)
    out.zero_()
    for anchors, dim in ((o.rows, 1), (o.columns, 0)):
        if anchors is not None and anchors.factor is not None:
            z, skipped = _exponents(o, s, apart, anchors, dim)
            if anchors.top is not None:
                z.sub_(anchors.top.unsqueeze(dim))
            out += z.exp_().mul_(anchors.factor.unsqueeze(dim)).masked_fill_(skipped, 0)


def _apart(o: Operands) -> Tensor:
    """True where a row and a column are no pair, ``(P, Q)``."""
    count = len(o.row_keys) - o.within
    apart = (o.row_keys[:count, :, None] == o.column_keys[:count, None, :]).any(0)
    return apart | (o.row_keys[-1, :, None] != o.column_keys[-1]) if o.within else apart


def _exponents(o: Operands, s: Tensor, apart: Tensor, anchors: Anchors, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``s_ij (1 / tau_i + beta_j)``, and where there is no pair; ``dim`` is the axis of the candidates."""
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
    dot = (e * s).masked_fill_(apart, 0).sum(dim)[None] if o.moments else None  # s may be NaN where there is no pair
    number = (~apart).sum(dim, dtype=s.dtype)[None] if o.counted else None
    return AnchorSums(e.sum(dim)[None], e.square().sum(dim)[None], None if top is None else top[None], dot, number)


# -- a wave in Triton --------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Shape of a tile, and how its product is pipelined."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


# One tile for each precision and kernel, so that sums are added in the same order in every run. The wide ones are of
# kernels that compile for every target without spilled registers, the narrow ones of the others (benchmarks/fused.py).
WIDE = {"bf16": Tile(128, 128, 64, 8, 3), "tf32": Tile(128, 128, 32, 8, 3)}
NARROW = {"bf16": Tile(128, 64, 64, 8, 3), "tf32": Tile(128, 64, 32, 8, 3)}
SMALL = {"tf32x3": Tile(64, 64, 32, 4, 2), "ieee": Tile(32, 32, 32, 4, 2)}
GROUP = 8  # rows of tiles that share columns in the cache


def tile_of(precision: str, maxima: bool, policy: bool) -> Tile:
    """Return the tile of a kernel.

    Args:
        precision: of the product.
        maxima: it finds the maximum of each anchor.
        policy: it knows thresholds or strengths.
    """
    return {**(NARROW if maxima or policy else WIDE), **SMALL}[precision]


def constants(o: Operands, tile: Tile) -> dict[str, Any]:
    """Return what both kernels know when they are compiled, and how they are launched."""
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
    """Return the tile of a kernel, and how many are down and across."""
    tile = tile_of(o.precision or "ieee", maxima, policy=_has_threshold(o) or any(o.strengths))
    return tile, -(-len(o.x) // tile.BM), -(-len(o.y) // tile.BN)


def triton_sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return sums of the anchors along the rows, and of those along the columns, by tile."""
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
    """Write ``A_ij``, ``(P, Q)``; all anchors have factors."""
    from compopt.tiles import language

    tile, down, across = _tile(o, maxima=False)
    weights = [_given(o, name) for name in ("factor", "top")]
    with torch.cuda.device_of(o.x):
        language.coefficients[(down * across,)](
            *(*_features(o), *weights[0], *weights[1], out, *_sizes(o), out.stride(0), *_numbers(o)),
            **constants(o, tile),
        )


def _given(o: Operands, name: str) -> list[Tensor]:
    """Return a field of the anchors along the rows and along the columns; without an entry where there is none."""
    values = [None if anchors is None else getattr(anchors, name) for anchors in (o.rows, o.columns)]
    return [o.x.new_empty(0, dtype=torch.float32) if value is None else value for value in values]


def _features(o: Operands) -> list[Tensor]:
    """Features, keys, scales and thresholds."""
    return [o.x, o.y, o.row_keys, o.column_keys, *_given(o, "scale"), *_given(o, "threshold")]


def _sizes(o: Operands) -> list[int]:
    return [*o.shape, o.x.shape[1], o.inside, o.row_keys.stride(0), o.column_keys.stride(0)]


def _numbers(o: Operands) -> list[float]:
    return [0.0 if o.shared is None else o.shared, *o.strengths]


def _read(o: Operands, written: Tensor) -> AnchorSums | None:
    """Name the planes, ``(tiles, anchors)`` each."""
    if not len(written):
        return None
    total, squares, *rest = written
    top, dot, number = (rest.pop(0) if there else None for there in (o.shared is None, o.moments, o.counted))
    return AnchorSums(total, squares, top, dot, number)


# -- all waves ---------------------------------------------------------------------------------------------------------


def sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return the sums of the anchors along the rows ``(P,)``, and of those along the columns ``(Q,)``.

    Memory beyond the operands, of one wave at a time: in torch some matrices ``(wave, Q)``; in Triton a few sums per
    tile and anchor. The result is the same in every run: nothing is added atomically.
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
    """``A Y``, ``(P, d)``, and ``A^T X``, ``(Q, d)``, of ``A_ij = f_i exp(z_ij - top_i) + f_j exp(z_ji - top_j)``.

    The product ``S`` is computed a second time, wave by wave, into one buffer ``(wave, Q)`` of the dtype of the
    features; two ordinary products read it.

    Args:
        o: operands of the sweep whose sums the factors ``f`` of the anchors follow from; anchors without them have no
            part in ``A``.
        transposed: compute ``A^T X``; otherwise it is zero.
    """
    rows, columns = (None if side is None or side.factor is None else side for side in (o.rows, o.columns))
    o = replace(o, rows=rows, columns=columns)
    one_wave = torch_coefficients if o.precision is None else triton_coefficients
    of_rows, of_columns = (z.new_zeros(z.shape, dtype=o.dtype) for z in (o.x, o.y))
    buffer: Tensor | None = None
    with tf32_allowed() if o.precision == "tf32" and o.x.is_cuda else contextlib.nullcontext():
        for wave in o.waves():
            if buffer is None:
                width = -(-len(o.y) // 16) * 16  # rows begin at aligned addresses, for the kernel and for the products
                buffer = o.x.new_empty(wave.stop - wave.start, width)[:, : len(o.y)]
            a = buffer[: wave.stop - wave.start]
            one_wave(o.part(wave), a)
            _add_product(of_rows[wave], a, o.y)
            if transposed:
                _add_product(of_columns, a.T, o.x[wave])
    return of_rows, of_columns


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """``into += a b``; a product in bfloat16 is added in float32."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into.add_(a @ b)


def log_sums(x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any]) -> Tensor:
    """``log sum_j exp(scale_i s_ij)`` of the anchors of both axes, ``(B, 2)``, differentiable once.

    Args:
        x, y: features along the rows and along the columns, ``(B, d)``, float32 or float64.
        scale: ``1 / tau_i`` of the anchors along the rows and along the columns, ``(B, 2)``.
        facts: fields of :class:`Operands` beside features and anchors.
    """
    return _LogSums.apply(x, y, scale, facts)


class _LogSums(torch.autograd.Function):
    """The sums as a node of the graph, which stores the features and a few numbers per anchor."""

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
        with torch.autocast(x.device.type, enabled=False):  # backward() may be called where it is on
            of_x, of_y = products(operands, transposed)
        return of_x, of_y if transposed else None, of_scale, None
