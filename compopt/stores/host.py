"""Rows in host memory, whatever device the features are on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compopt import accelerator
from compopt.stores.layout import WORD
from compopt.stores.memory import MemoryStore


class HostStore(MemoryStore):
    """The placement ``offload="cpu"``: one tensor in host memory, pinned where a device with streams is there.

    Without one a page costs nothing until it is written; pinned memory is claimed in full at construction.

    Raises:
        MemoryError: so much memory cannot be had.
    """

    instant_rows = 2048  # measured: 20 to 100 microseconds, a hand-over 150 to 300 (benchmarks/rows.py)

    def _zeros(self, n: int, device: torch.device) -> Tensor:
        if not accelerator.pins():
            return super()._zeros(n, device)
        with self._claim(n, device, pinned=True):
            return torch.zeros(self._shape(n), dtype=WORD, device="cpu", pin_memory=True)

    def to(self, device: torch.device) -> None:
        """Nothing: the rows stay on the host."""
        del device

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's memory is pinned again."""
        self.__dict__.update(state)
        if accelerator.pins() and not self._table.is_pinned():
            self._table = self._table.pin_memory()
