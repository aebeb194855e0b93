"""Record of what the library made the pretend device do, by the line that caused it (waits, transfers, operations)."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

LIBRARY = Path(__file__).parents[2] / "compopt"
BACKGROUND = ("compopt-",)  # threads that may wait
CARRIERS = (LIBRARY / "accelerator.py", LIBRARY / "stores" / "rows.py")  # they copy for other files
# Files that may copy between host and device during training, and the data that they copy.
NAMED = {
    "estimator/reader.py": "the index, which is checked on the host; with shards the numbers of the rows read here; "
    "what is known on the device first: features that are not finite, a bad index there",
    "arguments.py": "keys that a policy of pairs asks for, positions of further candidates",
    "kernel/features.py": "features of another model, which a policy of pairs asks for",
    "negatives/sampler.py": "positions of a pool of candidates",
    "stores/write_behind.py": "rows read and committed, and their numbers, on a side stream, or when a ticket is taken",
    "stores/snapshot.py": "former values of rows, and their numbers, while a save reads the rows",
    "stores/table.py": "with shards: which of the batch's rows are here",
}


@dataclass(frozen=True)
class Wait:
    """The host waited for the device, perhaps in a thread of the library."""

    what: str
    line: str
    background: bool


@dataclass(frozen=True)
class Transfer:
    """A copy between host and device."""

    line: str
    pinned: bool


@dataclass
class Ledger:
    """Counts since the last :meth:`clear`, of events caused by the library."""

    waits: Counter[Wait] = field(default_factory=Counter)
    transfers: Counter[Transfer] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    races: list[str] = field(default_factory=list)

    def clear(self) -> None:
        for counts in (self.waits, self.transfers, self.operations, self.races):
            counts.clear()

    def wait(self, what: str) -> None:
        where = cause()
        if where:
            background = threading.current_thread().name.startswith(BACKGROUND)
            self.waits[Wait(what, where, background)] += 1

    def transfer(self, pinned: bool) -> None:
        where = cause()
        if where:
            self.transfers[Transfer(where, pinned)] += 1

    def operation(self, name: str) -> None:
        self.operations[name] += 1

    def race(self, what: str) -> None:
        self.races.append(f"{what} at {cause() or 'a line of the user'}")

    def unforeseen(self) -> list[Transfer]:
        """Return copies that the library should not make, or not with memory that is not pinned."""
        return [copy for copy in self.transfers if not copy.pinned or copy.line.split(":")[0] not in NAMED]

    def waits_of_training(self) -> list[Wait]:
        """Return the waits outside the library's own threads."""
        return [wait for wait in self.waits.elements() if not wait.background]


LEDGER = Ledger()


def cause() -> str:
    """Return the innermost line of the library that is being run, or ``""`` if there is none.

    An operation of autograd itself, in its own thread, has no such line; it is named "backward".
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(LIBRARY) and path not in CARRIERS:
            return f"{path.relative_to(LIBRARY)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward" if threading.current_thread().name.startswith("Dummy") else ""
