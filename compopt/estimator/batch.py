"""One call's view of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compopt.estimator.groups import Hyper, SampleGroups


@dataclass
class Visit:
    """The rows that one call reads, of the whole batch over all ranks.

    Attributes:
        keys: ``index`` and, if given, ``index2`` and ``group``, ``(B,)`` int64, on the features' device.
        sizes: samples of every rank.
        own: this rank's part of the batch.
        rows: ``(B, 1)``, or ``(B, 2)`` when the second modality has rows of its own.
        host_rows: the same on the CPU, ``None`` where asking would wait for a device.
        columns: committed values, ``(B, D)``, with ``count``.
        old: the gathered blocks, ``(B * R, words)``; ``None`` without rows.
        payload: what the call sent along, of all ranks.
        distinct: the host knows that no sample occurs twice.
        bad: 0-d flag on the device: an index is out of range.
        depositing: the call is in training mode with gradients enabled.
    """

    groups: SampleGroups
    keys: dict[str, Tensor]
    sizes: list[int]
    own: slice
    rows: Tensor
    host_rows: Tensor | None
    columns: dict[str, Tensor]
    old: Tensor | None
    payload: list[Tensor]
    distinct: bool
    bad: Tensor | None
    dtype: torch.dtype
    depositing: bool

    def hypers(self, component: str) -> Hyper:
        """Hyper-parameters of one component for these rows."""
        return self.groups.hyper(component, self.rows, self.dtype)

    def hyper(self, component: str, key: str) -> Any:
        """One hyper-parameter for these rows."""
        return self.hypers(component)(key)

    def guard(self, value: Tensor) -> Tensor:
        """Make a value NaN if an index on the device was out of range."""
        return value if self.bad is None else torch.where(self.bad, torch.nan, value)
