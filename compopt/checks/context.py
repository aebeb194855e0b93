"""Checks of the callers of an estimator, which may lose its derivatives or repeat its deposits."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Modules that call a function in forward and again in backward.
CHECKPOINTS = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing")
# Modules from which the autograd engine is started, and by it the hooks.
ENGINE = ("torch.autograd", "torch.autograd.graph")
# Functions that call step() of an optimizer, with gradients of zero, so that it makes its state: no update.
STATE_MAKERS = {
    ("torch.distributed.checkpoint.state_dict", "_init_optim_state"),
    ("torch.distributed.optim.named_optimizer", "init_state"),
}
# Between such a function and a hook of the optimizer are a few frames of torch, of wrappers and of schedulers.
STATE_MAKERS_DEPTH = 32
# Modules that take parameters and groups from an optimizer's state dict, and leave the rest.
STATE_FILTERS = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp.fully_sharded_data_parallel")

F = TypeVar("F", bound=Callable[..., object])


def outside_of_graphs(function: F) -> F:
    """Hide a method from ``torch.compile``: it reads and writes rows, and talks to other ranks.

    ``torch.compiler.disable`` imports the compiler, which takes longer than the rest of torch; it is asked for only
    when somebody else has imported it.
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


def refuse_transforms() -> None:
    """Raise RuntimeError inside ``torch.func``: transforms see neither the closed-form gradient nor the rows."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "an estimator cannot be called inside a transform of torch.func (grad, vmap, jvp, jacrev, jacfwd, hessian "
            "and the like), which sees neither its closed-form gradient nor its rows; call it outside, on features "
            "that require grad (torch.func.functional_call alone may compute them), and use loss.backward() or "
            "torch.autograd.grad"
        )


def refuse_tangents(*given: tuple[str, object]) -> None:
    """Raise RuntimeError for a named argument with a tangent of forward-mode AD, which would be dropped."""
    if forward_ad._current_level < 0:  # outside of dual_level() there are none
        return
    for name, value in given:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{name} carries a tangent of forward-mode AD (torch.autograd.forward_ad), and an estimator has "
                f"gradients of reverse mode only; pass it detached, and for the derivative of the loss along a "
                f"direction take the inner product of the direction with torch.autograd.grad(loss, ...)"
            )


def in_checkpoint() -> bool:
    """Return whether a checkpointed function makes this call, in forward or again in backward.

    Torch tells a function neither that it is checkpointed nor that it is being recomputed; but in both cases a
    checkpoint is among its callers. The nearest caller decides: where the engine comes first, it runs a hook, which is
    no part of the function whose gradient is being computed.
    """
    frame = inspect.currentframe()
    while frame is not None:  # a loop, since every call that deposits comes here
        module = frame.f_globals.get("__name__")
        if module in CHECKPOINTS or module in ENGINE:
            return module in CHECKPOINTS
        frame = frame.f_back
    return False


def makes_optimizer_state() -> bool:
    """Return whether ``step()`` of an optimizer runs only to make its state, for ``torch.distributed.checkpoint``.

    Nothing else tells: a learning rate of zero may be the first one of a schedule, and whether gradients are zero is
    known to the device alone.
    """
    return any(caller in STATE_MAKERS for caller in _callers())


def drops_entries() -> bool:
    """Return whether ``state_dict()`` of an optimizer is for a module that drops all but state and groups."""
    return any(module in STATE_FILTERS for module, _ in _callers())


def _callers() -> Iterator[tuple[str | None, str]]:
    # modules and names of the functions that are running, nearest first
    frame = inspect.currentframe()
    for _ in range(STATE_MAKERS_DEPTH):
        if frame is None:
            return
        yield frame.f_globals.get("__name__"), frame.f_code.co_name
        frame = frame.f_back


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def warn(message: str) -> None:
    """Warn with the user's own line."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("compopt.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
