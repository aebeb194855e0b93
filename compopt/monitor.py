"""Facts learned on the device, acted on later: no call ever waits for the accelerator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Monitor:
    """Small integers copied to the host asynchronously and handed to a callback once they have arrived.

    On the CPU there is nothing to wait for and the callback runs at once.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.cuda.Event, Tensor, Callable[[int], None]]] = []

    def watch(self, value: Tensor, react: Callable[[int], None]) -> None:
        """Call ``react(int(value))`` as soon as that is free: now on the CPU, at a later :meth:`poll` on CUDA."""
        if value.device.type != "cuda":
            react(int(value))
            return
        host = torch.empty((), dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((event, host, react))

    def poll(self) -> None:
        """Run the callbacks of everything that has arrived; one that raises is not run again."""
        while self._waiting and self._waiting[0][0].query():
            _, host, react = self._waiting.pop(0)
            react(int(host))
