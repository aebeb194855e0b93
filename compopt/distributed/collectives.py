"""Collectives with errors that name the operation, and with tensors that torch releases before interpreter exit."""

from __future__ import annotations

import atexit
import datetime
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist
from torch import Tensor

from compopt.checks.context import warn

ProcessGroup = Any  # torch.distributed.ProcessGroup, which builds without distributed support do not have

# -- operations: named in every message and error -------------------------------------------------------------------

CALL, OBSERVE, PREFETCH = "the estimator's call", "observe() of a sampler", "prefetch() of shards"
PLACEMENTS = '; prefetch() communicates with offload="cpu" or "disk", which all ranks of shards must have alike'
# A message carries the operation's position in this list.
OPERATIONS = (
    "another operation",
    CALL,
    OBSERVE,
    PREFETCH,
    "the construction of an estimator",
    "the planning of a sampler's epoch",
    "read()",
    "state_dict()",
    "load_state_dict()",
    "add_sample_group()",
    "compopt.save()",
    "compopt.load()",
    "a diagnostic",
    "compopt.gradient_cache()",
)


class Operation(NamedTuple):
    """Operation in progress on a rank, the number of commits before it, and that of its message in the group."""

    operation: str = OPERATIONS[0]
    commits: int | None = None
    number: int = 0

    def __str__(self) -> str:
        return self.operation if self.commits is None else f"{self.operation} (commit {self.commits})"


NO_OPERATION = Operation()
# per thread: a save in the background does not change the operation of the training thread
_doing: ContextVar[Operation] = ContextVar("doing", default=NO_OPERATION)


def now() -> Operation:
    """Return the operation that :func:`doing` has set in this thread."""
    return _doing.get()


@contextmanager
def doing(operation: str, commits: int | None = None) -> Iterator[None]:
    """Set the operation that messages of this thread carry and that errors on other ranks name."""
    token = _doing.set(Operation(operation, commits))
    try:
        yield
    finally:
        _doing.reset(token)


def refuse_different(operations: Sequence[int]) -> None:
    """Raise on every rank unless all ranks are in the same operation."""
    if len(set(operations)) == 1:
        return
    found = []
    for operation in dict.fromkeys(operations):
        ranks = [str(rank) for rank, other in enumerate(operations) if other == operation]
        who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(ranks)} are"
        found.append(f"{who} in {OPERATIONS[operation]}")
    raise RuntimeError(
        f"{' while '.join(found)}; these are collective: call them on every rank, in the same order and not under "
        f"`if rank == 0`{PLACEMENTS if OPERATIONS.index(PREFETCH) in operations else ''}"
    )


# -- collectives ---------------------------------------------------------------------------------------------------


def all_gather(message: Tensor, group: ProcessGroup | None, size: int, what: Operation) -> Tensor:
    """Gather ``(...)`` into ``(K, ...)`` with the group's own backend."""
    gathered = message.new_empty((size, *message.shape))
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in newer torch
    out, own = _lend(gathered.view(-1)), _lend(message.contiguous().view(-1))
    run_collective(lambda: collect(out, own, group=group), group, what)
    return gathered


def gather_small(message: Tensor, group: ProcessGroup | None, size: int, what: Operation) -> Tensor:
    """Gather small messages ``(...)`` into ``(K, ...)`` by an all-to-all: every rank sends directly to the others.

    An all-to-all has one hop; the all-gather of Gloo is a ring of ``K - 1`` sequential hops. The bytes are the same.
    A rank that waits for long warns which ranks are missing.
    """
    received = message.new_empty((size, *message.shape))
    sent = message.expand_as(received).contiguous()
    run_collective(lambda: _exchange(received.view(-1), sent.view(-1), group, what), group, what)
    return received


def all_reduce(tensor: Tensor, group: ProcessGroup | None, what: Operation) -> Tensor:
    """Sum over ranks, in place."""
    run_collective(lambda: dist.all_reduce(_lend(tensor), group=group), group, what)
    return tensor


def gather_objects(value: Any, group: ProcessGroup, size: int, what: Operation) -> list[Any]:
    """Gather picklable values into a list by rank."""
    everyone = [None] * size
    run_collective(lambda: dist.all_gather_object(everyone, value, group=group), group, what)
    return everyone


