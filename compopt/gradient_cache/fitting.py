"""Size of micro-batches, found by trials."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compopt import checks
from compopt.distributed.ranks import Ranks
from compopt.gradient_cache.towers import BOUNDARY, SYNC, Tower, equal_sizes, holds_a_module, lengths

RESET = "reset_iter_state"  # of FSDP2, since torch 2.13
# Messages of errors other than torch.OutOfMemoryError, raised by other devices and by CUDA libraries that do not use
# torch's allocator. The first three are those of accelerate's should_reduce_batch_size.
OUT_OF_MEMORY = (
    "MPS backend out of memory",
    "can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class FittingSize:
    """Size of micro-batches for :func:`gradient_cache` that is halved until a micro-batch fits in memory.

    Before any gradient is accumulated, a trial encodes the largest micro-batch (the one with the most elements in
    tensors and lists) with a graph, and computes and discards the gradients of the parameters. After an out-of-memory
    error the size is halved and the trial repeated. A trial does not change gradients, random states or running
    statistics, and both passes use the size that was found. The results are therefore those of a run with this size
    from the start. Keep the object: later calls begin with ``size``.

    Each rank finds its own size, and ranks with fewer micro-batches are padded. A trial communicates nothing, so that a
    failure on one rank does not block the others: it calls the module inside DDP or a DeepSpeed engine, for which the
    inputs must be on the device of the module; under FSDP2 and ZeRO 3 each rank holds all parameters during a trial.
    FSDP1, synchronised batch normalisation and reentrant activation checkpointing are refused. Other models must not
    communicate in their forward pass.

    Args:
        size: initial size, for all towers that share this object.
        cut: ``(inputs, size) -> sizes``, the sizes of all micro-batches for a budget, for example of tokens.
            ``None``: ``size`` samples in each.
        trials: number of calls that begin with a trial. Two by default, since the optimizer allocates its state
            between the first two calls. ``None``: every call, for batches of various shapes.

    State: ``size`` and the number of calls; not saved. Communication: with several ranks two small objects per trial;
    under FSDP2 and ZeRO 3 three small objects and the parameters. ``trials`` must be the same on all ranks.

    Raises:
        ValueError: a wrapper or layer is refused, see above; the model is not a module, a method of a module, or a
            partial call of one.
        RuntimeError: micro-batches of size 1 do not fit in memory, or all parameters do not (under FSDP2 and ZeRO 3),
            on this or another rank; only some ranks begin with a trial.
        TypeError: ``cut`` is not callable.

    Source: ``find_executable_batch_size`` of accelerate, which repeats the whole training function.

    Example:
        >>> import torch, compopt
        >>> model, x, size = torch.nn.Linear(8, 4), torch.randn(64, 8), compopt.FittingSize(32)
        >>> loss = compopt.gradient_cache(compopt.DCLEstimator(), (model, model), (x, x), micro_batch_size=size)
        >>> size
        FittingSize(32)
    """

    def __init__(
        self, size: int, cut: Callable[[Any, int], Sequence[int]] | None = None, trials: int | None = 2
    ) -> None:
        if cut is not None and not callable(cut):
            raise TypeError(f"cut must be a function of inputs and a size, got {cut!r}")
        self.size, self.cut = checks.count("size", size), cut
        self.trials = None if trials is None else checks.count("trials", trials)
        self.calls = 0

    def __call__(self, inputs: Any) -> Sequence[int]:
        """Return the sizes of all micro-batches."""
        return equal_sizes(max(lengths(inputs)), self.size) if self.cut is None else self.cut(inputs, self.size)

    def __repr__(self) -> str:
        return f"FittingSize({self.size})"

    def halve(self) -> None:
        """Halve the size; raise a ``RuntimeError`` if that is not possible."""
        if self.size == 1:
            raise RuntimeError(
                "out of memory with micro-batches of size 1, the smallest micro_batch_size; use activation "
                "checkpointing, shorter inputs, or a smaller model"
            )
        self.size //= 2


def with_trials(towers: list[Tower]) -> list[tuple[Tower, FittingSize]]:
    """Return the towers that begin with a trial; raise if a trial would communicate with other ranks."""
    sized = [(tower, tower.size) for tower in towers if isinstance(tower.size, FittingSize) and torch.is_grad_enabled()]
    due = [(tower, size) for tower, size in sized if size.trials is None or size.calls < size.trials]
    for tower, _ in due:
        if tower.module is None:
            raise ValueError("FittingSize needs a module as model; give that, or a number as micro_batch_size")
        layers: list[Any] = [m for m in tower.module.modules() if isinstance(m, nn.SyncBatchNorm) and m.training]
        layers += [w for w in tower.wrappers if not hasattr(w, RESET) and not (w is tower.model and holds_a_module(w))]
        if layers:
            raise ValueError(
                f"FittingSize would leave other ranks waiting in {type(layers[0]).__name__}, which communicates in "
                f"every pass; give a number as micro_batch_size, or as model DDP, an engine of DeepSpeed, or FSDP2 of "
                f"torch 2.13 or newer"
            )
    return due


def fit(ranks: Ranks, towers: list[Tower], tried: list[tuple[Tower, FittingSize]]) -> None:
    """Halve sizes until the largest micro-batches of all ranks pass a trial."""

    def fails() -> bool:
        failed = any(_fails(*trial) for trial in tried)
        for tower in towers if failed else ():
            tower.split()
        return failed

    wrappers = [wrapper for tower, _ in tried for wrapper in tower.wrappers]
    again = bool(tried)
    while again:
        with gathered(ranks, wrappers):
            failed = ranks.agree(fails)
        again = any(ranks.gather_objects(failed))
    for size in {size for _, size in tried}:
        size.calls += 1


def _fails(tower: Tower, size: FittingSize) -> bool:
    """Run a trial; return True, and halve the size, if the largest micro-batch does not fit in memory."""
    try:
        tower.try_largest()
        return False
    except RuntimeError as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not any(x in str(error) for x in OUT_OF_MEMORY):
            raise
    finally:
        torch.clear_autocast_cache()
    gc.collect()  # the graph of the trial, which the error has held until here
    for device in tower.devices:
        getattr(torch, device.type).empty_cache()
    size.halve()
    return True


@contextmanager
def gathered(ranks: Ranks, wrappers: Iterable[Any]) -> Iterator[None]:
    """Gather all parameters of FSDP2 and ZeRO 3 on each rank, so that passes communicate nothing."""
    sharded = [wrapper for wrapper in dict.fromkeys(wrappers) if gathers(wrapper)]
    if sharded:  # a rank that lacks the memory must not block the others in the all-gather
        ranks.agree(lambda: [room_for(wrapper) for wrapper in sharded])
    with ExitStack() as stack:
        for wrapper in sharded:
            stack.enter_context(_gathered_by_zero3(wrapper) if _is_zero3(wrapper) else _gathered_by_fsdp2(wrapper))
        yield


def gathers(wrapper: Any) -> bool:
    """Return True for a wrapper that gathers parameters from other ranks in every pass: FSDP2, ZeRO 3."""
    return hasattr(wrapper, SYNC) or _is_zero3(wrapper)


def _is_zero3(wrapper: Any) -> bool:
    return hasattr(wrapper, BOUNDARY) and wrapper.zero_optimization_stage() == 3


def room_for(wrapper: Any) -> list[Tensor]:
    """Allocate the memory of the unsharded parameters."""
    if _is_zero3(wrapper):
        found = [(getattr(p, "ds_numel", p.numel()), p.dtype, p.device) for p in wrapper.parameters()]
    else:  # in the precision and on the device of a pass: shards may be in float32, or offloaded
        each = [(group.device, p) for group in _groups_of_fsdp2(wrapper) for p in group.fsdp_params]
        found = [(p._orig_size.numel(), p.param_dtype or p.orig_dtype, device) for device, p in each]
    return [torch.empty(n, dtype=dtype, device=device) for n, dtype, device in found]


def _groups_of_fsdp2(wrapper: Any) -> list[Any]:
    """Return the FSDP2 parameter groups, each of which is gathered together."""
    wrapper._get_fsdp_state()._lazy_init()  # sets the attributes that are read and restored here
    modules = [module for module in wrapper.modules() if hasattr(module, SYNC)]
    return [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]


@contextmanager
def _gathered_by_fsdp2(wrapper: Any) -> Iterator[None]:
    groups = _groups_of_fsdp2(wrapper)
    alone = {"post_forward_mesh_info": None, "reshard_after_backward": False, "reduce_grads": False}
    before = [{name: getattr(group, name) for name in alone} for group in groups]
    for module in wrapper.modules():
        if hasattr(module, SYNC):
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
