"""Published methods as compositions of a normalizer and a temperature."""

from compopt.presets.batch import DCLEstimator, InfoNCEEstimator, MemoryEstimator, SigLIPEstimator, recommended
from compopt.presets.published import settings
from compopt.presets.stateful import (
    EMC2Estimator,
    FastCLIPEstimator,
    ISogCLREstimator,
    NeuCLIPEstimator,
    SogCLREstimator,
)

__all__ = [
    "DCLEstimator",
    "EMC2Estimator",
    "FastCLIPEstimator",
    "ISogCLREstimator",
    "InfoNCEEstimator",
    "MemoryEstimator",
    "NeuCLIPEstimator",
    "SigLIPEstimator",
    "SogCLREstimator",
    "recommended",
    "settings",
]
