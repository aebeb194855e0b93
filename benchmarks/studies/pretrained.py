"""Study of published encoders that are fine-tuned in small batches.

    python -m benchmarks.studies.pretrained tune  --texts FOLDER [--arms "words: *"]  # rate, then the other settings
    python -m benchmarks.studies.pretrained final --texts FOLDER                      # three other seeds, test half
    python -m benchmarks.studies.pretrained report                                    # results/pretrained.md

``benchmarks.studies.published`` describes the data sets and encoders; FOLDER has the files of words and packages. A run
sees 1,600 training pairs once, or three times in the cases ``long``, with AdamW, clipping at norm 1 and a warm-up of
10 %, and is measured by R@1 in both directions among 1,024 held-out pairs.

Everything is tuned on ``words`` at batch 16 with both directions, and the other cases use those settings: batch 8 and
64, one direction, a mined negative per sample, three passes, and the other data sets. ``docstrings`` and ``icons``
played no part in any choice. ``recommended`` is what :func:`compopt.recommended` returns without further arguments; its
rate is the one that was chosen for 500 candidates. Each finished run is a line of ``results/pretrained.jsonl`` and is
not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compopt
from benchmarks.report import RESULTS, mean_spread, paired, standard_error, table
from benchmarks.studies.default.training import features
from benchmarks.studies.published import DIM, ICONS, NEAREST, POOL, TEXTS, Encoders, Pairs, encoded, mined
from benchmarks.studies.search import Arm, Job, Results, Search, by_seed, main, provenance, settings
from recipes.batches import Shuffled, seeded

SAMPLES, EPOCHS, WARMUP, DECAY, CLIP = 1_600, 3, 0.1, 0.01, 1.0
MICRO, LARGE = 16, 256  # samples per forward pass and per call of the gradient cache
DATA, TUNED_ON, BATCHES = (*TEXTS, ICONS), "words", (8, 16, 64)
RATES, TAUS, DECAYS = (2e-5, 5e-5, 1e-4, 2e-4), (0.02, 0.05, 0.1), (0.9, 0.95, 0.99)
CANDIDATES = (150, 500, 1500)
INFO, DCL, CACHED, SOG = "InfoNCE", "DCL", "InfoNCE, gradient cache", "SogCLR"
GUIDED = "InfoNCE, guide"  # the encoder as it was before training finds false negatives
OURS, MOMENTUM = "recommended", "recommended, momentum features"
WITHOUT = ", candidates=None"  # last part of the name of a loss
CHOSEN_K, FEWER = f"{OURS}, candidates chosen", f"{OURS}, candidates=500"
BEFORE = "before"  # an arm without training
# loss -> grids of its settings apart from the learning rate
TUNED: dict[str, dict[str, tuple[float, ...]]] = {
    INFO: {"tau": TAUS},
    "CLIP": {},
    CACHED: {"tau": TAUS},
    DCL: {"tau": TAUS},
    "SigLIP": {},
    SOG: {"tau": TAUS},
    OURS + WITHOUT: {},
    MOMENTUM + WITHOUT: {"decay": DECAYS},
    CHOSEN_K: {"candidates": CANDIDATES},
}
# loss -> its settings: the rate of CHOSEN_K, the decay of MOMENTUM + WITHOUT, the rate and temperature of INFO
CARRIED: dict[str, dict[str, float]] = {
    OURS: {"lr": 5e-5},
    MOMENTUM: {"lr": 5e-5, "decay": 0.99},
    FEWER: {"lr": 5e-5},
    GUIDED: {"lr": 5e-5, "tau": 0.05},
}
LOSSES = (*TUNED, *CARRIED)
# losses of the cases that are not tuned, too
COMPARED = (INFO, DCL, SOG, OURS, OURS + WITHOUT, MOMENTUM, CHOSEN_K, FEWER, GUIDED)
START = {"lr": 5e-5, "tau": 0.05, "decay": 0.95, "candidates": 500}  # where the tuning begins


# -- arms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case(Arm):
    """A loss in a case.

    Attributes:
        data: data set.
        loss: one of ``LOSSES``, or ``BEFORE``.
        batch: samples per call.
        directions: directions of the estimator.
        mined: whether each sample has a mined negative.
        epochs: number of passes over the training pairs.
    """

    data: str
    loss: str
    batch: int = MICRO
    directions: str = "both"
    mined: bool = False
    epochs: int = 1


CASES: Mapping[str, Mapping[str, Any]] = {
    **{str(batch): {"batch": batch} for batch in BATCHES},
    "one direction": {"directions": "forward"},
    "mined": {"mined": True},
    "long": {"epochs": EPOCHS},
}


def _home(loss: str) -> Case:
    """Return the arm in which the settings of a loss are chosen."""
    if loss in CARRIED:
        return Case(data=TUNED_ON, loss=loss, first=CARRIED[loss])
    grids = {"lr": RATES, **TUNED[loss]}
    batch, first = LARGE if loss == CACHED else MICRO, {name: START[name] for name in grids}
    return Case(data=TUNED_ON, loss=loss, batch=batch, first=first, grids=grids, widen={"lr": 2.0, "tau": 2.0})


def _name(data: str, loss: str, case: str) -> str:
    return f"{data}: {loss}, {case}"


HOME = str(MICRO)  # the case whose settings are tuned, on TUNED_ON
ARMS: dict[str, Case] = {_name(TUNED_ON, loss, HOME): _home(loss) for loss in LOSSES}
ARMS |= {
    _name(data, loss, case): Case(data=data, loss=loss, after=_name(TUNED_ON, loss, HOME), **options)
    for data in DATA
    for case, options in CASES.items()
    for loss in COMPARED
    if (data, case) != (TUNED_ON, HOME) and (loss, case) != (MOMENTUM, "one direction")  # which is refused
}
ARMS |= {f"{data}: {BEFORE}": Case(data=data, loss=BEFORE) for data in DATA}


def score(result: dict[str, Any]) -> float:
    """Return recall on the validation half."""
    return result["metrics"]["validation/recall"]


STUDY = Search(ARMS, RESULTS / "pretrained.jsonl", score)


# -- one run -------------------------------------------------------------------------------------------------------


def estimator(case: Case, options: Mapping[str, float], n: int) -> compopt.ContrastiveEstimator:
    """Return the estimator of a case."""
    given: dict[str, Any] = {"directions": case.directions}
    tau, loss = options.get("tau"), case.loss
    if loss in (INFO, CACHED):
        return compopt.InfoNCEEstimator(tau, **given)
    if loss == GUIDED:
        return compopt.InfoNCEEstimator(tau, pairs=compopt.PairPolicy(false_negatives=0.0, guided=True), **given)
    if loss == "CLIP":
        return compopt.InfoNCEEstimator(0.05, learn_tau=True, multiply_tau=False, **given)
    if loss == DCL:
        return compopt.DCLEstimator(tau, **given)
    if loss == "SigLIP":
        return compopt.SigLIPEstimator(**given)
    if loss == SOG:
        return compopt.SogCLREstimator(n, gamma=0.9, tau=tau, **given)
    if loss.endswith(WITHOUT):
        given["candidates"] = None
    elif loss in (CHOSEN_K, FEWER):
        given["candidates"] = int(options.get("candidates", START["candidates"]))
    return compopt.recommended(DIM, n, case.batch, momentum=loss.startswith(MOMENTUM), **given)


@dataclass
class Observed:
    """Means over the updates of a run, by name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **found: float) -> None:
        for name, value in found.items():
            self.values.setdefault(name, []).append(value)

    def means(self) -> dict[str, float]:
        """Return the means over the first and the last fifth of the updates, without missing values."""
        told = {}
        for name, values in self.values.items():
            part = max(1, len(values) // 5)
            for when, some in (("first", values[:part]), ("last", values[-part:])):
                known = [value for value in some if not math.isnan(value)]
                told[f"{name}/{when}"] = round(mean(known), 5) if known else math.nan
        return told


def gradients_of_anchors(z1: Tensor, z2: Tensor) -> dict[str, float]:
    """Return the share of anchors of the first side that their batch solves, and the gradient that they get.

    An anchor is solved if its positive is its nearest candidate in the batch. ``solved_gradient`` is the mean norm of
    the gradient with respect to solved anchors, relative to that of all anchors.
    """
    with torch.no_grad():
        nearest = (F.normalize(z1) @ F.normalize(z2).T).argmax(1)
        solved = nearest == torch.arange(len(z1))
        norm = z1.grad.norm(dim=1)
        relative = float(norm[solved].mean() / norm.mean()) if solved.any() else math.nan
    return {"solved": float(solved.float().mean()), "solved_gradient": relative}


def train(case: Case, options: Mapping[str, float], task: Pairs, model: Encoders, seed: int) -> Observed:
    """Fine-tune a model in place."""
    torch.manual_seed(seed)
    est, negatives = estimator(case, options, task.n), mined(case.data, task, model) if case.mined else None
    guide = encoded(model, task.train) if case.loss == GUIDED else None
    groups = [{"params": [*model.parameters()]}, {"params": [*est.parameters()], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], options["lr"], weight_decay=DECAY)
    est.attach(optimizer)
    encoder = compopt.MomentumEncoder(model, options["decay"]) if "decay" in options else None
    if encoder is not None:
        encoder.attach(est)
    updates, observed = case.epochs * task.n // case.batch, Observed()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options["lr"], updates + 1, pct_start=WARMUP)
    order = Shuffled(task.n, case.batch, task.n // case.batch, seed)
    for number in range(updates):
        index = order(number)
        inputs, given = [side[index] for side in task.train], {}
        if negatives is not None:
            draws = torch.randint(NEAREST, (len(index),), generator=seeded("mined", seed, number))
            drawn = negatives[index, draws]
            inputs.append(task.train[1][drawn])
        if encoder is not None:  # the copy encodes all candidates
            k1, k2, *further = encoder(*inputs)
            given["keys"] = k1, k2
            z1, z2 = forward(model, inputs[:2], case)
        else:
            z1, z2, *further = forward(model, inputs, case)
        if further:
            given["negatives"] = further[0], drawn
        if guide is not None:
            seen = [guide[0][index], guide[1][index], *(guide[1][drawn] for _ in further)]
            given["pairs"] = est.pairs.bind(guide=seen)
        for z in (z1, z2):
            z.retain_grad()
        est(z1, z2, index, **given).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        observed.add(gradient=float(norm), **gradients_of_anchors(z1, z2))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return observed


def forward(model: Encoders, inputs: list[Tensor], case: Case) -> tuple[Tensor, ...]:
    """Return the features of all inputs; a gradient cache would have the same."""
    if case.loss == CACHED:
        return features(model, (inputs[0], inputs[1]), MICRO)
    return model(*inputs)


def run_one(job: Job, texts: Path | None) -> dict[str, Any]:
    """Train and evaluate in this process."""
    import transformers

    case, part = ARMS[job.arm], "test" if job.final else "validation"
    task, model = Pairs(case.data, part, texts, SAMPLES), Encoders(case.data).train()
    before = [weight.detach().clone() for weight in model.parameters()]
    began, told = time.process_time(), {}
    if case.loss != BEFORE:
        told = train(case, job.options, task, model, job.seed).means()
    seconds = time.process_time() - began
    moved, size = (math.sqrt(sum(float(x.square().sum()) for x in xs)) for xs in (_moves(model, before), before))
    told["moved"] = round(moved / size, 6)
    metrics = {f"{part}/{name}": round(value, 6) for name, value in task.score(model).items()}
    versions = {"transformers": transformers.__version__}
    return {"metrics": metrics, "seconds": round(seconds, 1), "observed": told, **versions}


def _moves(model: nn.Module, before: list[Tensor]) -> list[Tensor]:
    return [weight.detach() - start for weight, start in zip(model.parameters(), before, strict=True)]


# -- the page ------------------------------------------------------------------------------------------------------

ABOUT = (
    f"R@1 (mean of both directions) among {POOL:,} held-out pairs, in per cent: mean ± standard deviation of three "
    f"seeds. Learning rate, temperature, number of candidates and the decay of a momentum copy are tuned for each loss "
    f"on `{TUNED_ON}` at batch {MICRO}, by R@1 of the validation half. All other columns and data sets use these "
    f"settings. `{OURS}` is the library's default, with 1,000 candidates; it is not tuned, and neither are "
    f"`{MOMENTUM}` and `{FEWER}`: their rate is that of `{CHOSEN_K}`, 5e-5. `{CACHED}` has batches of {LARGE} with "
    f"the same number of samples. `{GUIDED}` has the settings of InfoNCE, and leaves out the candidates that the "
    "encoder before training finds more similar to the anchor than its positive."
)
AGAINST = (
    f"`{OURS}` and the losses that it is to replace, with the differences by seed, mean ± standard error; that to the "
    "better of the two losses is bold."
)
WHY = (
    f"Runs on `{TUNED_ON}` at batch {MICRO} with the chosen settings, mean of the seeds, in the last fifth of the "
    "updates. An anchor is *solved* if its positive is the nearest candidate in its batch. *Gradient of solved "
    "anchors* is the mean norm of their gradient relative to that of all anchors of the batch. *Moved* is the norm of "
    "the change of the weights relative to that of the weights. Alignment (mean squared distance of positives) and "
    "uniformity (log of the mean Gaussian potential) are those of the held-out pairs; smaller values are better."
)
CHOSEN = "R@1 of the validation half in per cent. The chosen settings are bold."
OBSERVED = {
    "gradient before clipping": "gradient/last",
    "solved": "solved/last",
    "gradient of solved anchors": "solved_gradient/last",
    "moved": "moved",
}


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals = STUDY.finals(results)
    parts = [
        "# Fine-tuning of published encoders",
        provenance([*results.values()], "benchmarks/studies/pretrained.py"),
        ABOUT,
        f"## {OURS.capitalize()} against InfoNCE and DCL",
        AGAINST,
        summary(results),
        missed(results),
        unfinished(results),
    ]
    for data in DATA:
        if any(name.startswith(f"{data}: ") and not name.endswith(BEFORE) for name in finals):
            parts += [f"## {data.capitalize()}", *_of_data(finals, data)]
    parts += ["## What the losses do", WHY, _why(finals)]
    return "\n\n".join([*parts, settings(STUDY, results, CHOSEN, "validation", 1)])


def _shown(case: str) -> str:
    return f"batch {case}" if case.isdigit() else case


@dataclass(frozen=True)
class Compared:
    """Recall of the default and of the losses that it is to replace in one case, by seed."""

    name: str
    before: list[float]
    recall: dict[str, dict[int, float]]  # of INFO, DCL and OURS

    def gaps(self, theirs: str) -> list[float]:
        ours = self.recall[OURS]
        return [ours[seed] - value for seed, value in self.recall[theirs].items() if seed in ours]

    def better(self) -> str:
        """Return the better one of InfoNCE and DCL."""
        return max((INFO, DCL), key=lambda loss: mean(self.recall[loss].values()))


def compared(results: Results) -> list[Compared]:
    """Return the cases in which the default, InfoNCE and DCL have at least two seeds each."""
    finals, found = STUDY.finals(results), []
    for data in DATA:
        before = [run["metrics"]["test/recall"] for run in finals.get(f"{data}: {BEFORE}", [])]
        for case in CASES:
            recall = {loss: _recall(finals.get(_name(data, loss, case), [])) for loss in (INFO, DCL, OURS)}
            if min(map(len, recall.values())) > 1:
                found.append(Compared(f"{data}, {_shown(case)}", before, recall))
    return found


def summary(results: Results | None = None) -> str:
    """Return the table of the default against InfoNCE and DCL."""
    body = []
    for case in compared(STUDY.finished() if results is None else results):
        recall = [mean_spread([*case.recall[loss].values()]) for loss in (INFO, DCL, OURS)]
        gaps = {loss: paired(case.gaps(loss)) for loss in (INFO, DCL)}
        gaps[case.better()] = f"**{gaps[case.better()]}**"
        body.append([case.name, mean_spread(case.before[:1], 100, 1), *recall, *gaps.values()])
    return table(["", "before", INFO, DCL, f"`{OURS}`", f"minus {INFO}", f"minus {DCL}"], body)


def missed(results: Results) -> str:
    """Return a sentence with the cases in which the default is below the better loss by more than noise."""
    below = []
    for case in compared(results):
        gaps = case.gaps(case.better())
        if mean(gaps) < -2 * standard_error(gaps):
            below.append(f"{case.name} ({paired(gaps)})")
    about = f"Cases in which `{OURS}` is below the better of the two by more than two standard errors"
    return f"{about}: {'; '.join(below) or 'none'}."


def unfinished(results: Results) -> str:
    """Return a sentence with the cases that the table does not have."""
    done = {case.name for case in compared(results)}
    names = [f"{data}, {_shown(case)}" for data in DATA for case in CASES]
    return f"Not finished: {'; '.join(name for name in names if name not in done) or 'none'}."


def _of_data(finals: Mapping[str, Any], data: str) -> list[str]:
    before = [run["metrics"]["test/recall"] for run in finals.get(f"{data}: {BEFORE}", [])]
    cases = [case for case in CASES if any(_name(data, loss, case) in finals for loss in LOSSES)]
    rows = [loss for loss in LOSSES if any(_name(data, loss, case) in finals for case in cases)]
    cells = {loss: [finals.get(_name(data, loss, case), []) for case in cases] for loss in rows}
    recall = [
        [loss, *(mean_spread([run["metrics"]["test/recall"] for run in runs], 100, 1) for runs in cells[loss])]
        for loss in rows
    ]
    head = ["", *map(_shown, cases)]
    told = f"Before training: {mean_spread(before[:1], 100, 1)}."
    return [told, table(head, recall)]


def _recall(runs: Any) -> dict[int, float]:
    return by_seed(runs, "test/recall")


def _why(finals: Mapping[str, Any]) -> str:
    body = []
    for loss in LOSSES:
        if not (runs := finals.get(_name(TUNED_ON, loss, HOME), [])):
            continue
        told = [mean_spread([run["observed"][name] for run in runs][:3], digits=3) for name in OBSERVED.values()]
        measures = [
            mean_spread([run["metrics"][f"test/{name}"] for run in runs], digits=3)
            for name in ("alignment", "uniformity")
        ]
        body.append([loss, *told, *measures])
    return table(["", *OBSERVED, "alignment", "uniformity"], body)


if __name__ == "__main__":
    main(
        STUDY,
        "benchmarks.studies.pretrained",
        __doc__,
        run_one,
        page,
        "--texts",
        needs_data=lambda arm: ARMS[arm].data not in ("docstrings", ICONS),
    )
