"""Timing, memory and description of the measured accelerator."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.report import environment, quartiles
from compopt import accelerator

Action = Callable[[], object]


@dataclass
class Machine:
    """Device, sizes and time limit of the measurements.

    Attributes:
        device: device of the measurements.
        small: whether to use the small sizes of a trial.
        pretends: whether the device is the pretend accelerator of the tests, whose times mean nothing.
        ends: time by which the last part must end, by ``time.monotonic``.
        left_out: measurements that failed or for which no time was left.
    """

    device: torch.device
    small: bool
    pretends: bool
    ends: float
    left_out: list[str] = field(default_factory=list)

    def module(self) -> Any:
        return getattr(torch, self.device.type)

    def synchronize(self) -> None:
        accelerator.synchronize(self.device)

    def seconds(self, run: Action, calls: int = 1) -> float:
        """Return the seconds of one call on the device, between two events of its stream or by the CPU's clock."""
        if not accelerator.has_streams(self.device):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            self.synchronize()
            return (time.perf_counter() - start) / calls
        start, end = (self.module().Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def peak(self, run: Action) -> int | None:
        """Return the peak memory in bytes that a call adds on the device, including its gradients."""
        if not hasattr(self.module(), "max_memory_allocated"):
            return None
        self.synchronize()
        self.module().reset_peak_memory_stats()
        before = self.module().memory_allocated()
        run()
        self.synchronize()
        return self.module().max_memory_allocated() - before

    def forget(self) -> None:
        """Release cached memory."""
        if hasattr(self.module(), "empty_cache"):
            self.module().empty_cache()

    def time_is_up(self, what: str) -> bool:
        """Return whether the time is over, and if so record what is left out."""
        if time.monotonic() < self.ends:
            return False
        self.left_out.append(f"{what}: no time left")
        return True

    def describe(self) -> dict[str, Any]:
        """Return the facts that are needed to repeat the measurement, the device first."""
        name = "a pretend accelerator on the CPU (tests/pretend): times are meaningless" if self.pretends else "the CPU"
        facts: dict[str, Any] = {}
        if not self.pretends and self.device.type != "cpu":
            module = self.module()
            name = module.get_device_name(self.device) if hasattr(module, "get_device_name") else self.device.type
            facts = {"cuda": torch.version.cuda, "hip": torch.version.hip}
            if hasattr(module, "get_device_properties"):
                facts["device memory, GiB"] = round(module.get_device_properties(self.device).total_memory / 2**30)
        return {"device": name, **{k: v for k, v in facts.items() if v}, **environment()}


def with_peaks(
    machine: Machine, contenders: dict[str, Action], seconds: float, rounds: int, what: str
) -> dict[str, Any]:
    """Measure contenders in random order until the number of rounds or the time limit is reached.

    Returns:
        For each contender, the quartiles of its ``seconds``, its ``rounds`` and its ``peak``, or why it ``failed``.
    """
    found: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    calls: dict[str, int] = {}
    for name, run in contenders.items():
        if (why := attempt(machine, run, what, name)) is not None:
            failed[name] = why
            continue
        calls[name] = max(1, min(10, int(0.02 / max(1e-6, machine.seconds(run)))))
        found[name] = []
    end = min(machine.ends, time.monotonic() + seconds)
    for number in range(rounds):
        for name in random.Random(number).sample(list(found), len(found)):
            found[name].append(machine.seconds(contenders[name], calls[name]))
        if time.monotonic() > end and number >= 1:
            break
    result: dict[str, Any] = {name: {"failed": why} for name, why in failed.items()}
    for name, values in found.items():
        peak = machine.peak(contenders[name])
        result[name] = {"seconds": quartiles(values), "rounds": len(values), "peak": peak}
    return {name: result[name] for name in contenders}


def attempt(machine: Machine, run: Action, what: str, name: str) -> str | None:
    """Make one call and return why it failed, if it did, without an exception so that other contenders continue."""
    try:
        run()
        machine.synchronize()
    except Exception as error:
        machine.forget()
        words = "out of memory" if "memory" in str(error).lower() else f"{type(error).__name__}: {str(error)[:160]}"
        machine.left_out.append(f"{what}, {name}: {words}".replace("\n", " "))
        return words
    return None
