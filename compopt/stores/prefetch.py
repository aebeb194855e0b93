"""Prefetching of the rows of the next batch while the current batch trains."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from compopt.distributed.collectives import PREFETCH, Operation, doing, gather_small
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.stores.table import RowTable
from compopt.stores.write_behind import Ticket, WriteBehind

# Largest number of batches in flight; older ones belong to a loop that ended early.
MAX_IN_FLIGHT = 4


class Fetch(NamedTuple):
    """Reads of one batch in flight, of one or more tables.

    Attributes:
        number: number of the batch, equal on all ranks.
        rows: this rank's rows, ``(b, R)``, on the CPU.
        tickets: by table, a ticket; on shards a future, which is ready after the ranks have exchanged row numbers.
    """

    number: int
    rows: Tensor
    tickets: dict[str, Ticket | Future[dict[str, Ticket]]]

    def claim(self, name: str) -> Ticket | None:
        """Return the ticket of a table, if it is read ahead; on shards, wait for the exchange of row numbers."""
        ticket = self.tickets.get(name)
        return ticket.result()[name] if isinstance(ticket, Future) else ticket


class Prefetcher:
    """Queue of reads in flight, from which the call of a batch takes its own.

    Without shards, each rank reads the rows of its own samples and communicates nothing. On shards, the ranks exchange
    row numbers in a background thread over a separate process group, and each rank reads the rows that it holds. All
    ranks must then prefetch the same batches in the same order. If torch cannot form the group, shards are not
    prefetched.

    Args:
        tables: by name, the tables in host memory or on the disk.
    """

    def __init__(self, tables: Mapping[str, RowTable], ranks: Ranks) -> None:
        self._whole = {name: table for name, table in tables.items() if not table.sharded}
        self._shards = {name: table for name, table in tables.items() if table.sharded}
        self._ranks = ranks
        self._under_way: deque[Fetch] = deque()
        self._started, self._first = 0, 1  # batches with a number below `_first` are dropped
        # Held while a read starts and while batches are dropped: an exchange that ends after `drop_all`, which precedes
        # a load, must not start to read rows that are being overwritten.
        self._issuing = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._group: ProcessGroup | None = None

    def start(self, rows: Tensor, device: torch.device) -> None:
        """Start to read rows ``(b, R)``, given on the CPU, for a later call on ``device``."""
        if self._shards and self._thread is None:  # form the group at the first use, on all ranks
            with doing(PREFETCH):
                self._ranks.barrier()  # detects ranks with another offload=, which make a call instead of a prefetch
                self._group = self._ranks.new_host_group()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="compopt-prefetch")
        self._started += 1
        tickets: dict[str, Ticket | Future[dict[str, Ticket]]] = {}
        for name, table in self._whole.items():
            tickets[name] = _writer(table).prefetch(rows.flatten(), device)
        if self._thread is not None and self._group is not None:
            exchange = self._thread.submit(self._exchange, self._started, rows.flatten(), device)
            tickets |= dict.fromkeys(self._shards, exchange)
        if tickets:
            self._under_way.append(Fetch(self._started, rows, tickets))
            self._drop_before(self._started - MAX_IN_FLIGHT + 1)

    def _exchange(self, number: int, rows: Tensor, device: torch.device) -> dict[str, Ticket]:
        """Exchange the row numbers of the global batch, and start to read the local ones; runs in the thread."""
        now = Operation(PREFETCH, number=number)
        sizes = gather_small(torch.tensor(len(rows), device="cpu"), self._group, self._ranks.size, now).tolist()
        message = torch.zeros(max(sizes), dtype=torch.int64, device="cpu")
        message[: len(rows)] = rows
        gathered = gather_small(message, self._group, self._ranks.size, now)
        everyone = torch.cat([gathered[rank, :size] for rank, size in enumerate(sizes)])
        with self._issuing:
            if number < self._first:
                raise CancelledError
            return {
                name: _writer(table).prefetch(table.local(everyone[table.owned(everyone)]), device)
                for name, table in self._shards.items()
            }

    def find(self, rows: Tensor | None) -> Fetch | None:
        """Remove and return the read of these rows, or ``None``; reads that were started earlier are dropped."""
        for fetch in self._under_way:
            if rows is not None and torch.equal(fetch.rows, rows):
                self._drop_before(fetch.number)
                return self._under_way.popleft()
        return None

    def drop_all(self) -> None:
        """Drop all reads in flight; no read of these batches starts afterwards."""
        self._drop_before(self._started + 1)

    def _drop_before(self, number: int) -> None:
        with self._issuing:
            self._first = max(self._first, number)
        while self._under_way and self._under_way[0].number < number:
            self._under_way.popleft()


def _writer(table: RowTable) -> WriteBehind:
    assert isinstance(table.rows, WriteBehind)
    return table.rows
