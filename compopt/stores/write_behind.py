"""Write-behind access to a store on the host: asynchronous prefetching and asynchronous writes."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowStore

# Largest number of pending commits; a further commit waits.
PENDING_LIMIT = 64
# Largest number of commits kept for a ticket; after a further one, the ticket drops its prefetch and reads again.
KEPT_COMMITS = 8


@dataclass(eq=False)
class Ticket:
    """Handle of rows that are being prefetched, see :meth:`WriteBehind.prefetch`.

    Attributes:
        access: the object that issued the ticket.
        rows: row numbers, ``(R,)`` on the CPU.
        device: target device of the rows.
        ahead: future of the prefetch; ``None``: :meth:`take` reads the rows.
        later: commits since the ticket was issued.
    """

    access: WriteBehind
    rows: Tensor
    device: torch.device
    ahead: Future[Any] | None = None
    later: list[Commit] = field(default_factory=list)

    def take(self, device: torch.device | None = None) -> Tensor:
        """Return the currently committed values of the rows, on ``device`` or the device of the ticket."""
        self.access.check()
        device, ahead = device or self.device, self.ahead
        read = None if ahead is None else ahead.result()
        if read is None or self.ahead is None or self.device.type != device.type:
            return self.access.fetch(accelerator.to_device(self.rows, device), self.rows)
        block, rows, event = read
        accelerator.wait_event(event, device, (block, rows))
        return overlay(block, rows, self.later)


@dataclass(eq=False)
class Commit:
    """Row numbers and values of one commit, on the features' device, and on the CPU after ``event``."""

    rows: Tensor
    block: Tensor
    host: tuple[Tensor, Tensor]
    event: Any

    def on_host(self) -> tuple[Tensor, Tensor]:
        """Wait for the copy on the CPU, and return it."""
        if self.event is not None:
            self.event.synchronize()
        return self.host

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows and block on a device; wait only if it is not the features' device (``est.read()``)."""
        if self.rows.device.type == device.type:
            return self.rows, self.block
        rows, block = self.on_host()
        return accelerator.to_device(rows, device), accelerator.to_device(block, device)


