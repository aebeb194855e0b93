"""Triton kernels for tiles of the matrix of similarities; imported only inside functions, since Triton is optional.

Compile-time constants are in capitals:

``BM, BN, BK``: rows and columns of a tile, and the part of the features' dimension ``d`` in one step of the product.
``EVEN``: ``d`` is a multiple of ``BK``. ``UPCAST``: multiply in float32, since the interpreter multiplies bfloat16 as
integers. ``KEYS``: number of keys. ``AXIS``: axis of the candidates, 1 if the anchors are along the rows. ``SHIFTED``:
a maximum is subtracted from the exponents; otherwise all anchors have the scale ``shared``.

Exponents are in units of ``log 2``. ``excluded`` is the mask of the entries that are not pairs: those outside the
matrix ``(P, Q)``, which read row or column 0, and those whose row and column have an equal key.
"""

import triton
import triton.language as tl

NO_PAIR = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GROUP = tl.constexpr(8)  # rows of tiles that share columns in the cache


@triton.jit
def tile(
    x, y, row_keys, column_keys, P, Q, d, row_stride, column_stride,
    KEYS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the place of a tile, its rows and columns, its similarities in float32, and the mask ``excluded``."""
    number, width = tl.program_id(0), GROUP * tl.cdiv(Q, BN)  # programs that run together share rows and columns
    first = number // width * GROUP
    height = min(tl.cdiv(P, BM) - first, GROUP)
    down, across = first + number % width % height, number % width // height
    row, column, part = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_rows, in_columns = row < P, column < Q  # `== 0` below needs fewer registers than another comparison
    i, j = tl.where(in_rows, row, 0), tl.where(in_columns, column, 0)
    left = x + i.to(tl.int64)[:, None] * d + part[None, :]
    right = y + j.to(tl.int64)[None, :] * d + part[:, None]
    s = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, d, BK):
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            a = tl.load(left, mask=part[None, :] < d - start, other=0.0)
            b = tl.load(right, mask=part[:, None] < d - start, other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        s = tl.dot(a, b, s, input_precision=PRECISION)
        left += BK
        right += BK
    excluded = (in_rows == 0)[:, None] | (in_columns == 0)[None, :]
    for key in tl.static_range(KEYS):
        of_rows = tl.load(row_keys + key * row_stride + i)
        of_columns = tl.load(column_keys + key * column_stride + j)
        excluded = excluded | (of_rows[:, None] == of_columns[None, :])
    return down, across, row, column, s, excluded


@triton.jit
def along(values, anchor, anchors, AXIS: tl.constexpr):
    """Return values of anchors that broadcast to a tile; outside the matrix those of anchor 0."""
    return tl.expand_dims(tl.load(values + tl.where(anchor < anchors, anchor, 0)), AXIS)


@triton.jit
def exponents(s, scale, anchor, anchors, shared, AXIS: tl.constexpr, SHIFTED: tl.constexpr):
    """Return ``s_ij / tau_i``."""
    if SHIFTED:
        return s * (along(scale, anchor, anchors, AXIS) * LOG2E)
    else:
        return s * (shared * LOG2E)


@triton.jit
def write_sums(
    s, excluded, scale, anchor, anchors, shared, out, plane,
    AXIS: tl.constexpr, SHIFTED: tl.constexpr, MOMENTS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Write sums of the anchors of one axis over a tile: total, and optionally top, dot and count."""
    z, inside = exponents(s, scale, anchor, anchors, shared, AXIS, SHIFTED), anchor < anchors
    if SHIFTED:
        z = tl.where(excluded, NO_PAIR, z)
        top = tl.max(z, AXIS)
        z = z - tl.expand_dims(top, AXIS)
    e = tl.where(excluded, 0.0, tl.exp2(z))
    at = out + anchor  # incremented by one plane each time, since a multiple of `plane` may overflow 32 bits
    tl.store(at, tl.sum(e, AXIS), mask=inside)
    if SHIFTED:
        at += plane
        tl.store(at, tl.where(top > NO_PAIR, top * LN2, NO_PAIR), mask=inside)
    if MOMENTS:  # s may be NaN for excluded pairs
        at += plane
        tl.store(at, tl.sum(tl.where(excluded, 0.0, e * s), AXIS), mask=inside)
    if COUNTED:
        at += plane
        tl.store(at, tl.sum(tl.where(excluded, 0.0, 1.0), AXIS), mask=inside)


@triton.jit
def sums(
    x, y, row_keys, column_keys, row_scale, column_scale, row_out, column_out,
    P, Q, d, row_stride, column_stride, row_plane, column_plane, shared,
    KEYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHIFTED: tl.constexpr,
    MOMENTS: tl.constexpr, COUNTED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write sums of the anchors along both axes over one tile.

    ``row_out`` is ``(planes, tiles across, P)`` and ``column_out`` ``(planes, tiles down, Q)``, float32.
    """
    down, across, row, column, s, excluded = tile(
        x, y, row_keys, column_keys, P, Q, d, row_stride, column_stride, KEYS, EVEN, PRECISION, UPCAST, BM, BN, BK
    )
    if ROWS:
        row_out += across.to(tl.int64) * P
        write_sums(s, excluded, row_scale, row, P, shared, row_out, row_plane, 1, SHIFTED, MOMENTS, COUNTED)
    if COLUMNS:
        column_out += down.to(tl.int64) * Q
        write_sums(s, excluded, column_scale, column, Q, shared, column_out, column_plane, 0, SHIFTED, MOMENTS, COUNTED)


@triton.jit
def weighed(s, excluded, scale, factor, top, anchor, anchors, shared, AXIS: tl.constexpr, SHIFTED: tl.constexpr):
    """Return ``factor_i exp(z_ij - top_i)`` for the anchors of one axis."""
    z = exponents(s, scale, anchor, anchors, shared, AXIS, SHIFTED)
    if SHIFTED:
        z = z - along(top, anchor, anchors, AXIS) * LOG2E
    return tl.where(excluded, 0.0, tl.exp2(z) * along(factor, anchor, anchors, AXIS))


@triton.jit
def coefficients(
    x, y, row_keys, column_keys, row_scale, column_scale, row_factor, column_factor, row_top, column_top, out,
    P, Q, d, row_stride, column_stride, out_stride, shared,
    KEYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHIFTED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write one tile of ``A``, ``(P, Q)`` in the dtype of ``out``."""
    down, across, row, column, s, excluded = tile(
        x, y, row_keys, column_keys, P, Q, d, row_stride, column_stride, KEYS, EVEN, PRECISION, UPCAST, BM, BN, BK
    )
    a = tl.zeros((BM, BN), dtype=tl.float32)
    if ROWS:
        a += weighed(s, excluded, row_scale, row_factor, row_top, row, P, shared, 1, SHIFTED)
    if COLUMNS:
        a += weighed(s, excluded, column_scale, column_factor, column_top, column, Q, shared, 0, SHIFTED)
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(at, a.to(out.dtype.element_ty), mask=(row < P)[:, None] & (column < Q)[None, :])
