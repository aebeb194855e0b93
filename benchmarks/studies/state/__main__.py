"""State per sample in six cases that favour it, with errors of its normalizers and gradients.

    python -m benchmarks.studies.state tune  --wordnet FOLDER [--arms ARM ...]   # learning rate, temperature, the rest
    python -m benchmarks.studies.state final --wordnet FOLDER [--arms ARM ...]   # three other seeds, test half
    python -m benchmarks.studies.state report                                    # results/state.md

The cases are in ``benchmarks/studies/state/cases.py``.  FOLDER contains WordNet 3.0's files, as in Debian's package
wordnet-base.  ``--arms`` takes patterns: ``"noise: *"``.  Each finished run is a line of ``results/state.jsonl`` and is
not run again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.report import mean_spread, table
from benchmarks.studies.default.training import Setting, train
from benchmarks.studies.search import SEEDS, Job, Results, by_seed, difference, main, provenance, settings
from benchmarks.studies.state.cases import ARMS, CASES, LOSS, NOISE, OFTEN, PAIRS, STUDY, estimator, loss_of
from benchmarks.studies.state.gradients import measures

CONTROL, RECALL, WHY = "DCL", "test/recall", ("normalizer_error", "bias", "spread")
TITLES = {
    "tuned glyphs": f"Glyphs: model trained with DCL at batch 256, training continued at batch 8 ({PAIRS:,} pairs)",
    "tuned words": f"Words: model trained with DCL at batch 256, training continued at batch 8 ({PAIRS:,} pairs)",
    "frozen": f"Glyphs: frozen image tower of such a model, new text tower at batch 8 ({PAIRS:,} pairs)",
    "few": "Glyphs: 1,024 pairs, each seen 24 times, at batch 8",
    "repeats": f"Icons: captions of at least {OFTEN} icons each, at batch 64 ({PAIRS:,} pairs)",
    "noise": f"Glyphs: {NOISE:.0%} of the captions shuffled, at batch 16 ({PAIRS:,} pairs)",
}


def run_one(job: Job, wordnet: Path | None) -> dict[str, Any]:
    """Train and evaluate, in this process; on the final seeds, also measure the gradient."""
    arm = ARMS[job.arm]
    case, part = CASES[arm.case], "test" if job.final else "validation"
    task = case.task(part, wordnet)
    start = case.start(task, job.seed) if case.start else None
    if start is not None:
        start.eval()  # batch normalisation keeps its running statistics
    setting = Setting(batch=case.batch, lr=job.options["lr"], samples=case.samples, seed=job.seed)
    model, loss, seconds = train(task, loss_of(arm.loss, job.options), setting, start)
    found = {f"{part}/{name}": value for name, value in task.score(model).items()}
    if job.final:
        with torch.no_grad():
            features = task.training_features(model)
        found |= measures(estimator(loss), *features, case.batch)
    return {"metrics": {name: round(value, 6) for name, value in found.items()}, "seconds": round(seconds, 1)}


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals = STUDY.finals(results)
    known = [run for run in results.values() if run["job"]["arm"] in ARMS]
    about = (
        "Recall is measured as in `default.md`, in per cent on the test half: mean ± standard deviation of the seeds "
        f"{', '.join(map(str, SEEDS))}. The learning rate, then temperature, gamma and rho are chosen on the "
        f"validation half with another seed. *Over {CONTROL}*: mean of the differences by seed ± their standard error. "
        "*Error*: mean squared error of the log-normalizers that the estimator uses. *Bias*, *spread*: bias and spread "
        "of the feature gradient of a sample over the batches that may contain it, at the final weights, relative to "
        "the exact gradient over the whole data set at the temperatures of the estimator; they are comparable only at "
        "equal *tau*. A memory is updated with the features of each of these batches, as in training; rows are not "
        "changed."
    )
    parts = [
        "# State per sample in six favourable cases",
        provenance(known, "benchmarks/studies/state/__main__.py"),
        about,
    ]
    for case in CASES:
        if any(arm.startswith(f"{case}:") for arm in finals):
            parts += [f"## {TITLES[case]}", _of_case(finals, case)]
    chosen = "Validation recall in per cent. The chosen settings are bold."
    return "\n\n".join([*parts, settings(STUDY, results, chosen, "recall", 1)])


def _of_case(finals: dict[str, list[dict[str, Any]]], case: str) -> str:
    control = by_seed(finals.get(f"{case}: {CONTROL}", []), RECALL)
    body = []
    for loss in LOSS:
        runs = finals.get(f"{case}: {loss}", [])
        if not runs:
            continue
        own = by_seed(runs, RECALL)
        gap = "" if loss == CONTROL else difference(own, control)
        why = [mean_spread([run["metrics"][name] for run in runs], digits=2) for name in WHY]
        tau = f"{runs[0]['job']['options']['tau']:g}"
        body.append([loss, mean_spread(list(own.values()), digits=1), gap, tau, *why])
    head = ["", "recall", f"over {CONTROL}", "tau", "error", "bias", "spread"]
    return table(head, body)


if __name__ == "__main__":
    main(STUDY, "benchmarks.studies.state", __doc__, run_one, page, needs_data=lambda arm: "words" in ARMS[arm].case)
