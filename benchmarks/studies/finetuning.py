"""Study of fine-tuning in small batches: a trained encoder continues on captions that it has not seen.

    python -m benchmarks.studies.finetuning tune  --texts FOLDER [--arms "words: *"]   # learning rate, then temperature
    python -m benchmarks.studies.finetuning final --texts FOLDER   # five other seeds, test half
    python -m benchmarks.studies.finetuning report                 # results/finetuning.md

The data, FOLDER and encoders are those of ``benchmarks.studies.default``. Half of the captions (words: pairs, faces:
characters) belong to the data of the start, the others to those of the fine-tuning. DCL trains the start at batch 256,
once per data set. Fine-tuning sees 16,384 samples, in evaluation mode: the statistics of batch norm stay fixed.

- ``full``: all weights are trained, at batch 8, 16 and 64.
- ``LoRA``: adapters of rank 8 on all linear, convolutional and embedding layers (peft), at batch 16.
- ``mined``: all weights at batch 16, with a mined negative per sample (``negatives=``): one of the 8 samples with
  another caption that are nearest to it by the start's features, apart from the 10 nearest of all.

``DCL, gradient cache`` is DCL at batch 256 with :func:`compopt.gradient_cache`, in micro-batches of the arm's batch
size. It trains for the time of ``recommended``, not on as many samples: at its beginning each run measures the time of
both. Each finished run is a line of ``results/finetuning.jsonl`` and is not run again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import ttest_rel
from torch import Tensor, nn

import compopt
from benchmarks.report import RESULTS, mean_spread, paired, table
from benchmarks.studies.default.mining import neighbours
from benchmarks.studies.default.tasks import DIM, Task, load
from benchmarks.studies.default.training import DECAY, WARMUP, Setting, trained
from benchmarks.studies.search import Arm, Job, Results, Runs, Search, by_seed, main, provenance, settings
from recipes import cache
from recipes.batches import Shuffled, seeded

DATA, SAMPLES = ("glyphs", "icons", "words", "faces"), 16_384
START = Setting(batch=256, lr=1.6e-2, samples=131_072)
FULL, LORA, MINED = WAYS = ("full", "LoRA", "mined")
CASES = ((FULL, 8), (FULL, 16), (FULL, 64), (LORA, 16), (MINED, 16))
HEADS = [f"{way} {batch}" for way, batch in CASES]
MEMORY = 128  # momentum features in the memory: the length that compopt.recommended had when the first of them ran
OURS, MOMENTUM, CACHED = "recommended", "recommended, momentum features", "DCL, gradient cache"
LOSSES, TUNED_TAU = ("DCL", CACHED, OURS, MOMENTUM), ("DCL", CACHED)
BEFORE = "before"  # an arm without training
LARGE, RANK, SKIP, NEAREST, LOOKED_AT = 256, 8, 10, 8, 50
RATES, LORA_RATES, TAUS = (5e-4, 1e-3, 2e-3), (2e-3, 4e-3, 8e-3), (0.05, 0.07, 0.1)
SEEDS, ROUNDS, LEVEL = (0, 1, 2, 3, 4), 8, 0.01
Finals = Mapping[str, Runs]  # final runs by arm


@dataclass(frozen=True, kw_only=True)
class TunedArm(Arm):
    """A loss in a case.

    Attributes:
        data: data set.
        loss: one of ``LOSSES``, or ``BEFORE``.
        way: one of ``WAYS``.
        batch: samples per call; for the gradient cache, samples per micro-batch.
    """

    data: str
    loss: str
    way: str
    batch: int


def _arm(data: str, loss: str, way: str, batch: int) -> TunedArm:
    rates = {"lr": LORA_RATES if way == LORA else RATES}
    taus = {"tau": TAUS} if loss in TUNED_TAU else {}
    where = {"data": data, "loss": loss, "way": way, "batch": batch}
    return TunedArm(**where, first=dict.fromkeys(taus, 0.07), grids=rates | taus, widen={"lr": 2.0, "tau": 1.5})


ARMS: Mapping[str, TunedArm] = {
    f"{data}: {loss}, {way} {batch}": _arm(data, loss, way, batch)
    for data in DATA
    for way, batch in CASES
    for loss in LOSSES
} | {f"{data}: {BEFORE}": TunedArm(data=data, loss=BEFORE, way=FULL, batch=LARGE) for data in DATA}


def score(result: dict[str, Any]) -> float:
    """Return recall on the validation half."""
    return result["metrics"]["validation/recall"]


STUDY = Search(ARMS, RESULTS / "finetuning.jsonl", score, SEEDS)


# -- data and start ------------------------------------------------------------------------------------------------


class Half:
    """The training samples of a task with one half of the captions, and all of its held-out samples."""

    def __init__(self, task: Task, second: bool) -> None:
        captions, caption = task.group.unique(return_inverse=True)
        side = torch.randperm(len(captions), generator=torch.Generator().manual_seed(0)) % 2
        self.task, self.chosen = task, (side[caption] == int(second)).nonzero().flatten()
        self.n, self.mode, self.group = len(self.chosen), task.mode, task.group[self.chosen]

    def model(self) -> nn.Module:
        return self.task.model()

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.task.inputs(self.chosen[index], generator)

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        one, two = self.task.training_features(model)
        return one[self.chosen], two[self.chosen]

    def score(self, model: nn.Module) -> dict[str, float]:
        return self.task.score(model)


def begun(data: str, task: Task) -> nn.Module:
    """Return the start of a data set, in evaluation mode; it is trained once and then cached."""
    dcl = lambda half: compopt.DCLEstimator(0.07, mode=half.mode)  # noqa: E731
    return trained(Half(task, second=False), dcl, START, f"finetuning_{data}.npz")


def mined(data: str, task: Half, model: nn.Module) -> Tensor:
    """Return the negatives of each sample, ``(n, NEAREST)``: neighbours of its first side with another caption."""
    path, key = cache.file(None, f"finetuning_{data}_mined.npz"), f"{START} {SKIP} {NEAREST} {torch.__version__}"

    def make() -> dict[str, np.ndarray]:
        with torch.no_grad():
            sides = [F.normalize(side) for side in task.training_features(model)]
        found = neighbours(sides, SKIP, LOOKED_AT)[0]
        same = task.group[found] == task.group[:, None]
        return {"mined": found.gather(1, same.int().argsort(dim=1, stable=True)[:, :NEAREST]).numpy()}

    return torch.from_numpy(cache.read_or_make(path, key, ["mined"], make)["mined"])


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    kinds = nn.Linear, nn.Conv2d, nn.Embedding
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers)).eval()


# -- one run -------------------------------------------------------------------------------------------------------


def estimator(arm: TunedArm, options: Mapping[str, Any], n: int, mode: str) -> compopt.ContrastiveEstimator:
    if arm.loss in TUNED_TAU:
        return compopt.DCLEstimator(options["tau"], mode=mode)
    if arm.loss == MOMENTUM:
        return compopt.MemoryEstimator(DIM, MEMORY, momentum=True, mode=mode)
    return compopt.recommended(DIM, n, arm.batch, mode, candidates=None)


def encode(model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the features of both sides and of the mined negatives, if any, which are further second sides."""
    one, *others = inputs
    z1, z2 = model(one, torch.cat(others))
    return z1, *z2.split(len(one))


