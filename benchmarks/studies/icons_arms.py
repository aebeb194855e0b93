"""Arms of the study on icons: trainer, estimator, and the settings that are chosen one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.report import RESULTS as FOLDER
from benchmarks.studies.search import Arm, Search

EPOCHS, BATCH = 3, 64
METRIC = ("validation/image_retrieval_recall@10", "validation/text_retrieval_recall@10")

RATES = (5e-4, 1e-3, 2e-3)
TAUS = (0.05, 0.07, 0.1)


@dataclass(frozen=True, kw_only=True)
class IconArm(Arm):
    """A trainer with a loss.

    Attributes:
        trainer: ``open_clip``, ``adapter`` or ``recipe``.
        estimator: of the recipe.
    """

    trainer: str
    estimator: str = ""


def _recipe(
    estimator: str, tau: str = "tau", first: Mapping[str, Any] | None = None, **grids: tuple[Any, ...]
) -> IconArm:
    chosen, tried = {"lr": 1e-3, tau: 0.07, **(first or {})}, {"lr": RATES, tau: TAUS, **grids}
    return IconArm(trainer="recipe", estimator=estimator, first=chosen, grids=tried)


ARMS = {
    "open_clip": IconArm(trainer="open_clip", first={"lr": 1e-3}, grids={"lr": RATES}),
    "open_clip, adapter": IconArm(trainer="adapter", as_arm="open_clip"),
    "InfoNCE": _recipe("infonce"),
    "DCL": _recipe("dcl"),
    "SogCLR": _recipe("sogclr", first={"gamma": 0.8}, gamma=(0.6, 0.8, 0.95)),
    "iSogCLR": _recipe("isogclr", "tau_init", {"gamma": 0.8, "rho": 2.0}),
    "Residual": _recipe("residual"),
    "CLIP": IconArm(trainer="recipe", estimator="clip", as_arm="open_clip"),
}


def score(result: dict[str, Any]) -> float:
    """Recall at 10 in the validation families, mean of both directions."""
    return sum(result["metrics"][name] for name in METRIC) / len(METRIC)


STUDY = Search(ARMS, FOLDER / "icons.jsonl", score)
