"""In-memory store of the rows of one process."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compopt import accelerator

WORD = torch.complex128  # 16 bytes
PAGE = mmap.PAGESIZE
CGROUP = Path("/sys/fs/cgroup")  # of a container, whose processes share its memory
BLOCK_ROWS = 1 << 20  # rows copied at a time, so that copying a large table needs little additional memory
# Errors that NumPy and torch raise if an allocation fails, or if its size is out of range.
NO_MEMORY = (MemoryError, ValueError, OverflowError, torch.cuda.OutOfMemoryError)


def word(device: torch.device) -> torch.dtype:
    """Return the dtype of a table on a device: words of 16 bytes, or of 8 bytes without support for complex128."""
    return WORD if accelerator.supports(device, WORD) else torch.int64


class RowStore:
    """Table of ``n`` rows in one tensor, initially zeros, which mean "never visited".

    This class implements the placements in memory: on the features' device (``offload=None``) and on the host
    (``offload="cpu"``). The tensor is created on the CPU, where untouched zero pages use no memory. With
    ``offload=None`` the tensor moves to the features' device at the first training call. With ``offload="cpu"`` the
    tensor stays on the host. If a device with streams is available, its memory is pinned and thus fully allocated at
    construction.

    Rows of 16 bytes are stored as a one-dimensional tensor, because gathering complex128 elements is about twice as
    fast as gathering rows of a matrix. On a device without complex128 the table is a matrix of int64.

    The store records which groups of rows (about a page each) were written, so that a pass over the table, such as a
    save, reads no others: their pages may not exist yet. The record takes one byte per group.

    Row numbers and blocks are on the store's device; :meth:`fetch` and :meth:`commit` also accept tensors of another
    device. The cost of :meth:`gather`, :meth:`scatter`, :meth:`fetch` and :meth:`commit` is independent of ``n``.

    Args:
        n, words: number of rows, and of 16-byte words per row.
        on_host: keep the table on the host.

    Attributes:
        slow: whether reads may access a disk, so that prefetching is useful on every device.
        undo_log: callback of a save in progress (``Snapshot.keep``), called with rows ``(R,)`` before they are written.
        group: number of rows in a group, a power of two.
        written: mask of the groups that were written since all rows were zeros, on the store's device.

    Raises:
        MemoryError: the memory cannot be allocated.
    """

    slow = False
    undo_log: Callable[[Tensor], None] | None = None
    _table: Tensor

    def __init__(self, n: int, words: int, on_host: bool = False) -> None:
        self.n, self.words, self._on_host = n, words, on_host
        self._table = self._zeros(n, torch.device("cpu"))
        self._record(n)

    def _record(self, n: int, kept: Tensor | None = None) -> None:
        """Make the record of written groups for ``n`` rows, with the beginning of an earlier one."""
        self._shift = max(0, (PAGE // (16 * self.words)).bit_length() - 1)  # a group is no longer than a page, or a row
        self.n, self.group = n, 1 << self._shift
        self.written = lazy_zeros((-(-n // self.group),), torch.bool).to(self.device)
        if kept is not None:
            self.written[: len(kept)] = kept[: len(self.written)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "undo_log": None}  # a save in progress is that of the original

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._pins() and not self._table.is_pinned():
            self._table = self._table.pin_memory()

    @property
    def device(self) -> torch.device:
        return self._table.device

    @property
    def writable(self) -> bool:
        """Return whether this process may write the rows; ``False`` in a fork if only its parent may."""
        return True

    def gather(self, rows: Tensor) -> Tensor:
        """Copy rows ``(R,)`` int64 to a block ``(R, 2 * words)`` int64."""
        return self._as_block(self._table.index_select(0, rows))

    def scatter(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows; values of a repeated row must be equal."""
        if (log := self.undo_log) is not None:
            log(rows)
        if self.device.type == "cpu":  # numpy needs less time than torch for so few rows
            self.written.numpy()[rows.numpy() >> self._shift] = True
        else:
            self.written.scatter_(0, rows >> self._shift, True)
        self._table.index_copy_(0, rows, block.view(self._table.dtype).view(-1, *self._table.shape[1:]))

    def fetch(self, rows: Tensor, host_rows: Tensor | None = None) -> Tensor:
        """Copy rows ``(R,)`` to a new block on the device of ``rows``.

        With ``host_rows``, the same row numbers on the CPU, a store on the host does not wait for the accelerator.
        """
        if rows.device == self.device:
            return self.gather(rows)
        there = host_rows if host_rows is not None and self.device.type == "cpu" else rows
        return accelerator.to_device(self.gather(accelerator.to_device(there, self.device)), rows.device)

    def commit(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows, both on any one device; the caller must not change these tensors afterwards."""
        if rows.device != self.device or block.device != self.device:
            rows, block = accelerator.to_device(rows, self.device), accelerator.to_device(block, self.device)
        self.scatter(rows, block)

    def settle(self) -> None:
        """Wait until every commit is in the store and no read is in progress; required before direct access to it."""

    def ready(self) -> None:
        """Raise if rows must not be read or written (a table file of an earlier run)."""

    def resize(self, n: int) -> None:
        """Append zero rows, or drop the last rows, so that the table has ``n`` rows."""
        if n <= len(self._table):
            self._table = self._table[:n]  # a view: there may be no memory for a copy
        else:
            table = self._zeros(n, self.device)
            for rows in rows_of(self.written, self.group, self.n, BLOCK_ROWS):
                rows = rows.to(self.device)
                table.index_copy_(0, rows, self._table.index_select(0, rows))
            self._table = table
        self._record(n, self.written)

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Reset all rows to zeros, and return a context in which :meth:`scatter` writes the new values."""
        if self._table.device.type != "cpu" or self._table.is_pinned():
            self._table.zero_()
        else:
            self._table = torch.empty(0, dtype=WORD, device="cpu")  # free the memory before the new allocation
            self._table = self._zeros(self.n, torch.device("cpu"))
        self._record(self.n)
        yield

    def to(self, device: torch.device) -> None:
        """Move the table to the features' device, unless it must stay on the host."""
        if self._on_host or device == self._table.device:
            return
        while self.undo_log is not None:  # wait for a save that reads the rows
            sleep(1e-3)
        kind = word(device)
        with self._claim(self.n, device), torch.inference_mode(False):  # inference tensors would become read-only
            self._table = self._as_block(self._table).to(device).view(kind).view(self._shape(self.n, kind))
            self._record(self.n, self.written)

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
        """Turn a failed allocation into a MemoryError with the requested size and remedies."""
        try:
            yield
        except (*NO_MEMORY, RuntimeError) as error:
            if not pinned and not isinstance(error, NO_MEMORY):
                raise
            memory, remedies = f"memory of {device}", 'offload="cpu", offload="disk" with offload_dir='
            if device.type == "cpu":
                memory, remedies = f"{'pinned ' if pinned else ''}host memory", 'offload="disk" with offload_dir='
            raise MemoryError(
                f"n={n} rows of {self.words * 16} bytes need {n * self.words * 16:,} bytes of {memory}, which could "
                f"not be allocated: use {remedies}, or shard=True on several ranks"
            ) from error

    def _shape(self, n: int, kind: torch.dtype = WORD) -> tuple[int, ...]:
        per_row = self.words * 16 // kind.itemsize
        return (n,) if per_row == 1 else (n, per_row)

    def _as_block(self, rows: Tensor) -> Tensor:
        return (rows if rows.dim() == 2 else rows.view(-1, 1)).view(torch.int64)


def rows_of(written: Tensor, group: int, n: int, most: int) -> Iterator[Tensor]:
    """Return the numbers of the rows below ``n`` in groups of rows, given by a mask: ascending, on the CPU, in parts.

    A part has at most ``most`` rows. The mask may change afterwards.
    """
    groups, within = written.nonzero().flatten().cpu(), torch.arange(group, device="cpu")
    parts = ((some[:, None] * group + within).flatten() for some in groups.split(max(1, most // group)))
    return (rows for part in parts for rows in part[chosen(part < n)].split(most) if len(rows))


def chosen(mask: Tensor) -> Tensor | slice:
    """Return a mask ``(R,)`` as an index, a slice if all are chosen, which copies nothing."""
    return slice(None) if mask.all() else mask.nonzero().flatten()


def available_memory() -> float:
    """Return the bytes of host memory that can still be claimed, as far as the system (Linux) tells."""
    found = [math.inf]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # of a container; "max": no limit
        most, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        found.append(max(0, most - used + int(kept["inactive_file"])))  # the system frees the cache of files first
    return min(found)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype = WORD) -> Tensor:
    """Allocate zeros on the host; the system allocates each page at its first write.

    ``torch.zeros`` would write all pages at once (seconds for some GB), in small pages. NumPy requests huge pages, with
    which random gathers are 1.5 times and scatters twice as fast. The data start at a cache line, as in torch tensors.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + 48, dtype=np.uint8)
    skipped = -memory.ctypes.data % 64
    return torch.from_numpy(memory[skipped : skipped + size]).view(dtype).view(shape)