class FineTuning:
    """A model with its estimator, optimizer and batches.

    Args:
        arm, options: arm of the study, and its settings.
        task: data of the fine-tuning.
        model: model to train.
        negatives: result of :func:`mined`, or ``None``.
        seed: seed of the batches and of the negatives.
    """

    def __init__(
        self,
        arm: TunedArm,
        options: Mapping[str, Any],
        task: Half,
        model: nn.Module,
        negatives: Tensor | None,
        seed: int,
    ) -> None:
        self.arm, self.task, self.model, self.negatives, self.seed = arm, task, model, negatives, seed
        self.size = LARGE if arm.loss == CACHED else arm.batch  # samples per update
        self.order = Shuffled(task.n, self.size, task.n // self.size, seed)
        self.est = estimator(arm, options, task.n, task.mode)
        learned = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, options["lr"], weight_decay=DECAY, fused=True)
        self.est.attach(self.optimizer)
        self.encoder = compopt.MomentumEncoder(model) if arm.loss == MOMENTUM else None
        if self.encoder is not None:
            self.encoder.attach(self.est)

    def update(self, number: int) -> None:
        """Make one update of the weights."""
        index, draws = self.order(number), seeded("augment", self.seed, number)
        inputs: tuple[Tensor, ...] = self.task.inputs(index, draws)
        given: dict[str, Any] = {}
        if self.negatives is not None:
            drawn = self.negatives[index, torch.randint(NEAREST, (len(index),), generator=draws)]
            inputs = (*inputs, self.task.inputs(drawn, draws)[1])
            given["negatives"] = None, drawn  # the encoder returns their features
        if self.encoder is not None:  # the copy encodes all candidates
            k1, k2, *further = encode(self.encoder, inputs)
            inputs, given["keys"] = inputs[:2], (k1, k2)
            if further:
                given["negatives"] = further[0], drawn
        self._backward(inputs, index, given)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, inputs: tuple[Tensor, ...], index: Tensor, given: dict[str, Any]) -> None:
        if self.arm.loss == CACHED:
            size = self.arm.batch
            compopt.gradient_cache(self.est, self.model, inputs, index, micro_batch_size=size, encode=encode, **given)
            return
        z1, z2, *further = encode(self.model, inputs)
        if further:
            given["negatives"] = further[0], given["negatives"][1]
        self.est(z1, z2, index, **given).backward()

    def train(self, updates: int) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, updates, pct_start=WARMUP)
        for number in range(updates):
            self.update(number)
            schedule.step()


