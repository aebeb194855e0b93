"""Recall at equal budget: other packages' losses and our estimators in one loop, tuned over one grid.

    python -m benchmarks.peers.quality             # tunes, repeats the best, writes results/peers_quality.md (hours)
    python -m benchmarks.peers.quality --trial 640 # a short look, printed

Glyphs, two epochs, batches of 32, 64 and 256; settings are chosen on one seed and split and reported on three others,
as in ``benchmarks/glyphs.py``, whose runs of ours at batch 32 and 64 are taken over. Each run is a line of
``results/peers_quality.jsonl``; a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import glyphs
from benchmarks.glyphs_arms import TAUS, Arm, Grid, Job, main_arms, regime_arms
from benchmarks.machine import RESULTS, environment, heading
from benchmarks.peers import foreign, packages

MODULE = "benchmarks.peers.quality"
FILE = RESULTS / "peers_quality.jsonl"
OURS = ("infonce", "infonce-no-positive", "clip", "sogclr", "isogclr", "residual")
TWINS = {"open_clip-clip": "clip", "libauc-sogclr": "sogclr", "libauc-isogclr": "isogclr"}  # theirs: the same of ours
SIGLIP: Grid = {"tau": (*TAUS, 0.18), "bias": (-10.0, -5.0)}  # the paper's bias is one for batches of 32,768


def our_arms(batch_size: int) -> list[Arm]:
    """Ours: the glyph study's; what it lacks at 32 and 256 has a grid as wide as its own at 32."""
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
    narrow: Grid = {"gamma": (0.3, 0.8), "tau_lr": (0.002,)}
    rest = [
        replace(arm, grid={name: narrow.get(name, values) for name, values in arm.grid.items()})
        for arm in wide
        if (arm.method, arm.variant) not in kept
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
    """All, by batch size."""
    by_size = [our_arms(size) for size in (32, 64, 256)]
    return [arm for ours in by_size for arm in (*ours, *foreign_arms(ours))]


def results(file: Path) -> dict[str, dict[str, Any]]:
    """Of this study and of the glyph study."""
    return {**glyphs.finished(glyphs.RESULTS), **glyphs.finished(file)}


def report(chosen: list[Arm], file: Path, limit: int) -> str:
    """A table per batch size."""
    from benchmarks.glyphs_report import regime_sections

    env = {**environment(), **packages.versions()}
    note = "R@1 on held-out pairs in percent, mean ± standard deviation of three seeds; the gain is against the better"
    more = "of InfoNCE and InfoNCE without the positive. Two epochs at a peak learning rate of 1e-3."
    return "\n\n".join(
        [
            "\n".join([*heading("Recall at equal budget", env), note, more]),
            *regime_sections(chosen, results(file), limit),
        ]
    )


def main() -> None:
    foreign.register()
    if len(sys.argv) > 2 and sys.argv[1] == "run-one":
        print(json.dumps(glyphs.run_one(Job(**json.loads(sys.argv[2])), int(sys.argv[4]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--regimes", nargs="+", help="only these, for example 'batch 64'")
    parser.add_argument("--trial", type=int, default=0, metavar="N", help="N pairs, one epoch, one setting per method")
    parser.add_argument("--results", type=Path, default=FILE)
    args = parser.parse_args()
    chosen = glyphs.select(arms(), args)
    done = results(args.results)
    glyphs.carry_out([job for job in glyphs.tuning_jobs(chosen, args.trial) if job.key not in done], args, MODULE)
    done = results(args.results)
    final = [job for arm in chosen for job in glyphs.final_jobs(arm, done, args.trial)]
    glyphs.carry_out([job for job in final if job.key not in done], args, MODULE)
    text = report(chosen, args.results, args.trial)
    print(text)
    if not args.trial:
        (RESULTS / "peers_quality.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
