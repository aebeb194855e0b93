"""Places of rows: a store holds rows of 16-byte words, an access reads and commits them for a table."""

from __future__ import annotations

import os
from typing import Literal, get_args

from compopt.stores.base import RowAccess, RowStore, Ticket
from compopt.stores.disk import DiskStore
from compopt.stores.memory import HostStore, MemoryStore
from compopt.stores.write_behind import WriteBehind

__all__ = ["DiskStore", "HostStore", "MemoryStore", "Offload", "RowAccess", "RowStore", "Ticket", "WriteBehind"]
__all__ += ["check_offload", "open_rows"]

Offload = Literal["cpu", "disk"]


def check_offload(offload: Offload | None, offload_dir: str | os.PathLike[str] | None) -> None:
    """Refuse a placement that does not exist, and a directory without ``offload="disk"`` or the reverse."""
    if offload not in (None, *get_args(Offload)):
        raise ValueError(f'offload must be None, "cpu" or "disk", got {offload!r}')
    if offload == "disk" and offload_dir is None:
        raise ValueError('offload="disk" needs offload_dir=, a directory for the table; got None')
    if offload != "disk" and offload_dir is not None:
        raise ValueError(f'offload_dir={str(offload_dir)!r} needs offload="disk", got offload={offload!r}')
    if offload_dir is not None and not isinstance(offload_dir, (str, os.PathLike)):
        raise TypeError(f"offload_dir must be a path, got {offload_dir!r} of type {type(offload_dir).__name__}")


def open_rows(
    n: int,
    words: int,
    *,
    offload: Offload | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    name: str = "rows",
) -> RowAccess:
    """Make the rows of one process, placed where ``offload`` says.

    Args:
        n: rows.
        words: 16-byte words per row.
        offload: ``None``: beside the features; ``"cpu"``: host memory; ``"disk"``: a file in ``offload_dir``.
        offload_dir: of the table file.
        name: of the table file.

    Raises:
        ValueError: an unknown placement, a directory missing or to no use, more rows than fit.
    """
    check_offload(offload, offload_dir)
    if offload == "disk":
        assert offload_dir is not None
        return WriteBehind(DiskStore(offload_dir, name, n, words))
    return RowAccess(MemoryStore(n, words)) if offload is None else WriteBehind(HostStore(n, words))
