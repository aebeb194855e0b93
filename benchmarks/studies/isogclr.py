"""iSogCLR's ablation of ``tau_init`` and ``rho`` (Figure 7, Tables 8 and 9) on long-tailed data: glyph captions.

A caption belongs to between 1 and 16 glyphs. For every setting, the study reports recall of held-out names and the rank
correlation of a sample's temperature with the number of training pairs of its caption, which tests that frequent
semantics get large temperatures (Figure 5). SogCLR at the same temperatures is included for comparison::

    python -m benchmarks.studies.isogclr        # three seeds: some fifteen minutes of one core
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import spearmanr

import compopt
from benchmarks.report import environment, finish, mean_spread, table
from recipes import glyphs
from recipes.tasks import GlyphNames

PAIRS, BATCH, LR, TAU_LR = 2_048, 64, 2e-3, 1e-2
TAUS, RADII = (0.02, 0.07, 0.2), (0.5, 1.0, 2.0, 3.0)
Cell = tuple[str, float, float]  # method, tau or tau_init, rho
CELLS: list[Cell] = [
    *(("SogCLR", tau, 0.0) for tau in TAUS),
    *(("iSogCLR", tau, 2.0) for tau in TAUS),
    *(("iSogCLR", 0.07, rho) for rho in RADII if rho != 2.0),
]


def build(cell: Cell, n: int) -> compopt.ContrastiveEstimator:
    method, tau, rho = cell
    if method == "SogCLR":
        return compopt.SogCLREstimator(n, gamma=0.8, tau=tau)
    return compopt.ISogCLREstimator(n, gamma=0.8, rho=rho, lr=TAU_LR, tau_init=tau, reference="none")


def run(cell: Cell, seed: int, steps: int) -> dict[str, Any]:
    """Train on random batches; return recalls, and statistics of the learned temperatures."""
    torch.manual_seed(seed)
    task = GlyphNames(glyphs.load(None), limit=PAIRS)
    model, est, draws = task.model(), build(cell, task.n), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps)
    est.attach(optimizer)
    for _ in range(steps):
        index = torch.randperm(task.n, generator=draws)[:BATCH]
        image, text = task.inputs(index, draws)
        optimizer.zero_grad()
        est(model.image(image), model.text(text), index).backward()
        optimizer.step()
        schedule.step()
    found = {"cell": cell, "seed": seed, **task.evaluate(model.eval())}
    rows = est.read(torch.arange(task.n))
    if "tau" in rows:
        seen = rows["count"] > 0
        tau = rows["tau"].mean(1)[seen]
        found |= {"median": float(tau.median()), "rank": float(spearmanr(tau, task.caption_frequency()[seen])[0])}
    return found


def row(cell: Cell, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table row of one cell, over its seeds."""
    method, tau, rho = cell
    recalls = [mean_spread([run[name] for run in runs], 100) for name in ("r1", "r1_text_to_image")]
    learned = [
        mean_spread([run[name] for run in runs], digits=digits) if name in runs[0] else ""
        for name, digits in (("median", 3), ("rank", 2))
    ]
    return [method, str(tau), str(rho or ""), *recalls, *learned]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--quick", action="store_true", help="print the results and write no files")
    args, env = parser.parse_args(argv), environment()
    results = [[run(cell, seed, args.steps) for seed in args.seeds] for cell in CELLS]
    head = ["method", "tau, tau_init", "rho", "R@1 to name, %", "to image, %", "median tau", "rank correlation"]
    note = (
        f"{PAIRS:,} pairs, batch {BATCH}, {args.steps:,} steps. Values are mean ± standard deviation of the seeds "
        f"{', '.join(map(str, args.seeds))}. The last column is the rank correlation between the learned tau of a "
        "sample and the frequency of its caption."
    )
    body = [row(cell, runs) for cell, runs in zip(CELLS, results, strict=True)]
    finish(
        "isogclr",
        "iSogCLR with different tau_init and rho",
        env,
        [note, table(head, body, "lrrrrrr")],
        results,
        args.quick,
    )


if __name__ == "__main__":
    main()
