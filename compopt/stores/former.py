"""Former values of rows that were overwritten since a moment, sorted so that they are found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.complex128]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """Former values: row numbers ``(R,)``, ascending, each once, and ``(R, words)``."""

    rows: Rows
    block: Blocks

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, start: int, stop: int) -> Run:
        """Those of rows ``[start, stop)``, a view."""
        low, high = np.searchsorted(self.rows, [start, stop])
        return Run(self.rows[low:high], self.block[low:high])

    def after(self, row: int) -> Run:
        """Those from a row on; what goes before them is given back once it is half of all."""
        gone = int(np.searchsorted(self.rows, row))
        return self if 2 * gone < len(self) or not gone else Run(self.rows[gone:].copy(), self.block[gone:].copy())


def merge(oldest_first: Sequence[Run]) -> Run:
    """One run, which has of each row the oldest value; the rows of what is given need be neither sorted nor single."""
    rows = np.concatenate([run.rows for run in oldest_first])
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    first = np.ones(len(rows), dtype=bool)
    first[1:] = rows[1:] != rows[:-1]
    return Run(rows[first], np.concatenate([run.block for run in oldest_first])[order[first]])


class Former:
    """Runs of former values, oldest first, each at least twice as long as the next.

    They have at most twice as many values as there are rows that were overwritten.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def add(self, run: Run) -> None:
        """Values that were noted after all others."""
        while self.runs and len(self.runs[-1]) < 2 * len(run):
            run = merge([self.runs.pop(), run])
        if len(run):
            self.runs.append(run)

    def lay_over(self, block: Blocks, start: int) -> None:
        """Replace what was overwritten in a block ``(R, words)`` of the rows from ``start`` on."""
        for run in reversed(self.runs):  # the oldest value last, so that it counts
            part = run.between(start, start + len(block))
            block[part.rows - start] = part.block

    def forget_before(self, row: int) -> None:
        """Rows before this one are asked for no more."""
        self.runs = [rest for run in self.runs if len(rest := run.after(row))]
