"""Normalizers: estimates of the log-normalizer ``alpha_i`` of each anchor."""

from compopt.normalizers.batch import BatchNormalizer
from compopt.normalizers.memory import MemoryNormalizer
from compopt.normalizers.moving_average import MovingAverageEstimator
from compopt.normalizers.neural import NeuralNormalizer
from compopt.normalizers.sigmoid import SigmoidNormalizer

__all__ = [
    "BatchNormalizer",
    "MemoryNormalizer",
    "MovingAverageEstimator",
    "NeuralNormalizer",
    "SigmoidNormalizer",
]
