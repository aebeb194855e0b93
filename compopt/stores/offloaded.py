"""Rows on the host or on disk, read ahead of time and written behind the step."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowAccess, RowStore, Ticket
from compopt.stores.fetched import Fetched, gather
from compopt.stores.journal import Entry, Journal, Query
from compopt.stores.layout import WORD, moved

# Commits that wait for the store before a commit waits for them; also what a ticket that nobody takes keeps alive.
JOURNAL_LIMIT = 64


class OffloadedRows(RowAccess):
    """A store on the host that neither reads nor writes make the main thread, or the accelerator, wait for.

    *Journal.* A commit is appended to a journal, on the features' device, and is done; a writer thread copies it to
    the host and scatters it. A read gathers from the store and lays over it, on the features' device, every commit
    that the store may not hold yet, oldest first: it sees all commits made before it, whatever the writer has done.
    When :data:`JOURNAL_LIMIT` commits wait, the next one waits for the writer.

    *Prefetch.* A reader thread (unless the rows are few and in memory, see ``instant_rows``) gathers and lays over what
    was unwritten when the ticket was issued; the commits made since are handed to the ticket. On the CPU the writer
    thread reads its rows again once it has written them; what is not written when the rows are taken, and on a device
    all of it, is laid over then. A ticket that sees too many of them, or whose rows were loaded or grown meanwhile,
    reads anew instead; one that is thrown away costs nothing.

    On a device with streams, copies go through pinned memory on a side stream and nothing synchronises, provided
    that :meth:`fetch` is given the rows on the host too. Threads are started at the first use, end when this object is
    collected, and finish what is committed when the interpreter exits. In a forked process they are started anew.

    Args:
        store: where rows live; on the CPU.
        limit: of the journal.

    Errors of the writer thread are raised by the next call, and by every later one: what was committed since is
    lost. Copies and pickles wait for the writer and copy the store.
    """

    def __init__(self, store: RowStore, limit: int = JOURNAL_LIMIT) -> None:
        self.store, self._journal = store, Journal(limit)
        self._start()

    def _start(self) -> None:
        self._pid, self._writing = os.getpid(), True
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="compopt-writer")
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="compopt-reader")
        self._tickets: list[weakref.ref[Fetched]] = []
        self._streams: dict[torch.device, Any] = {}
        self._reading = False
        # A ticket and the journal must agree on which commits came before it: shards prefetch in a thread.
        self._lock = threading.Lock()

    # -- reading -----------------------------------------------------------------------------------------------

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        self.check()
        unwritten = self._journal.entries()  # before the gather: what retires meanwhile is laid over as well
        block = moved(self.store.gather(rows.cpu() if host_rows is None else host_rows), rows.device)
        query = Query(rows)
        for entry in unwritten:
            block = entry.lay_over(block, query)
        return block

    def prefetch(self, rows: Tensor, device: torch.device) -> Ticket:
        self.ready()
        device = accelerator.here(device)  # the reader thread may have another current device
        rows = rows.clone()  # a loader may reuse its buffer
        if device.type == "cpu" and len(rows) <= self.store.instant_rows:
            return Fetched(self, rows, device)  # read when taken
        ticket, side = Fetched(self, rows, device), self._side(device)
        with self._lock:
            self._tickets = [ref for ref in self._tickets if ref() is not None] + [weakref.ref(ticket)]
            self._reading = True
            unwritten = self._journal.entries()
            ticket.future = self._readers.submit(gather, self.store, rows, device, side, self._journal, unwritten)
        return ticket

    def _under_way(self) -> list[Fetched]:
        return [ticket for ref in self._tickets if (ticket := ref()) is not None]

    def forget(self, ticket: Fetched) -> None:
        """A ticket that needs no further commits."""
        with self._lock:
            self._tickets = [ref for ref in self._tickets if ref() not in (None, ticket)]

    def _side(self, device: torch.device) -> Any:
        """The stream on which copies to and from a device run; ``None`` where there are no streams."""
        if device not in self._streams:
            self._streams[device] = accelerator.new_stream(device)
        return self._streams[device]

    # -- writing -----------------------------------------------------------------------------------------------

    def commit(self, rows: Tensor, block: Tensor) -> None:
        self.ready()
        self.store.check_process()
        if self._journal.full():
            self._journal.wait(self._journal.limit - 1)
            self.check()
        with self._lock:
            entry = self._journal.append(rows, block)
            for ticket in self._under_way():
                ticket.add(entry, self._journal.limit)
        self._stage(entry)
        self._writers.submit(_write, self.store, entry, self._journal, tuple(self._tickets))

    def _stage(self, entry: Entry) -> None:
        """Start copying a commit to pinned host memory, behind the work that computes it."""
        device = entry.rows.device
        side = self._side(device)
        if side is None:
            entry.host = entry.rows.cpu(), entry.block.cpu().view(WORD), None
            return
        accelerator.wait_stream(side, device)
        with accelerator.current(device, side):
            rows, block = accelerator.to_host(entry.rows), accelerator.to_host(entry.block).view(WORD)
            entry.host = rows, block, accelerator.event(device)
        for tensor in (entry.rows, entry.block):
            tensor.record_stream(side)

    # -- lifetime ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every commit is in the store and nothing reads it; a forked process keeps its parent's.

        Tickets under way will read anew.
        """
        self.check()
        if self._writing:
            self._journal.wait(0)
        with self._lock:
            for ticket in self._under_way():
                ticket.expire()
        if self._reading:  # the reader takes one after the other, dropped tickets included
            self._reading = False  # first: what another thread prefetches meanwhile is waited for by the next one
            self._readers.submit(int).result()
        self.check()

    def close(self) -> None:
        """Settle, stop threads, close the store."""
        try:
            self.settle()
        finally:
            self._writers.shutdown()
            self._readers.shutdown()
            self.store.close()

    def check(self) -> None:
        """Raise what went wrong in the writer thread; in a forked process start threads of its own."""
        if self._pid != os.getpid():
            self._restart()
        error, written = self._journal.error, self._journal.written
        if error is not None:
            raise RuntimeError(
                f"commit {written + 1} of {self._journal.committed} could not be written ({type(error).__name__}: "
                f"{error}); the rows end with commit {written}: load a checkpoint into a new estimator"
            ) from error

    def ready(self) -> None:
        self.check()
        self.store.ready()

    def _restart(self) -> None:
        """The threads of the parent are not here: write what was under way at the fork again, it is the same."""
        old, self._journal = self._journal, Journal(self._journal.limit, self._journal.written)
        for ticket in self._under_way():
            ticket.abandon()
        self._start()
        try:
            self.store.check_process()
        except RuntimeError:  # only the parent writes: what it was about to write is laid over what is read here
            self._writing = False
        for entry in old._entries:  # without its lock, which a thread of the parent may have held
            (self.commit if self._writing else self._journal.append)(entry.rows, entry.block)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {"store": self.store, "_journal": self._journal}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def _write(store: RowStore, entry: Entry, journal: Journal, tickets: tuple[weakref.ref[Fetched], ...]) -> None:
    """In the writer thread: scatter one commit, spare the main thread laying it over tickets under way.

    Few and large calls: each gives the interpreter back, and the main thread gets it only while one lasts.
    """
    if journal.error is not None:
        return
    try:
        assert entry.host is not None
        rows, block, event = entry.host
        if event is not None:
            event.synchronize()
        store.scatter(rows, block)
        journal.retire(entry.number)
        for ticket in (ref() for ref in tickets):
            if ticket is not None:
                ticket.refresh(store, entry.number)
        ticket = None  # the caller may have thrown it away
    except BaseException as error:
        journal.fail(error)
