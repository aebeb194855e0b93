"""The rows of a store as they were at one moment, read in a thread while commits go on: an undo log."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowStore

# Values logged before a commit sorts them, so that a reader that waits for a disk cannot make the log grow without
# bound: 6 MB of rows of 16 bytes.
UNSORTED = 1 << 18
Run = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # row numbers, ascending, each once; their values


class Snapshot:
    """Copy-on-write view of a store as it is when this is made; rows are read once, in ascending order.

    A commit logs the former values of the rows that it will write (:meth:`keep`) before it writes them. :meth:`read`
    first copies rows from the store as they are and then lays the log over the copy, oldest values last: whatever
    write the copy has met, in whole or in part, was logged before. Neither waits for the other. On a device with
    streams rows are copied between two commits, on their stream, and taken to the host on another one.

    Memory: of each row that is written after the moment and before it is read at most two former values, and
    :data:`UNSORTED` values besides; a value takes the row's bytes and 8.

    Args:
        store: at rest now; it refers to this object until :meth:`release`.
    """

    def __init__(self, store: RowStore) -> None:
        accelerator.synchronize(store.device)  # commits on other streams belong to the moment
        self._store, self._left = store, 0  # rows before `_left` have been read
        self._stream, self._side = accelerator.current_stream(store.device), accelerator.new_stream(store.device)
        # Logged by commits and not sorted yet; on a device with streams on its way to the host, there after the event.
        # A commit appends without a lock, which a deque allows, so that it never waits for the reader.
        self._new: deque[tuple[Tensor, Tensor, Any]] = deque()
        self._unsorted = 0
        # Sorted, oldest first, each at least twice as long as the next: a value is merged a logarithmic number of
        # times, and a read looks into few runs. Written under the lock.
        self._log: list[Run] = []
        self._lock = threading.Lock()
        self._error: Exception | None = None
        store.undo_log = self.keep

    def keep(self, rows: Tensor) -> None:
        """Log the values of rows ``(R,)``, on the store's device, which will be written.

        What goes wrong here, such as memory that cannot be had, is raised by :meth:`read`: training goes on.
        """
        try:
            if rows.device.type == "cpu":  # elsewhere their number cannot be known without waiting
                rows = rows[rows >= self._left]
                if not len(rows):
                    return
            block = accelerator.to_host(self._store.gather(rows))
            self._new.append((accelerator.to_host(rows), block, accelerator.event(self._store.device)))
            self._unsorted += len(rows)
            if self._unsorted > UNSORTED and self._lock.acquire(blocking=False):  # else the reader is sorting
                try:
                    self._sort(wait=False)
                finally:
                    self._lock.release()
        except Exception as error:
            self._error = error
            self.release()

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows ``[start, stop)`` as they were, on the host.

        Ranges ascend and do not overlap.
        """
        device = self._store.device
        # The copy before the log: on the CPU a write that the copy meets was logged before the write began. On a
        # device with streams the copy is queued on the commits' stream, so that it meets whole commits only.
        with accelerator.current(device, self._stream):
            there = self._store.block(start, stop)
            event = accelerator.event(device)
        with accelerator.current(device, self._side):  # the wait below is for the copy, not for training's later work
            accelerator.wait_event(event, device, (there,))
            block = there.cpu()
        with self._lock:
            self._sort(wait=True)
            if self._error is not None:
                raise self._error
            for rows, values in reversed(self._log):
                low, high = np.searchsorted(rows, [start, stop])
                block.numpy()[rows[low:high] - start] = values[low:high]
            self._left = stop
        return block

    def release(self) -> None:
        """Stop logging and free the log. Takes no lock, since a forked process may have inherited it locked."""
        self._store.undo_log = None
        self._new, self._log = deque(), []

    def _sort(self, wait: bool) -> None:
        """Move what was logged into the sorted runs; without ``wait`` only what has arrived on the host."""
        arrived: list[Run] = []
        while self._new and (wait or self._new[0][2] is None or self._new[0][2].query()):
            rows, block, event = self._new.popleft()
            if event is not None:
                event.synchronize()
            arrived.append((rows.numpy(), block.numpy()))
        self._unsorted = 0
        if arrived:
            run = _oldest(arrived, self._left)
            while self._log and len(self._log[-1][0]) < 2 * len(run[0]):
                run = _oldest([self._log.pop(), run], self._left)
            self._log.append(run)


def _oldest(runs: Sequence[Run], left: int) -> Run:
    """Merge runs, oldest first, into the oldest value of each row from ``left`` on; they need not be sorted."""
    rows = np.concatenate([run[0] for run in runs])
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    first = rows >= left
    first[1:] &= rows[1:] != rows[:-1]
    return rows[first], np.concatenate([run[1] for run in runs])[order[first]]
