"""Measure the memory of a table on each rank, sharded and not, and the memory that saving a large table adds.

    python -m benchmarks.memory                     # writes benchmarks/results/memory.md
    python -m benchmarks.memory --quick             # small tables, printed only

Every rank is a process. All rows are written before the measurement, so that all memory pages are allocated.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from typing import Any

import torch

import compopt
from benchmarks.machine import MIB, Peak, on_ranks, resident
from benchmarks.report import environment, finish, table

RANKS = 4
ABOUT = """A row of SogCLR has 16 bytes for both directions. *Rows* is n x 16 bytes. *Anonymous* is the anonymous memory
of the process after every row was written, minus that before the table was built. Pages of a file are counted
separately, because the kernel can drop them. *Saving adds* is the highest anonymous memory during `compopt.save`,
sampled every 2 ms in a thread, minus that before the save. With several ranks, each value is the largest over the
ranks."""


def fill(est: compopt.SogCLREstimator) -> None:
    """Write every row of this process, as after long training."""
    store = est._engine.table.store  # the public interface writes only visited rows, by batch
    for start in range(0, store.n, 1 << 20):
        stop = min(start + (1 << 20), store.n)
        block = torch.randn(stop - start, 2, dtype=torch.float64).view(torch.int64)
        store.scatter(torch.arange(start, stop), block)
    ctypes.CDLL(None).malloc_trim(0)  # release memory that only the filling needed


def placed(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the arguments that place an estimator's rows."""
    place = {"offload": case["offload"], "shard": case["shard"]}
    return place | ({"offload_dir": folder} if case["offload"] == "disk" else {})


def measure_rank(rank: int, ranks: int, case: dict[str, Any], folder: str) -> dict[str, float]:
    """Measure the bytes of one rank's table and of saving it, and the seconds of the save."""
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


def measure(case: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Measure a case in separate processes and return the largest values over the ranks."""
    print(", ".join(f"{key}={value}" for key, value in case.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="memory-", dir=folder) as place:
        found = on_ranks(case["ranks"], measure_rank, case, place)
    return {**case, **{key: max(one[key] for one in found) for key in found[0]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="working directory (default: the system's temporary directory)")
    parser.add_argument("--quick", action="store_true", help="use small tables and write no files")
    args = parser.parse_args()
    env, (n, large) = environment(), (10**6, 4 * 10**6) if args.quick else (2 * 10**7, 2 * 10**8)
    cases = [
        {"ranks": RANKS, "n": n, "offload": offload, "shard": shard}
        for offload in (None, "cpu", "disk")
        for shard in ((False, True) if offload != "disk" else (True,))
    ]
    cases += [{"ranks": 1, "n": large, "offload": offload, "shard": False} for offload in ("cpu", "disk")]
    results = [measure(case, args.dir) for case in cases]
    head = ["placement", "ranks", "n", "rows, MiB", "anonymous, MiB", "of a file, MiB", "saving adds, MiB", "seconds"]
    body = []
    for r in results:
        place = f"{r['offload'] or 'device'}{', shard=True' if r['shard'] else ''}"
        sizes = [f"{size / MIB:,.0f}" for size in (r["n"] * 16, r["RssAnon"], r["RssFile"], r["saving"])]
        body.append([place, str(r["ranks"]), f"{r['n']:,}", *sizes, f"{r['seconds']:.1f}"])
    title = "Memory of tables and of saving them, per rank"
    finish("memory", title, env, [ABOUT, table(head, body)], results, args.quick)


if __name__ == "__main__":
    main()
