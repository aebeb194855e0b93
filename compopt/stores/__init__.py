"""Places of rows: a store holds rows of 16-byte words; write-behind keeps one on the host from making others wait."""

from typing import Literal

from compopt.stores.base import RowStore
from compopt.stores.disk import DiskStore
from compopt.stores.write_behind import Ticket, WriteBehind

__all__ = ["DiskStore", "Offload", "RowStore", "Ticket", "WriteBehind"]

Offload = Literal["cpu", "disk"]
