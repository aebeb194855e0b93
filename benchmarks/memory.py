"""Memory: what tables cost each rank, sharded and not, what saving one adds, and tables larger than memory.

    python -m benchmarks.memory                     # writes benchmarks/results/memory.md
    python -m benchmarks.memory --part limits       # estimators of 5e9 rows on disk: benchmarks/results/limits.md
    python -m benchmarks.memory --quick             # small tables, printed only

Every rank is a process. Rows of the first part are all written before anything is read off, so that no page is merely
promised.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import compopt
from benchmarks.machine import MIB, Peak, on_ranks, resident, status
from benchmarks.report import environment, finish, table

RANKS, DIM, BATCH = 4, 64, 256
TABLES = """Each row is SogCLR's, both directions: 16 bytes. *Rows* is n x 16 bytes. *Anonymous* is what the process has
more than before it built the table, after every row was written; pages of a file can be dropped by the kernel and are
counted apart. *Saving adds* is the highest anonymous memory during `compopt.save`, sampled every 2 ms in a thread,
beyond that before it. With several ranks, the largest of the ranks."""
LIMITS = """Every line is a process of its own, with several ranks that of rank 0. *Asked for* is the growth of its
anonymous memory, written or only reserved (VmData), from before the construction to after two calls, commits, a read, a
prefetch and a grown table. In memory, untouched pages are reserved and not written; a grown table is copied, so that
both are reserved for a moment."""
BUILD: dict[str, Callable[..., compopt.ContrastiveEstimator]] = {
    "SogCLREstimator": lambda n, **o: compopt.SogCLREstimator(n, **o),
    "ISogCLREstimator": lambda n, **o: compopt.ISogCLREstimator(n, rho=1.0, **o),
    "FastCLIPEstimator v2": lambda n, **o: compopt.FastCLIPEstimator(n, version="v2", rho=1.0, **o),
    "ResidualEstimator": lambda n, **o: compopt.ResidualEstimator(DIM, n, **o),
    "EMC2Estimator": lambda n, **o: compopt.EMC2Estimator(n, **o),
}


def fill(est: compopt.SogCLREstimator) -> None:
    """Write every row of this process, as training would have in the end."""
    store = est._engine.table.store  # the public interface writes what was visited, batch by batch
    for start in range(0, store.n, 1 << 20):
        stop = min(start + (1 << 20), store.n)
        store.write_block(start, torch.randn(stop - start, 2, dtype=torch.float64).view(torch.complex128))
    ctypes.CDLL(None).malloc_trim(0)  # what only the filling needed is not the table's


def placed(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Arguments that place an estimator's rows."""
    place = {"offload": case["offload"], "shard": case["shard"]}
    return place | ({"offload_dir": folder} if case["offload"] == "disk" else {})


def measure_table(rank: int, ranks: int, case: dict[str, Any], folder: str) -> dict[str, float]:
    """Bytes of one rank's table and of saving it, and seconds of the save."""
    compopt.save(compopt.SogCLREstimator(1000), f"{folder}/warm{rank}" if ranks == 1 else f"{folder}/warm")
    before = resident()
    est = compopt.SogCLREstimator(case["n"], **placed(case, f"{folder}/rows"))
    fill(est)
    after = resident()
    with Peak() as peak:
        begun = time.perf_counter()
        compopt.save(est, f"{folder}/checkpoints", keep=1)
        seconds = time.perf_counter() - begun
    grown = {key: after[key] - before[key] for key in before}
    return {**grown, "saving": peak.most - after["RssAnon"], "seconds": seconds}


def measure_limit(rank: int, ranks: int, case: dict[str, Any], folder: str) -> dict[str, float]:
    """Bytes that an estimator asks for and writes, and its seconds."""
    _use(BUILD[case["name"]](1000, **placed(case, f"{folder}/warm")), 1000, rank)  # threads, pages of the allocator
    reserved, anonymous = status("VmData"), status("RssAnon")
    begun = time.perf_counter()
    est = BUILD[case["name"]](case["n"], **placed(case, f"{folder}/rows"))
    built = time.perf_counter() - begun
    first = _use(est, case["n"], rank)
    file = sum(path.stat().st_blocks * 512 for path in Path(folder).glob("rows/*"))
    columns = BUILD[case["name"]](2).state_dict()["rows"].values()
    row_bytes = sum(column[0].numel() * column.element_size() for column in columns)
    own = {"asked": status("VmData") - reserved, "written": status("RssAnon") - anonymous}
    return {**own, "row_bytes": row_bytes, "built": built, "first": first, "file": file}


