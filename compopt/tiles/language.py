"""Triton kernels for tiles of the matrix of similarities; imported only inside functions, since Triton is optional.

Names; compile-time constants are in capitals:

==================  =================================================================================================
``P, Q, d``         rows of the wave, columns, dimension of the features
``BM, BN, BK``      rows and columns of a tile, and the part of ``d`` in one step of the product
``EVEN``            ``d`` is a multiple of ``BK``
``KEYS, WITHIN``    number of keys that exclude pairs if equal; one more key that excludes pairs if different
``AXIS``            axis of the candidates: 1 if anchors are along the rows, 0 if they are along the columns
``SHIFTED``         a maximum is subtracted from the exponents; otherwise all anchors have the scale ``shared``
``THRESHOLD``       candidates above a similarity are excluded; ``SPARED``: except further candidates
``HARD``            candidates have a ``beta``
``UPCAST``          multiply in float32, since the interpreter multiplies bfloat16 as integers
==================  =================================================================================================

Exponents are in units of ``log 2``. Rows and columns outside the matrix read row and column 0 and are not pairs.
"""

import triton
import triton.language as tl

NO_PAIR = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_of(P, Q, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the row and the column of the tile; programs that run together share rows and columns in the cache."""
    number = tl.program_id(0)
    down = tl.cdiv(P, BM)
    across = tl.cdiv(Q, BN)
    first = number // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    inside = number % (GROUP * across)
    return first + inside % height, inside // height


@triton.jit
def along(values, AXIS: tl.constexpr):
    """Return values of anchors, or of candidates for the other axis, as a column or as a row."""
    if AXIS == 1:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def similarities(
    x, y, row, column, d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return one tile of ``X Y^T`` in float32."""
    part = tl.arange(0, BK)
    left = x + row.to(tl.int64)[:, None] * d + part[None, :]
    right = y + column.to(tl.int64)[None, :] * d + part[:, None]
    s = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, d, BK):
        if EVEN:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=part[None, :] < d - start, other=0.0)
            b = tl.load(right, mask=part[:, None] < d - start, other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        s = tl.dot(a, b, s, input_precision=PRECISION)
        left += BK
        right += BK
    return s


@triton.jit
def apart(
    row_keys, column_keys, row_stride, column_stride, row, column, inside_rows, inside_columns,
    KEYS: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """Return a mask that is True if a row and a column are not a pair."""
    found = (inside_rows == 0)[:, None] | (inside_columns == 0)[None, :]
    for key in tl.static_range(KEYS):
        of_rows = tl.load(row_keys + key * row_stride + row)
        of_columns = tl.load(column_keys + key * column_stride + column)
        found = found | (of_rows[:, None] == of_columns[None, :])
    if WITHIN:
        of_rows = tl.load(row_keys + KEYS * row_stride + row)
        of_columns = tl.load(column_keys + KEYS * column_stride + column)
        found = found | (of_rows[:, None] != of_columns[None, :])
    return found


@triton.jit
def exponents(
    s, found, scale, threshold, anchor, further, shared, beta, beta_further,
    AXIS: tl.constexpr, SHIFTED: tl.constexpr, THRESHOLD: tl.constexpr, SPARED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Return ``s_ij (1 / tau_i + beta_j)`` in units of ``log 2``, and the mask of excluded pairs."""
    if THRESHOLD:
        above = s > along(tl.load(threshold + anchor), AXIS)
        if SPARED:
            above = above & along(further == 0, 1 - AXIS)
        found = found | above
    if SHIFTED:
        factor = along(tl.load(scale + anchor) * LOG2E, AXIS)
        if HARD:
            factor = factor + along(tl.where(further, beta_further, beta) * LOG2E, 1 - AXIS)
        return s * factor, found
    else:
        return s * (shared * LOG2E), found


@triton.jit
def write_sums(
    s, found, scale, threshold, anchor, inside, further, shared, beta, beta_further, out, plane,
    AXIS: tl.constexpr, SHIFTED: tl.constexpr, MOMENTS: tl.constexpr, COUNTED: tl.constexpr,
    THRESHOLD: tl.constexpr, SPARED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Write sums of the anchors of one axis over a tile: total, squares and optionally top, dot and count."""
    z, found = exponents(
        s, found, scale, threshold, anchor, further, shared, beta, beta_further, AXIS, SHIFTED, THRESHOLD, SPARED, HARD
    )
    if SHIFTED:
        z = tl.where(found, NO_PAIR, z)
        top = tl.max(z, AXIS)
        z = z - along(top, AXIS)
    e = tl.where(found, 0.0, tl.exp2(z))
    at = out + anchor  # incremented by one plane each time, since a multiple of `plane` may overflow 32 bits
    tl.store(at, tl.sum(e, AXIS), mask=inside)
    at += plane
    tl.store(at, tl.sum(e * e, AXIS), mask=inside)
    if SHIFTED:
        at += plane
        tl.store(at, tl.where(top > NO_PAIR, top * LN2, NO_PAIR), mask=inside)
    if MOMENTS:  # s may be NaN for excluded pairs
        at += plane
        tl.store(at, tl.sum(tl.where(found, 0.0, e * s), AXIS), mask=inside)
    if COUNTED:
        at += plane
        tl.store(at, tl.sum(tl.where(found, 0.0, 1.0), AXIS), mask=inside)


@triton.jit
def sums(
    x, y, row_keys, column_keys, row_scale, column_scale, row_threshold, column_threshold, row_out, column_out,
    P, Q, d, inside, row_stride, column_stride, row_plane, column_plane, shared, beta, beta_further,
    KEYS: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHIFTED: tl.constexpr,
    MOMENTS: tl.constexpr, COUNTED: tl.constexpr, THRESHOLD: tl.constexpr, SPARED: tl.constexpr, HARD: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write sums of the anchors along both axes over one tile.

    ``row_out`` is ``(planes, tiles across, P)`` and ``column_out`` ``(planes, tiles down, Q)``, float32.
    """
    down, across = tile_of(P, Q, BM, BN, GROUP)
    row = down * BM + tl.arange(0, BM)
    column = across * BN + tl.arange(0, BN)
    in_rows, in_columns = row < P, column < Q
    row, column = tl.where(in_rows, row, 0), tl.where(in_columns, column, 0)
    s = similarities(x, y, row, column, d, BM, BN, BK, EVEN, PRECISION, UPCAST)
    found = apart(row_keys, column_keys, row_stride, column_stride, row, column, in_rows, in_columns, KEYS, WITHIN)
    if ROWS:
        write_sums(
            s, found, row_scale, row_threshold, row, in_rows, column >= inside, shared, beta, beta_further,
            row_out + across.to(tl.int64) * P, row_plane,
            1, SHIFTED, MOMENTS, COUNTED, THRESHOLD, SPARED, HARD,
        )  # fmt: skip
    if COLUMNS:
        write_sums(
            s, found, column_scale, column_threshold, column, in_columns, row < 0, shared, beta, beta_further,
            column_out + down.to(tl.int64) * Q, column_plane,
            0, SHIFTED, MOMENTS, COUNTED, THRESHOLD, SPARED, HARD,
        )  # fmt: skip


@triton.jit
def weighed(
    s, found, scale, threshold, factor, top, anchor, further, shared, beta, beta_further,
    AXIS: tl.constexpr, SHIFTED: tl.constexpr, THRESHOLD: tl.constexpr, SPARED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Return ``factor_i exp(z_ij - top_i)`` for the anchors of one axis."""
    z, found = exponents(
        s, found, scale, threshold, anchor, further, shared, beta, beta_further, AXIS, SHIFTED, THRESHOLD, SPARED, HARD
    )
    if SHIFTED:
        z = z - along(tl.load(top + anchor) * LOG2E, AXIS)
    return tl.where(found, 0.0, tl.exp2(z) * along(tl.load(factor + anchor), AXIS))


@triton.jit
def coefficients(
    x, y, row_keys, column_keys, row_scale, column_scale, row_threshold, column_threshold,
    row_factor, column_factor, row_top, column_top, out,
    P, Q, d, inside, row_stride, column_stride, out_stride, shared, beta, beta_further,
    KEYS: tl.constexpr, WITHIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHIFTED: tl.constexpr,
    THRESHOLD: tl.constexpr, SPARED: tl.constexpr, HARD: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write one tile of ``A``, ``(P, Q)`` in the dtype of ``out``."""
    down, across = tile_of(P, Q, BM, BN, GROUP)
    row = down * BM + tl.arange(0, BM)
    column = across * BN + tl.arange(0, BN)
    in_rows, in_columns = row < P, column < Q
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    row, column = tl.where(in_rows, row, 0), tl.where(in_columns, column, 0)
    s = similarities(x, y, row, column, d, BM, BN, BK, EVEN, PRECISION, UPCAST)
    found = apart(row_keys, column_keys, row_stride, column_stride, row, column, in_rows, in_columns, KEYS, WITHIN)
    a = tl.zeros((BM, BN), dtype=tl.float32)
    if ROWS:
        a += weighed(
            s, found, row_scale, row_threshold, row_factor, row_top, row, column >= inside, shared, beta, beta_further,
            1, SHIFTED, THRESHOLD, SPARED, HARD,
        )  # fmt: skip
    if COLUMNS:
        a += weighed(
            s, found, column_scale, column_threshold, column_factor, column_top, column, row < 0,
            shared, beta, beta_further, 0, SHIFTED, THRESHOLD, SPARED, HARD,
        )  # fmt: skip
    tl.store(at, a.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
