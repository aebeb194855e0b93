"""All waves of a matrix: sums of its anchors, products of its coefficients with the features, a node of the graph."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from compopt.tiles import dense, launch
from compopt.tiles.choice import tf32_allowed
from compopt.tiles.operands import Anchors, AnchorSums, Operands, Weights


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


def log_sums(x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any]) -> Tensor:
    """``log sum_j exp(scale_i s_ij)`` of the anchors of both axes, ``(B, 2)``, differentiable once.

    Args:
        x, y: features along the rows and along the columns, ``(B, d)``, float32 or float64.
        scale: ``1 / tau_i`` of the anchors along the rows and along the columns, ``(B, 2)``.
        facts: fields of :class:`~compopt.tiles.operands.Operands` beside features and anchors.
    """
    return _LogSums.apply(x, y, scale, facts)


class _LogSums(torch.autograd.Function):
    """The sums as a node of the graph, which stores the features and a few numbers per anchor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any]) -> Tensor:
        low = torch.bfloat16 if facts["precision"] == "bf16" else x.dtype
        x, y, ctx.facts = x.to(low), y.to(low), facts
        with torch.autocast(x.device.type, enabled=False):
            found = sums(_operands(x, y, scale, facts, moments=ctx.needs_input_grad[2]))
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
        pairs = zip((grad * scale).unbind(1), log_sums.unbind(1), strict=True)
        rows, columns = (Weights(factor.contiguous(), top.contiguous()) for factor, top in pairs)
        operands, transposed = _operands(x, y, scale, ctx.facts), ctx.needs_input_grad[1]
        with torch.autocast(x.device.type, enabled=False):  # backward() may be called where it is on
            of_x, of_y = products(operands, rows, columns, transposed)
        return of_x, of_y if transposed else None, of_scale, None


def _operands(x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any], moments: bool = False) -> Operands:
    """Return the operands with these scales of the anchors along the rows and along the columns."""
    rows, columns = (Anchors(column.contiguous()) for column in scale.unbind(1))
    return Operands(x, y, rows, columns, moments=moments, **facts)
