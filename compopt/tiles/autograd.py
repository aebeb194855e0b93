"""Sums of the anchors of both axes as a node of autograd's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compopt.tiles import sweep
from compopt.tiles.operands import Anchors, Operands, Weights


class LogSums(torch.autograd.Function):
    """``log sum_j exp(scale_i s_ij)`` of the anchors of both axes, ``(B, 2)``; ``scale`` is ``(B, 2)``.

    The facts are fields of :class:`~compopt.tiles.operands.Operands` beside features and anchors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any]) -> Tensor:
        low = torch.bfloat16 if facts["precision"] == "bf16" else x.dtype
        x, y, ctx.facts = x.to(low), y.to(low), facts
        with torch.autocast(x.device.type, enabled=False):
            found = sweep.sums(_operands(x, y, scale, facts, moments=ctx.needs_input_grad[2]))
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
            of_x, of_y = sweep.products(operands, rows, columns, transposed)
        return of_x, of_y if transposed else None, of_scale, None


def _operands(x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any], moments: bool = False) -> Operands:
    """Return the operands with these scales of the anchors along the rows and along the columns."""
    rows, columns = (Anchors(column.contiguous()) for column in scale.unbind(1))
    return Operands(x, y, rows, columns, moments=moments, **facts)
