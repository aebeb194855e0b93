"""The published methods as compositions; nothing here but which parts and which defaults."""

from compopt.presets.dcl import DCLEstimator
from compopt.presets.emc2 import EMC2Estimator
from compopt.presets.fastclip import FastCLIPEstimator
from compopt.presets.infonce import InfoNCEEstimator
from compopt.presets.isogclr import ISogCLREstimator
from compopt.presets.memory import MemoryEstimator
from compopt.presets.neuclip import NeuCLIPEstimator
from compopt.presets.residual import ResidualEstimator
from compopt.presets.sogclr import SogCLREstimator

__all__ = [
    "DCLEstimator",
    "EMC2Estimator",
    "FastCLIPEstimator",
    "ISogCLREstimator",
    "InfoNCEEstimator",
    "MemoryEstimator",
    "NeuCLIPEstimator",
    "ResidualEstimator",
    "SogCLREstimator",
]
