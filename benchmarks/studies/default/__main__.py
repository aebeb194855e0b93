"""Comparison of methods: every contender on four data sets at five batch sizes, some also on four further data sets.

    python -m benchmarks.studies.default tune  --texts FOLDER [--arms ARM ...]   # learning rate, then temperature
    python -m benchmarks.studies.default final --texts FOLDER [--arms ARM ...]   # three other seeds, test half
    python -m benchmarks.studies.default report                                  # results/default.md

FOLDER contains the files of WordNet 3.0, as in Debian's package wordnet-base, for words, and for packages the file
Translation-en of Debian 12 (bookworm), which ``apt-get update -o Acquire::Languages=en`` downloads and
``/usr/lib/apt/apt-helper cat-file`` decompresses.  ``--arms`` takes patterns: ``"glyphs: *, 16"``.  ``recommended`` is
:func:`compopt.recommended`, which is not tuned; its learning rate is ``1e-3 sqrt(samples per update)``, at most 0.016,
or the multiple of it in the name of the arm.  Each finished run is a line of ``results/default.jsonl.gz`` and is not
run again.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.studies.default import mining
from benchmarks.studies.default.arms import ARMS, MINED, MINED_GRIDS, STUDY
from benchmarks.studies.default.losses import loss_of
from benchmarks.studies.default.report import page
from benchmarks.studies.default.tasks import READ_FOLDER, load
from benchmarks.studies.default.training import Setting, train
from benchmarks.studies.search import Job, main


def run_one(job: Job, texts: Path | None) -> dict[str, Any]:
    """Train and evaluate, in this process."""
    cell, part = ARMS[job.arm], "test" if job.final else "validation"
    task = load(cell.task, part, texts)
    of_arm = {each.name: getattr(cell, each.name) for each in fields(Setting) if hasattr(cell, each.name)}
    setting = Setting(lr=job.options["lr"], seed=job.seed, **of_arm)
    mined = {name: int(job.options[name]) for name in MINED_GRIDS} if cell.batches == MINED else {}
    order = mining.build(cell.task, task, cell.batch, seed=job.seed, **mined) if mined else None
    model, _, seconds = train(task, lambda task: loss_of(cell, job.options, task), setting, order=order)
    metrics = {f"{part}/{name}": round(value, 6) for name, value in task.score(model).items()}
    return {"metrics": metrics, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    module, needs = "benchmarks.studies.default", lambda arm: ARMS[arm].task in READ_FOLDER
    main(STUDY, module, __doc__, run_one, page, "--texts", needs)
