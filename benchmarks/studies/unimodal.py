"""SimCLR with each estimator, on glyph faces and coloured icons at batch 64, with tuned learning rate and temperature.

    python -m benchmarks.studies.unimodal tune  [--icons FILE] [--arms "icons: *"]   # learning rate, then temperature
    python -m benchmarks.studies.unimodal final [--icons FILE]                       # three other seeds
    python -m benchmarks.studies.unimodal report                                     # results/unimodal.md

Settings are chosen on one half of the held-out characters, or on the validation families of icons; results are those of
the other half, or of the test families. FILE is the packed npm package; without it, npm downloads it once. Each
finished run is a line of ``results/unimodal.jsonl`` and is not run again. A run takes about 40 (glyphs) or 70 (icons)
seconds of one core, with four views about 1.6 times as long. An arm has 8 runs, and one more whenever a grid grows; the
arms with four views, which use SimCLR's settings, have 3 runs. The total is some 110 core-minutes. There are only a few
passes, so that the ranking is that of early training, whereas the papers train for hundreds of epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, mean_spread, table
from benchmarks.studies.search import SEEDS, Arm, Job, Results, Search, by_seed, difference, main, provenance, settings
from recipes import batches, glyphs, icons
from recipes.engine import Config, Control, Run
from recipes.icon_task import icon_views
from recipes.methods import METHODS
from recipes.tasks import GlyphFaces, ImageViews, Labelled, Views

BATCH, CLUSTERED = 64, 16  # samples per batch; batches that are clustered together
PARTS = ("test", "validation")
PASSES, LIMIT = {"glyphs": 8, "icons": 4}, 12_288  # LIMIT: icons; more would get one or two visits


@dataclass(frozen=True, kw_only=True)
class Contender(Arm):
    """A method on a data set.

    Attributes:
        task: name of the data set.
        method: key of :data:`recipes.methods.METHODS`.
        batches: kind of batches, see :mod:`recipes.batches`.
        views: views of a sample.
    """

    task: str
    method: str
    batches: str = batches.RANDOM
    views: Views = Views()


def _arms(task: str) -> dict[str, Contender]:
    def arm(method: str, tau: float = 0.1, kind: str = batches.RANDOM) -> Contender:
        widen: Mapping[str, float] = {"lr": 2.0, "tau": 1.5}
        grids = {"lr": (5e-4, 1e-3, 2e-3), "tau": tuple(float(f"{tau * f:.2g}") for f in (0.6, 1.0, 1.6))}
        first = {"lr": 1e-3, "tau": tau}
        return Contender(task=task, method=method, batches=kind, first=first, grids=grids, widen=widen)

    contenders = {
        "SimCLR": arm("infonce"),
        "DCL": arm("infonce-no-positive"),
        "recommended": arm("memory", tau=0.07),
        "SogCLR": arm("sogclr"),
        "iSogCLR": arm("isogclr", tau=0.2),
        "EMC2": arm("emc2", tau=0.2),
        "SimCLR, spectral batches": arm("infonce", kind=batches.SPECTRAL),
    }
    return {f"{task}: {name}": contender for name, contender in contenders.items()}


ARMS = {**_arms("glyphs"), **_arms("icons")}


def score(result: dict[str, Any]) -> float:
    """Return the accuracy of the linear probe before the head."""
    return result["metrics"]["sgd_probe"]


STUDY = Search(ARMS, RESULTS / "unimodal.jsonl", score)


# -- one run -------------------------------------------------------------------------------------------------------


def load(arm: Contender, part: str, file: Path | None) -> ImageViews:
    """Return an arm's data set and views, with one part of the held-out samples."""
    if arm.task == "icons":
        data = icons.load(None, file, progress=False, coloured=True)
        return icon_views(data, part=part, limit=LIMIT, views=arm.views)
    task = GlyphFaces(glyphs.load(), views=arm.views)
    half = slice(PARTS.index(part), None, 2)
    task.queries = Labelled(task.queries.images[half], task.queries.labels[half])
    return task


def run_one(job: Job, file: Path | None) -> dict[str, Any]:
    """Train and evaluate, in this process."""
    arm = ARMS[job.arm]
    task = load(arm, "test" if job.final else "validation", file)
    options = METHODS[arm.method].options(task.mode, {"tau": job.options["tau"]})
    how = {"kind": arm.batches, "cluster_group": CLUSTERED} if arm.batches == batches.SPECTRAL else {}
    config = Config(arm.method, options, BATCH, PASSES[arm.task], lr=job.options["lr"], seed=job.seed, batches=how)
    run = Run(task, config, Control(eval_every=0)).train()
    return {"metrics": {name: round(run.final[name], 6) for name in task.labels}, "seconds": round(run.seconds, 1)}


# -- the page ------------------------------------------------------------------------------------------------------


ABOUT = (
    f"Batch {BATCH}, AdamW with a one-cycle schedule. Glyphs: the views are two shifted faces of a character, "
    f"{PASSES['glyphs']} passes; the probes predict to which of 20 scripts a held-out character belongs. Icons: "
    f"{LIMIT:,} icons in colour, augmented as in SimCLR, {PASSES['icons']} passes; the probes predict which of 500 "
    "names an icon of a held-out family has. Training is short: every row of a stateful method is visited once per "
    "pass. With four views, the first two are anchors (icons: large crops, the other two are small crops); a step "
    "takes about 1.6 times as long, and the settings are those of SimCLR. `recommended` is its memory of 128 samples; "
    "its temperature is tuned like those of the others. Values are accuracies in per cent, before "
    f"and after the projection head: mean ± standard deviation of the seeds {', '.join(map(str, SEEDS))}. *Gain*: "
    "difference of the SGD probe before the head from SimCLR, by seed."
)
CHOSEN = (
    "The settings are chosen one after another, on seed 100, by the SGD probe on the validation part (in per cent). "
    "The chosen ones are bold."
)


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    titles = ["", "1-NN", "logistic", "SGD probe", "head: 1-NN", "logistic", "SGD probe", "gain", "seeds"]
    finals, body = STUDY.finals(results), []
    for arm, runs in finals.items():
        values = [mean_spread([run["metrics"][name] for run in runs], 100) for name in ImageViews.labels]
        base = by_seed(finals.get(f"{ARMS[arm].task}: SimCLR", ()), "sgd_probe")
        gain = "" if arm.endswith(": SimCLR") else difference(by_seed(runs, "sgd_probe"), base)
        body.append([arm, *values, gain, str(len(runs))])
    where = provenance(list(results.values()), "benchmarks/studies/unimodal.py")
    parts = ["# Unimodal training", where, ABOUT, table(titles, body)]
    return "\n\n".join([*parts, settings(STUDY, results, CHOSEN, "validation", 1)])


if __name__ == "__main__":
    main(STUDY, "benchmarks.studies.unimodal", __doc__, run_one, page, "--icons", needs_data=lambda arm: False)
