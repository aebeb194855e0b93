"""Samplers for torch that select batches by features, or samples by rows, of the training so far."""

from compopt.samplers.bank import FeatureBank
from compopt.samplers.base import BankSampler
from compopt.samplers.ordered import OrderedBatchSampler
from compopt.samplers.scored import ScoredSampler
from compopt.samplers.spectral import SpectralBatchSampler

__all__ = ["BankSampler", "FeatureBank", "OrderedBatchSampler", "ScoredSampler", "SpectralBatchSampler"]
