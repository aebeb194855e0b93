"""Measure the time of reading and committing rows, by placement and table size, and its cost in a training step.

    python -m benchmarks.rows               # writes benchmarks/results/rows.md; needs 16 GB of disk
    python -m benchmarks.rows --quick       # small tables, few rounds, printed only
    python -m benchmarks.rows --steps-only  # only the training step, printed only

Every table is measured in a separate process, which isolates its memory. Only the public interface is used:
``MovingAverageEstimator`` is little more than a table of rows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import compopt
from benchmarks.machine import MIB, on_ranks, resident, timed
from benchmarks.report import environment, finish, quartiles, spread, table

TABLES = [("cpu", 10**5), ("cpu", 10**7), ("cpu", 2 * 10**8), ("disk", 10**5), ("disk", 10**7), ("disk", 10**9)]
QUICK = [("cpu", 10**5), ("disk", 10**7)]
COLD = 20  # batches of a table that was never touched before
ROUNDS = 25
US = {"digits": 0, "unit": 1e-6}  # microseconds
ABOUT = """A batch has {batch} random rows of `MovingAverageEstimator`. Each cell is the median (first to third
quartile) in microseconds of the training thread. *read*: `est.read(index)`; *update*: `est.update(values, index)`,
which reads rows and proposes new values; *commit*: `est.step()`. *First touch*: {cold} batches of a table that was
never accessed before; on disk, each row is then a hole in a sparse file. *Warm*: a fixed pool of {pool} batches, which
were visited and written before, in a cycle; {work} ms of matrix products run between the calls, in parallel with the
reader and writer threads. Memory is that of the process at the end minus that before the table was built: anonymous
memory, and pages of the file."""
STEPS = """Time of a whole training step of SogCLR, about 20 ms, compared with the same step with rows on the device of
the features. Contenders run round-robin, {steps} steps each, and differences are taken within a round."""


def batches(n: int, size: int, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(n, (size,), generator=generator) for _ in range(count)]


def placed(offload: str, folder: str) -> dict[str, Any]:
    return {"offload": offload, **({"offload_dir": folder} if offload == "disk" else {})}


class Work:
    """Fixed number of matrix products that took about ``milliseconds`` at construction."""

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


def measure_table(rank: int, ranks: int, offload: str, n: int, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of the calls of one table, and its memory."""
    before, found = resident(), {}
    started = time.perf_counter()
    est = compopt.MovingAverageEstimator(n, **placed(offload, folder))
    created = time.perf_counter() - started
    values, work = torch.randn(args.batch), Work(args.work / 2)

    def cycle(label: str, pool: list[Tensor], prefetch: bool = False, busy: bool = False) -> None:
        spent: dict[str, list[float]] = {"update": [], "commit": []}
        for index in pool:
            if prefetch:
                spent.setdefault("prefetch", []).append(timed(lambda index=index: est.prefetch(index)))
            if busy:
                work()
            spent["update"].append(timed(lambda index=index: est.update(values, index)))
            if busy:
                work()
            spent["commit"].append(timed(est.step))
        found.update({f"{name}, {label}": quartiles(seconds) for name, seconds in spent.items()})

    def read(label: str, pool: list[Tensor]) -> None:
        found[f"read, {label}"] = quartiles([timed(lambda index=index: est.read(index)) for index in pool])

    cycle("first touch", batches(n, args.batch, COLD, 1))
    pool = batches(n, args.batch, args.pool, 2)
    for index in pool:  # visited and written
        est.update(values, index)
        est.step()
    read("warm", pool)
    cycle("warm", pool, busy=True)
    cycle("warm, prefetched", pool, prefetch=True, busy=True)
    memory = {key: value - before[key] for key, value in resident().items()}
    return {"offload": offload, "n": n, "create": created, "seconds": found, "memory": memory}


