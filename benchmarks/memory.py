"""Memory: what a table costs each rank, sharded and not, and what saving a large one adds.

    python -m benchmarks.memory                     # writes benchmarks/results/memory.md
    python -m benchmarks.memory --quick             # small tables, printed only

Every rank is a process. Rows are all written before anything is read off, so that no page is merely promised.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import socket
import sys
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import compopt
from benchmarks.machine import resident, status
from benchmarks.saved import save
from recipes.report import environment, heading, table

MIB = 2**20
RANKS = 4
ABOUT = """Each row is SogCLR's, both directions: 16 bytes. *Rows* is n x 16 bytes. *Anonymous* is what the process has
more than before it built the table, after every row was written; pages of a file can be dropped by the kernel and are
counted apart. *Saving adds* is the highest anonymous memory during `compopt.save`, sampled every 2 ms in a thread,
beyond that before it. With several ranks, the largest of the ranks."""


class Peak(threading.Thread):
    """The most anonymous memory that this process has while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._ended = status("RssAnon"), threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, status("RssAnon"))

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self.join()


def fill(est: compopt.SogCLREstimator) -> None:
    """Write every row of this process, as training would have in the end."""
    store = est._engine.table.store
    for start in range(0, store.n, 1 << 20):
        stop = min(start + (1 << 20), store.n)
        store.write_block(start, torch.randn(stop - start, 2, dtype=torch.float64).view(torch.complex128))
    ctypes.CDLL(None).malloc_trim(0)  # what only the filling needed is not the table's


def measure(rank: int, ranks: int, port: int, case: dict, folder: str, result: Any) -> None:
    """Measure one rank of one case."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    options = {"offload": case["offload"], "shard": case["shard"]}
    if case["offload"] == "disk":
        options["offload_dir"] = f"{folder}/rows"
    warm = compopt.SogCLREstimator(1000)  # modules, threads, the allocator's first pages
    compopt.save(warm, f"{folder}/warm")
    before = resident()
    est = compopt.SogCLREstimator(case["n"], **options)
    fill(est)
    after = resident()
    with Peak() as peak:
        begun = time.perf_counter()
        compopt.save(est, f"{folder}/checkpoints", keep=1)
        seconds = time.perf_counter() - begun
    result[rank] = {key: after[key] - before[key] for key in before} | {
        "saving": peak.most - after["RssAnon"],
        "seconds": seconds,
    }
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(case: dict, folder: str | None) -> dict:
    """Run a case in processes of its own; its files are removed."""
    print(", ".join(f"{key}={value}" for key, value in case.items()), file=sys.stderr, flush=True)
    ranks, context = case["ranks"], mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = tempfile.mkdtemp(prefix="memory-", dir=folder)
    with context.Manager() as manager:
        result = manager.dict()
        try:
            mp.start_processes(measure, (ranks, port, case, place, result), nprocs=ranks, start_method="spawn")
            most = {key: max(one[key] for one in result.values()) for key in result[0]}
        finally:
            shutil.rmtree(place)
    return {**case, **most}


def cases(quick: bool) -> list[dict]:
    """Every placement on four ranks, sharded and not; one rank with the largest table that memory holds."""
    n, large = (10**6, 4 * 10**6) if quick else (2 * 10**7, 2 * 10**8)
    several = [
        {"ranks": RANKS, "n": n, "offload": offload, "shard": shard}
        for offload in (None, "cpu", "disk")
        for shard in ((False, True) if offload != "disk" else (True,))
    ]
    single = [{"ranks": 1, "n": large, "offload": offload, "shard": False} for offload in ("cpu", "disk")]
    return several + single


def report(env: dict, results: list[dict]) -> str:
    head = ["placement", "ranks", "n", "rows, MiB", "anonymous, MiB", "of a file, MiB", "saving adds, MiB", "seconds"]
    body = [
        [
            f"{r['offload'] or 'beside the features'}{', shard=True' if r['shard'] else ''}",
            str(r["ranks"]),
            f"{r['n']:,}",
            f"{r['n'] * 16 / MIB:,.0f}",
            *(f"{r[key] / MIB:,.0f}" for key in ("RssAnon", "RssFile", "saving")),
            f"{r['seconds']:.1f}",
        ]
        for r in results
    ]
    return "\n".join([*heading("Memory of tables and of saving them, per rank", env), ABOUT, "", table(head, body)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="where files are put (default: the system's place)")
    parser.add_argument("--quick", action="store_true", help="small tables, printed only")
    args = parser.parse_args()
    env = environment()
    results = [run(case, args.dir) for case in cases(args.quick)]
    text = report(env, results)
    print(text)
    if not args.quick:
        save("memory", text, env, results)


if __name__ == "__main__":
    main()
