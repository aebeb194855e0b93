"""Finished comparisons, kept as they were made: with other packages, and a paper estimate for many GPUs."""
