"""Training runs of the studies on glyphs: what a run depends on, which have finished, which setting was best."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.saved import RESULTS as FOLDER
from benchmarks.saved import read_runs

RESULTS = FOLDER / "glyphs.jsonl"
TUNE_SEED, TUNE_SPLIT = 100, 1
FINAL_SEEDS, FINAL_SPLIT = (0, 1, 2), 0
METRIC = "r1"
# what early runs do not say of themselves: they were made on two machines
UNRECORDED = {"machine": "Linux x86_64, 2 cores (processor not recorded)", "python": "3.11.7"}

Grid = dict[str, tuple[Any, ...]]
Results = dict[str, dict[str, Any]]  # key of a job -> its result


@dataclass(frozen=True)
class Job:
    """One training run: everything its result depends on."""

    method: str
    options: dict[str, Any]
    batch_size: int = 64
    epochs: int = 2
    seed: int = TUNE_SEED
    split: int = TUNE_SPLIT
    limit: int = 0
    errors: int = 0  # how many times the error of the normalizers is measured on the way
    batches: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Arm:
    """One method in one regime, with the grid its setting is chosen from."""

    regime: str
    method: str
    grid: Grid
    batch_size: int = 64
    epochs: int = 2
    limit: int = 0  # training pairs; 0: all
    variant: str = ""
    batches: dict[str, Any] = field(default_factory=dict)  # which samples share one; {}: random

    def jobs(self) -> list[Job]:
        """One tuning run per point of the grid."""
        points = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        setting = {"limit": self.limit, "batches": self.batches}
        return [Job(self.method, options, self.batch_size, self.epochs, **setting) for options in points]


def finished(path: Path) -> Results:
    """Results in a file by the keys of their jobs."""
    return {Job(**result["job"]).key: result for result in read_runs(path)}


def best(arm: Arm, results: Results, limit: int = 0) -> dict[str, Any] | None:
    """The result of the arm's best finished tuning run, None before the first."""
    tuned = [results[key] for job in arm.jobs() if (key := replace(job, limit=limit or job.limit).key) in results]
    return max(tuned, key=lambda result: result["final"][METRIC], default=None)


def final_jobs(arm: Arm, results: Results, limit: int = 0) -> list[Job]:
    """The runs of the arm's best setting, on the seeds and the split that are reported."""
    chosen = best(arm, results, limit)
    if chosen is None:
        return []
    job = Job(**chosen["job"])
    return [replace(job, seed=seed, split=FINAL_SPLIT) for seed in FINAL_SEEDS]


def tuning_jobs(arms: Iterable[Arm], limit: int) -> list[Job]:
    return [replace(job, limit=limit or job.limit) for arm in arms for job in arm.jobs()]


def provenance(results: Results) -> list[str]:
    """Where, with what and when the runs were made, in lines."""
    every = [{**UNRECORDED, **result} for result in results.values()]
    known = {key: ", ".join(dict.fromkeys(str(run[key]) for run in every)) for key in ("machine", "python", "torch")}
    threads = ", ".join(sorted({str(run["threads"]) for run in every}))
    commits = ", ".join(dict.fromkeys(run["commit"] for run in every))
    dates = sorted(run["date"] for run in every) or ["-"]
    return [
        f"- **hardware**: {known['machine']}; threads per run: {threads}",
        f"- **versions**: Python {known['python']}, torch {known['torch']}; **commit** {commits}",
        f"- **runs**: {len(every)}, {dates[0]} to {dates[-1]}",
    ]
