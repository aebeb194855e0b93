"""Normalizers: what stands for the log-normalizer ``alpha_i`` of each anchor."""

from compopt.normalizers.batch import BatchNormalizer
from compopt.normalizers.moving_average import MovingAverageEstimator
from compopt.normalizers.neural import NeuralNormalizer

__all__ = ["BatchNormalizer", "MovingAverageEstimator", "NeuralNormalizer"]
