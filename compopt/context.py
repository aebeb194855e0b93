"""Where an estimator is called from: what would lose its derivatives is refused by name."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_transforms() -> None:
    """Raise inside ``torch.func``: transforms see neither the closed-form gradient nor the rows.

    Raises:
        RuntimeError: a transform is active.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "an estimator cannot be called inside a transform of torch.func (grad, vmap, jvp, jacrev, jacfwd, hessian "
            "and the like), which sees neither its closed-form gradient nor its rows; call it outside, on features "
            "that require grad (torch.func.functional_call alone may compute them), and use loss.backward() or "
            "torch.autograd.grad"
        )


def refuse_tangent(name: str, value: object) -> None:
    """Raise for an argument with a forward-mode tangent, which would be dropped.

    Raises:
        RuntimeError: it is a dual number of ``torch.autograd.forward_ad``.
    """
    if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
        raise RuntimeError(
            f"{name} carries a tangent of forward-mode AD (torch.autograd.forward_ad), and an estimator has gradients "
            f"of reverse mode only; pass it detached, and for the derivative of the loss along a direction take the "
            f"inner product of the direction with torch.autograd.grad(loss, ...)"
        )
