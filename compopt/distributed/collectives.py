"""Collectives that say who waited for what, and whose tensors torch gives back before the interpreter ends."""

from __future__ import annotations

import atexit
import os
import pickle
import re
import time
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

ProcessGroup = Any  # torch.distributed.ProcessGroup, which builds without distributed support do not have
# Seconds that the interpreter's end waits for tensors; torch needs microseconds, unless another rank is awaited.
GRACE = 5.0
HANDOVER = 0.05  # seconds for threads that have a collective of somebody else's to let go of
MANY = 64  # references to tensors, from which on those to dropped ones are swept up
_lent: dict[int, ref[Tensor]] = {}  # by the reference's own address


def all_gather(message: Tensor, group: ProcessGroup | None, size: int, what: object) -> Tensor:
    """``(...)`` -> ``(K, ...)``; torch renamed the collective."""
    gathered = message.new_empty((size, *message.shape))
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    answered(lambda: collect(_lend(gathered.view(-1)), _lend(message.contiguous().view(-1)), group=group), group, what)
    return gathered


def tell(message: Tensor, group: ProcessGroup | None, size: int, what: object) -> Tensor:
    """``(...)`` -> ``(K, ...)`` like :func:`all_gather`, for small messages: every rank sends to every other itself.

    That is one hop, where the ring in which gloo gathers has ``K - 1``, one after another; the bytes are the same.
    """
    heard = message.new_empty((size, *message.shape))
    told = message.expand_as(heard).contiguous()
    answered(lambda: dist.all_to_all_single(_lend(heard.view(-1)), _lend(told.view(-1)), group=group), group, what)
    return heard


def all_reduce(tensor: Tensor, group: ProcessGroup | None, what: object) -> Tensor:
    """Sum over ranks, in place."""
    answered(lambda: dist.all_reduce(_lend(tensor), group=group), group, what)
    return tensor


def gather_objects(
    value: Any,
    group: ProcessGroup,
    size: int,
    what: object,
    sizes: Callable[[int], list[int]] | None = None,
) -> list[Any]:
    """Picklable values of all ranks, by rank.

    Args:
        value: this rank's.
        group, size, what: see :func:`all_gather`.
        sizes: from this rank's number of bytes to everybody's, where the ranks have another way to learn them.
    """
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    own = torch.tensor([len(content)], device="cpu")
    counts = sizes(len(content)) if sizes else tell(own, group, size, what).flatten().tolist()
    message = torch.zeros(max(counts), dtype=torch.uint8, device="cpu")
    message[: len(content)] = content
    everyone = all_gather(message, group, size, what).numpy()
    return [pickle.loads(everyone[rank, :count].tobytes()) for rank, count in enumerate(counts)]


def answered(collective: Callable[[], Any], group: ProcessGroup | None, what: object) -> Any:
    """Run a collective; where other ranks do not take part, say so instead of what the backend says.

    Raises:
        RuntimeError: from the backend's own.
    """
    started = time.monotonic()
    try:
        return collective()
    except RuntimeError as error:
        seconds, text = time.monotonic() - started, str(error)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        others, they = (f"rank {1 - rank}", "it") if size == 2 else ("the other ranks", "one of them")
        if re.search(r"timed? ?out", text, re.I) and seconds > 1:
            raise RuntimeError(
                f"rank {rank} waited {seconds:.0f} s in {what} for {others}, which did not arrive: did {they} fail, or "
                f"run out of data? What takes longer needs a longer timeout of the process group"
            ) from error
        if re.search(r"timed? ?out|connect|closed|reset by peer|broken pipe|remote", text, re.I):
            raise RuntimeError(
                f"rank {rank} lost the connection to {others} in {what}: did {they} fail, or end? Its own output says "
                f"why"
            ) from error
        raise


# -- the end of the interpreter ---------------------------------------------------------------------------------


def _lend(tensor: Tensor) -> Tensor:
    """An alias of a tensor that a collective alone refers to: it is gone when torch has let go of it.

    Gloo works in threads of torch. One that is done with a collective wakes the caller first and drops the tensors
    then, for which it takes the interpreter's lock; if the interpreter begins to end in between, the thread is ended
    instead, and that aborts the process: "terminate called without an active exception", after the right result.
    """
    alias = tensor.detach()
    # No WeakValueDictionary: its callback is Python code, and in the middle of that the interpreter can take the lock
    # away from the thread that has just dropped the last tensor.
    held = ref(alias)
    _lent[id(held)] = held
    if len(_lent) > MANY:
        _still_lent()
    return alias


def _still_lent() -> bool:
    """Forget what torch has let go of; is anything left?"""
    for key, held in list(_lent.items()):  # of a copy, which keeps the keys from being given out again
        if held() is None:
            _lent.pop(key, None)
    return bool(_lent)


@atexit.register
def _await_lent() -> None:
    """Leave the lock to torch's threads until they have let go of all tensors.

    Those of other people's collectives cannot be known. Without this package torch would end its threads before, with
    the process group; samplers and estimators keep that.
    """
    end = time.monotonic() + GRACE
    if _lent:
        time.sleep(HANDOVER)
    while _still_lent() and time.monotonic() < end:
        time.sleep(1e-3)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lent.clear)  # the threads are the parent's
