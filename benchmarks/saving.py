"""How long training waits for a save, with ``blocking=True`` and ``False``, and what a commit takes meanwhile.

    python -m benchmarks.saving --n 20000000

Every row is written by every save. Between two commits there is a step of a small model, so that commits come about as
often as in training. Times are medians of the saves; of commits the median and the 99th percentile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import compopt
from benchmarks.saved import save
from recipes.report import environment, heading, table

ABOUT = """SogCLR with n = {n:,}, batches of {batch} random rows; every save writes all rows. Medians of {saves} saves;
of commits median and 99th percentile, without a save and beside one."""
BATCH, DIM = 1024, 64
COLUMNS = [
    "rows on",
    "save() blocking",
    "save() beside",
    "until it is complete",
    "a commit",
    "99 %",
    "beside a save",
    "99 %",
]


def filled(n: int, offload: str | None, folder: Path) -> compopt.SogCLREstimator:
    """An estimator all of whose rows were visited."""
    options = {"offload_dir": folder / "rows"} if offload == "disk" else {}
    est = compopt.SogCLREstimator(n, gamma=0.9, offload=offload, **options)
    store = est._table.store
    for start in range(0, n, 1 << 20):
        stop = min(start + (1 << 20), n)
        store.write_block(
            start, torch.complex(torch.rand(stop - start, 1).double(), torch.ones(stop - start, 1).double())
        )
    return est


def commit(est: compopt.SogCLREstimator, seed: int) -> float:
    """Seconds of one commit, of random rows."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(BATCH, DIM, generator=generator).requires_grad_() for _ in range(2))
    est(x, y, torch.randint(est.n, (BATCH,), generator=generator)).backward()
    start = time.perf_counter()
    est.step()
    return time.perf_counter() - start


def percentiles(seconds: list[float]) -> list[str]:
    """Median and 99th percentile in milliseconds."""
    return [f"{1e3 * torch.tensor(seconds).quantile(q).item():.2f} ms" for q in (0.5, 0.99)]


def median(seconds: list[float]) -> str:
    return f"{1e3 * sorted(seconds)[len(seconds) // 2]:.0f} ms"


def measure(n: int, offload: str | None, saves: int, folder: Path) -> list[str]:
    """One line of the table."""
    est = filled(n, offload, folder)
    waits, calls, completions, alone, beside = [], [], [], [], []
    for number in range(saves):
        alone += [commit(est, seed) for seed in range(100)]
        start = time.perf_counter()
        compopt.save(est, folder / "c", keep=1, incremental=False)
        waits.append(time.perf_counter() - start)
        start = time.perf_counter()
        handle = compopt.save(est, folder / "c", keep=1, incremental=False, blocking=False)
        calls.append(time.perf_counter() - start)
        seed = 1000 * (number + 1)
        while not handle.done:
            beside.append(commit(est, seed := seed + 1))
        completions.append(time.perf_counter() - start)
        handle.wait()
    times = [median(waits), median(calls), median(completions)]
    return [offload or "device", *times, *percentiles(alone[10:]), *percentiles(beside), str(len(beside))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=20_000_000)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--offload", nargs="+", default=["none", "cpu", "disk"], choices=["none", "cpu", "disk"])
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = environment()
    lines = []
    for offload in args.offload:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            lines.append(measure(args.n, None if offload == "none" else offload, args.saves, Path(folder)))
    head = [*COLUMNS, "commits beside"]
    what = ABOUT.format(n=args.n, batch=BATCH, saves=args.saves)
    text = "\n".join([*heading("Saves and training", env), what, "", table(head, lines)])
    print(text)
    if not args.no_save:
        save("saving", text, env, [dict(zip(head, line, strict=True)) for line in lines])


if __name__ == "__main__":
    main()
