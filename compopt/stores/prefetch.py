"""Rows that arrive while the previous batch trains."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.distributed.collectives import PREFETCH, doing, tell
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.stores.table import RowTable
from compopt.stores.write_behind import Ticket, WriteBehind

# Batches under way at most; older ones were abandoned by a loop that was left early.
MOST = 4


@dataclass
class Fetch:
    """One batch under way."""

    number: int  # equal on all ranks for the same batch
    rows: Tensor  # this rank's row numbers, (b, R), on the CPU
    ticket: Ticket | Future[Ticket] | None = None  # on shards it is known once the ranks have told their rows
    dropped: bool = False  # no read may begin for it any more

    def claim(self) -> Ticket:
        """Return the ticket, once it is known which rows this process reads."""
        assert self.ticket is not None
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
        self._started = 0
        self._under_way: deque[Fetch] = deque()
        # Held while a read begins or a batch is dropped: after `drop_all`, which precedes a load, the exchange of a
        # shard that ends late begins no read of rows that are being overwritten.
        self._issuing = threading.RLock()
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
        fetch = Fetch(self._started, rows)
        if self._thread is None:
            fetch.ticket = self._rows.prefetch(rows.flatten(), device)
        else:
            fetch.ticket = self._thread.submit(self._exchange, fetch, device)
        self._under_way.append(fetch)
        while len(self._under_way) > MOST:
            self._drop(self._under_way.popleft())

    def _exchange(self, fetch: Fetch, device: torch.device) -> Ticket:
        """In the thread: learn the global batch, start reading the owned part of it."""
        rows = fetch.rows.flatten()
        sizes = self._tell(torch.tensor(len(rows), device="cpu")).tolist()
        message = torch.zeros(max(sizes), dtype=torch.int64, device="cpu")
        message[: len(rows)] = rows
        gathered = self._tell(message)
        everyone = torch.cat([gathered[rank, :size] for rank, size in enumerate(sizes)])
        local = self._table.local(everyone[self._table.owned(everyone)])
        with self._issuing:
            if fetch.dropped:
                raise CancelledError
            return self._rows.prefetch(local, device)

    def _tell(self, message: Tensor) -> Tensor:
        return tell(message, self._group, self._ranks.size, PREFETCH)

    def find(self, rows: Tensor | None) -> Fetch | None:
        """Return the read that was started for these rows, if any; those started before it are dropped."""
        if rows is None or not any(torch.equal(fetch.rows, rows) for fetch in self._under_way):
            return None
        while True:
            fetch = self._under_way.popleft()
            if torch.equal(fetch.rows, rows):
                return fetch
            self._drop(fetch)

    def drop_all(self) -> None:
        """Forget every read under way; none begins for these batches from here on."""
        while self._under_way:
            self._drop(self._under_way.popleft())

    def _drop(self, fetch: Fetch) -> None:
        with self._issuing:
            fetch.dropped = True
        if isinstance(fetch.ticket, Ticket):  # a shard's exchange may still wait for other ranks: let it end by itself
            fetch.ticket.drop()
