"""SogCLR's Figure 2 and its consequence: differences of a sample's two views in similarities to other samples.

SogCLR keeps one normalizer per sample, the mean of those of its two views. For each quarter of the glyph faces by
``epsilon_i^2`` (:func:`compopt.diagnostics.view_differences`), the study measures the distance of the two views'
normalizers from their mean, and of the stored normalizer from the exact one, after training with the settings of
``unimodal.py``::

    python -m benchmarks.studies.view_differences    # three seeds, about three minutes of one core
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import environment, finish, mean_spread, table
from compopt import diagnostics
from recipes import glyphs
from recipes.engine import Config, Control, Run
from recipes.methods import METHODS
from recipes.tasks import GlyphFaces

BATCH, PASSES, LR, TAU = 64, 8, 5e-4, 0.1
QUARTERS = ("least", "second", "third", "greatest")


def run(seed: int, passes: int) -> dict[str, list[float]]:
    """Train and return the means over each quarter by ``epsilon_i^2``."""
    task = GlyphFaces(glyphs.load())
    options = METHODS["sogclr"].options(task.mode, {"tau": TAU})
    trained = Run(task, Config("sogclr", options, BATCH, passes, lr=LR, seed=seed), Control(eval_every=0)).train()
    z1, z2 = task.training_features(trained.model.eval())
    epsilon = diagnostics.view_differences(z1, z2)
    views, mean = (diagnostics.log_normalizers(z1, z2, TAU, task.mode, kind) for kind in ("separate", "averaged"))
    positive = torch.cosine_similarity(z1, z2)[:, None]  # rows are of exp(s_ij / tau), the exact ones of h_ij
    stored = trained.est.read(torch.arange(task.n))["log_u"] - positive / TAU
    quarters = epsilon.argsort().chunk(len(QUARTERS))

    def means(values: Tensor) -> list[float]:
        return [float(values[quarter].mean()) for quarter in quarters]

    return {
        "epsilon": means(epsilon),
        "views": means((views - mean).abs().mean(1)),
        "stored": means((stored - mean).abs().mean(1)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--quick", action="store_true", help="print the results and write no files")
    args, env = parser.parse_args(argv), environment()
    results: list[dict[str, Any]] = [run(seed, args.passes) for seed in args.seeds]
    note = (
        f"Glyph faces, SogCLR at batch {BATCH}, {args.passes} passes, tau {TAU}. Each value is the mean over a quarter "
        f"of the samples: mean ± standard deviation of the seeds {', '.join(map(str, args.seeds))}. The last two "
        "columns are absolute distances in nats: from the normalizers of the two views to their mean, and from the "
        "stored normalizer to the exact one."
    )
    head = ["quarter by epsilon²", "epsilon²", "views' normalizers to their mean", "stored to exact normalizer"]
    digits = {"epsilon": 4, "views": 2, "stored": 2}
    body = [
        [name, *(mean_spread([found[key][k] for found in results], digits=digits[key]) for key in digits)]
        for k, name in enumerate(QUARTERS)
    ]
    sections = [note, table(head, body, "lrrr")]
    finish("view_differences", "Differences between the similarities of two views", env, sections, results, args.quick)


if __name__ == "__main__":
    main()
