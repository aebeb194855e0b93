"""Measure the time that training waits for a save, its bytes and memory, and the time of commits during a save.

    python -m benchmarks.saving --n 20000000
    python -m benchmarks.saving --n 200000000 --saves 1 --name saving_large     # some 30 GB of disk, ten minutes
    python -m benchmarks.saving --visits 64 200000 --n 10000000 100000000 1000000000 2000000000 --offload cpu disk \\
        --name saving_sparse    # 3 GB of disk, ten minutes

Two kinds of saves of all rows alternate: blocking, and with ``blocking=False`` during training. A forward and backward
pass of the loss precedes each commit, so that commits are about as frequent as in training.

With ``--visits``, only a few random rows of large tables are visited, and passes over the whole table are measured.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch

import compopt
from benchmarks.machine import MIB, Peak
from benchmarks.report import environment, finish, table

ABOUT = """SogCLR with n = {n:,} and batches of {batch} rows. Every save writes all rows ({size:,.0f} MiB); times are
medians over the saves ({saves} of each kind). *Blocking*: `compopt.save` with `blocking=True`. *Background*: time of
the call with `blocking=False`, and time until the save is complete. *Memory*: highest anonymous memory during a save,
sampled every 2 ms, minus that before it, the largest of the saves; during a background save it includes memory of the
training. Times of commits are the median and the 99th percentile, without a save and during one."""
SPARSE = """SogCLR with `reference="positive"`; random rows of the table were visited, the worst case, and the table was
synced. *Pages*: number of pages of 4 KiB with a visited row. *Checkpoint*: its size. Seconds and CPU seconds, medians
of three: of `compopt.save`; of `compopt.save(blocking=False)` until it is complete; of `compopt.load` into a new
estimator in memory (up to 1e8 rows); of `state_dict()` and `curation.scores`, whose results have an entry per row of
the table (if they fit). *Memory*: anonymous memory that the saves add, the largest. On the host, a visited row uses a
page of 2 MiB; cases that do not fit are left out."""
BATCH, DIM, VISITS = 1024, 64, 1000
ROW = 16  # bytes: both directions of log u and their numbers of visits
HEAD = [
    "rows on",
    "blocking",
    "memory, MiB",
    "background",
    "until complete",
    "memory, MiB",
    "commit",
    "99 %",
    "during a save",
    "99 %",
    "commits during saves",
]
SPARSE_HEAD = [
    *("rows on", "n", "visited", "pages", "checkpoint, MiB"),
    *("save, s", "CPU, s", "background, s", "CPU, s", "memory, MiB", "load, s", "state_dict, CPU s", "scores, CPU s"),
]


def fill(est: compopt.SogCLREstimator) -> None:
    """Write every row of this process, as after long training."""
    store = est._engine.table.store  # the public interface writes only visited rows, by batch
    for start in range(0, store.n, 1 << 20):
        stop = min(start + (1 << 20), store.n)
        block = torch.randn(stop - start, 2, dtype=torch.float64).view(torch.int64)
        store.scatter(torch.arange(start, stop), block)
    ctypes.CDLL(None).malloc_trim(0)  # release memory that only the filling needed


def visit(est: compopt.SogCLREstimator, index: torch.Tensor, seed: int) -> float:
    """Visit some rows and return the seconds of the commit."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(len(index), DIM, generator=generator).requires_grad_() for _ in range(2))
    est(x, y, index).backward()
    start = time.perf_counter()
    est.step()
    return time.perf_counter() - start


def commit(est: compopt.SogCLREstimator, seed: int, rows: int) -> float:
    """Visit random rows among the first ``rows`` and return the seconds of the commit."""
    return visit(est, torch.randint(rows, (BATCH,), generator=torch.Generator().manual_seed(seed)), seed)


class Blocking:
    """Seconds and memory of a blocking save."""

    def __init__(self, est: compopt.SogCLREstimator, folder: Path) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        with Peak() as peak:
            before, start = peak.most, time.perf_counter()
            compopt.save(est, folder, keep=2)
            self.seconds = time.perf_counter() - start
        self.memory = peak.most - before


class Beside:
    """Seconds and memory of a background save, and the seconds of the commits during it."""

    def __init__(self, est: compopt.SogCLREstimator, folder: Path, seed: int) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        with Peak() as peak:
            before, start = peak.most, time.perf_counter()
            handle = compopt.save(est, folder, keep=2, blocking=False)
            self.seconds = time.perf_counter() - start
            self.commits = []
            while not handle.done:
                self.commits.append(commit(est, seed + len(self.commits), est.n))
            self.complete = time.perf_counter() - start
            handle.wait()
        self.memory = peak.most - before


