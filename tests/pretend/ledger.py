"""What the library made the pretend device do, by the line that caused it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

LIBRARY = Path(__file__).parents[2] / "compopt"
BACKGROUND = ("compopt-",)  # threads that may wait
CARRIERS = (LIBRARY / "accelerator.py", LIBRARY / "stores" / "layout.py")  # what copies for others
# The files that may copy between host and device while a model trains, and what.
NAMED = {
    "estimator/reader.py": "the index, which is checked on the host; with shards the numbers of the rows read here; "
    "what is known on the device first: features that are not finite, a bad index there",
    "contrastive.py": "positions of further candidates",
    "negatives/sampler.py": "positions of a pool of candidates",
    "stores/write_behind.py": "rows read and committed, and their numbers, on a side stream",
    "stores/base.py": "few rows in memory, and their numbers, when a ticket is taken",
    "stores/snapshot.py": "former values of rows, and their numbers, while a save reads the rows",
    "stores/table.py": "with shards: which of the batch's rows are here",
}


@dataclass(frozen=True)
class Wait:
    """The host waited for the device."""

    phase: str
    what: str
    line: str


@dataclass(frozen=True)
class Transfer:
    """A copy between host and device."""

    phase: str
    way: str  # "to device" or "to host"
    pinned: bool
    line: str


@dataclass
class Ledger:
    """Counts since the last :meth:`clear`; of the library alone, unless it is told otherwise.

    Attributes:
        phase: what the program is in, for the counts; threads of the library are in ``"background"``.
        everything: also what no line of the library caused.
    """

    phase: str = "-"
    everything: bool = False
    waits: Counter[Wait] = field(default_factory=Counter)
    transfers: Counter[Transfer] = field(default_factory=Counter)
    transferred: Counter[Transfer] = field(default_factory=Counter)  # bytes
    operations: Counter[str] = field(default_factory=Counter)
    races: list[str] = field(default_factory=list)

    def clear(self) -> None:
        for counts in (self.waits, self.transfers, self.transferred, self.operations, self.races):
            counts.clear()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count under another name."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def wait(self, what: str) -> None:
        where = cause()
        if where or self.everything:
            self.waits[Wait(self._now(), what, where or "user")] += 1

    def transfer(self, way: str, pinned: bool, size: int) -> None:
        where = cause()
        if where or self.everything:
            one = Transfer(self._now(), way, pinned, where or "user")
            self.transfers[one] += 1
            self.transferred[one] += size

    def operation(self, name: str) -> None:
        self.operations[name] += 1

    def race(self, what: str) -> None:
        self.races.append(f"{what} at {cause() or 'a line of the user'}")

    def _now(self) -> str:
        return "background" if threading.current_thread().name.startswith(BACKGROUND) else self.phase

    def unforeseen(self) -> list[Transfer]:
        """Copies that the library should not make, or not from this memory."""
        return [copy for copy in self.transfers if not copy.pinned or copy.line.split(":")[0] not in NAMED]

    def waits_of_training(self) -> list[Wait]:
        """Those outside the library's own threads."""
        return [wait for wait in self.waits.elements() if wait.phase != "background"]


LEDGER = Ledger()


def cause() -> str:
    """The innermost line of the library that is being run; ``""``: none.

    An operation of autograd's own, in its thread, belongs to nobody's line: "backward".
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(LIBRARY) and path not in CARRIERS:
            return f"{path.relative_to(LIBRARY)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward" if threading.current_thread().name.startswith("Dummy") else ""
