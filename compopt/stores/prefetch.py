"""Rows that arrive while the previous batch trains."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from compopt.distributed.collectives import PREFETCH, doing, tell
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.stores.table import RowTable
from compopt.stores.write_behind import Ticket, WriteBehind

# Batches under way at most; older ones were abandoned by a loop that was left early.
MOST = 4


class Fetch(NamedTuple):
    """One batch under way: its number, equal on all ranks, this rank's rows ``(b, R)`` on the CPU, and their ticket.

    On shards the ticket is known once the ranks have told each other their rows.
    """

    number: int
    rows: Tensor
    ticket: Ticket | Future[Ticket]

    def claim(self) -> Ticket:
        """Return the ticket, once it is known which rows this process reads."""
        return self.ticket if isinstance(self.ticket, Ticket) else self.ticket.result()


class Prefetcher:
    """Starts reads and finds them again when their batch is called.

    With unsharded rows each rank reads those of its own samples and communicates nothing. With shards the ranks
    exchange the row numbers in a background thread, over a group of their own, and each reads what it holds; all
    ranks must then prefetch the same batches in the same order. Where torch cannot form that group, shards are
    not prefetched.
    """

    def __init__(self, rows: WriteBehind, table: RowTable, ranks: Ranks) -> None:
        self._rows, self._table, self._ranks = rows, table, ranks
        self._under_way: deque[Fetch] = deque()
        self._started, self._first = 0, 1  # batches before number `_first` are dropped
        # Held while a read begins or batches are dropped: after `drop_all`, which precedes a load, the exchange of a
        # shard that ends late begins no read of rows that are being overwritten.
        self._issuing = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._group: ProcessGroup | None = None

    def start(self, rows: Tensor, device: torch.device) -> None:
        """Begin to read rows ``(b, R)``, given on the CPU, for a later call on ``device``."""
        if self._table.sharded and self._thread is None:  # the group is formed at the first use, on all ranks alike
            with doing(PREFETCH):
                self._ranks.barrier()  # ranks that have nothing to prefetch, with another offload=, come with a call
                self._group = self._ranks.new_host_group()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="compopt-prefetch")
        if self._table.sharded and self._group is None:
            return
        self._started += 1
        if self._thread is None:
            ticket = self._rows.prefetch(rows.flatten(), device)
        else:
            ticket = self._thread.submit(self._exchange, self._started, rows.flatten(), device)
        self._under_way.append(Fetch(self._started, rows, ticket))
        self._drop_before(self._started - MOST + 1)

    def _exchange(self, number: int, rows: Tensor, device: torch.device) -> Ticket:
        """In the thread: learn the global batch, start reading the owned part of it."""
        sizes = self._tell(torch.tensor(len(rows), device="cpu")).tolist()
        message = torch.zeros(max(sizes), dtype=torch.int64, device="cpu")
        message[: len(rows)] = rows
        gathered = self._tell(message)
        everyone = torch.cat([gathered[rank, :size] for rank, size in enumerate(sizes)])
        local = self._table.local(everyone[self._table.owned(everyone)])
        with self._issuing:
            if number < self._first:
                raise CancelledError
            return self._rows.prefetch(local, device)

    def _tell(self, message: Tensor) -> Tensor:
        return tell(message, self._group, self._ranks.size, PREFETCH)

    def find(self, rows: Tensor | None) -> Fetch | None:
        """Return the read that was started for these rows, if any; those started before it are dropped."""
        for fetch in self._under_way if rows is not None else ():
            if torch.equal(fetch.rows, rows):
                self._drop_before(fetch.number)
                return self._under_way.popleft()
        return None

    def drop_all(self) -> None:
        """Forget every read under way; none begins for these batches from here on."""
        self._drop_before(self._started + 1)

    def _drop_before(self, number: int) -> None:
        with self._issuing:
            self._first = max(self._first, number)
        while self._under_way and self._under_way[0].number < number:
            self._under_way.popleft()