def _use(est: compopt.ContrastiveEstimator, n: int, rank: int) -> float:
    """Make two calls and what else a run does; seconds of the first call and commit."""
    generator = torch.Generator().manual_seed(rank)
    seconds = []
    for _ in range(2):
        index = torch.randint(0, n, (BATCH,), generator=generator)
        z1, z2 = torch.randn(2, BATCH, DIM, generator=generator).requires_grad_().unbind()
        est.prefetch(index)
        start = time.perf_counter()
        est(z1, z2, index).backward()
        est.step()
        seconds.append(time.perf_counter() - start)
    est.read(index)
    est.add_sample_group({"n": 1000})
    return seconds[0]


def run(measure: Callable[..., dict[str, float]], case: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Carry out a case in processes of its own; the largest value of the ranks, or that of rank 0."""
    print(", ".join(f"{key}={value}" for key, value in case.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="memory-", dir=folder) as place:
        found = on_ranks(case["ranks"], measure, case, place)
    largest = {key: max(one[key] for one in found) for key in found[0]}
    return {**case, **(largest if measure is measure_table else found[0])}


def tables(quick: bool, folder: str | None) -> tuple[str, list[dict[str, Any]]]:
    """Every placement on four ranks, sharded and not; one rank with the largest table that memory holds."""
    n, large = (10**6, 4 * 10**6) if quick else (2 * 10**7, 2 * 10**8)
    cases = [
        {"ranks": RANKS, "n": n, "offload": offload, "shard": shard}
        for offload in (None, "cpu", "disk")
        for shard in ((False, True) if offload != "disk" else (True,))
    ]
    cases += [{"ranks": 1, "n": large, "offload": offload, "shard": False} for offload in ("cpu", "disk")]
    results = [run(measure_table, case, folder) for case in cases]
    head = ["placement", "ranks", "n", "rows, MiB", "anonymous, MiB", "of a file, MiB", "saving adds, MiB", "seconds"]
    body = []
    for r in results:
        place = f"{r['offload'] or 'beside the features'}{', shard=True' if r['shard'] else ''}"
        sizes = [f"{size / MIB:,.0f}" for size in (r["n"] * 16, r["RssAnon"], r["RssFile"], r["saving"])]
        body.append([place, str(r["ranks"]), f"{r['n']:,}", *sizes, f"{r['seconds']:.1f}"])
    return table(head, body), results


def limits(quick: bool, folder: str | None) -> tuple[str, list[dict[str, Any]]]:
    """Estimators of 5e9 rows on disk, and SogCLR in memory on one, two and four ranks."""
    large, sharded = (10**7, 10**6) if quick else (5 * 10**9, 2 * 10**8)
    cases: list[dict[str, Any]] = [
        {"name": name, "n": large, "offload": "disk", "shard": False, "ranks": 1} for name in BUILD
    ]
    cases += [
        {"name": "SogCLREstimator", "n": sharded, "offload": None, "shard": ranks > 1, "ranks": ranks}
        for ranks in (1, 2, 4)
    ]
    results = [run(measure_limit, case, folder) for case in cases]
    head = ["rows", "bytes of the table, GiB", "asked for, MiB", "written, MiB", "file on disk, MiB"]
    body = []
    for r in results:
        where = "on disk" if r["offload"] else f"in memory, ranks: {r['ranks']}"
        size, file = r["n"] * r["row_bytes"] / 2**30, f"{r['file'] / MIB:.1f}" if r["offload"] else "-"
        cells = [f"{r['name']}, n = {r['n']:,} {where}", f"{size:.1f}", f"{r['asked'] / MIB:,.0f}"]
        body.append([*cells, f"{r['written'] / MIB:,.0f}", file, f"{r['built']:.3f}", f"{1000 * r['first']:.1f}"])
    return table([*head, "construction, s", "first call, ms"], body), results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("memory", "limits"), default="memory")
    parser.add_argument("--dir", default=None, help="where files are put (default: the system's place)")
    parser.add_argument("--quick", action="store_true", help="small tables, printed only")
    args = parser.parse_args()
    env, measure = environment(), tables if args.part == "memory" else limits
    page, results = measure(args.quick, args.dir)
    title = "Memory of tables and of saving them, per rank" if args.part == "memory" else "Tables larger than memory"
    about = TABLES if args.part == "memory" else LIMITS
    finish(args.part, title, env, [about, page], results, args.quick)


if __name__ == "__main__":
    main()
