"""Rows in one tensor in memory: on the device of the features, or on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.base import RowStore
from compopt.stores.layout import WORD, word

# What NumPy and torch raise where memory cannot be had, or so much cannot even be asked for.
NO_MEMORY = (MemoryError, ValueError, OverflowError, getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError))


class MemoryStore(RowStore):
    """The placements in memory: beside the features (``offload=None``), or on the host (``offload="cpu"``).

    Created on the CPU, where untouched zero pages cost nothing. Beside the features it moves to their device at the
    first training call. On the host it stays: pinned where a device with streams is there, and then claimed in full at
    construction.

    Args:
        n, words: of the table.
        on_host: stay on the host.

    Raises:
        MemoryError: so much memory cannot be had.
    """

    def __init__(self, n: int, words: int, on_host: bool = False) -> None:
        self.n, self.words, self._on_host = n, words, on_host
        self._table = self._zeros(n, torch.device("cpu"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "undo_log": None}  # a copy is not being saved

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._pins() and not self._table.is_pinned():
            self._table = self._table.pin_memory()

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

    def grow(self, n: int) -> None:
        table = self._zeros(n, self.device)
        table[: self.n].copy_(self._table)
        self._table, self.n = table, n

    def shrink(self, n: int) -> None:
        if len(self._table) > n:
            self._table = self._table[:n]  # no copy, for which there may be no memory
        self.n = n

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        if self._table.device.type != "cpu" or self._table.is_pinned():
            self._table.zero_()
        else:
            self._table = torch.empty(0, dtype=WORD, device="cpu")  # give back before asking for more
            self._table = self._zeros(self.n, torch.device("cpu"))
        yield

    def to(self, device: torch.device) -> None:
        if self._on_host or device == self._table.device:
            return
        self.await_snapshot()
        kind = word(device)
        with self._claim(self.n, device), torch.inference_mode(False):  # else they could not be written outside
            if kind == self._table.dtype:
                self._table = self._table.to(device)
                return
            matrix = self._as_block(self._table)  # viewed where complex128 is known: before the move or after it
            matrix = matrix.to(device).view(kind) if kind == WORD else matrix.view(kind).to(device)
            self._table = matrix.view(self._shape(self.n, kind))


def lazy_zeros(shape: tuple[int, ...]) -> Tensor:
    """Allocate complex128 zeros on the host whose pages come into being when they are first written.

    ``torch.zeros`` would write them all now (seconds for some GB) and in small pages; NumPy asks for huge ones, with
    which random gathers are 1.5 times and scatters twice as fast. Rows start at cache lines, as torch's do.
    """
    count = math.prod(shape)
    memory = np.zeros(count + 3, dtype=np.complex128)
    skipped = -(memory.ctypes.data // 16) % 4
    return torch.from_numpy(memory[skipped : skipped + count]).view(shape)
