"""Batch samplers for torch that choose batches by the features that the training loop computes."""

from compopt.samplers.bank import FeatureBank
from compopt.samplers.base import BankSampler
from compopt.samplers.ordered import OrderedBatchSampler
from compopt.samplers.spectral import SpectralBatchSampler

__all__ = ["BankSampler", "FeatureBank", "OrderedBatchSampler", "SpectralBatchSampler"]
