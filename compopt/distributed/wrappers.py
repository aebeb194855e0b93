"""Back-propagation in frameworks: trainers, and modules that reduce gradients between ranks (DDP, FSDP2, DeepSpeed)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BOUNDARY = "set_gradient_accumulation_boundary"  # of DeepSpeed's engine
SYNC = "set_requires_gradient_sync"  # of FSDP2


class TrainingStep(NamedTuple):
    """Backward pass of a gradient cache: arguments of :func:`gradient_cache`, or those of a trainer around it.

    Attributes:
        backward: replaces ``loss.backward()``; ``None``: that, or the backward pass of the DeepSpeed engine.
        reduce: reduce gradients between ranks in the last micro-batch.
        scale: factor of the gradients, for example ``1 / gradient_accumulation_steps``.
    """

    backward: Callable[[Tensor], Any] | None = None
    reduce: bool = True
    scale: float = 1.0


_step: ContextVar[TrainingStep | None] = ContextVar("compopt.gradient_cache", default=None)


@contextmanager
def training_step(step: TrainingStep) -> Iterator[None]:
    """Set the backward pass of a trainer for calls of :func:`gradient_cache` inside the context."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_step() -> TrainingStep | None:
    """Return the step of the trainer around this call, if any."""
    return _step.get()


def wrappers_in(module: nn.Module) -> list[Any]:
    """Return the outermost modules that reduce gradients between ranks."""
    if any(hasattr(module, name) for name in (BOUNDARY, SYNC, "no_sync")):
        return [module]
    return [wrapper for child in module.children() for wrapper in wrappers_in(child)]


@contextmanager
def without_reduction(wrappers: Iterable[Any]) -> Iterator[None]:
    """Accumulate gradients on each rank without reducing them."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            if hasattr(wrapper, BOUNDARY):
                before = getattr(wrapper, "_is_gradient_accumulation_boundary", None)
                stack.callback(getattr(wrapper, BOUNDARY), before)
                getattr(wrapper, BOUNDARY)(False)
            elif hasattr(wrapper, SYNC):
                stack.callback(getattr(wrapper, SYNC), True)
                getattr(wrapper, SYNC)(False)
            elif not _in_first_static_backward(wrapper):
                stack.enter_context(wrapper.no_sync())
        yield


def gathers(wrapper: Any) -> bool:
    """Return True for a wrapper that gathers parameters from other ranks in every pass: FSDP2, ZeRO 3."""
    return hasattr(wrapper, SYNC) or (hasattr(wrapper, BOUNDARY) and wrapper.zero_optimization_stage() == 3)


def check_reduced(wrappers: Iterable[Any]) -> None:
    """Raise if DDP still waits for a gradient. DDP itself raises in its next pass only, after a wrong step."""
    for wrapper in wrappers:
        if isinstance(wrapper, DistributedDataParallel) and wrapper.require_backward_grad_sync:
            wrapper._check_reducer_finalized()


def _in_first_static_backward(wrapper: Any) -> bool:
    """Return True before the first backward pass of DDP with ``static_graph``, which must reduce.

    Averaging gradients that have been averaged before does not change them.
    """
    return getattr(wrapper, "static_graph", False) and not wrapper._static_graph_delay_allreduce_enqueued


def run_backward(value: Tensor, wrappers: list[Any], held: list[Any], backward: Callable[[Tensor], Any] | None) -> bool:
    """Back-propagate a micro-batch by the framework's own method; return False if it has no graph."""
    if not value.requires_grad:  # the outputs of a callable that is not a module may require no gradient
        return False
    engine = next((wrapper for wrapper in wrappers if hasattr(wrapper, BOUNDARY)), None)
    if engine is not None and (backward is None or engine in held):
        backward = engine.backward  # the backward of accelerate would also run the optimizer step
    (backward or Tensor.backward)(value)
    return True
