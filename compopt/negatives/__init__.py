"""Negatives drawn by Markov chains; the weights are shares of visits."""

from compopt.negatives.sampler import MCMCNegativeSampler

__all__ = ["MCMCNegativeSampler"]
