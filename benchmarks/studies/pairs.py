"""Study of pair policies: the gain of each option for DCL and for the default, on data with false negatives.

    python -m benchmarks.studies.pairs tune  --wordnet FOLDER [--arms "repeats, glyphs: *"]   # rates, then strengths
    python -m benchmarks.studies.pairs final --wordnet FOLDER    # three other seeds, test half
    python -m benchmarks.studies.pairs report                    # results/pairs_quality.md

The data, FOLDER, encoders and training are those of ``benchmarks.studies.default`` at batch 64, with fewer samples:

- ``repeats``: four samples of each frequent caption (words: definition) in one batch, so that every anchor has three
  false negatives.
- ``duplicates``: a tenth of the samples is in the data a second time, under another index and in the same batch.
- ``mined`` (words): every definition has four words. At each visit it gets a further negative, one of the 4 words that
  are nearest to it by a teacher's features; some of these are correct answers. Batches are random.

The teacher, which is also the guide, is trained by DCL on the same data four times as long, in random batches. The
learning rate is tuned for DCL and for the default without a policy, for ``told`` (known samples of one caption) and for
the loss with the positive included. The strength of each other option is tuned at the rate without a policy.
Each finished run is a line of ``results/pairs_quality.jsonl`` and is not run again. There are 545 runs, and 37
more where the best rate is at an end of its grid, of 8 to 60 seconds of one core; the first of a data set also trains
the teacher. All take 210 core-minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compopt
from benchmarks.report import RESULTS, mean_spread, table
from benchmarks.studies.default.mining import Clustered, neighbours
from benchmarks.studies.default.tasks import DIM, Glyphs, Icons, Words
from benchmarks.studies.default.training import Setting, train, trained
from benchmarks.studies.search import SEEDS, Arm, Job, Results, Search, by_seed, difference, main, provenance, settings
from benchmarks.studies.state.cases import restricted
from compopt import PairPolicy
from recipes import text

REPEATS, DUPLICATES, MINED = SITUATIONS = ("repeats", "duplicates", "mined")
DATA, BASES = ("glyphs", "icons", "words"), ("DCL", "recommended")
PAIRS, PASSES, BATCH, TAU = {"glyphs": 16_384, "icons": 16_384, "words": 8_192}, 4, 64, 0.07
TIMES, COPIED, NEAREST = 4, 11, 4  # samples of a caption; one in 11 samples is a copy; words that are mined
RATES, WIDEN = (4e-3, 8e-3, 1.6e-2), {"lr": 2.0}
TEACHER_RATE, TEACHER_SEED, TEACHER_PASSES = 8e-3, 99, 16


# -- options -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A policy, and the further arguments of its calls.

    Attributes:
        policy: function from a strength to the policy.
        strengths: grid of strengths; empty if there is nothing to tune, or if ``takes`` gives the strength.
        told: samples of one caption are excluded from each other's negatives.
        mined: use the mined negatives, where there are any.
        include_positive: the base is InfoNCE, whose denominator contains the positive, in place of DCL.
        takes: option whose tuned settings are used; ``None``: the learning rate is tuned.
        situations, bases: situations and bases in which the option is run.
    """

    policy: Callable[[float], PairPolicy | None] = lambda strength: None
    strengths: tuple[float, ...] = ()
    told: bool = False
    mined: bool = True
    include_positive: bool = False
    takes: str | None = "no policy"
    situations: tuple[str, ...] = SITUATIONS
    bases: tuple[str, ...] = BASES


