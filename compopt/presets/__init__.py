"""Published methods as compositions of a normalizer and a temperature."""

from compopt.presets.batch import DCLEstimator, InfoNCEEstimator, MemoryEstimator, SigLIPEstimator, recommended
from compopt.presets.emc2 import EMC2Estimator
from compopt.presets.moving_average import FastCLIPEstimator, ISogCLREstimator, SogCLREstimator
from compopt.presets.neural import NeuCLIPEstimator, ResidualEstimator
from compopt.presets.published import settings

__all__ = [
    "DCLEstimator",
    "EMC2Estimator",
    "FastCLIPEstimator",
    "ISogCLREstimator",
    "InfoNCEEstimator",
    "MemoryEstimator",
    "NeuCLIPEstimator",
    "ResidualEstimator",
    "SigLIPEstimator",
    "SogCLREstimator",
    "recommended",
    "settings",
]