def measure_step(rank: int, ranks: int, offload: str, n: int, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a training step of SogCLR and the time that offloaded rows add; the baseline has at most 1e7 rows."""
    batch, dim, near = 512, 128, min(n, 10**7)
    here, there = compopt.SogCLREstimator(near), compopt.SogCLREstimator(n, **placed(offload, folder))
    encoders, x = [torch.nn.Linear(dim, dim) for _ in range(2)], torch.randn(2, batch, dim)
    pool = batches(n, batch, 200, 3)

    def step(est: compopt.SogCLREstimator, index: Tensor, work: Callable[[], object]) -> None:
        work()
        est(encoders[0](x[0]), encoders[1](x[1]), index % est.n).backward()
        est.step()

    for index in pool:  # warm
        step(there, index, int)
        step(here, index, int)
    bare = statistics.median(timed(lambda: step(here, pool[0], int)) for _ in range(20))
    work = Work(max(1.0, 20 - 1e3 * bare))

    def loop(est: compopt.SogCLREstimator, prefetching: bool) -> float:
        if prefetching:  # the first batch, which the step before would have prefetched in an endless loop
            est.prefetch(pool[0])
            time.sleep(0.005)
        started = time.perf_counter()
        for k in range(args.steps):
            if prefetching:
                est.prefetch(pool[k + 1])
            step(est, pool[k], work)
        return (time.perf_counter() - started) / args.steps

    contenders = {
        "offload=None": lambda: loop(here, False),
        "no prefetch": lambda: loop(there, False),
        "prefetch": lambda: loop(there, True),
    }
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(1 + ROUNDS):
        for name, call in contenders.items():
            seconds = call()
            if turn:  # the first round starts threads
                spent[name].append(seconds)
    base = spent["offload=None"]
    added = {f"{name}, added": [a - b for a, b in zip(spent[name], base, strict=True)] for name in list(spent)[1:]}
    found = {name: quartiles(values) for name, values in {**spent, **added}.items()}
    return {"offload": offload, "n": n, "step": found}


def apart(measure: Callable[..., dict[str, Any]], one: tuple[str, int], args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a separate process; its files are always removed."""
    print(f"{measure.__name__}: {one[0]}, n = {one[1]:,} ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="rows-", dir=args.dir) as folder:
        return on_ranks(1, measure, *one, folder, args)[0]


def title(result: dict[str, Any]) -> str:
    return f"{result['offload']}, n = {result['n']:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dir", default=None, help="directory of the table files (default: the system's temporary directory)"
    )
    parser.add_argument("--batch", type=int, default=5120, help="rows per read and commit")
    parser.add_argument("--pool", type=int, default=200, help="number of batches that are visited repeatedly when warm")
    parser.add_argument("--work", type=float, default=4.0, help="milliseconds of work between the calls")
    parser.add_argument("--steps", type=int, default=5, help="steps of each contender per round")
    parser.add_argument("--quick", action="store_true", help="use small tables and write no files")
    parser.add_argument("--steps-only", action="store_true", help="measure only the training step and write no files")
    args = parser.parse_args()
    if args.quick:
        args.pool = 30
    env, chosen = environment(), QUICK if args.quick else TABLES
    tables = [] if args.steps_only else [apart(measure_table, one, args) for one in chosen]
    steps = [apart(measure_step, one, args) for one in ([chosen[-1]] if args.quick else [TABLES[2], TABLES[-1]])]
    names = list(dict.fromkeys(name for r in tables for name in r["seconds"]))
    body = [
        [name, *(spread(r["seconds"][name], **US) if name in r["seconds"] else "" for r in tables)] for name in names
    ]
    body.append(["creation", *(f"{r['create'] / 1e-6:,.0f}" for r in tables)])
    body += [[f"{key}, MiB", *(f"{r['memory'][key] / MIB:,.0f}" for r in tables)] for key in ("RssAnon", "RssFile")]
    columns = list(steps[0]["step"])
    paid = [[title(r), *(spread(r["step"][name], **US) for name in columns)] for r in steps]
    parts = [
        ABOUT.format(batch=args.batch, cold=COLD, pool=args.pool, work=args.work),
        "## One table, microseconds",
        table(["", *map(title, tables)], body),
        "## Rows in a training step of SogCLR, microseconds",
        STEPS.format(steps=args.steps),
        table(["", *columns], paid),
    ]
    quick = args.quick or args.steps_only
    finish("rows", "Time of reading and committing rows", env, parts, {"tables": tables, "training": steps}, quick)


if __name__ == "__main__":
    main()
