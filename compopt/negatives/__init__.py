"""Negatives that are drawn rather than weighed: chains whose visits are the weights."""

from compopt.negatives.sampler import MCMCNegativeSampler

__all__ = ["MCMCNegativeSampler"]
