"""Gradient cache: the gradients of a large batch in the memory of a micro-batch."""

from compopt.gradient_cache.cache import gradient_cache
from compopt.gradient_cache.fitting import FittingSize

__all__ = ["FittingSize", "gradient_cache"]
