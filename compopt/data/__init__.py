"""Stable data-set indices, and a loader that looks one batch ahead."""

from compopt.data.indexed import Indexed, key_index
from compopt.data.prefetch_loader import PrefetchLoader

__all__ = ["Indexed", "PrefetchLoader", "key_index"]
