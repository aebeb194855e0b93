"""The interfaces of every placement: a store holds the rows of one process, an access reads and commits them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import sleep
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.layout import WORD, to_device_words


class RowStore(ABC):
    """``n`` rows of ``words`` 16-byte words in one tensor; zeros, which every column reads as "never seen", at first.

    Rows of 16 bytes are kept one-dimensional: gathering complex128 elements is about twice as fast as gathering rows of
    a matrix. On a device without complex128 they are rows of a matrix of int64.

    Row numbers and blocks are on the store's device. Neither :meth:`gather` nor :meth:`scatter` costs more when ``n``
    grows.

    Attributes:
        slow: rows may have to come from a disk, so that reading them ahead pays on every device.
        undo_log: of a save under way (``Snapshot.keep``): called with rows ``(R,)`` before they are written.
    """

    n: int
    words: int
    slow = False
    undo_log: Callable[[Tensor], None] | None = None
    _table: Tensor

    @property
    def device(self) -> torch.device:
        return self._table.device

    def gather(self, rows: Tensor) -> Tensor:
        """Copy rows ``(R,)`` int64 to a block ``(R, words)``."""
        return self._as_block(self._table.index_select(0, rows))

    def scatter(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows; a row that occurs twice has equal values."""
        if (log := self.undo_log) is not None:
            log(rows)
        self._table.index_copy_(0, rows, self._as_stored(block))

    def block(self, start: int, stop: int) -> Tensor:
        """Copy successive rows."""
        return self._as_block(self._table[start:stop].clone())

    @abstractmethod
    def grow(self, n: int) -> None:
        """Append zero rows until there are ``n``."""

    @abstractmethod
    def shrink(self, n: int) -> None:
        """Undo :meth:`grow`, also one that failed here."""

    @abstractmethod
    def overwriting(self) -> AbstractContextManager[None]:
        """Reset all rows to zeros; inside, :meth:`scatter` fills them."""

    def to(self, device: torch.device) -> None:
        """Follow the features to their device, where the placement allows it."""
        del device

    def ready(self) -> None:
        """Raise if rows may not be read or written now (a table file that an earlier run left)."""

    def writable(self) -> bool:
        """True unless this is a forked process and the rows belong to its parent."""
        return True

    def close(self) -> None:
        """Release what the store holds beside memory (files, mappings)."""

    def await_snapshot(self) -> None:
        """Wait until no save reads the rows any more."""
        while self.undo_log is not None:
            sleep(1e-3)

    def _shape(self, n: int, kind: torch.dtype = WORD) -> tuple[int, ...]:
        per_row = self.words * 16 // kind.itemsize
        return (n,) if per_row == 1 else (n, per_row)

    def _as_stored(self, block: Tensor) -> Tensor:
        block = block if block.dtype == self._table.dtype else block.view(self._table.dtype)
        return block.view(-1, *self._table.shape[1:])

    def _as_block(self, rows: Tensor) -> Tensor:
        return rows if rows.dim() == 2 else rows.view(-1, 1)


@dataclass(eq=False)
class Ticket:
    """Rows under way, see :meth:`RowAccess.prefetch`.

    Attributes:
        access: issued it.
        rows: their numbers, ``(R,)`` on the CPU.
        device: where they are wanted.
        future: of the read ahead; ``None``: rows are read when they are taken.
        number, settled: the access's counts of commits and of settlements when it was issued.
    """

    access: RowAccess
    rows: Tensor
    device: torch.device
    future: Future[Any] | None = None
    number: int = 0
    settled: int = 0

    def take(self, device: torch.device | None = None) -> Tensor:
        """Return the rows' committed values as of now, ``(R, words)``, on ``device`` or that of the ticket."""
        return self.access.take(self, self.device if device is None else device)

    def drop(self) -> None:
        """Give up the rows; a read that has not begun never does."""
        if self.future is not None:
            self.future.cancel()


class RowAccess:
    """Reads and commits rows at once: the placement beside the features, where a read is one kernel.

    Every read sees every commit made before it, also where a subclass reads ahead and writes behind.
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        """Read committed rows ``(R,)`` to a block ``(R, words)`` on the device of ``rows``, in memory of its own.

        ``host_rows``, the same row numbers on the CPU, spare a placement on the host the wait for the accelerator.
        """
        rows_there = host_rows if host_rows is not None and self.store.device.type == "cpu" else rows
        return to_device_words(self.store.gather(accelerator.to_device(rows_there, self.store.device)), rows.device)

    def prefetch(self, rows: Tensor, device: torch.device) -> Ticket:
        """Start fetching rows ``(R,)``, given on the CPU, to a device."""
        return Ticket(self, rows, device)

    def take(self, ticket: Ticket, device: torch.device) -> Tensor:
        """Return the rows of a ticket, see :meth:`Ticket.take`."""
        return self.fetch(accelerator.to_device(ticket.rows, device), ticket.rows)

    def commit(self, rows: Tensor, block: Tensor) -> None:
        """Write ``block`` (R, words) to ``rows`` (R,), both on one device; the caller must not change them any more."""
        device = self.store.device
        self.store.scatter(accelerator.to_device(rows, device), to_device_words(block, device))

    def ready(self) -> None:
        """Raise now what would make a read or a commit fail: a failed writer, rows of an earlier run."""
        self.store.ready()

    def settle(self) -> None:
        """Wait until every commit is in the store and nothing reads it; call it before touching the store itself.

        Tickets stay good: those under way read anew when they are taken.
        """

    def close(self) -> None:
        """Settle, stop threads, close the store."""
        self.settle()
        self.store.close()
