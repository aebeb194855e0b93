"""Recall at equal budget: other packages' losses and our estimators in one loop, tuned over one grid.

    python -m benchmarks.history.peers.quality             # tunes, repeats the best, writes peers_quality.md (hours)
    python -m benchmarks.history.peers.quality --trial 640 # a short look, printed

Glyphs, two epochs, batches of 32, 64 and 256; settings are chosen on one seed and split and reported on three others,
as in ``benchmarks/studies/glyphs.py``, whose runs of ours at batch 32 and 64 are taken over. Each run is a line of
``results/peers_quality.jsonl``; a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.history.peers import foreign, packages
from benchmarks.saved import HISTORY, save
from benchmarks.studies import glyphs, glyphs_report, jobs
from benchmarks.studies.glyphs_arms import TAUS, main_arms, regime_arms
from benchmarks.studies.glyphs_report import BASELINES
from benchmarks.studies.jobs import Arm, Grid, Job
from recipes import plots
from recipes.report import environment, heading

MODULE = "benchmarks.history.peers.quality"
FILE = HISTORY / "peers_quality.jsonl"
OURS = ("infonce", "infonce-no-positive", "clip", "sogclr", "isogclr", "residual")
TWINS = {"open_clip-clip": "clip", "libauc-sogclr": "sogclr", "libauc-isogclr": "isogclr"}  # theirs: the same of ours
VARIANT = ("isogclr", "reference none")
SIGLIP: Grid = {"tau": (*TAUS, 0.18), "bias": (-10.0, -5.0)}  # the paper's -10 is for batches of 32,768


def our_arms(batch_size: int) -> list[Arm]:
    """Our methods: the glyph study's arms; those that it lacks at 32 and 256 get a grid as wide as its own at 32."""
    regime = f"batch {batch_size}"
    wide = [
        replace(arm, regime=regime, batch_size=batch_size)
        for arm in main_arms()
        if arm.method in OURS and arm.batch_size == 64
    ]
    if batch_size == 64:
        return wide
    known = [arm for arm in regime_arms() if arm.regime == regime and arm.method in OURS and arm.method != "isogclr"]
    kept = {(arm.method, arm.variant) for arm in known}
    large = batch_size == 256  # there iSogCLR's rho, flat at 32 and 64, is not tuned, and it runs as the paper has it
    narrow: Grid = {"gamma": (0.8, 0.95) if large else (0.3, 0.8), "tau_lr": (0.002,)}
    narrow |= {"rho": (1.0,)} if large else {}
    rest = [
        replace(arm, grid={name: narrow.get(name, values) for name, values in arm.grid.items()})
        for arm in wide
        if (arm.method, arm.variant) not in kept and not (large and (arm.method, arm.variant) == VARIANT)
    ]
    return [*known, *rest]


def foreign_arms(ours: list[Arm]) -> list[Arm]:
    """The other packages', each over the grid of the same method of ours."""
    grids = {arm.method: arm.grid for arm in ours}
    arms = [
        replace(
            ours[0], method=method, grid={name: values for name, values in grids[twin].items() if name != "reference"}
        )
        for method, twin in TWINS.items()
    ]
    return [*arms, replace(ours[0], method="open_clip-siglip", grid=SIGLIP)]


def arms() -> list[Arm]:
    """All arms, by batch size."""
    by_size = [our_arms(size) for size in (32, 64, 256)]
    return [arm for ours in by_size for arm in (*ours, *foreign_arms(ours))]


def results(file: Path) -> dict[str, dict[str, Any]]:
    """Finished runs of this study and of the glyph study."""
    return {**jobs.finished(jobs.RESULTS), **jobs.finished(file)}


