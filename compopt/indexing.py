"""Data-set indices: checked on the host where they live there, flagged on the device where they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_vector(name: str, value: Any, batch: int) -> Tensor:
    """A 1-D integer tensor of ``batch`` entries, as int64."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of {batch} integers, got {type(value).__name__}")
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name} must hold integers (int64 data-set positions), got {value.dtype}")
    if value.dim() != 1:
        raise ValueError(f"{name} must have shape ({batch},), got {tuple(value.shape)}; one entry per sample")
    if len(value) != batch:
        raise ValueError(f"{name} has {len(value)} entries for a batch of {batch} samples; pass one per sample")
    if value.device.type == "meta":
        raise ValueError(f"{name} is on the meta device and holds no values; pass it on the CPU")
    return value.to(torch.int64)


def check_range(name: str, value: Tensor, n: int | None) -> Tensor | None:
    """IndexError on the host; on a device, a 0-d flag that says whether any entry is out of range."""
    if n is None:
        return None
    if value.device.type != "cpu":
        return ((value < 0) | (value >= n)).any()
    if len(value) == 0:
        return None
    low, high = value.aminmax()
    if low < 0 or high >= n:
        wrong = int(high) if high >= n else int(low)
        raise IndexError(f"{name} {wrong} is outside n={n}; pass data-set indices, not batch positions")
    return None


def distinct_values(value: Tensor) -> int | None:
    """How many different values there are; ``None`` where asking would wait for a device."""
    if value.device.type != "cpu":
        return None
    return int(np.unique(value.numpy()).size)
