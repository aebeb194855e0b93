"""Modules of frameworks that communicate between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

BOUNDARY = "set_gradient_accumulation_boundary"  # of DeepSpeed's engine
SYNC, RESET = "set_requires_gradient_sync", "reset_iter_state"  # of FSDP2


def wrappers_in(module: nn.Module) -> list[Any]:
    """Return the outermost modules that reduce gradients between ranks."""
    if any(hasattr(module, name) for name in (BOUNDARY, SYNC, "no_sync")):
        return [module]
    return [wrapper for child in module.children() for wrapper in wrappers_in(child)]


@contextmanager
def without_reduction(wrappers: Iterable[Any]) -> Iterator[None]:
    """Let gradients add up on each rank."""
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


def check_reduced(wrappers: Iterable[Any]) -> None:
    """Raise if DDP still waits for a gradient; it would raise in its next pass, after a step with wrong gradients."""
    for wrapper in wrappers:
        if isinstance(wrapper, DistributedDataParallel) and wrapper.require_backward_grad_sync:
            wrapper._check_reducer_finalized()


def _in_first_static_backward(wrapper: Any) -> bool:
    """Return True before the first backward pass of DDP with ``static_graph``, which must reduce.

    What has been averaged is averaged again with the rest, and stays as it is.
    """
    return getattr(wrapper, "static_graph", False) and not wrapper._static_graph_delay_allreduce_enqueued


def holds_a_module(model: Any) -> bool:
    """Return True for a wrapper whose ``module`` runs without it."""
    return hasattr(model, BOUNDARY) or isinstance(model, DistributedDataParallel)


@contextmanager
def gathered(wrappers: Iterable[Any]) -> Iterator[None]:
    """Hold all parameters of FSDP2 and ZeRO 3 on each rank, so that passes communicate nothing."""
    with ExitStack() as stack:
        for wrapper in dict.fromkeys(wrappers):
            if hasattr(wrapper, SYNC):
                stack.enter_context(_gathered_by_fsdp2(wrapper))
            elif hasattr(wrapper, BOUNDARY) and wrapper.zero_optimization_stage() == 3:
                stack.enter_context(_gathered_by_zero3(wrapper))
        yield


@contextmanager
def _gathered_by_fsdp2(wrapper: Any) -> Iterator[None]:
    wrapper._get_fsdp_state()._lazy_init()  # sets what is kept here
    modules = [module for module in wrapper.modules() if hasattr(module, SYNC)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    alone = {"post_forward_mesh_info": None, "reshard_after_backward": False, "reduce_grads": False}
    before = [{name: getattr(group, name) for name in alone} for group in groups]
    for module in modules:
        module.unshard()
    for group in groups:
        vars(group).update(alone)
    try:
        yield
    finally:
        wrapper.reset_iter_state()  # a pass may have ended in the middle
        for group, values in zip(groups, before, strict=True):
            vars(group).update(values)


@contextmanager
def _gathered_by_zero3(engine: Any) -> Iterator[None]:
    import deepspeed

    offload = engine.optimizer.parameter_offload
    handles = [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
    hooks = [handle.hooks_dict_ref() for handle in handles]
    before = [own.copy() for own in hooks]
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        for handle in handles:
            handle.remove()  # these hooks gather and release parameters
        try:
            yield
        finally:
            for own, all_of_them in zip(hooks, before, strict=True):
                own.clear()
                own.update(all_of_them)  # in their order
