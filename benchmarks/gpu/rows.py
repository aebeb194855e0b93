"""Measure reading and committing rows on the device, in pinned host memory and on disk, during work of the device."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch

import compopt
from benchmarks.gpu.machine import Machine
from benchmarks.report import quartiles

ROWS = 5120


def measure(machine: Machine, seconds: float) -> list[dict[str, Any]]:
    """Measure the time that rows add to a step of 20 ms, and the time of their calls in the training thread."""
    n, size = (10_000, 64) if machine.small else (20_000_000, ROWS)
    results = []
    for offload in (None, "cpu", "disk"):
        if machine.time_is_up(f"rows, {offload or 'device'}"):
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            place = {"offload_dir": folder} if offload == "disk" else {}
            steps = Steps(machine, compopt.MovingAverageEstimator(n, offload=offload, **place), n, size)
            found: dict[str, list[float]] = {"bare": [], "rows": [], "rows, prefetched": [], "thread": []}
            end = min(machine.ends, time.monotonic() + seconds / 3)
            for number in range(3 if machine.small else 20):
                found["bare"].append(steps.run())
                found["rows"].append(steps.run(use=True))
                found["rows, prefetched"].append(steps.run(use=True, ahead=True))
                found["thread"].append(steps.in_thread)
                if time.monotonic() > end and number >= 1:
                    break
            del steps
        place = {"offload": offload or "device", "n": n, "size": size, "rounds": number + 1}
        results.append(place | {name: quartiles(values) for name, values in found.items()})
    return results


class Steps:
    """Steps of work with a read before and a commit after it; ``in_thread``: seconds of these two calls per step."""

    def __init__(self, machine: Machine, est: compopt.MovingAverageEstimator, n: int, size: int) -> None:
        self._machine, self._est = machine, est.to(machine.device)
        generator = torch.Generator().manual_seed(0)
        self._count = 4 if machine.small else 12
        self._batches = [torch.randint(n, (size,), generator=generator) for _ in range(self._count + 1)]
        self._values = torch.randn(size, generator=generator).to(machine.device)
        self._matrix = torch.randn(*([64, 64] if machine.small else [4096, 4096]), device=machine.device)
        self._products = 1
        once = machine.seconds(self._work, 3)
        self._products = 1 if machine.small else max(1, round(0.01 / once))
        self.in_thread = 0.0

    def _work(self) -> None:
        for _ in range(self._products):
            self._matrix @ self._matrix

    def run(self, use: bool = False, ahead: bool = False) -> float:
        """Return the seconds of a step."""
        self.in_thread = 0.0

        def calls(step: int) -> None:
            if ahead:
                self._est.prefetch(self._batches[step + 1])
            self._est.update(self._values, self._batches[step])

        def steps() -> None:
            if ahead:
                self._est.prefetch(self._batches[0])
            for step in range(self._count):
                start = time.perf_counter()
                if use:
                    calls(step)
                self.in_thread += time.perf_counter() - start
                self._work(), self._work()
                start = time.perf_counter()
                if use:
                    self._est.step()
                self.in_thread += time.perf_counter() - start

        seconds = self._machine.seconds(steps) / self._count
        self.in_thread /= self._count
        return seconds
