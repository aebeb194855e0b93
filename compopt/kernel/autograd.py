"""Closed-form gradients handed to autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _ClosedForm(torch.autograd.Function):
    """A value whose gradients are already known; autograd stores those and nothing else."""

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, Sequence[Tensor]], *inputs: Tensor) -> Tensor:
        value, gradients = known  # in a tuple, which autograd does not look into: the value itself becomes the output
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # in backward: with create_graph=True, and only then
            raise RuntimeError(
                "backward through an estimator's loss with create_graph=True: a second derivative (gradient penalty, "
                "Hessian, hvp) is not available, since the pair weights are estimates that are held constant; call "
                "backward() or grad() without create_graph, and build a penalty on gradients of some other function"
            )
        gradients = ctx.saved_tensors
        scaled = (
            (gradient * grad_output.to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return None, *scaled


def with_gradients(value: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """``value`` as a node of the graph of some tensors, given in pairs with their gradients; without any, itself.

    Gradients are cast to the tensors' dtypes only when scaled.

    A backward pass with ``create_graph=True`` raises: the weights are estimates, and their derivative is not that of
    the objective.
    """
    if not pairs:
        return value
    tensors, gradients = zip(*pairs, strict=True)
    return _ClosedForm.apply((value, gradients), *tensors)


class _LowerBound(torch.autograd.Function):
    """``max(x, low)`` whose gradient still passes where descent would raise ``x`` back above ``low``.

    Autograd differentiates that rule once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float) -> Tensor:
        ctx.save_for_backward(x >= low)
        return x.clamp(min=low)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside | (grad_output < 0), grad_output, 0), None


def lower_bound(x: Tensor, low: float) -> Tensor:
    """``max(x, low)`` for a learned quantity: unlike ``clamp``, it can find its way back from below."""
    return _LowerBound.apply(x, low)
