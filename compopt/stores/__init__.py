"""Stores of rows of 16-byte words, in memory and on disk, and write-behind access to stores on the host."""

from typing import Literal

from compopt.stores.base import RowStore
from compopt.stores.disk import DiskStore
from compopt.stores.write_behind import Ticket, WriteBehind

__all__ = ["DiskStore", "Offload", "RowStore", "Ticket", "WriteBehind"]

Offload = Literal["cpu", "disk"]
