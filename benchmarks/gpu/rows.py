"""Reading and committing rows on the device, in pinned host memory and on disk, behind work of the device."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine
from compopt.stores import RowAccess, open_rows
from compopt.stores.layout import moved
from recipes.report import quartiles

ROWS = 5120


def measure(machine: Machine, seconds: float) -> list[dict[str, Any]]:
    """What a step of 20 ms grows by, and what the calls cost the training thread."""
    n, size = (10_000, 64) if machine.small else (20_000_000, ROWS)
    results = []
    for offload in (None, "cpu", "disk"):
        what = f"rows, {offload or 'device'}"
        if machine.time_is_up(what):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows = open_rows(n, 1, offload=offload, offload_dir=folder if offload == "disk" else None)
            rows.store.to(machine.device)
            steps = Steps(machine, rows, n, size)
            found: dict[str, list[float]] = {"bare": [], "rows": [], "rows, prefetched": [], "thread": []}
            end = min(machine.ends, time.monotonic() + seconds / 3)
            for number in range(3 if machine.small else 20):
                found["bare"].append(steps.run())
                found["rows"].append(steps.run(use=True))
                found["rows, prefetched"].append(steps.run(use=True, ahead=True))
                found["thread"].append(steps.in_thread)
                if time.monotonic() > end and number >= 1:
                    break
            rows.close()
        results.append({"offload": offload or "device", "n": n, "size": size, "rounds": number + 1, **found})
    return [
        {**r, **{key: quartiles(r[key]) for key in ("bare", "rows", "rows, prefetched", "thread")}} for r in results
    ]


class Steps:
    """Some steps of work with a read before it and a commit after it."""

    def __init__(self, machine: Machine, rows: RowAccess, n: int, size: int) -> None:
        self._machine, self._rows, device = machine, rows, machine.device
        generator = torch.Generator().manual_seed(0)
        self._count = 4 if machine.small else 12
        self._batches = [torch.randint(n, (size,), generator=generator) for _ in range(self._count + 1)]
        self._there = [batch.to(device) for batch in self._batches]
        self._block = moved(
            torch.randn(size, 2, generator=generator, dtype=torch.float64).view(torch.complex128), device
        )
        self._matrix = torch.randn(*([64, 64] if machine.small else [4096, 4096]), device=device)
        self._products = 1
        once = machine.seconds(self._work, 3)
        self._products = 1 if machine.small else max(1, round(0.01 / once))
        self.in_thread = 0.0

    def _work(self) -> None:
        for _ in range(self._products):
            self._matrix @ self._matrix

    def _take(self, step: int, ticket: Any) -> Tensor:
        if ticket is not None:
            return ticket.take()
        return self._rows.fetch(self._there[step], self._batches[step])

    def run(self, use: bool = False, ahead: bool = False) -> float:
        """Seconds of a step; ``in_thread`` is what reading and committing took of the training thread's own."""
        self.in_thread = 0.0

        def steps() -> None:
            ticket = self._rows.prefetch(self._batches[0], self._machine.device) if ahead else None
            for step in range(self._count):
                start = time.perf_counter()
                block = self._take(step, ticket) if use else None
                ticket = self._rows.prefetch(self._batches[step + 1], self._machine.device) if ahead else None
                self.in_thread += time.perf_counter() - start
                self._work(), self._work()
                start = time.perf_counter()
                if block is not None:
                    self._rows.commit(self._there[step].clone(), torch.where(block == block, self._block, block))
                self.in_thread += time.perf_counter() - start
            if ticket is not None:
                ticket.drop()

        seconds = self._machine.seconds(steps) / self._count
        self.in_thread /= self._count
        return seconds
