"""How long training waits for a save, what it writes and holds in memory, and what a commit takes meanwhile.

    python -m benchmarks.saving --n 20000000
    python -m benchmarks.saving --n 200000000 --saves 1 --name saving_large     # some 10 GB of disk, ten minutes
    python -m benchmarks.saving --visits 33000 10000 --n 1000000000 --name saving_sparse    # 6 GB of disk, minutes

Three saves in turn: of every row (``incremental=False``); of what changed since, after commits of rows of a tenth of
the table, as data read shard by shard visit them; and of every row with ``blocking=False``, beside training. Between
two commits there is a step of a small model, so that commits come about as often as in training.

With ``--visits FIRST MORE`` few rows of a large table on disk are visited, once in order and once uniformly: what the
first checkpoint takes, and what the next one adds.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from pathlib import Path

import torch

import compopt
from benchmarks.memory import MIB, Peak, fill
from benchmarks.saved import save
from compopt.checkpoint import manifest
from recipes.report import environment, heading, table

ABOUT = """SogCLR with n = {n:,}, batches of {batch} rows; medians of {saves} of each save. *Blocking*, *beside*: every
row is written ({size:,.0f} MiB). *Changed*: blocking, after {visits:,} commits of random rows of one tenth of the
table; *touched* are the pieces of 2^18 rows that these rows are in. Memory is the highest anonymous memory during the
save, sampled every 2 ms, beyond that before it; training has its own share of it beside a save. Of commits median and
99th percentile, without a save and beside one."""
SPARSE = """SogCLR with n = {n:,}, rows on disk; {first:,} samples are visited and saved, then {more:,} others too.
*In order*: neighbouring rows, as data read in the order of their shards visit them. *Uniformly*: random rows, as data
that are shuffled as a whole visit them; this is the worst case. Checkpoints have rows in chunks of 8,192 (128 KiB).
*Table*: what its file takes of the disk after both; *first*: size of the first checkpoint; *added*: files of the second
one that it does not share with the first; *chunks*: those that the visited rows are in; *s*: the save."""
BATCH, DIM, VISITS = 1024, 64, 1000
ROW = 16  # bytes: both directions of log u and their numbers of visits
HEAD = ["rows on", "blocking", "memory, MiB", "changed", "touched, MiB", "written, MiB", "memory, MiB"]
HEAD += ["beside", "until it is complete", "memory, MiB", "a commit", "99 %", "beside a save", "99 %", "commits beside"]


SPARSE_HEAD = ["visited", "table, MiB", "first, MiB", "chunks", "s", "added, MiB", "chunks", "s"]


def filled(n: int, offload: str | None, folder: Path) -> compopt.SogCLREstimator:
    """An estimator all of whose rows were visited."""
    options = {"offload_dir": folder / "rows"} if offload == "disk" else {}
    est = compopt.SogCLREstimator(n, gamma=0.9, offload=offload, **options)
    fill(est)
    return est


def batch(seed: int, rows: int) -> torch.Tensor:
    """Some of the first rows."""
    return torch.randint(rows, (BATCH,), generator=torch.Generator().manual_seed(seed))


def commit(est: compopt.SogCLREstimator, seed: int, rows: int) -> float:
    """Seconds of one commit, of random rows among the first."""
    return visit(est, batch(seed, rows), seed)


def visit(est: compopt.SogCLREstimator, index: torch.Tensor, seed: int) -> float:
    """Seconds of the commit of some rows."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(len(index), DIM, generator=generator).requires_grad_() for _ in range(2))
    est(x, y, index).backward()
    start = time.perf_counter()
    est.step()
    return time.perf_counter() - start


class Measured:
    """Seconds and memory of a blocking save."""

    def __init__(self, est: compopt.SogCLREstimator, folder: Path, incremental: bool) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        with Peak() as peak:
            before, start = peak.most, time.perf_counter()
            self.path = compopt.save(est, folder, keep=2, incremental=incremental)
            self.seconds = time.perf_counter() - start
        self.memory = peak.most - before

    def written(self) -> int:
        """Bytes that no earlier checkpoint shares."""
        return sum(file.stat().st_size for file in self.path.iterdir() if file.stat().st_nlink == 1)


