"""Tables larger than memory: what an estimator of 5e9 rows on disk takes, and what each rank takes of a sharded one.

    python -m benchmarks.limits            # writes benchmarks/results/limits.md
    python -m benchmarks.limits --quick    # 1e7 rows, printed only

Every row of the tables is a process of its own. *Asked for* is the growth of its anonymous memory, written or only
reserved (VmData), from before the construction to after two calls, commits, a read, a prefetch and a grown table.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import compopt
from benchmarks.machine import status
from benchmarks.saved import save
from recipes.report import environment, heading, table

MIB, DIM, BATCH = 2**20, 64, 256
BUILD: dict[str, Callable[..., compopt.ContrastiveEstimator]] = {
    "SogCLREstimator": lambda n, **o: compopt.SogCLREstimator(n, **o),
    "ISogCLREstimator": lambda n, **o: compopt.ISogCLREstimator(n, rho=1.0, **o),
    "FastCLIPEstimator v2": lambda n, **o: compopt.FastCLIPEstimator(n, version="v2", rho=1.0, **o),
    "ResidualEstimator": lambda n, **o: compopt.ResidualEstimator(DIM, n, **o),
    "EMC2Estimator": lambda n, **o: compopt.EMC2Estimator(n, **o),
}
HEAD = ["rows", "bytes of the table, GiB", "asked for, MiB", "written, MiB", "file on disk, MiB", "construction, s"]
HEAD += ["first call, ms"]


def measure(rank: int, ranks: int, port: int, case: dict[str, Any], folder: str, result: Any) -> None:
    """Measure one rank of one case."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    options = {"offload": "disk", "offload_dir": f"{folder}/rows"} if case["offload"] else {}
    options |= {"shard": True} if ranks > 1 else {}
    warm = {**options, "offload_dir": f"{folder}/warm"} if case["offload"] else options
    _work(BUILD[case["name"]](1000, **warm), 1000, rank)  # threads, pages of the allocator
    reserved, anonymous = status("VmData"), status("RssAnon")
    start = time.perf_counter()
    est = BUILD[case["name"]](case["n"], **options)
    built = time.perf_counter() - start
    first = _work(est, case["n"], rank)
    files = [path.stat().st_blocks * 512 for path in Path(folder).glob("rows/*")]
    own = {"asked": status("VmData") - reserved, "written": status("RssAnon") - anonymous}
    if rank == 0:
        words = est._engine.table.layout.row_bytes
        result.update(own, row_bytes=words, built=built, first=first, file=sum(files))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _work(est: compopt.ContrastiveEstimator, n: int, rank: int) -> float:
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


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run all ranks of one case, each in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        result = manager.dict()
        mp.spawn(measure, args=(case["ranks"], port, case, folder, result), nprocs=case["ranks"])
        return {**case, **result}


def line(one: dict[str, Any]) -> list[str]:
    """A row of the table."""
    where = "on disk" if one["offload"] else f"in memory, {one['ranks']} rank{'s' * (one['ranks'] > 1)}"
    size = f"{one['n'] * one['row_bytes'] / 2**30:.1f}"
    memory = [f"{one[key] / MIB:,.0f}" for key in ("asked", "written")]
    file = f"{one['file'] / MIB:.1f}" if one["offload"] else "-"
    name = f"{one['name']}, n = {one['n']:.0e} {where}".replace("e+0", "e").replace("e+", "e")
    return [name, size, *memory, file, f"{one['built']:.3f}", f"{1000 * one['first']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tables, printed only")
    quick = parser.parse_args().quick
    large, sharded = (10**7, 10**6) if quick else (5 * 10**9, 2 * 10**8)
    cases = [{"name": name, "n": large, "offload": True, "ranks": 1} for name in BUILD]
    cases += [{"name": "SogCLREstimator", "n": sharded, "offload": False, "ranks": ranks} for ranks in (1, 2, 4)]
    env, results = environment(), [run(case) for case in cases]
    about = (__doc__ or "").split("\n\n")[-1].strip()
    note = "With several ranks, of rank 0. In memory, untouched pages are reserved and not written."
    grown = "A grown table in memory is copied: both are reserved for a moment."
    text = "\n".join(
        [
            *heading("Tables larger than memory", env),
            f"{about} {note} {grown}",
            "",
            table(HEAD, list(map(line, results))),
        ]
    )
    print(text)
    if not quick:
        save("limits", text, env, results)


if __name__ == "__main__":
    main()
