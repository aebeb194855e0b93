"""The page of the study of state, from the runs that are finished."""

from __future__ import annotations

from typing import Any

from benchmarks.report import RESULTS as FOLDER
from benchmarks.report import mean_spread, table
from benchmarks.studies.command import provenance
from benchmarks.studies.search import SEEDS, Results, by_seed, difference
from benchmarks.studies.state.arms import ARMS, LOSS, STUDY
from benchmarks.studies.state.cases import CASES, NOISE, OFTEN, PAIRS

CONTROL, RECALL, WHY = "DCL", "test/recall", ("normalizer_error", "bias", "spread")
TITLES = {
    "tuned glyphs": f"Glyphs: weights that DCL has trained at batch 256 go on at batch 8 ({PAIRS:,} pairs)",
    "tuned words": f"Words: the same ({PAIRS:,} pairs)",
    "frozen": f"Glyphs: that image tower frozen, a new text tower at batch 8 ({PAIRS:,} pairs)",
    "few": "Glyphs: 1,024 pairs, each seen 24 times at batch 8",
    "repeats": f"Icons: captions that at least {OFTEN} icons bear, batch 64 ({PAIRS:,} pairs)",
    "noise": f"Glyphs: {NOISE:.0%} of the captions shuffled, batch 16 ({PAIRS:,} pairs)",
}


def write(results: Results) -> None:
    """``results/state.md``."""
    finals = STUDY.finals(results)
    runs = [run for run in results.values() if run["job"]["arm"] in ARMS]
    lines = [
        "# Where state per sample could pay",
        "",
        *provenance(runs, "benchmarks/studies/state/__main__.py"),
        "",
        "Recall as in the study of the default, in per cent on the test half, mean ± standard deviation of the seeds "
        f"{', '.join(map(str, SEEDS))}. Learning rate, then temperature, gamma and rho are chosen on the validation "
        f"half and another seed. *Over {CONTROL}*: mean of the differences by seed ± their standard error. *Error*: "
        "mean squared error of the log-normalizers that the estimator works with. *Bias*, *spread*: of a sample's "
        "feature gradient over the batches that it may be in, at the final weights, relative to the exact gradient "
        "over the whole data set at the estimator's own temperatures: compare them where *tau* is the same. A memory "
        "takes the features of each of these batches, as in training; rows stay as they are.",
        "",
        *(line for case in CASES if any(a.startswith(f"{case}:") for a in finals) for line in _of_case(finals, case)),
        *STUDY.settings(results, "Validation recall, in per cent; the chosen ones are bold.", "recall", 1),
    ]
    (FOLDER / "state.md").write_text("\n".join(lines) + "\n")


def _of_case(finals: dict[str, list[dict[str, Any]]], case: str) -> list[str]:
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
    return [f"## {TITLES[case]}", "", table(head, body), ""]
