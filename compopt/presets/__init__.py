"""Published methods as compositions of a normalizer and a temperature."""

from compopt.presets.batch import DCLEstimator, InfoNCEEstimator, MemoryEstimator, SigLIPEstimator, recommended
from compopt.presets.neural import NeuCLIPEstimator, ResidualEstimator
from compopt.presets.published import settings
from compopt.presets.rows import EMC2Estimator, FastCLIPEstimator, ISogCLREstimator, SogCLREstimator

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
