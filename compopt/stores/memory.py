"""Rows in one tensor, on the device of the features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowAccess, RowStore, Ticket
from compopt.stores.changes import Changes
from compopt.stores.layout import WORD, moved, word

# What NumPy and torch raise where memory cannot be had, or so much cannot even be asked for.
NO_MEMORY = (MemoryError, ValueError, OverflowError, getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError))
PINNED = (*NO_MEMORY, RuntimeError)


def lazy_zeros(shape: tuple[int, ...]) -> Tensor:
    """Zeros on the host, complex128, whose pages come into being when they are first written.

    ``torch.zeros`` would write them all now (seconds for some GB) and in small pages; NumPy asks for huge ones, with
    which random gathers are 1.5 times and scatters twice as fast. Rows start at cache lines, as torch's do.
    """
    count = math.prod(shape)
    memory = np.zeros(count + 3, dtype=np.complex128)
    skipped = -(memory.ctypes.data // 16) % 4
    return torch.from_numpy(memory[skipped : skipped + count]).view(shape)


class TensorStore(RowStore):
    """Rows seen as one tensor of 16-byte elements, wherever its memory comes from.

    Rows of 16 bytes are kept one-dimensional: gathering complex128 elements is about twice as fast as gathering
    rows of a matrix. On a device without complex128 they are rows of a matrix of int64.
    """

    _table: Tensor

    def _shape(self, n: int, kind: torch.dtype = WORD) -> tuple[int, ...]:
        per_row = self.words * 16 // kind.itemsize
        return (n,) if per_row == 1 else (n, per_row)

    def _as_stored(self, block: Tensor) -> Tensor:
        """A block in the table's words and dimensions."""
        block = block if block.dtype == self._table.dtype else block.view(self._table.dtype)
        return block.view(-1, *self._table.shape[1:])

    def _as_block(self, rows: Tensor) -> Tensor:
        """Rows of the table as a matrix."""
        return rows if rows.dim() == 2 else rows.view(-1, 1)

    @property
    def device(self) -> torch.device:
        return self._table.device

    def gather(self, rows: Tensor) -> Tensor:
        return self._as_block(self._table.index_select(0, rows))

    def scatter(self, rows: Tensor, block: Tensor) -> None:
        self.changes.mark(rows)  # first: a write that is interrupted has changed some of them
        if (snapshot := self.snapshot) is not None:
            snapshot.keep(rows)
        self._table.index_copy_(0, rows, self._as_stored(block))

    def block(self, start: int, stop: int) -> Tensor:
        return self._as_block(self._table[start:stop].clone())

    def write_block(self, start: int, block: Tensor) -> None:
        self.changes.mark_range(start, start + len(block))
        if (snapshot := self.snapshot) is not None:
            snapshot.keep(torch.arange(start, start + len(block), device=self.device))
        self._table[start : start + len(block)].copy_(self._as_stored(block))


class MemoryStore(TensorStore):
    """The default placement (``offload=None``): one tensor beside the features.

    Created on the CPU, where untouched zero pages cost nothing; it moves to the features' device at the first
    training call and then stays.

    Raises:
        MemoryError: so much memory cannot be had.
    """

    def __init__(self, n: int, words: int) -> None:
        self.n, self.words = n, words
        self._table, self.changes = self._zeros(n, torch.device("cpu")), Changes(n)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "snapshot": None}  # of a copy nobody wants one

    def _zeros(self, n: int, device: torch.device) -> Tensor:
        with self._claim(n, device):
            if device.type == "cpu":
                return lazy_zeros(self._shape(n))
            return torch.zeros(self._shape(n, word(device)), dtype=word(device), device=device)

    @contextmanager
    def _claim(self, n: int, device: torch.device, pinned: bool = False) -> Iterator[None]:
        """Where memory cannot be had, say how much was asked for and what to do."""
        errors = PINNED if pinned else NO_MEMORY
        try:
            yield
        except errors as error:
            memory, remedies = f"memory of {device}", 'offload="cpu", offload="disk" with offload_dir='
            if device.type == "cpu":
                memory, remedies = f"{'pinned ' if pinned else ''}host memory", 'offload="disk" with offload_dir='
            raise MemoryError(
                f"n={n} rows of {self.words * 16} bytes need {n * self.words * 16:,} bytes of {memory}, which cannot "
                f"be had: use {remedies}, or shard=True on several ranks"
            ) from error

    def grow(self, n: int) -> None:
        table = self._zeros(n, self.device)
        table[: self.n].copy_(self._table)
        self._table, self.n = table, n
        self.changes.grow(n)

    def shrink(self, n: int) -> None:
        if len(self._table) > n:
            self._table = self._table[:n]  # no copy, for which there may be no memory
        self.n = n
        self.changes.shrink(n)

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        if self.changes.since(0).any():
            self._erase()
        self.changes = Changes(self.n, self.device)
        yield

    def _erase(self) -> None:
        if self._table.device.type != "cpu" or self._table.is_pinned():
            self._table.zero_()
            return
        self._table = torch.empty(0, dtype=WORD, device="cpu")  # give back before asking for more
        self._table = self._zeros(self.n, torch.device("cpu"))

    def to(self, device: torch.device) -> None:
        if device != self._table.device:
            self.await_snapshot()
            with self._claim(self.n, device), torch.inference_mode(False):  # else they could not be written outside
                table = self._moved(device)
                self.changes.to(device)
                self._table = table

    def _moved(self, device: torch.device) -> Tensor:
        kind = word(device)
        if kind == self._table.dtype:
            return self._table.to(device)
        matrix = self._as_block(self._table)
        matrix = matrix.to(device).view(kind) if kind == WORD else matrix.view(kind).to(device)
        return matrix.view(self._shape(self.n, kind))


class DirectRows(RowAccess):
    """Rows beside the features: a read is one kernel, and prefetching has nothing to hide."""

    def __init__(self, store: RowStore) -> None:
        self.store = store

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        rows_there = host_rows if host_rows is not None and self.store.device.type == "cpu" else rows
        return moved(self.store.gather(accelerator.to_device(rows_there, self.store.device)), rows.device)

    def prefetch(self, rows: Tensor, device: torch.device) -> Ticket:
        return _Later(self, rows, device)

    def commit(self, rows: Tensor, block: Tensor) -> None:
        device = self.store.device
        self.store.scatter(accelerator.to_device(rows, device), moved(block, device))


class _Later(Ticket):
    """Fetches when it is taken, so that it sees everything committed until then."""

    def __init__(self, source: RowAccess, rows: Tensor, device: torch.device) -> None:
        self._source, self._rows, self._device = source, rows, device

    def take(self, device: torch.device | None = None) -> Tensor:
        return self._source.fetch(accelerator.to_device(self._rows, device or self._device), self._rows)
