"""Time of a sample with each loss, so that some are also compared at equal time.

    python -m benchmarks.studies.default.timing --wordnet FOLDER    # results/default_time.md, on a machine at rest

Training steps alone are timed, with the loop and the models of the study: forward passes, loss, backward passes,
update. The contenders of a data set take turns, so that what the machine does besides meets all of them.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.machine import in_turns
from benchmarks.report import environment, finish, table
from benchmarks.studies.default.arms import ARMS, REFERENCE, SETS, TIMED, TIMES
from benchmarks.studies.default.losses import loss_of
from benchmarks.studies.default.tasks import SAMPLES, load
from benchmarks.studies.default.training import Setting, train

ABOUT = f"""Milliseconds per 1,024 samples: the median of the rounds, all contenders once in each. Where losses are
compared at equal time, each sees as many samples as fit in the time that {REFERENCE} takes for {SAMPLES:,}: the number
in brackets, in thousands. Small batches pay for their many calls here, since these encoders are small."""


def measured(name: str, wordnet: Path, rounds: int, samples: int) -> dict[str, float]:
    """Seconds per sample of every contender on a data set; the first round warms up."""
    task = load(name, "validation", wordnet)

    def seconds(contender: str) -> float:
        cell = ARMS[f"{name}: {contender}"]
        setting = Setting(batch=cell.batch, lr=1e-3, samples=samples)
        return train(task, lambda task: loss_of(cell, cell.first, task), setting)[2] / samples

    found = in_turns({contender: partial(seconds, contender) for contender in TIMED}, rounds)
    return {contender: median(times) for contender, times in found.items()}


def told(times: dict[str, float], contender: str) -> str:
    """Milliseconds, and thousands of samples at equal time."""
    return f"{1024e3 * times[contender]:,.0f} ({SAMPLES / 1e3 * times[REFERENCE] / times[contender]:.0f})"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, required=True, help="folder of WordNet's files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2048, help="of a contender in a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = {**environment(), "command": "python -m benchmarks.studies.default.timing --wordnet FOLDER"}
    results = {name: measured(name, args.wordnet, args.rounds, args.samples) for name in SETS}
    body = [[contender, *(told(results[name], contender) for name in SETS)] for contender in TIMED]
    finish(TIMES, "What a sample costs", env, [ABOUT, table(["", *SETS], body)], results)


if __name__ == "__main__":
    main()
