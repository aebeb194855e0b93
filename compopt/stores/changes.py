"""Which rows of a store changed since when, so that a checkpoint writes what changed."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of a chunk: 128 KiB of rows of 16 bytes. A tar shard holds about as many samples, and its samples are visited
# together. Smaller chunks would make manifests longer; larger ones would write more rows that did not change.
CHUNK_ROWS = 1 << 13


def chunk_count(rows: int, chunk_rows: int) -> int:
    """Chunks that so many rows fill or begin."""
    return -(-rows // chunk_rows)


class Changes:
    """The period in which each chunk of :data:`CHUNK_ROWS` rows was last written; 0: never, its rows are zero.

    A period ends where a checkpoint is cut. What was written after the end of period ``p`` has a later one.

    Stores 4 bytes per chunk, beside the rows: marking must not wait for an accelerator.
    """

    def __init__(self, n: int, device: torch.device | str = "cpu") -> None:
        self.chunk_rows, self.period = CHUNK_ROWS, 1
        self._last = torch.zeros(chunk_count(n, self.chunk_rows), dtype=torch.int32, device=device)

    def mark(self, rows: Tensor) -> None:
        """Rows ``(R,)``, on the store's device, are written now."""
        self._last.index_fill_(0, rows // self.chunk_rows, self.period)

    def mark_range(self, start: int, stop: int) -> None:
        """Rows ``[start, stop)`` are written now."""
        self._last[start // self.chunk_rows : chunk_count(stop, self.chunk_rows)] = self.period

    def cut(self) -> int:
        """End the period, and return it."""
        self.period += 1
        return self.period - 1

    def since(self, period: int) -> Tensor:
        """Chunks written after the end of a period, ``(chunks,)`` bool, on the CPU; 0: written ever."""
        return (self._last > period).cpu()

    def grow(self, n: int) -> None:
        """Rows were appended, zeros."""
        more = chunk_count(n, self.chunk_rows) - len(self._last)
        self._last = torch.cat([self._last, self._last.new_zeros(more)])

    def shrink(self, n: int) -> None:
        """The inverse."""
        self._last = self._last[: chunk_count(n, self.chunk_rows)]

    def to(self, device: torch.device) -> None:
        """Follow the rows."""
        self._last = self._last.to(device)
