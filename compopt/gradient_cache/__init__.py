"""Gradient cache: the gradients of a large batch in the memory of a micro-batch."""

from compopt.gradient_cache.cache import gradient_cache

__all__ = ["gradient_cache"]