def run_collective(collective: Callable[[], Any], group: ProcessGroup | None, what: Operation) -> Any:
    """Run a collective; raise a descriptive ``RuntimeError`` if other ranks do not take part."""
    started = time.monotonic()
    try:
        return collective()
    except RuntimeError as error:
        # torch has no class for these errors: match the messages of gloo and NCCL
        seconds, text = time.monotonic() - started, str(error)
        # a timeout that is reported immediately follows from an earlier failure: this rank did not wait
        late = re.search(r"timed? ?out", text, re.I) and seconds > 1
        if not late and not re.search(r"timed? ?out|connect|closed|reset by peer|broken pipe|remote", text, re.I):
            raise
        rank, (others, they) = dist.get_rank(group), _missing(group, what, GRACE)
        if late:
            raise RuntimeError(
                f"rank {rank} waited {seconds:.0f} s in {what} for {others}, which did not arrive: did {they} fail, or "
                f"run out of data? What takes longer needs a longer timeout of the process group"
            ) from error
        raise RuntimeError(
            f"rank {rank} lost the connection to {others} in {what}: did {they} fail, or end? Its own output says why"
        ) from error


# -- missing ranks: those that have left no mark in the group's store ------------------------------------------------

# seconds after which a rank that waits leaves a mark, and warns first; further warnings come after twice the time
MARK, WARN_SECONDS = 5.0, 30.0


def _exchange(received: Tensor, sent: Tensor, group: ProcessGroup | None, what: Operation) -> None:
    """Send equal parts of a message to all ranks, and warn which ranks do not take part."""
    started, until = time.monotonic(), MARK
    work = dist.all_to_all_single(_lend(received), _lend(sent), group=group, async_op=True)
    try:
        while not work.is_completed():
            with suppress(RuntimeError):  # not zero, which torch reads as no limit
                work.wait(datetime.timedelta(seconds=max(0.01, until - (time.monotonic() - started))))
            if work.is_completed():
                break
            others, they = _missing(group, what)
            if until >= WARN_SECONDS:
                waited = f"rank {dist.get_rank(group)} has waited {until:.0f} s in {what} for {others}"
                other = "out of the loop or a call behind, or in another collective, such as dist.barrier()"
                warn(f"{waited}: is {they} busy, {other}?")
            until = max(WARN_SECONDS, 2 * until)
        work.wait()  # raises the error of a collective that has failed
    finally:
        del work  # which has the tensors; a traceback would keep it


def _missing(group: ProcessGroup | None, what: Operation, patience: float = 0.0) -> tuple[str, str]:
    """Leave a mark for this message; return the ranks without one, and a pronoun, after ``patience`` or at the last."""
    rank, end = dist.get_rank(group), time.monotonic() + patience
    others = [other for other in range(dist.get_world_size(group)) if other != rank]
    missing = others[:1]  # rank 0 has the store, unless a launcher has it

    def look() -> None:
        with suppress(RuntimeError):
            world: Any = dist.distributed_c10d._world
            store = world.pg_map[group or dist.group.WORLD][1]
            store.set(f"compopt/{rank}", str(what.number))
            marks = [(other, f"compopt/{other}") for other in others]
            while True:
                here = [k for k, mark in marks if store.check([mark]) and int(store.get(mark)) >= what.number]
                missing[:] = [other for other in others if other not in here] or others
                if len(here) >= len(others) - 1 or time.monotonic() > end:
                    break
                time.sleep(0.05)
            time.sleep(min(patience, 1.0))  # this process may have the store, which the others read now

    thread = threading.Thread(target=look, daemon=True)  # a store on a lost machine may never answer
    thread.start()
    thread.join(patience + GRACE)
    several = len(missing) > 1
    return f"rank{'s' * several} {', '.join(map(str, missing))}", "one of them" if several else "it"


# -- interpreter exit ----------------------------------------------------------------------------------------------

# Gloo runs in threads of torch. A thread that has finished a collective first wakes the caller and then acquires the
# GIL to release the tensors. If the interpreter begins to exit in between, the thread is terminated, which aborts the
# process ("terminate called without an active exception") after a correct result. Without this package torch would end
# its threads earlier, with the process group; estimators keep the process group alive.

GRACE = 5.0  # seconds to wait for marks after an error, and for tensors at exit (microseconds if no rank is missing)
HANDOVER = 0.05  # seconds for threads that run collectives of other code, the tensors of which are not tracked
MANY = 64  # number of tensors to track; the latest ones suffice
_lent: deque[ref[Tensor]] = deque(maxlen=MANY)


def _lend(tensor: Tensor) -> Tensor:
    """Return an alias that only the collective references, so that its deallocation shows that torch released it."""
    alias = tensor.detach()
    # Not a WeakSet: its callback is Python code, during which the thread that has just released the last tensor can
    # lose the GIL.
    _lent.append(ref(alias))
    return alias


def _still_lent() -> bool:
    return any(held() is not None for held in tuple(_lent))


@atexit.register
def _await_lent() -> None:
    """Sleep, without holding the GIL, until torch's threads have released all tensors."""
    end = time.monotonic() + GRACE
    if _lent:
        time.sleep(HANDOVER)
    while _still_lent() and time.monotonic() < end:
        time.sleep(1e-3)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lent.clear)  # the threads exist in the parent only
