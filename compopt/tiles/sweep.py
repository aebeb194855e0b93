"""All waves of a matrix: sums of its anchors, and the products of its coefficients with the features."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from compopt.tiles import dense, launch
from compopt.tiles.choice import tf32_allowed
from compopt.tiles.operands import AnchorSums, Operands, Weights


def sums(o: Operands) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return the sums of the anchors along the rows ``(P,)``, and of those along the columns ``(Q,)``.

    Memory beyond the operands, of one wave at a time: in torch some matrices ``(wave, Q)``; in Triton a few sums per
    tile and anchor. The result is the same in every run: nothing is added atomically.
    """
    one_wave = dense.sums if o.precision is None else launch.sums
    rows: list[AnchorSums] = []
    columns: AnchorSums | None = None
    for wave in o.waves():
        of_rows, of_columns = one_wave(o, wave)
        if of_rows is not None:
            rows.append(of_rows.merged())
        if of_columns is not None:
            more = of_columns.merged()
            columns = more if columns is None else AnchorSums.together([columns, more], torch.stack).merged()
    return AnchorSums.together(rows, torch.cat) if rows else None, columns


def products(o: Operands, rows: Weights | None, columns: Weights | None, transposed: bool) -> tuple[Tensor, Tensor]:
    """``A Y``, ``(P, d)``, and ``A^T X``, ``(Q, d)``, of ``A_ij = f_i exp(z_ij - top_i) + f_j exp(z_ji - top_j)``.

    The product ``S`` is computed a second time, wave by wave, into one buffer ``(wave, Q)`` of the dtype of the
    features; two ordinary products read it.

    Args:
        o: operands of the sweep whose sums the weights follow from.
        rows, columns: of the anchors along each axis; ``None``: they have no part in ``A``.
        transposed: compute ``A^T X``; otherwise it is zero.
    """
    one_wave = dense.coefficients if o.precision is None else launch.coefficients
    of_rows, of_columns = (z.new_zeros(z.shape, dtype=o.dtype) for z in (o.x, o.y))
    buffer: Tensor | None = None
    with tf32_allowed() if o.precision == "tf32" and o.x.is_cuda else contextlib.nullcontext():
        for wave in o.waves():
            if buffer is None:
                width = -(-len(o.y) // 16) * 16  # rows begin at aligned addresses, for the kernel and for the products
                buffer = o.x.new_empty(wave.stop - wave.start, width)[:, : len(o.y)]
            a = buffer[: wave.stop - wave.start]
            one_wave(o, wave, rows, columns, a)
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