class WriteBehind:
    """Write-behind access to a store on the host, without waits of the main thread or the accelerator.

    This object replaces the store. A commit appends its rows, on the features' device, to the pending commits and
    returns; a background thread copies them to the host and scatters them. A read gathers from the store and overlays,
    on the features' device, every commit that was pending at its start. The result therefore includes all earlier
    commits, independently of the progress of the thread. With ``limit`` pending commits, the next commit waits.

    The same thread gathers the rows of tickets and copies them to a device with streams. For other devices it only
    reads rows from the disk into memory, and :meth:`Ticket.take` reads them again. Tickets that were issued before a
    call of :meth:`settle` read again after it. Dropped tickets are not read.

    On a device with streams, copies use pinned memory and a side stream and nothing synchronises, provided that
    :meth:`fetch` also gets the row numbers on the host. The thread starts at the first use and ends when this object is
    collected. Before the interpreter exits, the thread writes all pending commits. A forked process starts its own
    thread.

    After a failed write of the thread, the next call and every later call raise; all commits since then are lost.
    Copying and pickling wait for the thread and copy the store.
    """

    def __init__(self, store: RowStore, limit: int = PENDING_LIMIT) -> None:
        self.store, self._limit = store, limit
        self._pending: deque[Commit] = deque()
        self._committed = 0
        self._error: BaseException | None = None
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compopt-rows")
        self._last: Future[Any] | None = None
        # Guards `_pending` and `_tickets`. Held while work is submitted to the thread, so that tickets and commits have
        # the same order there and in the thread's queue (shards prefetch in another thread). Never held while rows are
        # read or written.
        self._changed = threading.Condition()
        self._tickets: WeakSet[Ticket] = WeakSet()  # tickets with a valid prefetch
        self._side = functools.cache(accelerator.new_stream)  # side stream of copies, for devices with streams

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        """Read committed rows, see :meth:`RowStore.fetch`."""
        self.check()
        # Before the gather, which may read any part of the pending commits; the overlay repeats them in full. After the
        # gather, a commit that was read only in part might no longer be pending.
        with self._changed:
            pending = list(self._pending)
        block = accelerator.to_device(self.store.gather(rows.cpu() if host_rows is None else host_rows), rows.device)
        return overlay(block, rows, pending)

    def prefetch(self, rows: Tensor, device: torch.device) -> Ticket:
        """Start to read rows ``(R,)``, given on the CPU, for a device, and return their ticket."""
        self.ready()
        device = accelerator.here(device)  # the thread may have another current device
        ticket = Ticket(self, rows.clone(), device)  # a copy, since a loader may reuse its buffer
        if self.store.slow or accelerator.has_streams(device):
            with self._changed:
                ticket.ahead = self._submit(self._read_ahead, ticket.rows, device, self._side(device))
                self._tickets.add(ticket)
            finalize(ticket, ticket.ahead.cancel)  # cancel the read of a dropped ticket if it has not started
        return ticket

    def _read_ahead(self, rows: Tensor, device: torch.device, side: Any) -> tuple[Tensor, Tensor, Any] | None:
        """Gather the rows of a ticket, in the thread, after all commits before the ticket and before all later ones."""
        block = self.store.gather(rows)
        if side is None:
            return None
        with accelerator.current(device, side):
            return accelerator.to_device(block, device), accelerator.to_device(rows, device), accelerator.event(device)

    def _forget(self, ticket: Ticket) -> None:
        """Discard the prefetched rows and later commits of a ticket, so that :meth:`Ticket.take` reads again."""
        ticket.ahead, ticket.later = None, []
        self._tickets.discard(ticket)

    def _submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        self._last = self._thread.submit(work, *args)
        return self._last

    def commit(self, rows: Tensor, block: Tensor) -> None:
        """Commit rows, see :meth:`RowStore.commit`."""
        self.ready()
        if not self.store.writable:
            raise RuntimeError("these rows are written by the parent of this forked process, which only reads them")
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or len(self._pending) < self._limit)
        self.check()
        commit = self._copied(rows, block)
        with self._changed:
            self._committed += 1
            self._pending.append(commit)
            self._submit(self._write, commit)
            for ticket in list(self._tickets):
                ticket.later.append(commit)
                if len(ticket.later) > KEPT_COMMITS:
                    self._forget(ticket)

    def _copied(self, rows: Tensor, block: Tensor) -> Commit:
        """Start copying a commit to pinned host memory."""
        device = rows.device
        side = self._side(device)
        if side is None:
            return Commit(rows, block, (rows.cpu(), block.cpu()), None)
        # The side stream waits for the work that computes the commit, and the thread waits for the event of the copy;
        # the main thread does not wait.
        accelerator.wait_stream(side, device)
        with accelerator.current(device, side):
            host = accelerator.to_host(rows), accelerator.to_host(block)
            event = accelerator.event(device)
        for tensor in (rows, block):  # keep the allocator from reusing their memory while the side stream reads it
            tensor.record_stream(side)
        return Commit(rows, block, host, event)

    def _write(self, commit: Commit) -> None:
        """Scatter one commit, in the thread, by one large call that releases the interpreter lock."""
        if self._error is not None:
            return
        try:
            self.store.scatter(*commit.on_host())
        except BaseException as error:
            self._error = error
        with self._changed:
            if self._error is None:
                self._pending.popleft()
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait for the thread, see :meth:`RowStore.settle`."""
        self.check()
        if self._last is not None:
            wait([self._last])  # one thread: all earlier work has ended too
        with self._changed:
            for ticket in list(self._tickets):  # the caller may write to the store
                self._forget(ticket)
        self.check()

    def check(self) -> None:
        """Raise an error of the thread's writes; in a forked process, start a new thread."""
        if self._pid != os.getpid():
            self._restart()
        if self._error is not None:
            written = self._committed - len(self._pending)
            raise RuntimeError(
                f"commit {written + 1} of {self._committed} could not be written ({type(self._error).__name__}: "
                f"{self._error}); the rows end with commit {written}: load a checkpoint into a new estimator"
            ) from self._error

    def ready(self) -> None:
        """Raise if a read or a commit would fail, after a failed write or with rows of an earlier run."""
        self.check()
        self.store.ready()

    def _restart(self) -> None:
        """Start a new thread in a forked process, and write the commits that were pending at the fork again.

        Writing a commit twice is harmless. If only the parent may write, the commits stay pending in this process, and
        reads overlay them.
        """
        for ticket in list(self._tickets):  # their prefetch runs in the thread of the parent
            self._forget(ticket)
        self._start()
        for commit in list(self._pending) if self.store.writable else ():
            self._submit(self._write, commit)

    def __reduce__(self) -> tuple[Any, ...]:
        self.settle()
        return WriteBehind, (self.store, self._limit)


def overlay(block: Tensor, rows: Tensor, commits: Sequence[Commit]) -> Tensor:
    """Return a block with the values of some commits, given oldest first, in place of those read; without waiting."""
    there = [commit.on(rows.device) for commit in commits if len(commit.rows)]
    if not there:
        return block
    written, order = torch.sort(torch.cat([pair[0] for pair in there]), stable=True)
    # Of equal rows take the last one, which is the newest commit's.
    found = torch.searchsorted(written, rows, right=True).sub_(1).clamp_(min=0)
    new = torch.cat([pair[1] for pair in there])[order[found]]
    return torch.where((written[found] == rows)[:, None], new, block)
