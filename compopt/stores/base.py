"""The interface of every placement."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class RowStore(ABC):
    """``n`` rows of ``words`` 16-byte words. Rows start as zeros, which every column reads as "never seen".

    Contract: :meth:`gather` returns fresh memory; :meth:`scatter` is only called with distinct rows; the two
    are the whole hot path, and neither costs more when ``n`` grows.
    """

    n: int
    words: int

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where gathered blocks arrive and where row numbers are expected."""

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor:
        """Rows ``(R,)`` int64 -> block ``(R, words)`` complex128."""

    @abstractmethod
    def scatter(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to distinct rows."""

    @abstractmethod
    def grow(self, n: int) -> None:
        """Append zero rows until there are ``n``."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Follow the features to their device, where the placement allows it."""

    @abstractmethod
    def block(self, start: int, stop: int) -> Tensor:
        """A copy of a range of rows (checkpoints)."""

    @abstractmethod
    def write_block(self, start: int, block: Tensor) -> None:
        """Overwrite a range of rows (checkpoints)."""
