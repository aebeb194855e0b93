"""Arms of the study on icons: trainer, estimator, and the settings that are chosen one after another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.saved import RESULTS as FOLDER
from benchmarks.saved import read_runs

RESULTS = FOLDER / "icons.jsonl"
EPOCHS, BATCH = 3, 64
TUNE_SEED, SEEDS = 100, (0, 1, 2)
METRIC = ("validation/image_retrieval_recall@10", "validation/text_retrieval_recall@10")

Results = dict[str, dict[str, Any]]  # key of a job -> its result
RATES = (5e-4, 1e-3, 2e-3)
TAUS = (0.05, 0.07, 0.1)


@dataclass(frozen=True)
class Job:
    """One training run: everything its result depends on."""

    arm: str
    options: dict[str, Any]
    seed: int

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Arm:
    """A trainer with a loss.

    Attributes:
        trainer: ``open_clip``, ``adapter`` or ``recipe``.
        estimator: of the recipe.
        first: settings to begin with.
        grids: setting -> values; one setting after another is chosen, the others stay.
        as_arm: take what was chosen for another arm.
    """

    trainer: str
    estimator: str = ""
    first: Mapping[str, Any] = field(default_factory=dict)
    grids: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    as_arm: str = ""


def _recipe(estimator: str, tau: str = "tau", first: Mapping[str, Any] | None = None, **grids: tuple[Any, ...]) -> Arm:
    return Arm("recipe", estimator, {"lr": 1e-3, tau: 0.07, **(first or {})}, {"lr": RATES, tau: TAUS, **grids})


ARMS = {
    "open_clip": Arm("open_clip", first={"lr": 1e-3}, grids={"lr": RATES}),
    "open_clip, adapter": Arm("adapter", as_arm="open_clip"),
    "InfoNCE": _recipe("infonce"),
    "DCL": _recipe("dcl"),
    "SogCLR": _recipe("sogclr", first={"gamma": 0.8}, gamma=(0.6, 0.8, 0.95)),
    "iSogCLR": _recipe("isogclr", "tau_init", {"gamma": 0.8, "rho": 2.0}),
    "Residual": _recipe("residual"),
    "CLIP": Arm("recipe", "clip", as_arm="open_clip"),
}


def finished(path: Any = RESULTS) -> Results:
    """Results in a file by the keys of their jobs."""
    return {Job(**run["job"]).key: run for run in read_runs(path)}


def score(result: dict[str, Any]) -> float:
    """Recall at 10 in the validation families, mean of both directions."""
    return sum(result["metrics"][name] for name in METRIC) / len(METRIC)


def best(arm: str, results: Results) -> dict[str, Any] | None:
    """The settings that are chosen when all grids are done, else None."""
    chosen, missing = _search(ARMS[arm].as_arm or arm, results)
    return None if missing else chosen


def next_jobs(arm: str, results: Results, final: bool = False) -> list[Job]:
    """Runs that can begin: those of the first grid that is not done, or the final ones once all are."""
    chosen, missing = _search(ARMS[arm].as_arm or arm, results)
    if missing:
        return [] if ARMS[arm].as_arm else missing
    return [job for seed in SEEDS if final and (job := Job(arm, chosen, seed)).key not in results]


def _search(arm: str, results: Results) -> tuple[dict[str, Any], list[Job]]:
    """The best settings so far, and the runs that the present grid still lacks."""
    chosen = dict(ARMS[arm].first)
    for name, values in ARMS[arm].grids.items():
        jobs = [Job(arm, {**chosen, name: value}, TUNE_SEED) for value in values]
        if missing := [job for job in jobs if job.key not in results]:
            return chosen, missing
        chosen = max(jobs, key=lambda job: score(results[job.key])).options
    return chosen, []
