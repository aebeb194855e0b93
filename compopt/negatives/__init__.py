"""Negatives drawn by Markov chains, whose visits are the weights."""

from compopt.negatives.sampler import MCMCNegativeSampler

__all__ = ["MCMCNegativeSampler"]
