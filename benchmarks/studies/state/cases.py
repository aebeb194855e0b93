"""Cases that should favour state per sample, and their initial models.

==========  ==================================================================================================
tuned       glyphs and words: a model that DCL has trained at batch 256 continues at batch 8 with small steps, so that
            rows stay fresh
frozen      glyphs: the image tower of that model is frozen, a new text tower learns (LiT)
few         glyphs: 1,024 pairs, each seen 24 times at batch 8
repeats     icons: captions of at least 64 icons each, so that a batch of 64 contains many false negatives
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
from benchmarks.studies.default.arms import LARGEST_TAU, WIDEN, score
from benchmarks.studies.default.losses import LOSSES, Settings
from benchmarks.studies.default.tasks import DIM, Glyphs, Icons, Task, Words
from benchmarks.studies.default.training import Loss, Setting, trained
from benchmarks.studies.search import Arm, Search
from recipes.models import TextTower
from recipes.tasks import NamedImages, in_chunks

PAIRS = 8192
OFTEN = 64  # smallest number of training icons per caption of `repeats`
NOISE = 0.2
BEGINNING = Setting(batch=256, lr=1.6e-2, samples=65_536)  # setting of the initial models


@dataclass(frozen=True)
class Case:
    """Data set, training settings, and initial grids of the learning rate and the temperature.

    Attributes:
        task: function from the evaluated part and the folder of WordNet's files to the data set.
        start: function that returns the initial model; ``None``: a new one.
        tau: initial grid of temperatures.
    """

    task: Callable[[str, Path | None], Any]
    batch: int
    samples: int
    rates: tuple[float, ...]
    start: Callable[[Task, int], nn.Module] | None = None
    tau: tuple[float, ...] = (0.05, 0.07, 0.1)


def dcl_trained(task: Task, seed: int) -> nn.Module:
    """Return a model that DCL has trained at batch 256, the same for every arm, in training mode."""
    setting, name = replace(BEGINNING, seed=seed), f"start_{type(task).__name__}_{seed}.npz"
    return trained(task, lambda task: compopt.DCLEstimator(0.07, mode=task.mode), setting, name).train()


class HalfFrozen(nn.Module):
    """Precomputed image features, and a new text tower."""

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
    """Return the icons task, restricted to training pairs with frequent captions."""
    task = Icons(part, limit=0)
    often = (task.caption_frequency() >= OFTEN).nonzero().flatten()
    chosen = often[torch.randperm(len(often), generator=torch.Generator().manual_seed(0))[:PAIRS]]
    return restricted(task, chosen.sort().values)


def restricted(task: NamedImages, chosen: Tensor) -> Any:
    """Restrict a task to some of its training pairs, in place, and return it."""
    task.images, task.caption = task.images[chosen], task.caption[chosen]
    task.n, task.group = len(chosen), task.caption
    return task


def noisy(part: str, folder: Path | None) -> Glyphs:
    """Return the glyphs task with shuffled captions for some of the training images."""
    task = Glyphs(part, PAIRS)
    wrong = torch.randperm(task.n, generator=torch.Generator().manual_seed(0))[: int(NOISE * task.n)]
    task.caption = task.caption.clone()
    task.caption[wrong] = task.caption[wrong.roll(1)]
    task.group = task.caption
    return task


# recall has two maxima in tau if a tower is frozen
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
    """Estimator with labels, by which samples with the same caption are excluded from each other's negatives."""

    def __init__(self, est: Any, labels: Tensor) -> None:
        super().__init__()
        self.est, self.labels = est, labels

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        return self.est(z1, z2, index, labels=self.labels[index])

    def step(self) -> None:
        self.est.step()


# initial values and grids of further settings, in addition to learning rate and temperature
LOSS: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "InfoNCE": ({}, {}),
    "DCL": ({}, {}),
    "SogCLR": ({"gamma": 0.8}, {"gamma": (0.5, 0.8, 0.95)}),
    "iSogCLR": ({"gamma": 0.8, "rho": 1.0}, {"rho": (0.5, 1.0, 2.0), "gamma": (0.5, 0.8, 0.95)}),
    "Memory": ({"length": 128}, {}),
    "DCL, labels": ({}, {}),
}


def loss_of(name: str, options: Settings) -> Callable[[Task], Loss]:
    """Return a function that builds a new loss for a task."""
    if name == "DCL, labels":
        return lambda task: Labelled(compopt.DCLEstimator(options["tau"], mode=task.mode), task.group)
    if name == "iSogCLR":
        fixed = {"lr": 0.01, "beta": 0.9, "tau_min": 0.01, "tau_max": LARGEST_TAU, "reference": "none"}
        return lambda task: compopt.ISogCLREstimator(
            task.n, options["gamma"], options["rho"], tau_init=options["tau"], mode=task.mode, **fixed
        )
    return lambda task: LOSSES[name](task, options)


def estimator(loss: Any) -> compopt.ContrastiveEstimator:
    """Return the estimator of a loss."""
    return loss.est if isinstance(loss, Labelled) else loss


def _arms() -> Mapping[str, Tried]:
    found = {}
    for name, case in CASES.items():
        for loss, (first, grids) in LOSS.items():
            if loss == "DCL, labels" and name != "repeats":
                continue
            start = {"lr": case.rates[1], "tau": 0.07, **first}
            all_grids = {"lr": case.rates, "tau": case.tau, **grids}
            most = {"tau": LARGEST_TAU} if loss == "iSogCLR" else {}
            found[f"{name}: {loss}"] = Tried(case=name, loss=loss, first=start, grids=all_grids, widen=WIDEN, most=most)
    return found


ARMS = _arms()
STUDY = Search(ARMS, RESULTS / "state.jsonl", score)
