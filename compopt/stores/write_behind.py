"""Write-behind: the rows of a store on the host, read ahead of time and written after the step."""

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

# Commits that wait for the store before a commit waits for them.
PENDING_LIMIT = 64
# Commits that are kept for a ticket after it was issued: one for which more were made reads anew.
KEPT_COMMITS = 8


@dataclass(eq=False)
class Ticket:
    """Rows under way, see :meth:`WriteBehind.prefetch`.

    Attributes:
        access: issued it.
        rows: their numbers, ``(R,)`` on the CPU.
        device: where they are wanted.
        ahead: future of the read ahead; ``None``: rows are read when they are taken.
        later: commits that were made since it was issued.
    """

    access: WriteBehind
    rows: Tensor
    device: torch.device
    ahead: Future[Any] | None = None
    later: list[Commit] = field(default_factory=list)

    def take(self, device: torch.device | None = None) -> Tensor:
        """Return the rows' committed values as of now, on ``device`` or that of the ticket."""
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
    """Rows and their values: on the features' device, and on the CPU after ``event``."""

    rows: Tensor
    block: Tensor
    host: tuple[Tensor, Tensor]
    event: Any

    def on_host(self) -> tuple[Tensor, Tensor]:
        """Wait for the copy on the CPU and return it."""
        if self.event is not None:
            self.event.synchronize()
        return self.host

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows and block on a device; waits only on another one than the features' (``est.read()``)."""
        if self.rows.device.type == device.type:
            return self.rows, self.block
        rows, block = self.on_host()
        return accelerator.to_device(rows, device), accelerator.to_device(block, device)


class WriteBehind:
    """A store on the host that neither reads nor writes make the main thread, or the accelerator, wait for.

    It is used in the place of the store. A commit is appended to the pending ones, on the features' device, and is
    done; one thread copies it to the host and scatters it. A read gathers from the store and lays over it, on the
    features' device, every commit that was pending when it began: it sees all commits made before it, whatever the
    thread has done. When ``limit`` commits are pending, the next one waits.

    The same thread gathers the rows of tickets and sends them to a device with streams. On other devices it only brings
    rows from the disk to memory, where taking the ticket reads them. Tickets that were under way when :meth:`settle`
    was called read anew, and those that are dropped are not read.

    On a device with streams, copies go through pinned memory on a side stream and nothing synchronises, provided
    that :meth:`fetch` is given the rows on the host too. The thread starts at the first use, ends when this object is
    collected, and finishes what is committed when the interpreter exits. A forked process starts its own.

    Errors of the thread's writes are raised by the next call, and by every later one: what was committed since is
    lost. Copies and pickles wait for the thread and copy the store.
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
        # Guards `_pending` and `_tickets`. It is held while work is handed to the thread, so that they and the thread's
        # queue agree on which of a ticket and a commit came first (shards prefetch in a thread of their own). It is
        # never held while rows are read or written.
        self._changed = threading.Condition()
        self._tickets: WeakSet[Ticket] = WeakSet()  # with a read ahead that is valid
        self._side = functools.cache(accelerator.new_stream)  # of copies to and from a device, where it has streams

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        """Read committed rows, see :meth:`RowStore.fetch`."""
        self.check()
        # Before the gather: it may meet any part of what is pending now, and a commit that is written meanwhile is laid
        # over in any case. Afterwards, a commit half of which was met could already have left the pending ones.
        with self._changed:
            pending = list(self._pending)
        block = accelerator.to_device(self.store.gather(rows.cpu() if host_rows is None else host_rows), rows.device)
        return overlay(block, rows, pending)

    def prefetch(self, rows: Tensor, device: torch.device) -> Ticket:
        """Start fetching rows ``(R,)``, given on the CPU, to a device."""
        self.ready()
        device = accelerator.here(device)  # the thread may have another current device
        ticket = Ticket(self, rows.clone(), device)  # a loader may reuse its buffer
        if self.store.slow or accelerator.has_streams(device):
            with self._changed:
                ticket.ahead = self._submit(self._read_ahead, ticket.rows, device, self._side(device))
                self._tickets.add(ticket)
            finalize(ticket, ticket.ahead.cancel)  # nobody waits for it: a read that has not begun never does
        return ticket

    def _read_ahead(self, rows: Tensor, device: torch.device, side: Any) -> tuple[Tensor, Tensor, Any] | None:
        """In the thread, which has written all commits made before the ticket and none made after it."""
        block = self.store.gather(rows)
        if side is None:
            return None
        with accelerator.current(device, side):
            return accelerator.to_device(block, device), accelerator.to_device(rows, device), accelerator.event(device)

    def _forget(self, ticket: Ticket) -> None:
        """Let a ticket read anew; it keeps nothing."""
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
        # The copy waits on the device for the work that computes the commit, and the thread for the copy's event: the
        # host does not wait.
        accelerator.wait_stream(side, device)
        with accelerator.current(device, side):
            host = accelerator.to_host(rows), accelerator.to_host(block)
            event = accelerator.event(device)
        for tensor in (rows, block):  # else the allocator could give their memory away while the side stream reads it
            tensor.record_stream(side)
        return Commit(rows, block, host, event)

    def _write(self, commit: Commit) -> None:
        """In the thread: scatter one commit, in one large call, which leaves the interpreter to the main thread."""
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
            wait([self._last])  # and with it all before it
        with self._changed:
            for ticket in list(self._tickets):  # the caller may write the store
                self._forget(ticket)
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the thread; start one anew in a forked process."""
        if self._pid != os.getpid():
            self._restart()
        if self._error is not None:
            written = self._committed - len(self._pending)
            raise RuntimeError(
                f"commit {written + 1} of {self._committed} could not be written ({type(self._error).__name__}: "
                f"{self._error}); the rows end with commit {written}: load a checkpoint into a new estimator"
            ) from self._error

    def ready(self) -> None:
        """Raise now what would make a read or a commit fail: a failed write, rows of an earlier run."""
        self.check()
        self.store.ready()

    def _restart(self) -> None:
        """Write what was pending at the fork again, which changes nothing that was written already.

        Where only the parent writes, it stays pending here and is laid over what is read.
        """
        for ticket in list(self._tickets):  # the thread that read ahead is the parent's
            self._forget(ticket)
        self._start()
        for commit in list(self._pending) if self.store.writable else ():
            self._submit(self._write, commit)

    def __reduce__(self) -> tuple[Any, ...]:
        self.settle()
        return WriteBehind, (self.store, self._limit)


def overlay(block: Tensor, rows: Tensor, commits: Sequence[Commit]) -> Tensor:
    """Replace what some commits, oldest first, wrote in a block that was read; without waiting for a device."""
    there = [commit.on(rows.device) for commit in commits if len(commit.rows)]
    if not there:
        return block
    written, order = torch.sort(torch.cat([pair[0] for pair in there]), stable=True)
    # the last of equal rows: the newest commit's
    found = torch.searchsorted(written, rows, right=True).sub_(1).clamp_(min=0)
    new = torch.cat([pair[1] for pair in there])[order[found]]
    return torch.where((written[found] == rows)[:, None], new, block)
