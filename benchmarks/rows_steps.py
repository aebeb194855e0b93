"""What reading and committing rows adds to a training step, with and without prefetch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import compopt
from benchmarks.machine import timed
from compopt.stores import Ticket, open_rows
from recipes.report import quartiles

CPU = torch.device("cpu")


def batches(n: int, size: int, count: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(n, (size,), generator=g) for _ in range(count)]


class Work:
    """A fixed number of matrix products, which took about so many milliseconds at construction."""

    def __init__(self, milliseconds: float, size: int = 384) -> None:
        self.a = torch.randn(size, size)
        until = time.perf_counter() + 0.5  # the first ones are several times slower
        while time.perf_counter() < until:
            self.a @ self.a
        one = statistics.median(timed(lambda: self.a @ self.a) for _ in range(200))
        self.count = max(1, round(milliseconds * 1e-3 / one))

    def __call__(self) -> None:
        for _ in range(self.count):
            self.a @ self.a


def measure_step(offload: str, n: int, directory: str, size: int, pool_size: int, work_ms: float, steps: int) -> dict:
    """Added wall time of a step that reads and commits a batch of rows, with and without prefetch."""
    options = {"offload_dir": directory} if offload == "disk" else {}
    rows = open_rows(n, 1, offload=offload, **options)
    block, pool = torch.randn(size, 1, dtype=torch.complex128), batches(n, size, pool_size, 2)
    for batch in pool:
        rows.fetch(batch, batch)
        rows.commit(batch, block)
    rows.settle()
    work = Work(work_ms)

    def bare() -> None:
        for _ in range(steps):
            work()

    def fetched() -> None:
        for batch in pool[:steps]:
            work()
            rows.commit(batch, rows.fetch(batch, batch))

    under_way: list[Ticket] = []

    def first() -> None:
        under_way[:] = [rows.prefetch(pool[0], CPU)]

    def prefetched() -> None:
        for k in range(steps):
            under_way.append(rows.prefetch(pool[k + 1], CPU))
            work()
            rows.commit(pool[k], under_way.pop(0).take())

    contenders = {"bare": bare, "no prefetch": fetched, "prefetch": prefetched}
    result = interleave(contenders, steps, rounds=25, prepare={"prefetch": first})
    rows.close()
    return {"offload": offload, "n": n, "rows": size, "step": result}


def interleave(
    contenders: dict[str, Callable[[], None]],
    steps: int,
    rounds: int,
    prepare: dict[str, Callable[[], None]],
) -> dict[str, list[float]]:
    """Seconds per step, and what each contender adds to the first of its round; preparations are not counted."""
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, call in contenders.items():
            if name in prepare:  # the batch before the first step, which an endless loop would have prefetched
                prepare[name]()
                time.sleep(0.005)
            seconds = timed(call) / steps
            if turn:  # the first round starts threads
                spent[name].append(seconds)
    base = next(iter(contenders))
    added = {
        f"{name}, added": quartiles([a - b for a, b in zip(values, spent[base], strict=True)])
        for name, values in spent.items()
        if name != base
    }
    return {name: quartiles(values) for name, values in spent.items()} | added


def step_overhead(n: int, offload: str, directory: str, batch: int = 512, dim: int = 128, steps: int = 5) -> dict:
    """A whole training step of SogCLR, about 20 ms, against the same step with its rows beside the features.

    The encoders are two linear maps and as many matrix products as fill 20 ms; the estimators differ only in where
    their rows are. The baseline has at most 10,000,000 rows.
    """
    options = {"offload_dir": directory} if offload == "disk" else {}
    here = compopt.SogCLREstimator(min(n, 10**7))
    there = compopt.SogCLREstimator(n, offload=offload, **options)
    encoders = [torch.nn.Linear(dim, dim) for _ in range(2)]
    x = [torch.randn(batch, dim) for _ in range(2)]

    def step(est: compopt.SogCLREstimator, index: Tensor, work: Callable[[], object]) -> None:
        work()
        est(encoders[0](x[0]), encoders[1](x[1]), index).backward()
        est.step()

    pool = [index % min(n, 10**7) if n < 10**7 else index for index in batches(n, batch, 200, 3)]
    local = [index % min(n, 10**7) for index in pool]
    for index, near in zip(pool, local, strict=True):  # warm
        step(there, index, lambda: None)
        step(here, near, lambda: None)
    bare = statistics.median(timed(lambda: step(here, local[0], lambda: None)) for _ in range(20))
    work = Work(max(1.0, 20 - 1e3 * bare))

    def loop(est: compopt.SogCLREstimator, pool: list[Tensor], prefetching: bool) -> Callable[[], None]:
        def run() -> None:
            for k in range(steps):
                if prefetching:
                    est.prefetch(pool[k + 1])
                step(est, pool[k], work)

        return run

    contenders = {
        "offload=None": loop(here, local, False),
        "no prefetch": loop(there, pool, False),
        "prefetch": loop(there, pool, True),
    }
    prepare = {"prefetch": lambda: there.prefetch(pool[0])}
    return {"offload": offload, "n": n, "rows": batch, "step": interleave(contenders, steps, 25, prepare)}
