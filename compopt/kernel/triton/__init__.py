"""Kernels in Triton, opt-in: the sums and gradients of plain pairs of features, in tiles."""
