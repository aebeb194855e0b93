"""Losses with averages per sample (robust risks, average precision, partial AUC, rankings), and SupCon."""

from compopt.losses.base import CompositionalLoss, RobustLoss
from compopt.losses.compositional import InnerAverage
from compopt.losses.pairs import (
    AveragePrecisionLoss,
    CVaRPartialAUCLoss,
    PairLoss,
    PartialAUCLoss,
    TwoWayCVaRPartialAUCLoss,
    TwoWayPartialAUCLoss,
)
from compopt.losses.rankings import ListwiseLoss, NDCGLoss
from compopt.losses.supervised import SupConLoss

__all__ = [
    "AveragePrecisionLoss",
    "CVaRPartialAUCLoss",
    "CompositionalLoss",
    "InnerAverage",
    "ListwiseLoss",
    "NDCGLoss",
    "PairLoss",
    "PartialAUCLoss",
    "RobustLoss",
    "SupConLoss",
    "TwoWayCVaRPartialAUCLoss",
    "TwoWayPartialAUCLoss",
]
