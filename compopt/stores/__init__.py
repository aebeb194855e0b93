"""Where rows live. A store holds ``n`` rows of 16-byte words and knows two verbs: gather and scatter."""

from compopt.stores.base import RowStore
from compopt.stores.memory import MemoryStore

__all__ = ["MemoryStore", "RowStore"]
