"""The interfaces of every placement: the rows of one process, and how a table reaches them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from compopt.stores.changes import Changes


class Keeper(Protocol):
    """Who needs rows as they were: a checkpoint that is written beside commits."""

    def keep(self, rows: Tensor) -> None:
        """Rows ``(R,)`` will be written."""

    def wait(self) -> None:
        """Until the store may be moved or closed."""


class RowStore(ABC):
    """``n`` rows of ``words`` 16-byte words. Rows start as zeros, which every column reads as "never seen".

    Contract: :meth:`gather` returns fresh memory; :meth:`scatter` writes equal values where a row occurs twice;
    the two are the whole hot path, and neither costs more when ``n`` grows.
    """

    n: int
    words: int
    #: Which rows were written when; whoever writes marks them.
    changes: Changes
    #: Whoever writes rows tells it before.
    snapshot: Keeper | None = None
    #: So many rows are gathered in less time than it takes to hand the work to a thread.
    instant_rows: int = 0

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where gathered blocks arrive and where row numbers are expected."""

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor:
        """Rows ``(R,)`` int64 -> block ``(R, words)`` complex128."""

    @abstractmethod
    def scatter(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows."""

    @abstractmethod
    def grow(self, n: int) -> None:
        """Append zero rows until there are ``n``."""

    @abstractmethod
    def shrink(self, n: int) -> None:
        """Take back what :meth:`grow` appended, whether it succeeded here or not."""

    def check_process(self) -> None:
        """Refuse to write from a fork of the process that alone may."""

    def to(self, device: torch.device) -> None:
        """Follow the features to their device, where the placement allows it."""
        del device

    @abstractmethod
    def block(self, start: int, stop: int) -> Tensor:
        """A copy of a range of rows (checkpoints)."""

    @abstractmethod
    def write_block(self, start: int, block: Tensor) -> None:
        """Overwrite a range of rows (checkpoints)."""

    @abstractmethod
    def overwriting(self) -> AbstractContextManager[None]:
        """Forget all rows; within, :meth:`write_block` says what they are now, and the others are zeros."""

    def await_snapshot(self) -> None:
        """Wait until nobody reads the rows where they are."""
        if (snapshot := self.snapshot) is not None:
            snapshot.wait()

    def ready(self) -> None:
        """Raise if rows may not be read or written now (a table file that an earlier run left)."""

    def close(self) -> None:
        """Give back what the store holds beside memory (files, mappings)."""


class Ticket(ABC):
    """Rows under way, see :meth:`RowAccess.prefetch`."""

    @abstractmethod
    def take(self, device: torch.device | None = None) -> Tensor:
        """The rows' committed values as of now, ``(R, words)``; call it once.

        Args:
            device: where they are wanted, if that was not known when they were asked for; else the requested one.
        """

    def drop(self) -> None:
        """Nobody will take it."""


class RowAccess(ABC):
    """How a table reaches a store: every read sees every commit made before it, whatever runs in between."""

    store: RowStore

    @abstractmethod
    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        """Committed rows ``(R,)`` -> block ``(R, words)`` on the device of ``rows``, in memory of its own.

        Args:
            rows: row numbers, int64.
            host_rows: the same on the CPU, if the caller has them there: spares a placement on the host the wait
                for the accelerator.
        """

    @abstractmethod
    def prefetch(self, rows: Tensor, device: torch.device) -> Ticket:
        """Start fetching rows ``(R,)``, given on the CPU, to a device; returns at once."""

    @abstractmethod
    def commit(self, rows: Tensor, block: Tensor) -> None:
        """Write ``block`` (R, words) to ``rows`` (R,), both on one device; returns at once if it can.

        The tensors belong to the rows from here on: the caller must not change them. A row that occurs twice has
        equal values.
        """

    def ready(self) -> None:
        """Raise now what would make a read or a commit fail: a failed writer, rows of an earlier run."""

    def settle(self) -> None:
        """Wait until every commit is in the store and nothing reads it; call it before touching the store itself.

        Tickets stay good: those under way read anew when they are taken.
        """

    def close(self) -> None:
        """Settle, stop threads, close the store."""
        self.settle()
        self.store.close()