MARGIN, DCL = "false negatives, margin", BASES[:1]  # a memory refuses guide, prior and several positives
INCLUDED, PRIORS = "positive included", (0.001, 0.01, 0.05)
OPTIONS: Mapping[str, Option] = {
    "no policy": Option(takes=None),
    "no mined negatives": Option(mined=False, situations=(MINED,)),
    MARGIN: Option(lambda m: PairPolicy(false_negatives=m), (-0.05, 0.05, 0.2)),
    f"{MARGIN}, mined ones spared": Option(
        lambda m: PairPolicy(false_negatives=m, spare_extra=True), takes=MARGIN, situations=(MINED,)
    ),
    "false negatives, relative": Option(lambda r: PairPolicy(false_negatives=("relative", r)), (0.8, 0.95)),
    "false negatives, guided": Option(lambda m: PairPolicy(false_negatives=m, guided=True), (-0.2, -0.05), bases=DCL),
    "hardness": Option(lambda beta: PairPolicy(hardness=beta), (1.0, 4.0)),
    "hardness of mined ones": Option(lambda beta: PairPolicy(hardness=(0.0, beta)), (1.0, 4.0), situations=(MINED,)),
    "prior": Option(lambda share: PairPolicy(prior=share), PRIORS, bases=DCL),
    INCLUDED: Option(takes=None, include_positive=True, situations=(DUPLICATES,), bases=DCL),
    f"{INCLUDED}, prior": Option(
        lambda share: PairPolicy(prior=share),
        PRIORS,
        takes=INCLUDED,
        include_positive=True,
        situations=(DUPLICATES,),
        bases=DCL,
    ),
    "told": Option(told=True, takes=None),
    "positives by label": Option(
        lambda strength: PairPolicy(positives="labels"), situations=(REPEATS, DUPLICATES), bases=DCL
    ),
}


@dataclass(frozen=True, kw_only=True)
class PairArm(Arm):
    """An option in a situation."""

    situation: str
    data: str
    base: str
    option: str


def _arm(situation: str, data: str, base: str, name: str) -> PairArm:
    where = {"situation": situation, "data": data, "base": base, "option": name}
    takes, strengths = OPTIONS[name].takes, OPTIONS[name].strengths
    if takes is None:
        return PairArm(**where, grids={"lr": RATES}, widen=WIDEN)
    grids = {"strength": strengths} if strengths else {}
    return PairArm(**where, grids=grids, after=f"{situation}, {data}: {base}, {takes}")


ARMS: Mapping[str, PairArm] = {
    f"{situation}, {data}: {base}, {name}": _arm(situation, data, base, name)
    for situation in SITUATIONS
    for data in (DATA if situation != MINED else ("words",))
    for base in BASES
    for name, option in OPTIONS.items()
    if situation in option.situations and base in option.bases
}


def score(result: dict[str, Any]) -> float:
    """Recall on the validation half."""
    return result["metrics"]["validation/recall"]


STUDY = Search(ARMS, RESULTS / "pairs_quality.jsonl", score)


# -- data ----------------------------------------------------------------------------------------------------------


def load(situation: str, data: str, part: str, wordnet: Path | None) -> tuple[Any, Tensor]:
    """Return the task, and the number of each sample's cluster, ``(n,)``; the samples of a cluster share a batch."""
    if data == "words":
        task, chosen = _words(situation, part, wordnet)
    else:
        task = {"glyphs": Glyphs, "icons": Icons}[data](part, limit=0)
        chosen = choose(task.caption, situation, PAIRS[data])
        task = restricted(task, chosen)
    same = {REPEATS: task.group, DUPLICATES: chosen, MINED: torch.arange(task.n)}[situation]
    return task, same.unique(return_inverse=True)[1]


def _words(situation: str, part: str, wordnet: Path | None) -> tuple[Words, Tensor]:
    """Return the words task with definitions as the anchors of direction 1, and the positions of its samples."""
    pairs = text.load(wordnet, held_out=4096, each=situation != DUPLICATES)
    pairs = replace(pairs, queries=pairs.documents, documents=pairs.queries)
    number: dict[str, int] = {}
    group = torch.tensor([number.setdefault(pairs.queries[at], len(number)) for at in pairs.train])
    chosen = choose(group, situation, PAIRS["words"])
    task = Words(part, pairs=replace(pairs, train=pairs.train[chosen]))
    task.group = group[chosen]
    return task, chosen


