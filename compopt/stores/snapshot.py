"""Snapshot of a store, which a thread reads while commits continue, by means of an undo log."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowStore, chosen, rows_of

# Number of logged values above which a commit sorts them, so that the log does not grow without bound while the reader
# waits for a disk: 6 MB for rows of 16 bytes.
UNSORTED = 1 << 18
Run = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # row numbers, ascending, each once; their values


class Snapshot:
    """Copy-on-write view of a store at the time of construction; visited rows are read once, in ascending order.

    A commit logs the former values of its rows (:meth:`keep`) before it overwrites them. :meth:`read` copies the
    current rows of the store and then overwrites the copy with the logged values, the oldest ones last. Every write
    that the copy contains, completely or partially, was logged before. Commits and reads do not wait for each other. On
    a device with streams, rows are copied between two commits on the stream of the commits, and transferred to the host
    on a side stream.

    Memory: at most two former values of each row that is written before it is read, and :data:`UNSORTED` values more;
    each value needs the bytes of a row and 8 bytes.

    Args:
        store: the store, without pending commits; it refers to this object until :meth:`release`.
    """

    def __init__(self, store: RowStore) -> None:
        accelerator.synchronize(store.device)  # the snapshot includes commits on other streams
        self._store, self._left = store, 0  # rows before `_left` have been read
        self._written = store.written.to("cpu", copy=True)
        self._stream, self._side = accelerator.current_stream(store.device), accelerator.new_stream(store.device)
        # Logged by commits and not sorted yet; with streams, the copy on the host is complete after the event. A deque
        # allows appends without a lock, so that a commit never waits for the reader.
        self._new: deque[tuple[Tensor, Tensor, Any]] = deque()
        self._unsorted = 0
        # Sorted runs, oldest first, each at least twice as long as the next: each value is merged a logarithmic number
        # of times, and a read searches few runs. Guarded by the lock.
        self._log: list[Run] = []
        self._lock = threading.Lock()
        self._error: Exception | None = None
        store.undo_log = self.keep

    def keep(self, rows: Tensor) -> None:
        """Log the current values of rows ``(R,)``, on the store's device, before they are overwritten.

        An error, such as a failed allocation, is raised by :meth:`read` instead, so that training continues.
        """
        try:
            if rows.device.type == "cpu":  # on a device the host would wait for the size of the selection
                rows = rows[rows >= self._left]
                if not len(rows):
                    return
            block = accelerator.to_host(self._store.gather(rows))
            self._new.append((accelerator.to_host(rows), block, accelerator.event(self._store.device)))
            self._unsorted += len(rows)
            if self._unsorted > UNSORTED and self._lock.acquire(blocking=False):  # otherwise the reader is sorting
                try:
                    self._sort(wait=False)
                finally:
                    self._lock.release()
        except Exception as error:
            self._error = error
            self.release()

    def visited(self, most: int, part: int = 0, parts: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield numbers ``(R,)`` and values of the rows that are not zeros, at most ``most`` at a time, on the host.

        With ``parts``, every ``parts``-th piece of ``most`` rows of the table is read, from number ``part`` on. The
        tensors are overwritten when the next ones are yielded.
        """
        # One buffer: small tensors that live on between the large ones of each read would fragment the memory.
        count = 0
        all_rows = torch.empty(most, dtype=torch.int64, device="cpu")
        blocks = torch.empty(most, 2 * self._store.words, dtype=torch.int64, device="cpu")
        for rows in rows_of(self._written, self._store.group, self._store.n, most):
            if not len(rows := rows[chosen(rows // most % parts == part)]):
                continue
            block = self.read(rows)
            kept = chosen(block.any(dim=1))
            rows = rows[kept]
            if count + len(rows) > most:
                yield all_rows[:count], blocks[:count]
                count = 0
            at = slice(count, count + len(rows))
            all_rows[at], blocks[at], count = rows, block[kept], at.stop
        if count:
            yield all_rows[:count], blocks[:count]

    def read(self, rows: Tensor) -> Tensor:
        """Return rows ``(R,)`` as of the construction, on the host; ``rows`` ascend, also from call to call."""
        device = self._store.device
        # Copy first, then apply the log: on the CPU every write that the copy contains was logged before it began. On
        # a device with streams the copy is queued on the commits' stream, so that it contains whole commits only.
        with accelerator.current(device, self._stream):
            there = self._store.gather(accelerator.to_device(rows, device))
            event = accelerator.event(device)
        with accelerator.current(device, self._side):  # wait for the copy, not for later work on the training stream
            accelerator.wait_event(event, device, (there,))
            block = there.cpu()
        with self._lock:
            self._sort(wait=True)
            if self._error is not None:
                raise self._error
            for logged, values in reversed(self._log):
                low, high = np.searchsorted(logged, [int(rows[0]), int(rows[-1]) + 1])
                at = np.searchsorted(rows.numpy(), logged[low:high])
                read = rows.numpy()[at] == logged[low:high]
                block.numpy()[at[read]] = values[low:high][read]
            self._left = int(rows[-1]) + 1
        return block

    def release(self) -> None:
        """Stop logging and free the log, without the lock, since a forked process may have inherited it locked."""
        self._store.undo_log = None
        self._new, self._log = deque(), []

    def _sort(self, wait: bool) -> None:
        """Move logged values into the sorted runs; without ``wait``, only those that have arrived on the host."""
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
    """Merge (unsorted) runs, given oldest first, into the oldest value of each row from row ``left`` on."""
    rows = np.concatenate([run[0] for run in runs])
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    first = rows >= left
    first[1:] &= rows[1:] != rows[:-1]
    return rows[first], np.concatenate([run[1] for run in runs])[order[first]]
