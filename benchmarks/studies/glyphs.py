"""Main table of quality: every method on glyphs at batch 64, with tuned options, over three seeds.

    python -m benchmarks.studies.glyphs --runs runs/glyphs.jsonl            # train what the file lacks, print the table
    python -m benchmarks.studies.glyphs --report                            # print the published runs, train nothing
    python -m benchmarks.studies.glyphs --runs FILE --methods sogclr emc2   # some methods only

A run takes 40 to 140 s on one thread, all 36 runs about 40 minutes. The options were chosen on another seed and
another split; ``results/glyphs.md`` has the grids and the other batch sizes, as of commit 2310a77.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, variance
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.report import RESULTS, append_run, mean_spread, read_runs, table
from benchmarks.studies.search import SEEDS, stamp
from recipes.engine import Config, Control, Run
from recipes.glyphs import load
from recipes.methods import METHODS
from recipes.tasks import GlyphNames

PUBLISHED = RESULTS / "glyphs.jsonl"
EPOCHS = 2
STATELESS = 2  # number of stateless arms, which are first; gains are measured against the better one

# (method, batch size, tuned options)
ARMS: list[tuple[str, int, dict[str, Any]]] = [
    ("infonce", 64, {"tau": 0.12}),
    ("infonce-no-positive", 64, {"tau": 0.05}),
    ("clip", 64, {"tau": 0.18}),
    ("sogclr", 64, {"gamma": 0.95, "reference": "none", "tau": 0.08}),
    ("sogclr", 64, {"gamma": 0.95, "reference": "positive", "tau": 0.08}),
    ("isogclr", 64, {"reference": "positive", "rho": 1.0, "tau": 0.08, "tau_lr": 0.002}),
    ("isogclr", 64, {"reference": "none", "rho": 2.5, "tau": 0.08, "tau_lr": 0.002}),
    ("fastclip-v3", 64, {"rho": 1.0, "tau": 0.05, "tau_lr": 0.0001}),
    ("neuclip", 64, {"tau": 0.08, "through_alpha": True}),
    ("emc2", 64, {"burn_in": 0.5, "encode": 0, "tau": 0.05}),
    ("emc2", 64, {"burn_in": 0.5, "encode": 1, "tau": 0.12}),
    ("infonce", 256, {"tau": 0.08}),
]


def job_of(arm: tuple[str, int, dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return the fields that determine a run's result, as in the file of runs."""
    method, batch_size, options = arm
    shared = {"epochs": EPOCHS, "seed": seed, "split": 0, "limit": 0}
    return {"method": method, "options": options, "batch_size": batch_size, **shared}


def find(runs: Sequence[dict[str, Any]], job: dict[str, Any]) -> dict[str, Any] | None:
    return next((run for run in runs if all(run["job"][name] == value for name, value in job.items())), None)


def train(task: GlyphNames, job: dict[str, Any]) -> dict[str, Any]:
    options = METHODS[job["method"]].options(task.mode, job["options"])
    config = Config(job["method"], options, job["batch_size"], EPOCHS, seed=job["seed"], data=task.description)
    run = Run(task, config, Control(eval_every=0)).train()
    return {"job": job, "final": run.final, "seconds": round(run.seconds, 2), "steps": run.step, **stamp()}


def page(runs: Sequence[dict[str, Any]], arms: Sequence[tuple[str, int, dict[str, Any]]]) -> str:
    """Return the table: R@1 in per cent, mean ± standard deviation; the gain is over the better stateless method."""
    every = [[run for seed in SEEDS if (run := find(runs, job_of(arm, seed)))] for arm in arms]
    recall = [[100 * run["final"]["r1"] for run in found] for found in every]
    control = max(
        (r for arm, r in zip(arms, recall, strict=True) if arm in ARMS[:STATELESS] and r), key=mean, default=[]
    )
    body = []
    for arm, found, r1 in zip(arms, every, recall, strict=True):
        gain = ""
        if arm in ARMS[STATELESS:-1] and min(len(r1), len(control)) > 1:
            error = (variance(r1) / len(r1) + variance(control) / len(control)) ** 0.5
            gain = f"{mean(r1) - mean(control):+.1f} ± {error:.1f}"
        title = METHODS[arm[0]].title + ("" if arm[1] == 64 else f", batch {arm[1]}")
        measures = [mean_spread([run["final"][name] for run in found], 100) for name in ("r1", "r1_text_to_image")]
        seconds = f"{mean(run['seconds'] for run in found):.0f}" if found else "-"
        options = " ".join(f"{name} {value}" for name, value in arm[2].items())
        body.append([title, options, *measures, gain, str(len(found)), seconds])
    return table(["method", "options", "image to name", "name to image", "gain", "seeds", "s per run"], body, "ll")


def main(argv: Sequence[str] | None = None) -> None:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root.add_argument("--report", action="store_true", help="print the table of the stored runs without training")
    root.add_argument("--runs", type=Path, default=PUBLISHED, help="file of the runs, one line of JSON per run")
    root.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    root.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    args = root.parse_args(argv)
    torch.set_num_threads(args.threads)
    arms = [arm for arm in ARMS if arm[0] in args.methods]
    if not args.report:
        jobs = [job_of(arm, seed) for arm in arms for seed in SEEDS]
        missing = [job for job in jobs if find(read_runs(args.runs), job) is None]
        task = GlyphNames(load()) if missing else None
        for job in tqdm(missing, unit="run"):
            append_run(args.runs, train(task, job))
    print(page(read_runs(args.runs), arms))


if __name__ == "__main__":
    main()
