"""compopt: contrastive losses with state, which behave like ``torch.optim`` optimizers."""

from compopt import (
    accelerator,
    curation,
    data,
    diagnostics,
    functional,
    integrations,
    losses,
    presets,
    samplers,
    schedules,
    testing,
)
from compopt.checkpoint import load, save
from compopt.contrastive import ContrastiveEstimator
from compopt.curation import ScoreKeeper
from compopt.estimator.base import Estimator
from compopt.estimator.parts import Normalizer, Temperature
from compopt.gradient_cache import TokenBudget, gradient_cache
from compopt.losses.compositional import compositional_loss
from compopt.module import as_module
from compopt.momentum import MomentumEncoder
from compopt.negatives import MCMCNegativeSampler
from compopt.normalizers import (
    BatchNormalizer,
    MemoryNormalizer,
    MovingAverageEstimator,
    NeuralNormalizer,
    SigmoidNormalizer,
)
from compopt.pairs import PairPolicy
from compopt.presets import (
    DCLEstimator,
    EMC2Estimator,
    FastCLIPEstimator,
    InfoNCEEstimator,
    ISogCLREstimator,
    MemoryEstimator,
    NeuCLIPEstimator,
    SigLIPEstimator,
    SogCLREstimator,
    recommended,
)
from compopt.temperatures import FixedTemperature, TemperatureDual

__version__ = "0.4.0"

__all__ = [
    "BatchNormalizer",
    "ContrastiveEstimator",
    "DCLEstimator",
    "EMC2Estimator",
    "Estimator",
    "FastCLIPEstimator",
    "FixedTemperature",
    "ISogCLREstimator",
    "InfoNCEEstimator",
    "MCMCNegativeSampler",
    "MemoryEstimator",
    "MemoryNormalizer",
    "MomentumEncoder",
    "MovingAverageEstimator",
    "NeuCLIPEstimator",
    "NeuralNormalizer",
    "Normalizer",
    "PairPolicy",
    "ScoreKeeper",
    "SigLIPEstimator",
    "SigmoidNormalizer",
    "SogCLREstimator",
    "Temperature",
    "TemperatureDual",
    "TokenBudget",
    "accelerator",
    "as_module",
    "compositional_loss",
    "curation",
    "data",
    "diagnostics",
    "functional",
    "gradient_cache",
    "integrations",
    "load",
    "losses",
    "presets",
    "recommended",
    "samplers",
    "save",
    "schedules",
    "testing",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
