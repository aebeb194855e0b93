"""Time of reading and committing rows, by placement and table size, and what a training step pays for it.

    python -m benchmarks.rows               # writes benchmarks/results/rows.md and rows.json; needs 16 GB of disk
    python -m benchmarks.rows --quick       # small tables, few rounds, printed and not written
    python -m benchmarks.rows --steps-only  # only the training step, printed and not written

Every table is measured in a process of its own, so that its memory can be read off; table files lie in a temporary
directory under --dir and are removed at the end, errors included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import compopt
from benchmarks.machine import resident, timed
from benchmarks.rows_report import COLD_BATCHES, report, step_table
from benchmarks.saved import ROOT, save
from compopt.stores import DiskStore, OffloadedRows, RowStore, Ticket, open_rows
from recipes.report import environment, quartiles

TABLES = [("cpu", 10**5), ("cpu", 10**7), ("cpu", 2 * 10**8), ("disk", 10**5), ("disk", 10**7), ("disk", 10**9)]
QUICK = [("cpu", 10**5), ("disk", 10**7)]
LAYOUTS = [10**5, 10**7, 2 * 10**8]
DESCRIPTION = {"columns": {"log_u": [2, "float32"], "count": [2, "int32"]}}
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


# one table ----------------------------------------------------------------------------------------


def measure_table(offload: str, n: int, directory: str, size: int, pool_size: int, work_ms: float) -> dict:
    before = resident()
    opened = time.perf_counter()
    options = {"offload_dir": directory} if offload == "disk" else {}
    rows = open_rows(n, 1, offload=offload, description=DESCRIPTION, **options)
    result: dict = {"offload": offload, "n": n, "create": time.perf_counter() - opened, "seconds": {}}
    assert isinstance(rows, OffloadedRows)
    block = torch.randn(size, 1, dtype=torch.complex128)
    store: RowStore = rows.store

    def cycle(label: str, pool: list[Tensor], scatter: bool = True) -> None:
        reads, writes = [], []
        for batch in pool:
            reads.append(timed(lambda batch=batch: store.gather(batch)))
            if scatter:
                writes.append(timed(lambda batch=batch: store.scatter(batch, block)))
        result["seconds"][f"gather, {label}"] = quartiles(reads)
        if scatter:
            result["seconds"][f"scatter, {label}"] = quartiles(writes)

    cycle("first touch", batches(n, size, COLD_BATCHES, 1))
    pool = batches(n, size, pool_size, 2)
    for batch in pool:
        store.gather(batch)
        store.scatter(batch, block)
    cycle("warm", pool)
    for label, prefetching in (("no prefetch", False), ("prefetch", True)):
        result["seconds"] |= main_thread(rows, pool, block, Work(work_ms / 2), prefetching, label)
    rows.settle()
    result["memory"] = {key: value - before[key] for key, value in resident().items()}
    if offload == "disk":
        rows.close()
        evict(Path(directory))
        store = DiskStore(directory, "rows", n, 1, DESCRIPTION)
        store.stale = False  # the rows are ours
        cycle("evicted", pool[:COLD_BATCHES], scatter=False)
        store.close()
    return result


def evict(directory: Path) -> None:
    """Write the table back and drop its pages, which nothing maps any more."""
    fd = os.open(directory / "rows.rows", os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def main_thread(
    rows: OffloadedRows, pool: list[Tensor], block: Tensor, work: Work, prefetching: bool, label: str
) -> dict[str, list[float]]:
    """Time what the calls cost the training thread, with work between them."""
    spent: dict[str, list[float]] = {}

    def spend(name: str, call: Callable[[], object]) -> object:
        start = time.perf_counter()
        value = call()
        spent.setdefault(f"{name}, {label}", []).append(time.perf_counter() - start)
        return value

    ticket = rows.prefetch(pool[0], CPU)
    for k, batch in enumerate(pool):
        if prefetching:
            following = spend("prefetch", lambda k=k: rows.prefetch(pool[(k + 1) % len(pool)], CPU))
            work()
            spend("take", ticket.take)
            ticket = following
        else:
            work()
            spend("fetch", lambda batch=batch: rows.fetch(batch, batch))
        work()
        fresh = block + 1
        spend("commit", lambda batch=batch, fresh=fresh: rows.commit(batch, fresh))
    return {name: quartiles(values) for name, values in spent.items()}


# the whole step ------------------------------------------------------------------------------------


def measure_step(offload: str, n: int, directory: str, size: int, pool_size: int, work_ms: float, steps: int) -> dict:
    """Added wall time of a step that reads and commits a batch of rows, with and without prefetch."""
    options = {"offload_dir": directory} if offload == "disk" else {}
    rows = open_rows(n, 1, offload=offload, description=DESCRIPTION, **options)
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


# layout -------------------------------------------------------------------------------------------


def measure_layout(n: int, size: int, rounds: int) -> dict:
    """Compare one row of four float32 as a 16-byte element with one tensor per column, in memory that was written."""
    table = torch.ones(n, dtype=torch.complex128)
    columns = [torch.ones(n) for _ in range(4)]
    words, values = torch.randn(size, dtype=torch.complex128), torch.randn(size)
    spent: dict[str, list[float]] = {}
    for rows in batches(n, size, rounds, 4):
        for name, gather, scatter in (
            ("rows", lambda r=rows: table[r], lambda r=rows: table.index_copy_(0, r, words)),
            (
                "columns",
                lambda r=rows: [c.index_select(0, r) for c in columns],
                lambda r=rows: [c.index_copy_(0, r, values) for c in columns],
            ),
        ):
            if name == "rows":
                gather = lambda r=rows: table.index_select(0, r)  # noqa: E731
            # fresh rows for each side: neither finds in the cache what the other brought there
            spent.setdefault(f"{name}, gather", []).append(timed(gather))
            spent.setdefault(f"{name}, scatter", []).append(timed(scatter))
            spent.setdefault(f"{name}, both", []).append(spent[f"{name}, gather"][-1] + spent[f"{name}, scatter"][-1])
    ratio = [c / r for c, r in zip(spent["columns, both"], spent["rows, both"], strict=True)]
    return {"n": n, "seconds": {k: quartiles(v) for k, v in spent.items()}, "columns to rows": quartiles(ratio)}


# running ------------------------------------------------------------------------------------------


def in_a_process(args: argparse.Namespace, kind: str, offload: str, n: int) -> dict:
    """Measure in a process of its own; its files are removed whatever happens."""
    print(f"{kind}: {offload}, n = {n:,} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="rows-", dir=args.dir) as directory:
        options = {"batch": args.batch, "pool": args.pool, "work": args.work, "step": args.step, "steps": args.steps}
        command = [
            sys.executable,
            "-m",
            "benchmarks.rows",
            "--one",
            kind,
            offload,
            str(n),
            directory,
            "--threads",
            str(args.threads),
        ]
        command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout)


def measure_one(args: argparse.Namespace) -> dict:
    kind, offload, number, directory = args.one
    n = int(number)
    if kind == "table":
        return measure_table(offload, n, directory, args.batch, args.pool, args.work)
    if kind == "step":
        return measure_step(offload, n, directory, args.batch, args.pool, args.step, args.steps)
    if kind == "training":
        return step_overhead(n, offload, directory, steps=args.steps)
    return measure_layout(n, args.batch, args.pool)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="where table files are put (default: the system's place)")
    parser.add_argument("--batch", type=int, default=5120, help="rows per gather and commit")
    parser.add_argument("--pool", type=int, default=200, help="batches that are visited again and again when warm")
    parser.add_argument("--work", type=float, default=4.0, help="ms of work between the calls of the training thread")
    parser.add_argument("--step", type=float, default=20.0, help="ms of work of a step")
    parser.add_argument("--steps", type=int, default=5, help="steps of a contender in one round")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; the reader and writer need a core too")
    parser.add_argument("--quick", action="store_true", help="small tables, printed only")
    parser.add_argument("--steps-only", action="store_true", help="only what a step pays, printed only")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(measure_one(args)))
        return
    if args.quick:
        args.pool = 30
    chosen = QUICK if args.quick else TABLES
    env, results = environment(), {"tables": [], "steps": [], "training": [], "layouts": []}
    largest = [chosen[-1]] if args.quick else [("cpu", 2 * 10**8), ("disk", 10**9)]
    results["steps"] = [in_a_process(args, "step", *one) for one in largest]
    results["training"] = [in_a_process(args, "training", *one) for one in largest]
    if args.steps_only:
        print("\n\n".join(step_table(r) for r in (results["steps"], results["training"]) if r))
        return
    results["tables"] = [in_a_process(args, "table", *one) for one in chosen]
    results["layouts"] = [in_a_process(args, "layout", "none", n) for n in (LAYOUTS[:2] if args.quick else LAYOUTS)]
    text = report(env, args, results)
    print(text)
    if not args.quick:
        save("rows", text, env, results)


if __name__ == "__main__":
    main()
