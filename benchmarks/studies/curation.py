"""Wrong captions on purpose: how well rows tell them, and what leaving them out is worth, on glyph names.

A share of the training pairs gets the captions of other pairs; all arms see the same number of samples::

    python -m benchmarks.studies.curation run      # what results/curation.jsonl lacks; about 40 s of one core per run
    python -m benchmarks.studies.curation report   # results/curation.md

The arms train DCL or the default (``compopt.recommended``), the latter beside a ``ScoreKeeper``:

- ``DCL``, ``default``: on all pairs.
- ``during``: from the third epoch on without the pairs that the rows suspect (``ScoredSampler``): as many as the rows
  say after two epochs, but for one in 20, drawn anew.
- ``weights`` and ``weights, early``: on all pairs, with ``est.weights("robust")`` as ``sample_weight=`` from the third
  or the second epoch on, anew four times per epoch; the share of wrong pairs stays as the rows say after two epochs.
- ``rows, 1 epoch`` and ``rows``: trained anew without the suspects of the first run's rows after one epoch (as many as
  there are wrong ones, since one epoch is too short to count them), or after all of it (as many as the rows said after
  two epochs).
- ``similarity``: the same number of pairs with the lowest similarity of the trained model, which takes a pass over the
  data of its own.
- ``oracle``: without the wrong pairs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import compopt
from benchmarks.report import RESULTS, append_run, mean_spread, paired, read_runs, table
from benchmarks.studies.search import SEEDS, provenance, stamp
from compopt import curation
from compopt.samplers import ScoredSampler
from recipes import glyphs
from recipes.tasks import GlyphNames

PAIRS, BATCH, EPOCHS, LR = 16_384, 64, 4, 2e-3
SHARES = (0.0, 0.1, 0.2, 0.4)
READ_EVERY = 64  # steps after which weights are made anew
WARM_UP = 2  # epochs on all pairs, after which the rows say how many are wrong
NOTHING = torch.zeros(0, dtype=torch.int64)
WEIGHED = {"weights": WARM_UP, "weights, early": 1}  # arms in one run, and the epoch from which weights are used
ARMS = ("DCL", "default", "during", *WEIGHED, "rows, 1 epoch", "rows", "similarity", "oracle")
PATH = RESULTS / "curation.jsonl"


def noisy_task(share: float, seed: int) -> tuple[GlyphNames, Tensor]:
    """Return the pairs, a share of them with each other's captions, and a mask of those whose caption is wrong."""
    task = GlyphNames(glyphs.load(None), limit=PAIRS)
    chosen = torch.randperm(task.n, generator=torch.Generator().manual_seed(seed))[: round(share * task.n)]
    right, given = task.caption.clone(), task.caption.clone()
    given[chosen] = right[chosen.roll(1)]
    task.caption = task.group = given
    return task, given != right