def choose(caption: Tensor, situation: str, n: int) -> Tensor:
    """Return positions of ``n`` training samples: a tenth twice, or ``TIMES`` of each frequent caption."""
    order = torch.randperm(len(caption), generator=torch.Generator().manual_seed(0))
    if situation == DUPLICATES:
        copies = n // COPIED
        return torch.cat([order[: n - copies], order[:copies]])
    often = torch.bincount(caption).argsort(descending=True, stable=True)[: n // TIMES]
    order = order[caption[order].argsort(stable=True)]
    first = torch.searchsorted(caption[order], often)
    return order[first[:, None] + torch.arange(TIMES)].flatten()


def taught(arm: PairArm, policy: PairPolicy | None, task: Any) -> tuple[list[Tensor], Tensor | None]:
    """Return a teacher's features of both sides, and mined words ``(n, NEAREST)``; empty and ``None`` if not used."""
    mines = arm.situation == MINED and OPTIONS[arm.option].mined
    if not mines and not (policy and policy.guided):
        return [], None
    name = f"pairs_{arm.situation}_{arm.data}.npz"
    setting = Setting(batch=BATCH, lr=TEACHER_RATE, samples=TEACHER_PASSES * task.n, seed=TEACHER_SEED)
    model = trained(task, lambda task: compopt.DCLEstimator(TAU), setting, name)
    with torch.no_grad():
        features = [F.normalize(side) for side in task.training_features(model)]
    return features, neighbours(features, 0, NEAREST)[0] if mines else None


# -- one run -------------------------------------------------------------------------------------------------------


class Policed:
    """An estimator with a policy, which adds the further arguments to each call.

    Args:
        arm: arm of the study.
        policy: policy of its option at the tuned strength.
        task: data set.
        teacher, nearest: results of :func:`taught`.
    """

    def __init__(
        self, arm: PairArm, policy: PairPolicy | None, task: Any, teacher: Sequence[Tensor], nearest: Tensor | None
    ) -> None:
        self.told, self.policy = OPTIONS[arm.option].told, policy or PairPolicy()
        self.task, self.teacher, self.nearest = task, teacher, nearest
        if arm.base == "DCL":
            included = OPTIONS[arm.option].include_positive
            self.est = compopt.InfoNCEEstimator(TAU, pairs=policy, include_positive=included)
        else:
            self.est = compopt.recommended(DIM, task.n, BATCH, pairs=policy)

    def watch(self, model: nn.Module) -> None:
        """Keep the encoders, which also encode the mined negatives."""
        self.model: Any = model

    def __call__(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Draw the mined negatives and return the loss of a batch."""
        group, given, guide = self.task.group, dict[str, Any](), [side[index] for side in self.teacher]
        if self.told:
            given["index2"] = group[index]
        if self.policy.positives == "labels":
            given["labels"] = group[index]
        if self.nearest is not None:
            mined = self.nearest[index, torch.randint(NEAREST, (len(index),))]
            given["extra"] = self.model.text(self.task.answers[mined])
            given["extra_index"] = group[mined] if self.told else mined
            guide.append(self.teacher[1][mined])
        if self.policy.guided:
            given["guide"] = guide
        return self.est(z1, z2, index, **given)

    def step(self) -> None:
        self.est.step()

    def parameters(self) -> list[Tensor]:
        return []


def run_one(job: Job, wordnet: Path | None) -> dict[str, Any]:
    """Train and evaluate in this process."""
    arm, part = ARMS[job.arm], "test" if job.final else "validation"
    task, clusters = load(arm.situation, arm.data, part, wordnet)
    policy = OPTIONS[arm.option].policy(job.options.get("strength", 0.0))
    teacher, nearest = taught(arm, policy, task)
    setting = Setting(batch=BATCH, lr=job.options["lr"], samples=PASSES * task.n, seed=job.seed)
    order = Clustered(clusters, BATCH, job.seed)
    model, _, seconds = train(task, lambda task: Policed(arm, policy, task, teacher, nearest), setting, order=order)
    metrics = {f"{part}/{name}": round(value, 6) for name, value in task.score(model).items()}
    right = 0.0 if nearest is None else (task.group[nearest] == task.group[:, None]).float().mean().item()
    return {"metrics": metrics, "seconds": round(seconds, 1), "right_mined": round(right, 3)}


# -- the page ------------------------------------------------------------------------------------------------------

ABOUT = (
    f"{PAIRS['glyphs']:,} training pairs (words: {PAIRS['words']:,}), {PASSES} passes, batch {BATCH}, temperature "
    f"{TAU}, small encoders from scratch. Recall as in the study of the default (glyphs, words: R@1; icons: accuracy "
    "among 500 names), in per cent on the test half, mean ± standard deviation of the seeds "
    f"{', '.join(map(str, SEEDS))}; in brackets the gain over the same estimator without a policy, mean of the "
    "differences by seed ± their standard error. `recommended` is a `MemoryEstimator` here. Empty cells are options "
    "that a memory refuses, or have not been run. *Told*: `index2=` identifies the samples of one caption. *Guided*: "
    "by the features of a teacher that DCL has trained on these data four times as long, in random batches. "
    '*Positives by label*: `positives="labels"`, all samples of the caption are positives. *Positive included*: '
    "InfoNCE, whose denominator contains the positive, in place of DCL."
)
LIMITS = (
    "Limits: small data, small encoders, few passes; the icons have only about a thousand test samples. The batches "
    "are composed so that false negatives share one, which is rare in random batches of these data. The learning rate "
    "is the best one without a policy (*told*, *positive included*: their own). The temperature is fixed; `hardness` "
    "has the effect of a smaller temperature of the negatives. Strengths are chosen from two or three values, on one "
    "seed."
)
TITLES = {
    REPEATS: f"Captions that repeat: {TIMES} samples of each in one batch",
    DUPLICATES: "Duplicates: a tenth of the samples a second time, in the same batch",
    MINED: f"Mined negatives: one of the {NEAREST} nearest words, {{right}} % of them correct answers",
}
CHOSEN = "Settings are chosen on seed 100 by recall on the validation half, in per cent; the chosen ones are bold."


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals, runs = STUDY.finals(results), list(results.values())
    right = mean_spread([run["right_mined"] for run in runs if run["right_mined"]][:1], 100)
    parts = ["# Pair policies: gain of each option", provenance(runs, "benchmarks/studies/pairs.py"), ABOUT, LIMITS]
    for situation in SITUATIONS:
        if any(ARMS[arm].situation == situation for arm in finals):
            parts += [f"## {TITLES[situation].format(right=right)}", _of_situation(finals, situation)]
    return "\n\n".join([*parts, settings(STUDY, results, CHOSEN, "validation", 1)])


def _of_situation(finals: dict[str, list[dict[str, Any]]], situation: str) -> str:
    columns = dict.fromkeys(f"{arm.data}: {arm.base}" for arm in ARMS.values() if arm.situation == situation)
    rows = [name for name, option in OPTIONS.items() if situation in option.situations]
    cells = [[name, *(_cell(finals, f"{situation}, {column}", name) for column in columns)] for name in rows]
    return table(["", *columns], cells)


def _cell(finals: dict[str, list[dict[str, Any]]], where: str, name: str) -> str:
    runs, base = (by_seed(finals.get(f"{where}, {each}", []), "test/recall") for each in (name, "no policy"))
    gain = "" if name == "no policy" else difference(runs, base)
    return (mean_spread(list(runs.values())) + (f" ({gain})" if gain else "")) if runs else ""


if __name__ == "__main__":
    main(STUDY, "benchmarks.studies.pairs", __doc__, run_one, page, needs_data=lambda arm: ARMS[arm].data == "words")
