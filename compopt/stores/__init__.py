"""Where rows live: stores hold rows of 16-byte words, ``Rows`` is how a table reads and commits them."""

from compopt.stores.base import Rows, RowStore, Ticket
from compopt.stores.memory import DirectRows, MemoryStore

__all__ = ["DirectRows", "MemoryStore", "RowStore", "Rows", "Ticket"]
