"""Which method: every contender on four data sets at five batch sizes, equally many samples seen; and two small sets.

    python -m benchmarks.studies.default tune  --wordnet FOLDER [--arms ARM ...]   # learning rate, then temperature
    python -m benchmarks.studies.default final --wordnet FOLDER [--arms ARM ...]   # three other seeds, test half
    python -m benchmarks.studies.default.timing --wordnet FOLDER                   # what "equal time" gives each
    python -m benchmarks.studies.default report                                    # results/default.md

FOLDER has WordNet 3.0's files, as Debian's package wordnet-base has them.  ``--arms`` takes patterns:
``"glyphs: *, 16"``.  ``recommended`` is :func:`compopt.recommended`: nothing is chosen for it, and its learning rate is
``1e-3 sqrt(samples per update)``, at most 0.016, everywhere.  Each finished run is a line of
``results/default.jsonl``; it is not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.command import command, stamp
from benchmarks.studies.default import mining
from benchmarks.studies.default.arms import ARMS, MINED, MINED_GRIDS, STUDY
from benchmarks.studies.default.losses import loss_of
from benchmarks.studies.default.report import write
from benchmarks.studies.default.tasks import load
from benchmarks.studies.default.training import Setting, train
from benchmarks.studies.search import SEEDS, Job


def run_one(job: Job, wordnet: Path | None, threads: int) -> dict[str, Any]:
    """Train and evaluate, in this process."""
    torch.set_num_threads(threads)
    cell, part = ARMS[job.arm], "test" if job.seed in SEEDS else "validation"
    task = load(cell.task, part, wordnet)
    where = {name: getattr(cell, name) for name in ("batch", "accumulate", "forward", "batches", "samples")}
    setting = Setting(lr=job.options["lr"], seed=job.seed, **where)
    mined = {name: int(job.options[name]) for name in MINED_GRIDS} if cell.batches == MINED else {}
    order = mining.build(cell.task, task, cell.batch, seed=job.seed, **mined) if mined else None
    model, _, seconds = train(task, lambda task: loss_of(cell, job.options, task), setting, order=order)
    return {
        "job": asdict(job),
        "metrics": {f"{part}/{name}": round(value, 6) for name, value in task.score(model).items()},
        "seconds": round(seconds, 1),
        **stamp(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    command("benchmarks.studies.default", __doc__, STUDY, run_one, write, lambda arm: ARMS[arm].task == "words", argv)


if __name__ == "__main__":
    main()
