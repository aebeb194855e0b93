"""Gradient cache: the gradients of a large batch in the memory of a micro-batch."""

from compopt.gradient_cache.cache import gradient_cache
from compopt.gradient_cache.inputs import TokenBudget

__all__ = ["TokenBudget", "gradient_cache"]
