"""Commits that a store may not hold yet, and how they are laid over rows that were read from it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compopt.stores.layout import moved


class Query:
    """Row numbers that are read, ``(R,)`` on one device; on the CPU they are sorted when that is first needed."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """``(rows in order, their positions)``: looking up sorted numbers is several times as fast."""
        if self._sorted is None:
            order = np.argsort(self.rows.numpy())
            self._sorted = self.rows.numpy()[order], order
        return self._sorted


class Entry:
    """One commit.

    Attributes:
        number: 1, 2, ... in the order of the commits.
        rows: ``(R,)``, where the features are; ``block``: ``(R, words)``.
        host: the same on the CPU once they are there, with the event after which they are.
    """

    def __init__(self, number: int, rows: Tensor, block: Tensor) -> None:
        self.number, self.rows, self.block = number, rows, block
        self.host: tuple[Tensor, Tensor, Any] | None = None
        self._sorted: tuple[Tensor, Tensor] | None = None

    def sorted(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows in ascending order and their block; two threads may both sort, and find the same."""
        if self._sorted is None:
            if self.rows.device.type == "cpu":
                order = torch.from_numpy(np.argsort(self.rows.numpy()))
                rows = self.rows[order]
            else:
                rows, order = torch.sort(self.rows)
            self._sorted = rows, self.block.index_select(0, order)
        rows, block = self._sorted
        return rows.to(device), moved(block, device)  # another device than the features': est.read(), which may wait

    def lay_over(self, block: Tensor, query: Query) -> Tensor:
        """The rows of this commit replaced in a block that was read for a query; on the CPU in place.

        Without waiting for a device.
        """
        if not len(self.rows):
            return block
        rows, new = self.sorted(block.device)
        if block.device.type == "cpu":
            wanted, position = query.sorted()
            at = np.searchsorted(rows.numpy(), wanted)
            np.minimum(at, len(rows) - 1, out=at)
            (hit,) = np.nonzero(rows.numpy()[at] == wanted)
            if len(hit):
                block.numpy()[position[hit]] = new.numpy()[at[hit]]
            return block
        found = torch.searchsorted(rows, query.rows).clamp_(max=len(rows) - 1)
        return torch.where((rows[found] == query.rows)[:, None], new[found], block)


class Journal:
    """The commits that are not known to be in the store, oldest first, at most ``limit``."""

    def __init__(self, limit: int, written: int = 0) -> None:
        self.limit = limit
        self.committed = self.written = written
        self.error: BaseException | None = None
        self._entries: deque[Entry] = deque()
        self._changed = threading.Condition()

    def append(self, rows: Tensor, block: Tensor) -> Entry:
        """A new commit."""
        with self._changed:
            self.committed += 1
            entry = Entry(self.committed, rows, block)
            self._entries.append(entry)
        return entry

    def entries(self) -> list[Entry]:
        """The unwritten commits, oldest first."""
        with self._changed:
            return list(self._entries)

    def retire(self, number: int) -> None:
        """Every commit up to a number is in the store."""
        with self._changed:
            self.written = max(self.written, min(number, self.committed))
            while self._entries and self._entries[0].number <= self.written:
                self._entries.popleft()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """A commit could not be written; nothing is written after it."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def full(self) -> bool:
        """No further commit is taken."""
        return len(self._entries) >= self.limit

    def wait(self, unwritten: int) -> None:
        """Until at most so many commits are unwritten, or writing failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or len(self._entries) <= unwritten)

    def __reduce__(self) -> tuple[Any, ...]:
        """For a copy, whose store holds every commit."""
        return Journal, (self.limit, self.committed)
