"""Places of rows: a store holds rows of 16-byte words, an access reads and commits them for a table."""

from typing import Literal

from compopt.stores.base import MemoryStore, RowStore
from compopt.stores.disk import DiskStore
from compopt.stores.write_behind import RowAccess, Ticket, WriteBehind

__all__ = ["DiskStore", "MemoryStore", "Offload", "RowAccess", "RowStore", "Ticket", "WriteBehind"]

Offload = Literal["cpu", "disk"]
