"""Arms of the study on text: a loss of the trainer's, at a batch size, and the settings that are chosen for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.report import RESULTS as FOLDER
from benchmarks.studies.search import Arm, Search

BATCHES = (16, 64, 256)
EPOCHS, PAIRS, POOL = 4, 12_288, 1_000
HELD_OUT = 4 * POOL  # for validation, and as many for the test
RATES, SCALES = (2e-3, 4e-3, 8e-3, 1.6e-2), (5.0, 10.0, 20.0, 40.0)
# Further values for losses whose best one was at the end of the grid.
MORE_RATES = {"MNRL": (3.2e-2,), "Residual": (3.2e-2,)}
MORE_SCALES = {"MNRL": (2.5,), "iSogCLR": (2.5,)}

# loss -> settings to begin with, beside learning rate and scale
LOSSES: dict[str, dict[str, Any]] = {
    "MNRL": {},
    "Cached MNRL": {},
    "DCL": {},
    "SogCLR": {"gamma": 0.8},
    "iSogCLR": {"gamma": 0.8, "rho": 2.0},
    "Residual": {},
    "Memory": {},
}
VARIED = ("MNRL", "DCL", "SogCLR", "iSogCLR", "Residual")


@dataclass(frozen=True, kw_only=True)
class TextArm(Arm):
    """A loss on a data set.

    Attributes:
        loss: one of ``LOSSES``.
        batch: pairs per step.
        hard: the data have a mined negative for every anchor.
        each: every word of a synset is a pair with its definition, so that definitions repeat.
        told: equal words and equal definitions are never each other's negatives.
    """

    loss: str
    batch: int = 64
    hard: bool = False
    each: bool = False
    told: bool = False


def _arm(loss: str, batch: int) -> TextArm:
    first = {"lr": 4e-3, "scale": 20.0, **LOSSES[loss]}
    if loss == "Cached MNRL":  # the same gradient
        return TextArm(loss=loss, batch=batch, as_arm=f"MNRL, {batch}")
    rates, scales = RATES + MORE_RATES.get(loss, ()), MORE_SCALES.get(loss, ()) + SCALES
    return TextArm(loss=loss, batch=batch, first=first, grids={"lr": rates, "scale": scales})


def _varied(loss: str, **options: Any) -> TextArm:
    return TextArm(loss=loss, as_arm=f"{loss}, 64", **options)


ARMS: Mapping[str, TextArm] = {
    **{f"{loss}, {batch}": _arm(loss, batch) for batch in BATCHES for loss in LOSSES},
    **{f"{loss}, hard negatives": _varied(loss, hard=True) for loss in VARIED},
    **{f"{loss}, repeated": _varied(loss, each=True) for loss in VARIED},
    **{f"{loss}, repeated and told": _varied(loss, each=True, told=True) for loss in VARIED},
}


def score(result: dict[str, Any]) -> float:
    """Recall at 10 of the validation pairs: steadier than at 1."""
    return result["metrics"]["validation/recall@10"]


STUDY = Search(ARMS, FOLDER / "text.jsonl", score)
