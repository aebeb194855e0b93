"""Study of many visits per row: gain of methods with state per sample over InfoNCE and DCL.

    python -m benchmarks.studies.visits tune   [--data digits ...] [--methods ...] [--minutes 60]  # at batch 8
    python -m benchmarks.studies.visits final  [--data ...] [--methods ...] [--batches ...] [--minutes 60]
    python -m benchmarks.studies.visits plan     # number of runs, and hours that remain
    python -m benchmarks.studies.visits report   # results/visits.md
    python -m benchmarks.studies.visits plot     # results/visits.png

``benchmarks.studies.visits.data`` describes the data sets; ``icons`` needs npm. Every epoch visits each row once, so
that the number of epochs is that of visits. Each length is a run of its own, with a cosine of its own length.

Learning rate, temperature, and gamma, rho, prototypes, length and decay where they exist are chosen one after another,
for each method and data set, at batch 8 with 20 epochs, by the mean recall of two seeds on other pairs than those of
the final runs. All batch sizes and lengths use them. ``docstrings`` and ``icons`` come last: they play no part in the
choice of defaults. Each finished run is a line of ``results/visits.jsonl`` and is not run again; all runs are made by
one process with one thread, and can be stopped at any moment.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.report import RESULTS, append_run
from benchmarks.studies.search import TUNE_SEED, Arm, Job, Results, Search, stamp
from benchmarks.studies.visits.data import DATA, SIZES, load
from benchmarks.studies.visits.training import METHODS, train

BATCHES, VISITS, SEEDS = (8, 16, 4, 64), (20, 40, 80, 10, 5), (0, 1, 2, 3, 4)  # in the order of the runs
TUNED_AT, TUNE_SEEDS = (8, 20), (TUNE_SEED, TUNE_SEED + 1)
HELD_OUT = ("docstrings", "icons")  # no default is chosen with these data sets
GRIDS: dict[str, tuple[float, ...]] = {
    "lr": (1e-3, 3e-3, 1e-2),
    "tau": (0.05, 0.1, 0.2),
    "gamma": (0.1, 0.3, 0.5, 0.8),
    "rho": (0.5, 1.0, 2.0),
    "tau_lr": (2e-3, 1e-2),
    "prototypes": (64, 256, 1024),
    "length": (64, 256),
    "decay": (0.9, 0.97, 0.99),
}
START = {
    "lr": 3e-3, "tau": 0.1, "gamma": 0.3, "rho": 1.0, "tau_lr": 2e-3, "prototypes": 256, "length": 64, "decay": 0.97
}  # fmt: skip
WIDEN = {"lr": 3.0, "tau": 2.0, "rho": 2.0}
FURTHER: dict[str, tuple[str, ...]] = {  # settings beside the learning rate and the temperature
    "recommended, momentum": ("decay",),
    "MoCo with DCL": ("decay", "length"),
    "SogCLR": ("gamma",),
    "SogCLR, positive": ("gamma",),
    "iSogCLR": ("gamma", "rho", "tau_lr"),
    "FastCLIP v3": ("gamma", "rho"),
    "NeuCLIP, Algorithm 1": ("rho", "prototypes"),
}


@dataclass(frozen=True, kw_only=True)
class Cell(Arm):
    """A method on a data set, with a batch size and a number of visits per row."""

    data: str
    method: str
    batch: int
    visits: int


def name(data: str, method: str, batch: int, visits: int) -> str:
    return f"{data}: {method}, {batch}, {visits}"


def _cell(data: str, method: str, batch: int, visits: int) -> Cell:
    where: dict[str, Any] = {"data": data, "method": method, "batch": batch, "visits": visits}
    if (batch, visits) != TUNED_AT:
        return Cell(**where, after=name(data, method, *TUNED_AT))
    grids = {key: GRIDS[key] for key in ("lr", "tau", *FURTHER.get(method, ()))}
    return Cell(**where, first={key: START[key] for key in grids}, grids=grids, widen=WIDEN)


ARMS = {name(*cell): _cell(*cell) for cell in itertools.product(DATA, METHODS, BATCHES, VISITS)}
PART = {False: "validation", True: "test"}


def score(result: dict[str, Any]) -> float:
    """Return recall on the pairs of the tuning."""
    return result["metrics"]["validation/recall"]


STUDY = Search(ARMS, RESULTS / "visits.jsonl", score, SEEDS)


def run_one(job: Job) -> dict[str, Any]:
    """Train and evaluate; a run of the tuning has the means of its seeds."""
    cell, seconds, steps, found = ARMS[job.arm], 0.0, 0, []
    for fold, seed in enumerate((job.seed,) if job.final else TUNE_SEEDS):
        pairs = load(cell.data, None if job.final else fold)
        model, took = train(cell.method, job.options, pairs, cell.batch, cell.visits, seed)
        seconds, steps = seconds + took, steps + cell.visits * (pairs.n // cell.batch)
        found.append(pairs.recall(model))
    metrics = {f"{PART[job.final]}/{key}": round(mean(run[key] for run in found), 6) for key in found[0]}
    return {"job": asdict(job), "metrics": metrics, "seconds": round(seconds, 2), "steps": steps, **STAMP}


STAMP = stamp()


def waiting(arms: Sequence[str], final: bool, results: Results) -> Iterator[Job]:
    """Yield the runs that are missing, of the tuning before the final ones; ``results`` must grow meanwhile."""
    for arm in dict.fromkeys(ARMS[arm].after or arm for arm in arms):
        while missing := STUDY.next_jobs(arm, results):
            yield from missing
    for arm in arms if final else ():
        yield from STUDY.next_jobs(arm, results, final=True)


def carry_out(arms: Sequence[str], final: bool, minutes: float) -> None:
    """Make the missing runs in this process, until the time is over."""
    results, end = STUDY.finished(), time.monotonic() + 60 * minutes
    with tqdm(unit="run") as bar:
        for job in waiting(arms, final, results):
            if time.monotonic() > end:
                return
            results[job.key] = run = run_one(job)
            append_run(STUDY.path, run)
            bar.set_postfix_str(job.arm + ("" if job.final else f" {score(run):.4f}"))
            bar.update()


# -- the plan ------------------------------------------------------------------------------------------------------


def hours(results: Results) -> tuple[int, float, float]:
    """Return the number of missing final runs, their estimated hours, and the hours so far.

    A run takes the time per step of finished runs of the same method, at the nearest batch size.
    """
    pace: dict[tuple[str, int], list[float]] = {}
    for run in results.values():
        cell = ARMS[run["job"]["arm"]]
        pace.setdefault((cell.method, cell.batch), []).append(run["seconds"] / run["steps"])
    count, seconds = 0, 0.0
    for cell in ARMS.values():
        known = [batch for batch in BATCHES if (cell.method, batch) in pace]
        arm = name(cell.data, cell.method, cell.batch, cell.visits)
        best = STUDY.best(ARMS[arm].after or arm, results)
        done = 0 if best is None else sum(Job(arm, best, seed).key in results for seed in SEEDS)
        count += len(SEEDS) - done
        if known:
            near = min(known, key=lambda batch: abs(batch - cell.batch))
            seconds += (len(SEEDS) - done) * _steps(cell) * mean(pace[cell.method, near])
    return count, seconds / 3600, sum(run["seconds"] for run in results.values()) / 3600


def _steps(cell: Cell) -> int:
    return cell.visits * (SIZES[cell.data][0] // cell.batch)


def main(argv: Sequence[str] | None = None) -> None:
    root = argparse.ArgumentParser(
        "python -m benchmarks.studies.visits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("command", choices=("tune", "final", "plan", "report", "plot"))
    root.add_argument("--data", nargs="+", choices=DATA, default=[*DATA])
    root.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    root.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=[*BATCHES])
    root.add_argument("--visits", nargs="+", type=int, choices=VISITS, default=[*VISITS])
    root.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this time")
    args = root.parse_args(argv)
    if args.command in ("tune", "final"):
        torch.set_num_threads(1)
        cells: Iterable[tuple[str, int, int, str]] = itertools.product(
            args.data, args.batches, args.visits, args.methods
        )
        arms = [name(data, method, batch, visits) for data, batch, visits, method in cells]
        carry_out(arms, args.command == "final", args.minutes)
    elif args.command == "plan":
        count, left, spent = hours(STUDY.finished())
        print(f"{count} final runs left, about {left:.1f} hours; {spent:.1f} hours so far")
    else:
        from benchmarks.studies.visits import report

        target = STUDY.path.with_suffix(".md" if args.command == "report" else ".png")
        if args.command == "report":
            target.write_text(report.page(STUDY.finished()).rstrip() + "\n")
        else:
            report.plot(STUDY.finished(), target)
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
