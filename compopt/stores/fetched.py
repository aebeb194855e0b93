"""Rows that a reader thread fetches ahead of time."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowStore, Ticket
from compopt.stores.journal import Entry, Journal, Query
from compopt.stores.layout import moved


class Source(Protocol):
    """Who issued a ticket: rows that can be read anew."""

    def check(self) -> None:
        """Raise what a thread of its own ran into; start threads anew after a fork."""

    def forget(self, ticket: Fetched) -> None:
        """Hand it no more commits."""

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        """Committed rows, now."""


class Fetched(Ticket):
    """Rows that a reader thread is gathering, and the commits made since that are not laid over them yet.

    Three threads meet here. The main thread adds commits, takes and drops; the writer thread refreshes; the reader
    thread's result is in ``future``, which is ``None`` once there is nothing to wait for. Whoever changes the block,
    or takes commits off the queue, holds the lock; the main thread alone appends to the queue, without it.
    """

    def __init__(self, source: Source, rows: Tensor, device: torch.device) -> None:
        self._source, self._rows, self._device = source, rows, device
        self.future: Future[Read] | None = None
        self._later: deque[Entry] = deque()
        self._lock = threading.Lock()
        self._expired = self._done = False

    def add(self, entry: Entry, limit: int) -> None:
        """A commit made after the ticket was issued."""
        if len(self._later) >= limit:
            self.expire()
        if not self._expired:
            self._later.append(entry)

    def expire(self) -> None:
        """Keep nothing; a later take() reads anew."""
        with self._lock:
            self._expired, self.future = True, None
            self._later.clear()

    def abandon(self) -> None:
        """The same where the thread that held the lock may be gone: after a fork."""
        self._expired, self.future, self._later, self._lock = True, None, deque(), threading.Lock()

    def refresh(self, store: RowStore, written: int) -> None:
        """In the writer thread, on the CPU: read again, now that the commits made since are in the store.

        One call that leaves the interpreter to others, where laying over takes ten.
        """
        with self._lock:
            read = self._arrived() if self._device.type == "cpu" else None
            if read is None:
                return
            read.block = store.gather(read.query.rows)
            for pending in (read.missing, self._later):
                while pending and pending[0].number <= written:  # not clear(): the main thread may be adding one
                    pending.popleft()

    def _arrived(self) -> Read | None:
        future = self.future
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def _lay_over(self, read: Read) -> None:
        for pending in (read.missing, self._later):
            while pending:
                read.block = pending.popleft().lay_over(read.block, read.query)

    def take(self, device: torch.device | None = None) -> Tensor:
        device = self._device if device is None else device
        if self._done:
            raise RuntimeError("these prefetched rows were taken or dropped before; a ticket is good for one take()")
        self._done = True
        self._source.check()  # after a fork the reader is the parent's
        self._source.forget(self)
        if self.future is None:
            return self._source.fetch(accelerator.to_device(self._rows, device), self._rows)
        read = self.future.result()
        with self._lock:  # from here on the writer thread leaves the block alone: it would lack what was laid over
            if read.block.device.type != device.type:  # the reader has no streams, or did not know of the device yet
                read.block = moved(read.block, device)
                read.query = Query(accelerator.to_device(self._rows, device))
            accelerator.wait_event(read.event, device, (read.block, read.query.rows))
            self._lay_over(read)
            self.future = None
            return read.block

    def drop(self) -> None:
        self._done = True
        self._source.forget(self)
        self.expire()


@dataclass
class Read:
    """What a reader thread hands over: the gathered block, and which commits must still be laid over it."""

    block: Tensor
    query: Query
    missing: deque[Entry]
    event: Any


def gather(
    store: RowStore, rows: Tensor, device: torch.device, side: Any, journal: Journal, unwritten: list[Entry]
) -> Read:
    """In the reader thread: gather, send to the device, on the CPU also lay over what was not written.

    Commits on an accelerator belong to the main thread's stream and are laid over there.
    """
    missing = deque(entry for entry in unwritten if entry.number > journal.written)  # as of now, before the gather
    block, query, event = store.gather(rows), Query(rows), None
    if side is None:
        while missing and missing[0].rows.device.type == "cpu":
            block = missing.popleft().lay_over(block, query)
        return Read(block, query, missing, None)
    with accelerator.current(device, side):
        block, query = moved(block, device), Query(accelerator.to_device(rows, device))
        event = accelerator.event(device)
    return Read(block, query, missing, event)
