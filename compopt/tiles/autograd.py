"""Sums of the anchors of both axes as a node of autograd's graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compopt.tiles import sweep
from compopt.tiles.operands import Anchors, Operands, Weights


class LogSums(torch.autograd.Function):
    """``log sum_j exp(scale_i s_ij)`` of the anchors of both axes, ``(B, 2)``; ``scale`` is ``(B, 2)``.

    The operands have the other facts; their features and anchors are replaced.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, operands: Operands) -> Tensor:
        ctx.operands = replace(operands, moments=ctx.needs_input_grad[2])
        found = [side for side in sweep.sums(_filled(ctx.operands, x, y, scale)) if side is not None]
        log_sums = torch.stack([side.log_total() for side in found], dim=1)
        means = [torch.where(side.total > 0, side.dot / side.total, 0) for side in found if side.dot is not None]
        ctx.save_for_backward(x, y, scale, log_sums, *means)
        return log_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # in backward: with create_graph=True, and only then
            raise RuntimeError("contrastive_sums is differentiable once; call backward() without create_graph=True")
        x, y, scale, log_sums, *means = ctx.saved_tensors
        of_scale = grad * torch.stack(means, dim=1) if means else None
        if not any(ctx.needs_input_grad[:2]):
            return None, None, of_scale, None
        pairs = zip((grad * scale).unbind(1), log_sums.unbind(1), strict=True)
        rows, columns = (Weights(factor.contiguous(), top.contiguous()) for factor, top in pairs)
        of_x, of_y = sweep.products(_filled(ctx.operands, x, y, scale), rows, columns, ctx.needs_input_grad[1])
        return of_x, of_y if ctx.needs_input_grad[1] else None, of_scale, None


def _filled(o: Operands, x: Tensor, y: Tensor, scale: Tensor) -> Operands:
    """Return the operands with these features, and scales of the anchors along the rows and along the columns."""
    dtype = torch.bfloat16 if o.precision == "bf16" else x.dtype
    rows, columns = (Anchors(column.contiguous()) for column in scale.unbind(1))
    return replace(o, x=x.to(dtype), y=y.to(dtype), rows=rows, columns=columns)
