"""Where rows live: stores hold rows of 16-byte words, ``RowAccess`` is how a table reads and commits them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from compopt.stores.base import RowAccess, RowStore, Ticket
from compopt.stores.disk import DiskStore
from compopt.stores.host import HostStore
from compopt.stores.memory import DirectRows, MemoryStore
from compopt.stores.offloaded import OffloadedRows
from compopt.stores.tablefile import describe

__all__ = [
    "DirectRows",
    "DiskStore",
    "HostStore",
    "MemoryStore",
    "OffloadedRows",
    "RowStore",
    "RowAccess",
    "Ticket",
    "check_offload",
    "describe",
    "open_rows",
]


def check_offload(offload: str | None, offload_dir: str | os.PathLike[str] | None) -> None:
    """Refuse a placement that does not exist, and a directory without ``offload="disk"`` or the reverse."""
    if offload not in (None, "cpu", "disk"):
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
    offload: str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    name: str = "rows",
    description: Mapping[str, Any] | None = None,
) -> RowAccess:
    """The rows of one process, placed where ``offload`` says.

    Args:
        n: rows.
        words: 16-byte words per row.
        offload: ``None``: beside the features; ``"cpu"``: host memory; ``"disk"``: a file in ``offload_dir``.
        offload_dir: of the table file.
        name: of the table file.
        description: what a row holds, for the table file; see :func:`describe`.

    Raises:
        ValueError: an unknown placement, a directory missing or to no use, a table file that does not fit.
    """
    check_offload(offload, offload_dir)
    if offload is None:
        return DirectRows(MemoryStore(n, words))
    if offload == "cpu":
        return OffloadedRows(HostStore(n, words))
    assert offload_dir is not None
    return OffloadedRows(DiskStore(offload_dir, name, n, words, description or {}))
