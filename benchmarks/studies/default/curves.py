"""Learning curves of the default and of two tuned losses at batch 16, on the data sets that need no large download.

    python -m benchmarks.studies.default.curves --wordnet FOLDER    # three seeds, about half an hour of one core
    python docs/drawings.py                                         # draws docs/concepts/learning_curves.svg from it

Data, encoders and settings are those of the study (``python -m benchmarks.studies.default``); without ``--wordnet`` the
words are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor, nn

from benchmarks.report import environment, finish, mean_spread, table
from benchmarks.studies.default.arms import ARMS, DEFAULT, STUDY
from benchmarks.studies.default.losses import loss_of
from benchmarks.studies.default.tasks import SAMPLES, Task, load
from benchmarks.studies.default.training import Loss, Setting, train
from benchmarks.studies.search import SEEDS

NAME, BATCH, POINTS = "default_curves", 16, 8
LOSSES, SETS = ("InfoNCE", "DCL", DEFAULT), ("glyphs", "words", "faces")
ABOUT = f"""Recall on the test half after each eighth of a run of {SAMPLES:,} samples at batch {BATCH}, in per cent.
Mean ± standard deviation of the seeds {", ".join(map(str, SEEDS))}. The loops, settings and seeds are those of
[default.md](default.md)."""


class Measured:
    """A loss that measures the model at equal distances during a run.

    Args:
        loss: the loss.
        task: held-out data and the score.
        updates: of the run.
    """

    def __init__(self, loss: Loss, task: Task, updates: int) -> None:
        self.loss, self.task, self.every = loss, task, updates // POINTS
        self.updates = 0
        self.recalls: list[float] = []

    def __call__(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        return self.loss(z1, z2, index)

    def watch(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.loss.parameters()

    def step(self) -> None:
        self.loss.step()
        self.updates += 1
        if self.updates % self.every == 0:
            self.recalls.append(round(self.task.score(self.model.eval())["recall"], 6))
            self.model.train()


def curve(arm: str, task: Task, seed: int) -> list[float]:
    """Return the recalls of a run."""
    cell, chosen = ARMS[arm], STUDY.best(arm, STUDY.finished())
    if chosen is None:
        raise SystemExit(f"{arm}: nothing is chosen yet; python -m benchmarks.studies.default tune --arms {arm!r}")
    setting = Setting(batch=cell.batch, lr=chosen["lr"], seed=seed)
    updates = setting.samples // setting.batch
    measured = train(task, lambda task: Measured(loss_of(cell, chosen, task), task, updates), setting)[1]
    return measured.recalls


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, metavar="FOLDER", help="WordNet 3.0's files")
    parser.add_argument("--quick", action="store_true", help="one seed, printed only")
    args, env = parser.parse_args(argv), environment()
    results: dict[str, dict[str, list[list[float]]]] = {}
    for name in SETS if args.wordnet else [name for name in SETS if name != "words"]:
        task = load(name, "test", args.wordnet)
        seeds = SEEDS[:1] if args.quick else SEEDS
        results[name] = {loss: [curve(f"{name}: {loss}, {BATCH}", task, seed) for seed in seeds] for loss in LOSSES}
    body = [
        [name, loss, *(mean_spread(values, 100) for values in zip(*curves, strict=True))]
        for name, losses in results.items()
        for loss, curves in losses.items()
    ]
    head = ["", "", *(f"{SAMPLES * point // POINTS:,}" for point in range(1, POINTS + 1))]
    parts = [ABOUT, table(head, body, "ll" + "r" * POINTS)]
    finish(NAME, "Learning curves at batch 16", env, parts, results, args.quick)


if __name__ == "__main__":
    main()