def share_of_samples(ours: FineTuning, theirs: FineTuning) -> float:
    """Return how many samples ``theirs`` sees in the time in which ``ours`` sees one; both make some updates.

    Time is that of the processor, with one thread, so that other processes have little influence.
    """
    ratios = []
    for turn in range(1 + ROUNDS):
        seconds = []
        for each in (ours, theirs):
            began, calls = time.process_time(), LARGE // each.size
            for call in range(calls):
                each.update(turn * calls + call)
            seconds.append(time.process_time() - began)
        ratios.append(seconds[0] / seconds[1])
    return median(ratios[1:])  # the first turn warms up


def run_one(job: Job, texts: Path | None) -> dict[str, Any]:
    """Train and evaluate in this process."""
    arm, part = ARMS[job.arm], "test" if job.final else "validation"
    whole = load(arm.data, part, texts)
    model, task = begun(arm.data, whole), Half(whole, second=True)
    told = {} if arm.loss == BEFORE else fine_tune(arm, job, task, model)
    metrics = {f"{part}/{name}": round(value, 6) for name, value in task.score(model).items()}
    return {"metrics": metrics, "seconds": 0.0, **told}


def fine_tune(arm: TunedArm, job: Job, task: Half, model: nn.Module) -> dict[str, float]:
    """Fine-tune a model in place; return the seconds, and the samples seen as a multiple of ``SAMPLES``."""
    negatives = mined(arm.data, task, model) if arm.way == MINED else None
    torch.manual_seed(job.seed)
    model = with_adapters(model) if arm.way == LORA else model
    share = 1.0
    if arm.loss == CACHED:
        ours, theirs = (
            FineTuning(each, job.options, task, copy.deepcopy(model), negatives, job.seed)
            for each in (replace(arm, loss=OURS), arm)
        )
        share = share_of_samples(ours, theirs)
    run = FineTuning(arm, job.options, task, model, negatives, job.seed)
    began = time.process_time()
    run.train(round(share * SAMPLES / run.size))
    return {"share": round(share, 3), "seconds": round(time.process_time() - began, 1)}


