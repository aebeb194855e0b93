"""Store of the rows of one process, in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.layout import WORD, to_device_words, word

# What NumPy and torch raise where memory cannot be had, or so much cannot even be asked for.
NO_MEMORY = (MemoryError, ValueError, OverflowError, torch.cuda.OutOfMemoryError)


class RowStore:
    """``n`` rows of ``words`` 16-byte words in one tensor; zeros, which every column reads as "never seen", at first.

    This class has the placements in memory: beside the features (``offload=None``), or on the host (``offload="cpu"``).
    The tensor is made on the CPU, where untouched zero pages cost nothing. Beside the features it moves to their device
    at the first training call. On the host it stays: pinned where a device with streams is there, and then claimed in
    full at construction.

    Rows of 16 bytes are kept one-dimensional: gathering complex128 elements is about twice as fast as gathering rows of
    a matrix. On a device without complex128 they are rows of a matrix of int64.

    Row numbers and blocks are on the store's device; :meth:`fetch` and :meth:`commit` take those of another one. No
    method but :meth:`resize` and :meth:`overwriting` costs more when ``n`` grows.

    Args:
        n, words: of the table.
        on_host: stay on the host.

    Attributes:
        slow: rows may have to come from a disk, so that reading them ahead pays on every device.
        undo_log: of a save under way (``Snapshot.keep``): called with rows ``(R,)`` before they are written.

    Raises:
        MemoryError: so much memory cannot be had.
    """

    slow = False
    undo_log: Callable[[Tensor], None] | None = None
    _table: Tensor

    def __init__(self, n: int, words: int, on_host: bool = False) -> None:
        self.n, self.words, self._on_host = n, words, on_host
        self._table = self._zeros(n, torch.device("cpu"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "undo_log": None}  # a copy is not being saved

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._pins() and not self._table.is_pinned():
            self._table = self._table.pin_memory()

    @property
    def device(self) -> torch.device:
        return self._table.device

    @property
    def writable(self) -> bool:
        """True unless this is a forked process and the rows belong to its parent."""
        return True

    def gather(self, rows: Tensor) -> Tensor:
        """Copy rows ``(R,)`` int64 to a block ``(R, words)``."""
        return self._as_block(self._table.index_select(0, rows))

    def scatter(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows; a row that occurs twice has equal values."""
        if (log := self.undo_log) is not None:
            log(rows)
        self._table.index_copy_(0, rows, block.view(self._table.dtype).view(-1, *self._table.shape[1:]))

    def block(self, start: int, stop: int) -> Tensor:
        """Copy successive rows."""
        return self._as_block(self._table[start:stop].clone())

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        """Read rows ``(R,)`` to a block ``(R, words)`` on the device of ``rows``, in memory of its own.

        ``host_rows``, the same row numbers on the CPU, spare a store on the host the wait for the accelerator.
        """
        there = host_rows if host_rows is not None and self.device.type == "cpu" else rows
        return to_device_words(self.gather(accelerator.to_device(there, self.device)), rows.device)

    def commit(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows, both on any one device; the caller must not change them any more."""
        self.scatter(accelerator.to_device(rows, self.device), to_device_words(block, self.device))

    def settle(self) -> None:
        """Wait until every commit is in the store and nothing reads it; call it before touching the store itself."""

    def ready(self) -> None:
        """Raise if rows may not be read or written now (a table file that an earlier run left)."""

    def resize(self, n: int) -> None:
        """Append zero rows until there are ``n``, or drop the last ones."""
        if n <= len(self._table):
            self._table = self._table[:n]  # no copy, for which there may be no memory
        else:
            table = self._zeros(n, self.device)
            table[: self.n].copy_(self._table)
            self._table = table
        self.n = n

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Reset all rows to zeros; inside, :meth:`scatter` fills them."""
        if self._table.device.type != "cpu" or self._table.is_pinned():
            self._table.zero_()
        else:
            self._table = torch.empty(0, dtype=WORD, device="cpu")  # give back before asking for more
            self._table = self._zeros(self.n, torch.device("cpu"))
        yield

    def to(self, device: torch.device) -> None:
        """Follow the features to their device, where the placement allows it."""
        if self._on_host or device == self._table.device:
            return
        while self.undo_log is not None:  # a save reads the rows
            sleep(1e-3)
        kind = word(device)
        with self._claim(self.n, device), torch.inference_mode(False):  # else they could not be written outside
            if kind == self._table.dtype:
                self._table = self._table.to(device)
                return
            matrix = self._as_block(self._table)  # viewed where complex128 is known: before the move or after it
            matrix = matrix.to(device).view(kind) if kind == WORD else matrix.view(kind).to(device)
            self._table = matrix.view(self._shape(self.n, kind))

    def _pins(self) -> bool:
        return self._on_host and accelerator.pins()

    def _zeros(self, n: int, device: torch.device) -> Tensor:
        pinned, kind = self._pins(), word(device)
        with self._claim(n, device, pinned):
            if device.type == "cpu" and not pinned:
                return lazy_zeros(self._shape(n))
            return torch.zeros(self._shape(n, kind), dtype=kind, device=device, pin_memory=pinned)

    @contextmanager
    def _claim(self, n: int, device: torch.device, pinned: bool = False) -> Iterator[None]:
        """Say how much memory was asked for, and what to do, where it cannot be had."""
        try:
            yield
        except (*NO_MEMORY, RuntimeError) as error:
            if not pinned and not isinstance(error, NO_MEMORY):
                raise
            memory, remedies = f"memory of {device}", 'offload="cpu", offload="disk" with offload_dir='
            if device.type == "cpu":
                memory, remedies = f"{'pinned ' if pinned else ''}host memory", 'offload="disk" with offload_dir='
            raise MemoryError(
                f"n={n} rows of {self.words * 16} bytes need {n * self.words * 16:,} bytes of {memory}, which cannot "
                f"be had: use {remedies}, or shard=True on several ranks"
            ) from error

    def _shape(self, n: int, kind: torch.dtype = WORD) -> tuple[int, ...]:
        per_row = self.words * 16 // kind.itemsize
        return (n,) if per_row == 1 else (n, per_row)

    def _as_block(self, rows: Tensor) -> Tensor:
        return rows if rows.dim() == 2 else rows.view(-1, 1)


def lazy_zeros(shape: tuple[int, ...]) -> Tensor:
    """Allocate complex128 zeros on the host whose pages come into being when they are first written.

    ``torch.zeros`` would write them all now (seconds for some GB) and in small pages; NumPy asks for huge ones, with
    which random gathers are 1.5 times and scatters twice as fast. Rows start at cache lines, as torch's do.
    """
    count = math.prod(shape)
    memory = np.zeros(count + 3, dtype=np.complex128)
    skipped = -(memory.ctypes.data // 16) % 4
    return torch.from_numpy(memory[skipped : skipped + count]).view(shape)
