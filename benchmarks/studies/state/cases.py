"""Cases that should favour state per sample, and the models that they begin with.

==========  ==================================================================================================
tuned       glyphs and words: weights that DCL has trained at batch 256 go on at batch 8 and small steps, so that
            rows stay fresh
frozen      glyphs: the image tower of that model stays as it is, a new text tower learns (LiT)
few         glyphs: 1,024 pairs, each seen 24 times at batch 8
repeats     icons: captions that at least 64 icons bear, so that a batch of 64 is full of false negatives
noise       glyphs: a fifth of the captions is shuffled
==========  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compopt
from benchmarks.report import RESULTS
from benchmarks.studies.default.arms import LARGEST_TAU, LEARNED, WIDEN, score
from benchmarks.studies.default.losses import LOSSES, Settings
from benchmarks.studies.default.tasks import DIM, Glyphs, Icons, Task, Words
from benchmarks.studies.default.training import Loss, Setting, trained
from benchmarks.studies.search import Arm, Search
from recipes.models import TextTower
from recipes.tasks import NamedImages, in_chunks

PAIRS = 8192
OFTEN = 64  # training icons that bear a caption of `repeats`
NOISE = 0.2
BEGINNING = Setting(batch=256, lr=1.6e-2, samples=65_536)  # of the models that go on


@dataclass(frozen=True)
class Case:
    """A data set, how it is trained on, and the learning rates to begin with.

    Attributes:
        task: from the part that is measured and the folder of WordNet's files.
        start: the model to go on from; ``None``: a new one.
        tau: temperatures to begin with.
    """

    task: Callable[[str, Path | None], Any]
    batch: int
    samples: int
    rates: tuple[float, ...]
    start: Callable[[Task, int], nn.Module] | None = None
    tau: tuple[float, ...] = (0.05, 0.07, 0.1)


def dcl_trained(task: Task, seed: int) -> nn.Module:
    """A model that DCL has trained at batch 256, the same one for every arm, to be trained further."""
    setting, name = replace(BEGINNING, seed=seed), f"start_{type(task).__name__}_{seed}.npz"
    return trained(task, lambda task: compopt.DCLEstimator(0.07, mode=task.mode), setting, name).train()


class HalfFrozen(nn.Module):
    """Image features that are known, and a new text tower."""

    def __init__(self, image: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.image, self.text = image.requires_grad_(False).eval(), text

    def forward(self, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return features, self.text(tokens)


class FrozenImages(Glyphs):
    """Glyphs whose images are encoded once, by the tower of a trained model."""

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.encoded[index], self.tokens[self.caption[index]]


def half_frozen(task: FrozenImages, seed: int) -> nn.Module:
    whole = dcl_trained(Glyphs("validation", PAIRS), seed).eval()
    task.encoded = in_chunks(whole.image, task.images)
    torch.manual_seed(seed)
    return HalfFrozen(whole.image, TextTower(len(task.tokenizer), task.tokenizer.length, DIM))


def often_captioned(part: str, folder: Path | None) -> Icons:
    """Pairs whose caption many others bear too."""
    task = Icons(part, limit=0)
    often = (task.caption_frequency() >= OFTEN).nonzero().flatten()
    chosen = often[torch.randperm(len(often), generator=torch.Generator().manual_seed(0))[:PAIRS]]
    return restricted(task, chosen.sort().values)


def restricted(task: NamedImages, chosen: Tensor) -> Any:
    """The same task with fewer training pairs."""
    task.images, task.caption = task.images[chosen], task.caption[chosen]
    task.n, task.group = len(chosen), task.caption
    return task


def noisy(part: str, folder: Path | None) -> Glyphs:
    """Some training images have each other's captions."""
    task = Glyphs(part, PAIRS)
    wrong = torch.randperm(task.n, generator=torch.Generator().manual_seed(0))[: int(NOISE * task.n)]
    task.caption = task.caption.clone()
    task.caption[wrong] = task.caption[wrong.roll(1)]
    task.group = task.caption
    return task


# recall has two maxima in tau where a tower is frozen
WIDE_TAUS = (0.05, 0.07, 0.1, 0.15, 0.225, 0.338, 0.5)
RATES, SMALL_RATES = (2e-3, 4e-3, 8e-3), (1e-4, 3e-4, 1e-3)
CASES = {
    "tuned glyphs": Case(lambda part, _: Glyphs(part, PAIRS), 8, 24_576, SMALL_RATES, dcl_trained),
    "tuned words": Case(lambda part, folder: Words(part, folder, PAIRS), 8, 24_576, SMALL_RATES, dcl_trained),
    "frozen": Case(lambda part, _: FrozenImages(part, PAIRS), 8, 32_768, RATES, half_frozen, WIDE_TAUS),
    "few": Case(lambda part, _: Glyphs(part, 1024), 8, 24_576, (1e-3, 2e-3, 4e-3)),
    "repeats": Case(often_captioned, 64, 32_768, RATES),
    "noise": Case(noisy, 16, 32_768, RATES),
}


# -- arms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tried(Arm):
    """A loss in a case."""

    case: str
    loss: str


class Labelled(nn.Module):
    """An estimator that is told which samples have one caption: they are not each other's negatives."""

    def __init__(self, est: Any, labels: Tensor) -> None:
        super().__init__()
        self.est, self.labels = est, labels

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        return self.est(z1, z2, index, labels=self.labels[index])

    def step(self) -> None:
        self.est.step()


# beside learning rate and temperature: values to begin with, and grids
LOSS: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "InfoNCE": ({}, {}),
    "DCL": ({}, {}),
    "SogCLR": ({"gamma": 0.8}, {"gamma": (0.5, 0.8, 0.95)}),
    "iSogCLR": ({"gamma": 0.8, "rho": 1.0}, {"rho": (0.5, 1.0, 2.0), "gamma": (0.5, 0.8, 0.95)}),
    "Memory": ({"length": 128}, {}),
    "DCL, labels": ({}, {}),
}
WIDER = {**WIDEN, "rho": 2.0}


def loss_of(name: str, options: Settings) -> Callable[[Task], Loss]:
    """A new one, for a task."""
    if name == "DCL, labels":
        return lambda task: Labelled(compopt.DCLEstimator(options["tau"], mode=task.mode), task.group)
    return lambda task: LOSSES[name](task, options)


def estimator(loss: Any) -> compopt.ContrastiveEstimator:
    """The estimator of a loss."""
    return loss.est if isinstance(loss, Labelled) else loss


def _arms() -> Mapping[str, Tried]:
    found = {}
    for name, case in CASES.items():
        for loss, (first, grids) in LOSS.items():
            if loss == "DCL, labels" and name != "repeats":
                continue
            start = {"lr": case.rates[1], "tau": 0.07, **first}
            all_grids = {"lr": case.rates, "tau": case.tau, **grids}
            most = {"tau": LARGEST_TAU} if loss in LEARNED else {}
            found[f"{name}: {loss}"] = Tried(case=name, loss=loss, first=start, grids=all_grids, widen=WIDER, most=most)
    return found


ARMS = _arms()
STUDY = Search(ARMS, RESULTS / "state.jsonl", score)