def costs(action: Callable[[], object]) -> tuple[float, float]:
    """Return the medians of wall and CPU seconds of three calls."""
    walls, cpus = [], []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return median(walls), median(cpus)


def sparse(n: int, visits: int, offload: str, folder: Path) -> list[str] | None:
    """Return one line of the result for a large table of which few rows are visited; ``None`` if it does not fit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if offload == "cpu" and (ROW * n > 0.9 * memory or min(ROW * n, 2 * visits * MIB) > memory / 2):
        return None
    options = {"offload_dir": folder / "rows"} if offload == "disk" else {}
    est = compopt.SogCLREstimator(n, gamma=0.9, reference="positive", offload=offload, **options)
    rows = torch.randint(n, (2 * visits,), generator=torch.Generator().manual_seed(0)).unique()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[:visits]]
    for seed, index in enumerate(rows.split(BATCH)):
        visit(est, index, seed)
    path = compopt.save(est, folder / "c", keep=1)  # waits for pending commits
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    os.sync()
    with Peak() as peak:
        before = peak.most
        direct = costs(lambda: compopt.save(est, folder / "c", keep=1))
        beside = costs(lambda: compopt.save(est, folder / "c", keep=1, blocking=False).wait())
    load = state = scores = "-"
    if n <= 10**8:
        load = f"{costs(lambda: compopt.load(compopt.SogCLREstimator(n, reference='positive'), folder / 'c'))[0]:.2f}"
        scores = f"{costs(lambda: compopt.curation.scores(est))[1]:.2f}"
    if ROW * n < memory / 3:
        state = f"{costs(est.state_dict)[1]:.2f}"
    return [
        *(offload, f"{n:.0e}".replace("+0", ""), f"{visits:,}", f"{len((rows // 256).unique()):,}"),
        *(f"{size / MIB:,.1f}", *(f"{value:.2f}" for value in (*direct, *beside))),
        *(f"{(peak.most - before) / MIB:.0f}", load, state, scores),
    ]


def percentiles(seconds: list[float]) -> list[str]:
    """Return the median and the 99th percentile in milliseconds."""
    return [f"{1e3 * torch.tensor(seconds).quantile(q).item():.2f} ms" for q in (0.5, 0.99)]


def told(saves: list[Blocking] | list[Beside]) -> tuple[str, str]:
    """Return the median time and the largest memory of some saves."""
    return f"{1e3 * median(one.seconds for one in saves):.0f} ms", f"{max(one.memory for one in saves) / MIB:.0f}"


def measure(n: int, offload: str | None, saves: int, folder: Path) -> list[str]:
    """Return one line of the result."""
    options = {"offload_dir": folder / "rows"} if offload == "disk" else {}
    est = compopt.SogCLREstimator(n, gamma=0.9, offload=offload, **options)
    fill(est)
    every, beside, alone = [], [], []
    for number in range(saves):
        first = 1_000_000 * number
        every.append(Blocking(est, folder / "c"))
        alone += [commit(est, first + visit, n // 10) for visit in range(VISITS)]
        beside.append(Beside(est, folder / "c", first + VISITS))
    commits = [seconds for one in beside for seconds in one.commits]
    call, most = told(beside)
    complete = f"{1e3 * median(one.complete for one in beside):.0f} ms"
    return [
        *(offload or "device", *told(every)),
        *(call, complete, most, *percentiles(alone[10:]), *percentiles(commits), str(len(commits))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[20_000_000], help="several only with --visits")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--visits", type=int, nargs="+", default=[], help="numbers of visited rows of large tables")
    parser.add_argument("--offload", nargs="+", default=["none", "cpu", "disk"], choices=["none", "cpu", "disk"])
    parser.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    parser.add_argument("--name", default="saving", help="name of the result file")
    parser.add_argument("--no-save", action="store_true", help="print the results and write no files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env, lines = environment(), []
    folder = tempfile.TemporaryDirectory(dir=args.dir)  # removed at the end: minutes, if the disk discards blocks
    for number, (offload, n, visits) in enumerate(product(args.offload, args.n, args.visits or [0])):
        here = Path(folder.name, str(number))
        if visits:
            line = sparse(n, visits, offload, here)
        else:
            line = measure(n, None if offload == "none" else offload, args.saves, here)
        if line is not None:
            lines.append(line)
            print(*line, flush=True)
    about = SPARSE if args.visits else ABOUT.format(n=n, batch=BATCH, saves=args.saves, size=ROW * n / MIB)
    head = SPARSE_HEAD if args.visits else HEAD
    finish(args.name, "Saves during training", env, [about, table(head, lines)], lines, args.no_save)


if __name__ == "__main__":
    main()
