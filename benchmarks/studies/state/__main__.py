"""Where state per sample could pay: six cases that favour it, and why it does or does not.

    python -m benchmarks.studies.state tune  --wordnet FOLDER [--arms ARM ...]   # learning rate, temperature, the rest
    python -m benchmarks.studies.state final --wordnet FOLDER [--arms ARM ...]   # three other seeds, test half
    python -m benchmarks.studies.state report                                    # results/state.md

The cases are in ``benchmarks/studies/state/cases.py``.  FOLDER has WordNet 3.0's files, as Debian's package
wordnet-base has them.  ``--arms`` takes patterns: ``"noise: *"``.  Each finished run is a line of
``results/state.jsonl``; it is not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.command import command, stamp
from benchmarks.studies.default.training import Setting, train
from benchmarks.studies.search import SEEDS, Job
from benchmarks.studies.state.arms import ARMS, STUDY, estimator, loss_of
from benchmarks.studies.state.cases import CASES
from benchmarks.studies.state.gradients import measures
from benchmarks.studies.state.report import write


def run_one(job: Job, wordnet: Path | None, threads: int) -> dict[str, Any]:
    """Train and evaluate, in this process; the final seeds also measure the gradient."""
    torch.set_num_threads(threads)
    arm, final = ARMS[job.arm], job.seed in SEEDS
    case, part = CASES[arm.case], "test" if final else "validation"
    task = case.task(part, wordnet)
    start = case.start(task, job.seed) if case.start else None
    if start is not None:
        start.eval()  # batch normalisation keeps what it knows
    setting = Setting(batch=case.batch, lr=job.options["lr"], samples=case.samples, seed=job.seed)
    model, loss, seconds = train(task, loss_of(arm.loss, job.options), setting, start)
    found = {f"{part}/{name}": value for name, value in task.score(model).items()}
    if final:
        with torch.no_grad():
            features = task.training_features(model)
        found |= measures(estimator(loss), *features, case.batch)
    return {
        "job": asdict(job),
        "metrics": {name: round(value, 6) for name, value in found.items()},
        "seconds": round(seconds, 1),
        **stamp(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    command("benchmarks.studies.state", __doc__, STUDY, run_one, write, lambda arm: "words" in ARMS[arm].case, argv)


if __name__ == "__main__":
    main()
