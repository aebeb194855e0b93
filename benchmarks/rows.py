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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import resident, timed
from benchmarks.rows_report import COLD_BATCHES, report, step_table
from benchmarks.rows_steps import CPU, Work, batches, measure_step, step_overhead
from benchmarks.saved import ROOT, save
from compopt.stores import DiskStore, RowStore, WriteBehind, open_rows
from recipes.report import environment, quartiles

TABLES = [("cpu", 10**5), ("cpu", 10**7), ("cpu", 2 * 10**8), ("disk", 10**5), ("disk", 10**7), ("disk", 10**9)]
QUICK = [("cpu", 10**5), ("disk", 10**7)]
LAYOUTS = [10**5, 10**7, 2 * 10**8]


# one table ----------------------------------------------------------------------------------------


def measure_table(offload: str, n: int, directory: str, size: int, pool_size: int, work_ms: float) -> dict:
    before = resident()
    opened = time.perf_counter()
    options = {"offload_dir": directory} if offload == "disk" else {}
    rows = open_rows(n, 1, offload=offload, **options)
    result: dict = {"offload": offload, "n": n, "create": time.perf_counter() - opened, "seconds": {}}
    assert isinstance(rows, WriteBehind)
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
        store = DiskStore(directory, "rows", n, 1)
        store.stale = False  # the rows are ours
        store._map(n), store._own()
        store._holes = 0
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
    rows: WriteBehind, pool: list[Tensor], block: Tensor, work: Work, prefetching: bool, label: str
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
