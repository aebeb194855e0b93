"""What is compared in each case, and the settings that are chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import compopt
from benchmarks.report import RESULTS as FOLDER
from benchmarks.studies.default.arms import LARGEST_TAU, LEARNED, WIDEN, score
from benchmarks.studies.default.losses import LOSSES, Options
from benchmarks.studies.default.tasks import Task
from benchmarks.studies.default.training import Loss
from benchmarks.studies.search import Arm, Search
from benchmarks.studies.state.cases import CASES


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


def loss_of(name: str, options: Options) -> Callable[[Task], Loss]:
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
STUDY = Search(ARMS, FOLDER / "state.jsonl", score)
