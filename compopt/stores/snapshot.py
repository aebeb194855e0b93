"""The rows of a store as they were at one moment, read in a thread while commits go on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowStore
from compopt.stores.changes import chunk_count
from compopt.stores.former import Former, Run, merge
from compopt.stores.layout import WORD

# Former values that are noted before whoever notes them sorts them: 6 MB of rows of 16 bytes.
UNSORTED = 1 << 18


def copies(store: RowStore, chunks: Sequence[int]) -> Iterator[Tensor]:
    """The rows of some chunks as they are now, a block for each, where they are."""
    size = store.changes.chunk_rows
    for chunk in chunks:
        yield store.block(chunk * size, min((chunk + 1) * size, store.n))


def on_host(blocks: Iterable[Tensor]) -> list[Tensor]:
    """Blocks ``(R, words)`` on the host, one after the other."""
    return [block.cpu().view(WORD) for block in blocks]


class ChunkSnapshot:
    """Some chunks of a store as they are when this is made; each is read once, in ascending order.

    Whoever writes rows gives them to :meth:`keep` before, which notes what they were. A chunk is read from the store
    as it is, and what was noted by then is laid over it. A write that the read has met, as a whole or in part, was
    noted before it began, so that neither waits for the other. On a device with streams a chunk is copied between two
    commits, on their stream, and taken to the host on another one: a commit waits for nothing.

    Memory: of each row that is written after the moment and before it is read at most two former values, and
    :data:`UNSORTED` values and those of one commit besides; a value takes the row's bytes and 8.

    Args:
        store: to which it belongs until :meth:`release`; at rest now.
        chunks: which will be read, ascending.
    """

    def __init__(self, store: RowStore, chunks: Sequence[int]) -> None:
        self._store, self._size = store, store.changes.chunk_rows
        self._left = torch.zeros(chunk_count(store.n, self._size), dtype=torch.bool, device="cpu")
        self._left[torch.as_tensor(chunks, dtype=torch.int64, device="cpu")] = True
        self._stream, self._side = accelerator.current_stream(store.device), accelerator.new_stream(store.device)
        self._noted: list[tuple[Tensor, Tensor, Any]] = []
        self._unsorted, self._former = 0, Former()
        self._noting, self._sorting = threading.Lock(), threading.Lock()
        self._error: Exception | None = None
        self._released = threading.Event()
        store.snapshot = self

    # -- beside the reader ---------------------------------------------------------------------------------------

    def keep(self, rows: Tensor) -> None:
        """Rows ``(R,)``, on the store's device, will be written: note what they are.

        What goes wrong here, such as memory that cannot be had, is raised by :meth:`read`: training goes on.
        """
        try:
            self._note(rows)
        except Exception as error:
            self._error = error
            self.release()

    def _note(self, rows: Tensor) -> None:
        if rows.device.type == "cpu":  # elsewhere their number cannot be known without waiting
            rows = rows[self._left[rows // self._size]]
            if not len(rows):
                return
        block = self._store.gather(rows)
        noted = rows, block, accelerator.event(rows.device)
        with self._noting:
            self._noted.append(noted)
            self._unsorted += len(rows)
        if self._unsorted > UNSORTED:  # the reader waits for a disk
            self._sort()

    def wait(self) -> None:
        """Until nobody reads the store any more."""
        self._released.wait()

    # -- the reader ----------------------------------------------------------------------------------------------

    def read(self, chunks: Sequence[int]) -> list[Tensor]:
        """The rows of some chunks as they were, a block ``(R, words)`` for each, on the host."""
        device = self._store.device
        with accelerator.current(device, self._stream):
            there = list(copies(self._store, chunks))  # all of them: each wait is one for a step
            event = accelerator.event(device)
        with accelerator.current(device, self._side):
            accelerator.wait_event(event, device, there)
            blocks = on_host(there)
        self._sort()  # after the read: of what it has met, everything was noted
        if self._error is not None:
            raise self._error
        with self._sorting:
            for chunk, block in zip(chunks, blocks, strict=True):
                self._former.lay_over(block.numpy(), chunk * self._size)
            self._left[chunks] = False
            self._former.forget_before((chunks[-1] + 1) * self._size)
        return blocks

    def _sort(self) -> None:
        """Take what was noted to the host, in order."""
        with self._sorting:
            with self._noting:
                noted, self._noted, self._unsorted = self._noted, [], 0
            runs = [self._to_host(*one) for one in noted]
            if runs:
                run, left = merge(runs), self._left.numpy()
                wanted = left[run.rows // self._size]
                self._former.add(run if wanted.all() else Run(run.rows[wanted], run.block[wanted]))

    def _to_host(self, rows: Tensor, block: Tensor, event: Any) -> Run:
        with accelerator.current(rows.device, self._side):
            accelerator.wait_event(event, rows.device, (rows, block))
            return Run(rows.cpu().numpy(), block.cpu().view(WORD).numpy())

    def release(self) -> None:
        """The store is read no more, and what was noted is given back."""
        self._store.snapshot = None
        self._released.set()
        with self._noting:
            self._noted, self._unsorted, self._former = [], 0, Former()

    def abandon(self) -> None:
        """The same in a forked process, where the thread that reads is not: it may have held a lock."""
        self._store.snapshot = None
        self._released = threading.Event()
        self._released.set()


class Snapshot:  # stopgap
    """Undo log: the rows of a store as they are now, read by ascending ranges while commits go on."""

    def __init__(self, store: RowStore) -> None:
        self._store, self._log, self._read = store, list[tuple[Tensor, Tensor]](), 0
        self._lock, self._released, self._error = threading.Lock(), threading.Event(), list[Exception]()
        store.snapshot = self

    def keep(self, rows: Tensor) -> None:
        """Rows will be written."""
        try:
            with self._lock:
                rows = rows[rows >= self._read]
                self._log.append((rows.cpu(), self._store.gather(rows).cpu().view(WORD)))
        except Exception as error:
            self._error.append(error)

    def read(self, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` as they were."""
        with self._lock:
            if self._error:
                raise self._error[0]
            block = self._store.block(start, stop).cpu().view(WORD)
            for rows, former in reversed(self._log):
                mine = (rows >= start) & (rows < stop)
                block[rows[mine] - start] = former[mine]
            self._read = stop
        return block

    def wait(self) -> None:
        """Until the store may be moved or closed."""
        self._released.wait()

    def release(self) -> None:
        """End it."""
        self._store.snapshot = None
        self._log = []
        self._released.set()