def train(
    task: GlyphNames,
    est: compopt.ContrastiveEstimator,
    seed: int,
    sampler: Iterable[int],
    weigh: Callable[[Tensor], Tensor | None] = lambda index: None,
) -> torch.nn.Module:
    """Train on as many batches as four passes over all samples make; the sampler gives one pass after another."""
    torch.manual_seed(seed)
    model, draws = task.model(), torch.Generator().manual_seed(seed)
    steps = EPOCHS * (task.n // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps)
    est.attach(optimizer)
    for index in islice(endless(sampler), steps):
        image, text = task.inputs(index, draws)
        est(model.image(image), model.text(text), index, sample_weight=weigh(index)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def endless(sampler: Iterable[int]) -> Iterator[Tensor]:
    """Yield full batches of one pass after another."""
    while True:
        yield from (batch for batch in torch.tensor(list(sampler)).split(BATCH) if len(batch) == BATCH)


class Rest:
    """Random passes over all samples but some; ``between`` is called when a pass begins, with its number."""

    def __init__(self, n: int, out: Tensor, seed: int, between: Callable[[int], None] = lambda number: None) -> None:
        mask = torch.ones(n, dtype=torch.bool)
        mask[out] = False
        self.samples, self.between, self.number = mask.nonzero().flatten(), between, 0
        self.draws = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        self.between(self.number)
        self.number += 1
        return iter(self.samples[torch.randperm(len(self.samples), generator=self.draws)].tolist())


class Weights:
    """Robust weights of the samples of a batch from epoch ``first`` on, made anew after every ``READ_EVERY`` steps."""

    def __init__(self, est: compopt.ContrastiveEstimator, n: int, first: int) -> None:
        self.est, self.values = est, torch.ones(n)
        self.first, self.told = (epoch * (n // BATCH) for epoch in (first, WARM_UP))
        self.share: float | None = None

    def __call__(self, index: Tensor) -> Tensor | None:
        if self.est.t < self.first:
            return None
        if self.est.t % READ_EVERY == 0:
            found = curation.scores(self.est)
            if self.est.t <= self.told:
                self.share = curation.wrong_share(found)
            self.values = curation.weights(found, "robust", self.share)
        return self.values[index]


def auroc(score: Tensor, wrong: Tensor) -> float:
    """Return the probability that a wrong pair has a lower score than a right one; NaN without wrong ones."""
    return float(roc_auc_score(wrong.numpy(), -score.nan_to_num(0).numpy())) if wrong.any() else float("nan")


class FirstRun:
    """The default on all pairs, with its rows after every epoch."""

    def __init__(self, task: GlyphNames, wrong: Tensor, seed: int) -> None:
        self.wrong, self.rows = wrong, list[curation.Scores]()
        self.est = default(task)
        self.model = train(task, self.est, seed, Rest(task.n, NOTHING, seed, self._look))
        self._look(EPOCHS)
        z1, z2 = task.training_features(self.model)
        self.similarity = torch.linalg.vecdot(z1, z2)

    def _look(self, number: int) -> None:
        if number:
            self.rows.append(curation.scores(self.est))

    def facts(self) -> dict[str, Any]:
        return {
            "auroc": [auroc(rows.score, self.wrong) for rows in self.rows],
            "share_of_rows": [curation.wrong_share(rows) for rows in self.rows],
            "auroc_similarity": auroc(self.similarity, self.wrong),
        }

    def suspects(self, arm: str) -> Tensor:
        """Return what an arm that trains anew leaves out."""
        last = curation.suspects(self.rows[-1], curation.wrong_share(self.rows[WARM_UP - 1]))
        if arm == "rows, 1 epoch":
            return curation.suspects(self.rows[0], float(self.wrong.float().mean()))
        lowest = torch.argsort(self.similarity, stable=True)[: len(last)]
        return {"rows": last, "similarity": lowest, "oracle": self.wrong.nonzero().flatten()}[arm]


def default(task: GlyphNames) -> compopt.ContrastiveEstimator:
    return compopt.recommended(task.dim, task.n, BATCH, keep_scores=True)


def run(share: float, seed: int, arms: tuple[str, ...]) -> None:
    """Train the arms that are missing for one share and seed, and append their results."""
    task, wrong = noisy_task(share, seed)
    first: FirstRun | None = None
    for arm in arms:
        started, facts = time.perf_counter(), {}
        if arm not in ("DCL", "during", *WEIGHED):
            first = first or FirstRun(task, wrong, seed)
        if arm == "default":
            assert first is not None
            model, facts = first.model, first.facts()
        elif arm == "during":
            est = default(task)
            sampler = ScoredSampler(est, WARM_UP, seed=seed)
            model = train(task, est, seed, sampler)
            facts = {"left_out": len(sampler.left_out), "wrong_left_out": int(wrong[sampler.left_out].sum())}
        elif arm in WEIGHED:
            weights = Weights(est := default(task), task.n, WEIGHED[arm])
            model = train(task, est, seed, Rest(task.n, NOTHING, seed), weights)
            less = 1 - weights.values
            facts = {"left_out": float(less.sum()), "wrong_left_out": float(less[wrong].sum())}
        else:
            est = compopt.DCLEstimator(0.07) if arm == "DCL" else compopt.recommended(task.dim, task.n, BATCH)
            out = NOTHING if first is None or arm == "DCL" else first.suspects(arm)
            facts = {"left_out": len(out), "wrong_left_out": int(wrong[out].sum())}
            model = train(task, est, seed, Rest(task.n, out, seed))
        result = {"share": share, "seed": seed, "arm": arm, "metrics": task.evaluate(model), **facts}
        append_run(PATH, result | {"seconds": round(time.perf_counter() - started, 1), **stamp()})
        print(json.dumps(result), flush=True)


# -- the page ------------------------------------------------------------------------------------------------------

ABOUT = (
    f"{PAIRS:,} training pairs, batch {BATCH}, {EPOCHS} epochs, AdamW with one cycle at {LR:g}; R@1 from image to name "
    f"on held-out glyphs with right names, in per cent; mean ± standard deviation of the seeds "
    f"{', '.join(map(str, SEEDS))}; the gain is over the default, by seed, and recovered is the gain as a share of "
    "what noise costs the default. A weighted pair is left out by what its last weight lacks to 1. Nothing was tuned."
)


COLUMNS = ["wrong", "arm", "R@1", "gain", "recovered, %", "left out, %", "of these wrong, %", "seeds"]


def page() -> str:
    runs = read_runs(PATH)
    by = {share: {arm: of(runs, share, arm) for arm in ARMS} for share in SHARES}
    told = [row for share, arms in by.items() for row in telling(share, list(arms["default"].values()))]
    clean = by[0.0]["default"]
    gains = [
        gained(share, arm, found, arms["default"], clean)
        for share, arms in by.items()
        for arm, found in arms.items()
        if found
    ]
    epochs = [f"after epoch {k + 1}" for k in range(EPOCHS)]
    return "\n\n".join(
        [
            "# Wrong pairs: what rows tell",
            provenance(runs, "benchmarks/studies/curation.py"),
            ABOUT,
            "## Telling wrong pairs",
            table(["wrong", "", *epochs, "trained model's similarity"], told, "llrrrrr"),
            "## Leaving them out",
            table(COLUMNS, gains, "llrrrrrr"),
        ]
    )


def of(runs: list[dict[str, Any]], share: float, arm: str) -> dict[int, dict[str, Any]]:
    """Return the runs of one arm by seed."""
    return {run["seed"]: run for run in runs if (run["share"], run["arm"]) == (share, arm) and run["seed"] in SEEDS}


def telling(share: float, firsts: list[dict[str, Any]]) -> list[list[str]]:
    """Return the lines of one share in the first table."""
    if not firsts:
        return []
    shares = [mean_spread([run["share_of_rows"][k] for run in firsts], 100) for k in range(EPOCHS)]
    lines = [[f"{share:.0%}", "estimated share of wrong pairs, %", *shares, ""]]
    if share:
        found = [mean_spread([run["auroc"][k] for run in firsts], digits=3) for k in range(EPOCHS)]
        similarity = mean_spread([run["auroc_similarity"] for run in firsts], digits=3)
        lines.insert(0, [f"{share:.0%}", "AUROC of the rows", *found, similarity])
    return lines


def gained(
    share: float,
    arm: str,
    found: dict[int, dict[str, Any]],
    base: dict[int, dict[str, Any]],
    clean: dict[int, dict[str, Any]],
) -> list[str]:
    """Return the line of one arm in the second table."""
    recall = {seed: run["metrics"]["r1"] for seed, run in found.items()}
    gains = {seed: value - base[seed]["metrics"]["r1"] for seed, value in recall.items() if seed in base}
    gain = paired([100 * value for value in gains.values()]) if arm != "default" and len(gains) > 1 else ""
    costs = {seed: clean[seed]["metrics"]["r1"] - base[seed]["metrics"]["r1"] for seed in gains if seed in clean}
    recovered = mean_spread([gains[seed] / cost for seed, cost in costs.items()], 100) if share else ""
    out = [run for run in found.values() if run.get("left_out")]
    left = mean_spread([run["left_out"] / PAIRS for run in out], 100)
    right = mean_spread([run["wrong_left_out"] / run["left_out"] for run in out], 100)
    found_by_rows = ["" if arm == "default" else recovered, left, right]
    return [f"{share:.0%}", arm, mean_spread(list(recall.values()), 100), gain, *found_by_rows, str(len(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    options = parser.parse_args()
    if options.command == "report":
        PATH.with_suffix(".md").write_text(page() + "\n")
        return
    torch.set_num_threads(1)
    for seed in options.seeds:
        for share in options.shares:
            done = {run["arm"] for run in read_runs(PATH) if (run["share"], run["seed"]) == (share, seed)}
            run(share, seed, tuple(arm for arm in options.arms if arm not in done and (share or arm != "oracle")))


if __name__ == "__main__":
    main()
