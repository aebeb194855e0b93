"""A training step of sentence-transformers with its own loss and with ours, in turns, in one process.

    python -m benchmarks.text_steps

A step is forward and backward of the loss, AdamW, and for an estimator its commit.  The models: the study's small one,
and one of the size of all-MiniLM-L6 (6 layers of width 384), with new weights.  Texts are the standard library's
docstrings.  Losses take turns within every round, in an order drawn anew; a ratio is that of two neighbours in time.
Prints and writes ``results/text_steps.md``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.machine import in_turns, timed
from benchmarks.report import environment, heading, quartiles, save, spread, table
from benchmarks.studies.text import LOSSES, estimator
from recipes.text import TextPairs, load, small_model, tokenizer_of

MODELS = {"1 x 64": {"width": 64, "layers": 1}, "6 x 384": {"width": 384, "layers": 6}}
BATCHES = {"1 x 64": (16, 64, 256), "6 x 384": (16, 64)}
OURS = [name for name in LOSSES if "MNRL" not in name]


def stepper(loss: torch.nn.Module, features: list[dict[str, Any]], labels: torch.Tensor) -> Callable[[], float]:
    """One training step on a batch, which gives its milliseconds."""
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-4)
    for module in getattr(loss, "estimators", ()):
        module.est.attach(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss([dict(each) for each in features], labels).backward()
        optimizer.step()

    return lambda: 1000 * timed(step)


def steppers(pairs: TextPairs, tokenizer: Any, kind: str, batch: int, cached: bool) -> dict[str, Callable[[], float]]:
    """A step with each loss, each with a model of its own."""
    from sentence_transformers.sentence_transformer import losses

    from compopt.integrations.sentence_transformers import CachedEstimatorLoss, EstimatorLoss

    torch.manual_seed(0)
    n, at = len(pairs.train), pairs.train[:batch]
    theirs = losses.CachedMultipleNegativesRankingLoss if cached else losses.MultipleNegativesRankingLoss
    ours = CachedEstimatorLoss if cached else EstimatorLoss
    made = {}
    for name in ("MNRL", *OURS):
        model = small_model(tokenizer, **MODELS[kind])
        features = [model.preprocess([column[i] for i in at]) for column in (pairs.queries, pairs.documents)]
        options = {"scale": 20.0, **LOSSES[name]}
        loss = theirs(model) if name == "MNRL" else ours(model, estimator(name, n, MODELS[kind]["width"], options))
        made[name] = stepper(loss, features, torch.arange(batch))
    return made


def ratios(times: dict[str, list[float]], name: str) -> list[float]:
    return [ours / theirs for ours, theirs in zip(times[name], times["MNRL"], strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row of the table (default 20)")
    args = parser.parse_args(argv)
    env = environment()
    pairs = load()
    tokenizer = tokenizer_of([*pairs.queries, *pairs.documents], length=24)
    body, results = [], {}
    for kind in args.models:
        for batch in BATCHES[kind]:
            for cached in (False, True):
                made = steppers(pairs, tokenizer, kind, batch, cached)
                trial = in_turns(made, 2, warm=2)  # the first ones allocate
                rounds = max(5, int(1000 * args.seconds / sum(min(each) for each in trial.values())))
                times = in_turns(made, rounds, warm=0)
                results[f"{kind}, {batch}, {'cached' if cached else 'plain'}"] = times
                cells = [spread(quartiles(ratios(times, name)), 3) for name in OURS]
                what = ["MNRL", "Cached MNRL"][cached]
                body.append([kind, str(batch), what, f"{statistics.median(times['MNRL']):.1f}", *cells, str(rounds)])
                print(*body[-1], flush=True)
    head = ["layers x width", "batch", "theirs", "ms", *OURS, "rounds"]
    lines = [
        *heading("A step of sentence-transformers: ours over theirs", env),
        "Milliseconds of a step with their loss; for ours, the ratio to it within a round: median and quartiles.",
        "",
        table(head, body),
    ]
    save("text_steps", "\n".join(lines), env, results)


if __name__ == "__main__":
    main()
