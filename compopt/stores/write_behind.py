"""Write-behind: rows on the host or on disk, read ahead of time and written after the step."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowAccess, RowStore, Ticket
from compopt.stores.layout import WORD, moved

# Commits that wait for the store before a commit waits for them; also what a ticket that nobody takes keeps alive.
PENDING_LIMIT = 64


@dataclass(eq=False)
class Commit:
    """Rows that the store may not hold yet.

    Attributes:
        number: 1, 2, ... in the order of the commits.
        rows, block: ``(R,)`` and ``(R, words)``, where the features are.
        host: the same on the CPU, there after ``event``.
    """

    number: int
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
        return accelerator.to_device(rows, device), moved(block, device)


@dataclass(frozen=True)
class ReadAhead:
    """Rows of a ticket on their device: those that commit ``number`` and the ones before it left."""

    block: Tensor
    rows: Tensor
    event: Any
    number: int


class WriteBehind(RowAccess):
    """A store on the host that neither reads nor writes make the main thread, or the accelerator, wait for.

    *Write-behind.* A commit is appended to the pending ones, on the features' device, and is done; one thread copies it
    to the host and scatters it. A read gathers from the store and lays over it, on the features' device, every commit
    that was pending when it began: it sees all commits made before it, whatever the thread has done. When
    :data:`PENDING_LIMIT` commits are pending, the next one waits.

    *Read-ahead.* The same thread gathers the rows of tickets (unless they are few and in memory, see ``instant_rows``).
    It works in order, so that it has written all commits made before a ticket when it reads its rows. Those made later
    are kept with the ticket and laid over when it is taken. On the CPU the thread reads the rows of tickets under way
    again after each write, which leaves the interpreter to others where laying over does not. A ticket that sees too
    many commits, or whose rows were loaded or grown meanwhile, reads anew.

    On a device with streams, copies go through pinned memory on a side stream and nothing synchronises, provided
    that :meth:`fetch` is given the rows on the host too. The thread starts at the first use, ends when this object is
    collected, and finishes what is committed when the interpreter exits. A forked process starts its own.

    Args:
        store: where rows live; on the CPU.
        limit: of pending commits.

    Errors of the thread's writes are raised by the next call, and by every later one: what was committed since is
    lost. Copies and pickles wait for the thread and copy the store.
    """

    def __init__(self, store: RowStore, limit: int = PENDING_LIMIT) -> None:
        super().__init__(store)
        self._limit, self._committed = limit, 0
        self._pending: deque[Commit] = deque()
        self._error: BaseException | None = None
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compopt-rows")
        self._last: Future[None] | None = None  # the latest that the thread was given
        # Shards prefetch in a thread of their own: a ticket and the commits must agree on which came first.
        self._changed = threading.Condition()
        self._tickets: list[weakref.ref[Ticket]] = []
        self._sides: dict[torch.device, Any] = {}

    # -- reading -----------------------------------------------------------------------------------------------

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        self.check()
        with self._changed:
            pending = list(self._pending)  # before the gather, which may meet any part of them
        block = moved(self.store.gather(rows.cpu() if host_rows is None else host_rows), rows.device)
        return overlay(block, rows, pending)

    def prefetch(self, rows: Tensor, device: torch.device) -> Ticket:
        self.ready()
        device = accelerator.here(device)  # the thread may have another current device
        ticket = Ticket(self, rows.clone(), device)  # a loader may reuse its buffer
        if device.type == "cpu" and len(rows) <= self.store.instant_rows:
            return ticket
        with self._changed:
            reference = weakref.ref(ticket)
            self._tickets = [*(ref for ref in self._tickets if ref() is not None), reference]
            ticket.future = self._thread.submit(self._read_ahead, reference, self._side(device), self._committed)
            self._last = ticket.future
        return ticket

    def _read_ahead(self, reference: weakref.ref[Ticket], side: Any, number: int) -> None:
        """In the thread: gather the rows of a ticket and send them to its device."""
        ticket = reference()
        if ticket is None:
            return
        block = self.store.gather(ticket.rows)
        if side is None:
            ticket.read = ReadAhead(block, ticket.rows, None, number)
            return
        with accelerator.current(ticket.device, side):
            there = moved(block, ticket.device), accelerator.to_device(ticket.rows, ticket.device)
            ticket.read = ReadAhead(*there, accelerator.event(ticket.device), number)

    def take(self, ticket: Ticket, device: torch.device) -> Tensor:
        self.check()
        if (future := ticket.future) is None:
            return super().take(ticket, device)
        future.result()
        read: ReadAhead = ticket.read  # the thread replaces it, and never changes it
        if read.block.device.type != device.type:  # no streams, or the device was not known when rows were asked for
            read = ReadAhead(moved(read.block, device), accelerator.to_device(ticket.rows, device), None, read.number)
        accelerator.wait_event(read.event, device, (read.block, read.rows))
        later = [commit for commit in ticket.later if commit.number > read.number]
        ticket.expire()
        return overlay(read.block, read.rows, later)

    def _under_way(self) -> list[Ticket]:
        return [ticket for ref in self._tickets if (ticket := ref()) is not None and ticket.future is not None]

    def _side(self, device: torch.device) -> Any:
        """Stream on which copies to and from a device run; ``None`` where there are no streams."""
        if device not in self._sides:
            self._sides[device] = accelerator.new_stream(device)
        return self._sides[device]

    # -- writing -----------------------------------------------------------------------------------------------

    def commit(self, rows: Tensor, block: Tensor) -> None:
        self.ready()
        if not self.store.writable():
            raise RuntimeError("these rows are written by the parent of this forked process, which only reads them")
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or len(self._pending) < self._limit)
        self.check()
        host, event = self._to_host(rows, block)
        with self._changed:
            self._committed += 1
            commit = Commit(self._committed, rows, block, host, event)
            self._pending.append(commit)
            for ticket in self._under_way():
                while ticket.later and ticket.read and ticket.later[0].number <= ticket.read.number:
                    ticket.later.popleft()
                ticket.later.append(commit)
                if len(ticket.later) > self._limit:
                    ticket.expire()
            self._last = self._thread.submit(self._write, commit)

    def _to_host(self, rows: Tensor, block: Tensor) -> tuple[tuple[Tensor, Tensor], Any]:
        """Start copying a commit to pinned host memory, behind the work that computes it."""
        device = rows.device
        side = self._side(device)
        if side is None:
            return (rows.cpu(), block.cpu().view(WORD)), None
        accelerator.wait_stream(side, device)
        with accelerator.current(device, side):
            host = accelerator.to_host(rows), accelerator.to_host(block).view(WORD)
            event = accelerator.event(device)
        for tensor in (rows, block):
            tensor.record_stream(side)
        return host, event

    def _write(self, commit: Commit) -> None:
        """In the thread: scatter one commit, then read the rows of tickets under way again.

        Few and large calls: each gives the interpreter back, and the main thread gets it only while one lasts.
        """
        if self._error is not None:
            return
        try:
            self.store.scatter(*commit.on_host())
            with self._changed:
                self._pending.popleft()
                tickets = [t for t in self._under_way() if t.device.type == "cpu" and t.read is not None]
                self._changed.notify_all()
            for ticket in tickets:
                ticket.read = ReadAhead(self.store.gather(ticket.rows), ticket.rows, None, commit.number)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    # -- lifetime ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.check()
        if self._last is not None:
            wait([self._last])  # and with it all before it
        with self._changed:
            for ticket in self._under_way():
                ticket.expire()
        self.check()

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._thread.shutdown()
            self.store.close()

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
        self.check()
        self.store.ready()

    def _restart(self) -> None:
        """Write what was pending at the fork again, which changes nothing that was written already.

        Where only the parent writes, it stays pending here and is laid over what is read.
        """
        for ticket in self._under_way():
            ticket.expire()
        self._start()
        if self.store.writable():
            for commit in self._pending:
                self._last = self._thread.submit(self._write, commit)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {"store": self.store, "limit": self._limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def overlay(block: Tensor, rows: Tensor, commits: Sequence[Commit]) -> Tensor:
    """Replace what some commits, oldest first, wrote in a block that was read; without waiting for a device."""
    commits = [commit for commit in commits if len(commit.rows)]
    if not commits:
        return block
    there = [commit.on(rows.device) for commit in commits]
    written, order = torch.sort(torch.cat([pair[0] for pair in there]), stable=True)
    # the last of equal rows: the newest commit's
    found = torch.searchsorted(written, rows, right=True).sub_(1).clamp_(min=0)
    new = torch.cat([pair[1] for pair in there])[order[found]]
    return torch.where((written[found] == rows)[:, None], new, block)