def report(chosen: list[Arm], file: Path, limit: int, env: dict[str, Any]) -> str:
    """A table per batch size."""
    note = [
        "R@1 on held-out pairs in percent, mean ± standard deviation of three seeds; the gain is against the better",
        "of InfoNCE and DCL. Two epochs at a peak learning rate of 1e-3, one grid for twins.",
        "Seconds are of two runs at a time on a machine that did other work too: they cannot be compared.",
    ]
    done = results(file)
    finals = [done[job.key] for arm in chosen for job in jobs.final_jobs(arm, done, limit) if job.key in done]
    commits = ", ".join(dict.fromkeys(one["commit"] for one in finals))
    note += [f"Runs of commits {commits}; a thread each."]
    sections = glyphs_report.regime_sections(chosen, done, limit)
    tuning = glyphs_report.tuning_section(chosen, done, limit)
    return "\n\n".join(["\n".join([*heading("Recall at equal budget", env), *note]), *sections, tuning])


def reached(chosen: list[Arm], file: Path, limit: int) -> list[dict[str, Any]]:
    """R@1 of every seed, both ways, by batch size and method."""
    done, found = results(file), []
    for arm in chosen:
        finals = [done[job.key] for job in jobs.final_jobs(arm, done, limit) if job.key in done]
        both = {metric: [100 * one["final"][metric] for one in finals] for metric in ("r1", "r1_text_to_image")}
        name = glyphs_report.arm_name(arm)
        found.append({"batch": arm.batch_size, "method": arm.method, "name": name, **both})
    return [one for one in found if one["r1"]]


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Mean and range, a panel per batch size: ours, theirs and the baselines."""
    with plots.plt.rc_context(plots.STYLE):
        sizes = sorted({one["batch"] for one in found})
        figure, axes = plots.new_figure(4.5 * len(sizes), 4.5, 1, len(sizes))
        for axis, size in zip(axes[0], sizes, strict=True):
            own = sorted((one for one in found if one["batch"] == size), key=lambda one: statistics.mean(one["r1"]))
            for place, one in enumerate(own):
                theirs, baseline = one["method"].startswith(("open_clip", "libauc")), one["method"] in BASELINES
                colour = plots.WRONG if theirs else plots.COLOURS[0] if baseline else plots.COLOURS[4]
                axis.plot([min(one["r1"]), max(one["r1"])], [place, place], color=colour)
                axis.plot(statistics.mean(one["r1"]), place, "o", color=colour)
            axis.set_yticks(range(len(own)), [one["name"] for one in own], fontsize=8)
            axis.set(title=f"batch {size}: R@1, %")
        figure.suptitle("blue: compopt; red: other packages; grey: stateless baselines", fontsize=9)
        plots.save_figure(figure, path)


def main() -> None:
    foreign.register()
    if len(sys.argv) > 2 and sys.argv[1] == "run-one":
        print(json.dumps(glyphs.run_one(Job(**json.loads(sys.argv[2])), int(sys.argv[4]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="+", help="only these methods")
    parser.add_argument("--regimes", nargs="+", help="only these regimes, for example 'batch 64'")
    parser.add_argument("--trial", type=int, default=0, metavar="N", help="N pairs, one epoch, one setting per method")
    parser.add_argument("--results", type=Path, default=FILE)
    args = parser.parse_args()
    chosen = glyphs.select(arms(), args)
    done = results(args.results)
    glyphs.carry_out([job for job in jobs.tuning_jobs(chosen, args.trial) if job.key not in done], args, MODULE)
    done = results(args.results)
    final = [job for arm in chosen for job in jobs.final_jobs(arm, done, args.trial)]
    glyphs.carry_out([job for job in final if job.key not in done], args, MODULE)
    env = {**environment(), **packages.versions()}
    text = report(chosen, args.results, args.trial, env)
    print(text)
    if not (args.trial or args.methods or args.regimes):
        found = reached(chosen, args.results, args.trial)
        save("peers_quality", text, env, found, HISTORY)
        draw(found, HISTORY / "peers_quality.png")


if __name__ == "__main__":
    main()
