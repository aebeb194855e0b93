"""Pair-weight kernel: statistics and closed-form gradients of all pairs of a batch."""
