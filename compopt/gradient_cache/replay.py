"""The same random numbers and buffers in two passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the states of the generators of the CPU and of devices."""
    others = (getattr(torch, device.type).get_rng_state(device) for device in devices)
    return [torch.get_rng_state(), *others]


@contextmanager
def replayed(states: list[Tensor], devices: Sequence[torch.device]) -> Iterator[None]:
    """Draw the random numbers that followed a state, and then go on where the generators were."""
    kind = devices[0].type if devices else None
    with torch.random.fork_rng(devices, **({"device_type": kind} if kind else {})):
        torch.set_rng_state(states[0])
        for device, state in zip(devices, states[1:], strict=True):
            getattr(torch, device.type).set_rng_state(state, device)
        yield


@contextmanager
def kept(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Give buffers the values back that they have now."""
    values = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)
