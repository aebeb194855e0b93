"""Non-contrastive losses: robust risks, average precision, partial AUC and rankings, with averages per sample."""

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
    "TwoWayCVaRPartialAUCLoss",
    "TwoWayPartialAUCLoss",
]
