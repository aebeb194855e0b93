"""Operations in which ranks communicate: each rank tells which one it is in, and errors name it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

CALL, OBSERVE, PREFETCH = "the estimator's call", "observe() of a sampler", "prefetch() of shards"
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
)


class Doing(NamedTuple):
    """Operation of a rank, and the number of commits before it."""

    operation: str = OPERATIONS[0]
    commits: int | None = None

    def __str__(self) -> str:
        return self.operation if self.commits is None else f"{self.operation} (commit {self.commits})"


ANYTHING = Doing()
_doing: ContextVar[Doing] = ContextVar("doing", default=ANYTHING)


def now() -> Doing:
    """Return the operation that :func:`doing` has set in this thread."""
    return _doing.get()


@contextmanager
def doing(operation: str, commits: int | None = None) -> Iterator[None]:
    """Set the operation that this thread tells to other ranks, and that their errors name."""
    token = _doing.set(Doing(operation, commits))
    try:
        yield
    finally:
        _doing.reset(token)


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