# -- the page ------------------------------------------------------------------------------------------------------

ABOUT = (
    f"Encoders of the study of the default, trained by DCL on one half of the captions, and fine-tuned on "
    f"{SAMPLES:,} samples with the other half. Recall as in that study (glyphs, words, faces: R@1; icons: accuracy "
    "among 500 names), in per cent on the test half, mean ± standard deviation of the seeds "
    f"{', '.join(map(str, SEEDS))}. `{CACHED}` has batches of {LARGE}, and the time of `{OURS}` at the batch size of "
    "the column, which is its micro-batch. The learning rate of every row is tuned, and the temperature of the rows "
    f"without a memory. Momentum features have a memory of {MEMORY} samples."
)
AGAINST = (
    f"Differences of recall by seed, mean ± standard error, with the p-value of a paired two-sided t-test; bold if p < "
    f"{LEVEL}. *Samples* is the number of samples that the gradient cache sees in the same time, as a multiple of "
    f"{SAMPLES:,}."
)
CHOSEN = "Settings are chosen on seed 100 by recall on the validation half, in per cent; the chosen ones are bold."


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals, runs = complete(results), list(results.values())
    parts = ["# Fine-tuning in small batches", provenance(runs, "benchmarks/studies/finetuning.py"), ABOUT]
    for data in DATA:
        parts += [f"## {data.capitalize()}", *_of_data(finals, data)]
    return "\n\n".join([*parts, settings(STUDY, results, CHOSEN, "validation", 1)])


def complete(results: Results) -> Finals:
    """Return the final runs of the arms that have one for every seed."""
    return {arm: runs for arm, runs in STUDY.finals(results).items() if len(runs) == len(STUDY.seeds)}


def _of_data(finals: Finals, data: str) -> list[str]:
    before = _recall(finals.get(f"{data}: {BEFORE}", []))
    recall = [
        [loss, *(mean_spread([*_recall(runs).values()]) for runs in _runs(finals, data, loss))] for loss in LOSSES
    ]
    against = [
        [f"{ours} - {theirs}", *_against(finals, data, ours, theirs)]
        for ours in (OURS, MOMENTUM)
        for theirs in ("DCL", CACHED)
    ]
    shares = [mean_spread([run["share"] for run in runs][:1], digits=2) for runs in _runs(finals, data, CACHED)]
    return [
        f"Before fine-tuning: {mean_spread([*before.values()][:1])}.",
        table(["", *HEADS], recall),
        AGAINST,
        table(["", *HEADS], [*against, ["samples", *shares]]),
    ]


def _runs(finals: Finals, data: str, loss: str) -> list[Runs]:
    """Return the runs of a loss in each case, none for cases that have not been run."""
    return [finals.get(f"{data}: {loss}, {head}", []) for head in HEADS]


def _against(finals: Finals, data: str, ours: str, theirs: str) -> list[str]:
    """Return the differences of two losses in all cases."""
    pairs = zip(_runs(finals, data, ours), _runs(finals, data, theirs), strict=True)
    return [difference(*map(_recall, pair)) for pair in pairs]


def _recall(runs: Runs) -> dict[int, float]:
    return by_seed(runs, "test/recall")


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Format the difference by seed with its p-value; empty if one of the losses has not been run."""
    if not ours or not theirs:
        return ""
    one, two = ([values[seed] for seed in sorted(ours)] for values in (ours, theirs))
    p = float(ttest_rel(one, two).pvalue)
    told = f"{paired([a - b for a, b in zip(one, two, strict=True)])}, p = {p:.2g}"
    return f"**{told}**" if p < LEVEL else told


if __name__ == "__main__":
    main(
        STUDY,
        "benchmarks.studies.finetuning",
        __doc__,
        run_one,
        page,
        "--texts",
        needs_data=lambda arm: ARMS[arm].data == "words",
    )