class Beside:
    """Seconds and memory of a save that goes on beside commits."""

    def __init__(self, est: compopt.SogCLREstimator, folder: Path, seed: int) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        with Peak() as peak:
            before, start = peak.most, time.perf_counter()
            handle = compopt.save(est, folder, keep=2, incremental=False, blocking=False)
            self.call = time.perf_counter() - start
            self.commits = []
            while not handle.done:
                self.commits.append(commit(est, seed + len(self.commits), est.n))
            self.complete = time.perf_counter() - start
            handle.wait()
        self.memory = peak.most - before


def touched(est: compopt.SogCLREstimator, seeds: range, rows: int) -> int:
    """Bytes of the pieces that some batches' rows are in."""
    chunk = manifest.PIECE_ROWS
    visited = torch.cat([batch(seed, rows) for seed in seeds])
    return ROW * chunk * len((visited // chunk).unique())


def sparse(n: int, visits: list[int], uniform: bool, folder: Path) -> list[str]:
    """One line of the table of large tables of which few rows are visited."""
    est = compopt.SogCLREstimator(n, gamma=0.9, offload="disk", offload_dir=folder / "rows")
    number = sum(visits)
    rows = torch.arange(number)
    if uniform:
        rows = torch.randint(n, (2 * number,), generator=torch.Generator().manual_seed(0)).unique()
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[:number]]
    cells = []
    for part in rows.split(visits):
        for seed, index in enumerate(part.split(BATCH)):
            visit(est, index, seed)
        saved = Measured(est, folder / "c", incremental=True)
        size, chunk = saved.written(), manifest.CHUNK_ROWS
        cells += [f"{size / MIB:,.1f}", f"{len((part // chunk).unique()):,}", f"{saved.seconds:.1f}"]
    disk = sum(512 * file.stat().st_blocks for file in (folder / "rows").rglob("*") if file.is_file())
    return ["uniformly" if uniform else "in order", f"{disk / MIB:,.1f}", *cells]


def percentiles(seconds: list[float]) -> list[str]:
    """Median and 99th percentile in milliseconds."""
    return [f"{1e3 * torch.tensor(seconds).quantile(q).item():.2f} ms" for q in (0.5, 0.99)]


def median(seconds: list[float]) -> str:
    return f"{1e3 * sorted(seconds)[len(seconds) // 2]:.0f} ms"


def highest(sizes: list[int]) -> str:
    return f"{max(sizes) / MIB:.0f}"


def measure(n: int, offload: str | None, saves: int, folder: Path) -> list[str]:
    """One line of the table."""
    est, all_of, changed, beside, alone = filled(n, offload, folder), [], [], [], []
    for number in range(saves):
        first = 1_000_000 * number
        all_of.append(Measured(est, folder / "c", incremental=False))
        alone += [commit(est, first + visit, n // 10) for visit in range(VISITS)]
        changed.append(Measured(est, folder / "c", incremental=True))
        size, written = touched(est, range(first, first + VISITS), n // 10), changed[-1].written()
        beside.append(Beside(est, folder / "c", first + VISITS))
    commits = [seconds for one in beside for seconds in one.commits]
    return [
        offload or "device", median([one.seconds for one in all_of]), highest([one.memory for one in all_of]),
        median([one.seconds for one in changed]), f"{size / MIB:.0f}", f"{written / MIB:.0f}",
        highest([one.memory for one in changed]), median([one.call for one in beside]),
        median([one.complete for one in beside]), highest([one.memory for one in beside]),
        *percentiles(alone[10:]), *percentiles(commits), str(len(commits)),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=20_000_000)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument(
        "--visits", type=int, nargs=2, metavar=("FIRST", "MORE"), help="visit few rows of a large table"
    )
    parser.add_argument("--offload", nargs="+", default=["none", "cpu", "disk"], choices=["none", "cpu", "disk"])
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--name", default="saving", help="of the result file")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = environment()
    lines, head = [], SPARSE_HEAD if args.visits else HEAD
    for case in (False, True) if args.visits else args.offload:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            if args.visits:
                lines.append(sparse(args.n, args.visits, case, Path(folder)))
            else:
                lines.append(measure(args.n, None if case == "none" else case, args.saves, Path(folder)))
    if args.visits:
        what = SPARSE.format(n=args.n, first=args.visits[0], more=args.visits[1])
    else:
        what = ABOUT.format(n=args.n, batch=BATCH, saves=args.saves, size=ROW * args.n / MIB, visits=VISITS)
    text = "\n".join([*heading("Saves and training", env), what, "", table(head, lines)])
    print(text)
    if not args.no_save:
        save(args.name, text, env, [list(line) for line in lines])


if __name__ == "__main__":
    main()
