"""Checks of the context of a call: transforms and callers that would drop derivatives or repeat deposits."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Modules that run a function in forward and again in backward.
CHECKPOINTS = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing")
# Modules that start the autograd engine, which runs the hooks.
ENGINE = ("torch.autograd", "torch.autograd.graph")
# Functions that call step() of an optimizer with zero gradients only to create its state; this is not an update.
STATE_MAKERS = {
    ("torch.distributed.checkpoint.state_dict", "_init_optim_state"),
    ("torch.distributed.optim.named_optimizer", "init_state"),
}
# Modules that read state and groups from an optimizer's state dict, and drop all other entries.
STATE_FILTERS = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp.fully_sharded_data_parallel")
# Largest number of frames (of torch, wrappers and schedulers) between these and a hook of the optimizer.
DEPTH = 32

F = TypeVar("F", bound=Callable[..., object])


def outside_of_graphs(function: F) -> F:
    """Exclude a method from ``torch.compile``, because it reads and writes rows and communicates with other ranks.

    ``torch.compiler.disable`` imports the compiler, which takes longer than the rest of torch. It is therefore called
    only if the compiler has already been imported.
    """
    disabled: list[Callable[..., object]] = []

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return cast(F, called)


def refuse_derivatives(*given: tuple[str, object]) -> None:
    """Raise RuntimeError for derivatives that would be lost: inside ``torch.func``, or a named tangent of forward mode.

    A transform of ``torch.func`` handles neither the closed-form gradient nor the rows.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "an estimator cannot be called inside a transform of torch.func (grad, vmap, jvp, jacrev, jacfwd, hessian "
            "and the like), which sees neither its closed-form gradient nor its rows; call it outside, on features "
            "that require grad (torch.func.functional_call alone may compute them), and use loss.backward() or "
            "torch.autograd.grad"
        )
    if forward_ad._current_level < 0:  # outside of dual_level() there are no tangents
        return
    for name, value in given:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{name} carries a tangent of forward-mode AD (torch.autograd.forward_ad), and an estimator has "
                f"gradients of reverse mode only; pass it detached, and for the derivative of the loss along a "
                f"direction take the inner product of the direction with torch.autograd.grad(loss, ...)"
            )


def in_checkpoint() -> bool:
    """Return whether a checkpointed function makes this call, in forward or in the recomputation during backward.

    Torch has no query for either case, but in both of them a checkpoint module is on the call stack. The nearest caller
    decides: if the autograd engine is nearer than the checkpoint, the engine runs a hook, which is not part of the
    checkpointed function.
    """
    frame = inspect.currentframe()
    while frame is not None:  # of any depth
        module = frame.f_globals.get("__name__")
        if module in CHECKPOINTS or module in ENGINE:
            return module in CHECKPOINTS
        frame = frame.f_back
    return False


def called_from(places: Collection[object]) -> bool:
    """Return whether a module, or a function ``(module, name)``, of ``places`` is on the call stack.

    The call stack is the only evidence that ``step()`` creates state: a learning rate of zero may be the first value of
    a schedule, and a comparison of the gradients with zero would wait for the device.
    """
    frame = inspect.currentframe()
    for _ in range(DEPTH):
        if frame is None:
            return False
        module = frame.f_globals.get("__name__")
        if module in places or (module, frame.f_code.co_name) in places:
            return True
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def warn(message: str) -> None:
    """Warn with the location of the nearest caller outside of compopt and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("compopt.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
