"""The page and the picture of the study on icons, from the runs that are finished."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

from benchmarks.report import RESULTS as FOLDER
from benchmarks.report import mean_spread, table
from benchmarks.studies.command import provenance
from benchmarks.studies.icons_arms import ARMS, BATCH, EPOCHS, STUDY
from benchmarks.studies.search import SEEDS, Results

COLUMNS = {
    "zero-shot, top 1": "zeroshot/acc1",
    "top 5": "zeroshot/acc5",
    "image to text, R@1": "retrieval/text_retrieval_recall@1",
    "R@10": "retrieval/text_retrieval_recall@10",
    "text to image, R@1": "retrieval/image_retrieval_recall@1",
    "R@10 ": "retrieval/image_retrieval_recall@10",
}
TWINS = ("open_clip", "open_clip, adapter")


CHOSEN = (
    "Chosen one after another, on seed 100, by recall at 10 in other held-out families (mean of both directions, "
    "in per cent):"
)


def write(results: Results) -> None:
    """``results/icons.md`` and ``icons.png``."""
    finals = STUDY.finals(results)
    lines = [
        "# CLIP on icons",
        "",
        *provenance(list(results.values()), "benchmarks/studies/icons.py", ["open_clip"]),
        "",
        f"{EPOCHS} epochs over 20,480 icons, batch 64, one small open_clip model (`recipes/clip/icons.json`); whole "
        "families of icons held out. Figures of clip-benchmark, in per cent: mean ± standard deviation of the seeds "
        f"{', '.join(map(str, SEEDS))}. `open_clip` is its own trainer with its own loss; `open_clip, adapter` is the "
        "same command with `--estimator clip`; the others are `recipes/clip_webdataset.py`. `CLIP` and both runs of "
        "open_clip learn one temperature, iSogCLR one per sample; the others hold it.",
        "",
        _final_table(finals),
        "",
        *_curves(finals),
        *STUDY.settings(results, CHOSEN, "validation", 2),
    ]
    (FOLDER / "icons.md").write_text("\n".join(lines) + "\n")
    if all(arm in finals for arm in TWINS):
        _draw(finals)


def _final_table(finals: dict[str, list[dict[str, Any]]]) -> str:
    body = []
    for arm, runs in finals.items():
        values = [mean_spread([run["metrics"][name] for run in runs], 100, 2) for name in COLUMNS.values()]
        body.append([arm, *values, str(len(runs)), mean_spread([run["scale"] for run in runs])])
    return table(["", *COLUMNS, "seeds", "logit scale"], body)


def _curves(finals: dict[str, list[dict[str, Any]]]) -> list[str]:
    """How far the adapter's curve is from open_clip's, beside how far seeds are from each other."""
    pairs = list(zip(*(map(_curve, finals.get(arm, [])) for arm in TWINS), strict=False))
    if not pairs:
        return []
    gaps = [_gap(one, two) for one, two in pairs]
    between = [_gap(pairs[i][0], pairs[j][0]) for i in range(len(pairs)) for j in range(i)]
    first = max(abs(one[0] - two[0]) for one, two in pairs)
    last = [mean(two[-20:]) - mean(one[-20:]) for one, two in pairs]
    return [
        "## The same curve",
        "",
        f"The training loss that open_clip logs every ten steps, {len(pairs[0][0])} values per run; ours is InfoNCE "
        f"less log |N|, which is added here. The two runs of a seed draw other batches (the first losses differ by up "
        f"to {first:.3f}), so that they are compared as two seeds are: on average over the steps they are "
        f"{_told(gaps)} apart, two seeds of open_clip {_told(between)}. Over the last 200 steps the adapter's loss is "
        f"{_told(last)} above.",
        "",
    ]


def _curve(run: dict[str, Any]) -> list[float]:
    """The losses of a run, as InfoNCE."""
    less = math.log(BATCH - 1) if ARMS[run["job"]["arm"]].trainer == "adapter" else 0.0
    return [loss + less for loss in run["curve"]]


def _gap(one: list[float], two: list[float]) -> float:
    return mean(abs(a - b) for a, b in zip(one, two, strict=True))


def _told(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _draw(finals: dict[str, list[dict[str, Any]]]) -> None:
    """Left: both curves of one seed; right: zero-shot accuracy of all arms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for arm, style in zip(TWINS, ("-", "--"), strict=True):
        curve = _curve(finals[arm][0])
        left.plot([10 * i for i in range(len(curve))], curve, style, label=arm)
    left.set(xlabel="step", ylabel="training loss", title="open_clip's trainer: its own loss, and the adapter")
    left.legend()
    for place, (arm, runs) in enumerate(finals.items()):
        values = [100 * run["metrics"]["zeroshot/acc1"] for run in runs]
        right.barh(place, mean(values), color="C0" if arm in TWINS else "C2", alpha=0.5)
        right.plot(values, [place] * len(values), "k.", markersize=4)
    right.set_yticks(range(len(finals)), list(finals))
    right.invert_yaxis()
    right.set(xlabel="zero-shot accuracy, %", title="held-out families, three seeds")
    figure.tight_layout()
    figure.savefig(FOLDER / "icons.png", dpi=110)
