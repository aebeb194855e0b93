"""Control messages of the ranks: which operation each is in, and what to say when one of them does not come."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from compopt.distributed.collectives import ProcessGroup

CALL, OBSERVE, PREFETCH = "the estimator's call", "observe() of a sampler", "prefetch() of shards"
# What a rank may be doing when it sends a message, which carries the number.
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
)
# Integers of an opening message before any call has needed more.
FIRST_LENGTH = 32


class Doing(NamedTuple):
    """What a rank is doing: an operation, and the number of commits before it."""

    operation: str
    commits: int | None = None

    def __str__(self) -> str:
        return self.operation if self.commits is None else f"{self.operation} (commit {self.commits})"


_ANYTHING = Doing(OPERATIONS[0])
_doing: ContextVar[Doing] = ContextVar("doing", default=_ANYTHING)


def now() -> Doing:
    """What this thread is doing, as :func:`doing` says."""
    return _doing.get()


@contextmanager
def doing(operation: str, commits: int | None = None) -> Iterator[None]:
    """What this thread tells other ranks, and an error of theirs, that it is doing."""
    token = _doing.set(Doing(operation, commits))
    try:
        yield
    finally:
        _doing.reset(token)


class Control:
    """What this process knows of one process group, whichever of its objects communicate over it.

    Attributes:
        host: the group of control messages, where the group itself has no backend for CPU tensors.
        length: integers in an opening message. Every rank takes part in every opening, so that it is alike on all of
            them, whatever they are doing: backends end the process when messages differ in length.
        doing: the last opening's.
    """

    def __init__(self) -> None:
        self.host: ProcessGroup | None = None
        self.length = FIRST_LENGTH
        self.doing = _ANYTHING

    def __str__(self) -> str:
        return str(self.doing)


class Caller:
    """The thread that calls an estimator, which alone communicates for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def check(self, now: Doing) -> None:
        """This thread is about to communicate.

        Raises:
            RuntimeError: calls come from another thread, with whose messages these would be mixed up.
        """
        own, other = threading.current_thread(), self._thread
        if now.operation in (CALL, OBSERVE):
            self._thread = own
        elif other is not None and other is not own and other.is_alive():
            raise RuntimeError(
                f"{now} communicates with other ranks in thread {own.name!r} while thread {other.name!r} calls the "
                f"estimator: their messages would be mixed up. Do it in that thread; what it returns may be written to "
                f"a file in another one"
            )


_controls: WeakKeyDictionary[Any, Control] = WeakKeyDictionary()


def control_of(group: ProcessGroup) -> Control:
    """The one control of a group, as long as that exists."""
    return _controls.setdefault(group, Control())


def refuse_different(operations: Sequence[int]) -> None:
    """Raise on every rank if they are not all in one operation."""
    if len(set(operations)) == 1:
        return
    by_operation: dict[int, list[int]] = {}
    for rank, operation in enumerate(operations):
        by_operation.setdefault(operation, []).append(rank)
    found = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} "
        f"{'is' if len(ranks) == 1 else 'are'} in {OPERATIONS[operation]}"
        for operation, ranks in by_operation.items()
    ]
    raise RuntimeError(
        f"{' while '.join(found)}; these are collective: call them on every rank, in the same order and not under "
        f"`if rank == 0`"
    )
