"""What a process takes of the machine: seconds, and bytes of memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def status(field: str) -> int:
    """A size in bytes from Linux's status of this process, for example ``VmRSS``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def resident() -> dict[str, int]:
    """Bytes of this process in memory: anonymous ones, and pages of files."""
    return {field: status(field) for field in ("RssAnon", "RssFile")}


def in_turns(variants: dict[str, Callable[[], float]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """What each variant gives, in every round and in another order each time; ``warm`` rounds before are not kept."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    shuffle = random.Random(0)
    for number in range(warm + rounds):
        order = list(variants)
        shuffle.shuffle(order)
        for name in order:
            value = variants[name]()
            if number >= warm:
                found[name].append(value)
    return found
