"""Places of rows: a store holds rows of 16-byte words, an access reads and commits them for a table."""

from typing import Literal

from compopt.stores.base import RowAccess, RowStore, Ticket
from compopt.stores.disk import DiskStore
from compopt.stores.memory import MemoryStore
from compopt.stores.write_behind import WriteBehind

__all__ = ["DiskStore", "MemoryStore", "Offload", "RowAccess", "RowStore", "Ticket", "WriteBehind"]

Offload = Literal["cpu", "disk"]
