"""The files of a table on disk, and how a table that a killed run left is read.

Three files in one directory, little-endian like every machine that torch supports:

- ``<name>.rows``: ``n`` rows of ``words`` 16-byte words, sparse until written.
- ``<name>.json``: format version, ``id`` (new whenever all rows are overwritten), ``state`` (``"loading"`` while
  they are), ``n``, ``words``, ``row_bytes`` and ``description``: which columns a row holds.
- ``<name>.redo``: the latest commit, written before its rows are touched: :data:`HEADER`, row numbers, rows.

A commit that a kill interrupts is complete in the redo record or has not touched a row, so the rows with a complete
record applied are the state after a commit, whenever the process died. This holds for killed processes, whose writes
the page cache keeps; after a power loss use a checkpoint.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compopt.stores.layout import WORD, Column, RowLayout
from compopt.stores.space import in_memory

FORMAT = 1
READY, LOADING = "ready", "loading"
# magic, id of the table, number of the commit, rows, words per row, CRC of rows and block
HEADER = struct.Struct("<8s16sQQQI")
MAGIC = b"cmpoptR1"


def describe(layout: RowLayout) -> dict[str, Any]:
    """What a row holds: ``columns`` (name -> width, dtype) and ``offsets`` (name -> first byte in the row)."""
    columns = {c.name: [c.width, str(c.dtype).removeprefix("torch.")] for c in layout.columns}
    return {"columns": columns, "offsets": dict(layout.offsets)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file as a whole: a reader sees the old or the new one."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The description of a table, or a ValueError that names the file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: the rows beside it cannot be told apart; delete them") from None
    except ValueError as error:
        raise ValueError(f"{path} does not describe a table ({error}); delete it and the rows beside it") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ValueError(f"{path} has format {found!r}, this version reads format {FORMAT}")
    return content


def write_redo(fd: int, table_id: str, number: int, rows: Tensor, block: Tensor) -> None:
    """Record a commit in one write."""
    parts = (rows.numpy().data.cast("B"), block.numpy().data.cast("B"))
    crc = zlib.crc32(parts[1], zlib.crc32(parts[0]))
    header = HEADER.pack(MAGIC, bytes.fromhex(table_id), number, len(rows), block.shape[1], crc)
    wanted = len(header) + sum(part.nbytes for part in parts)
    written = os.pwritev(fd, [header, *parts], 0)
    if written != wanted:  # a full disk, or more than the kernel's 2 GiB: nothing has been scattered yet
        raise OSError(f"the redo record of {len(rows)} rows needs {wanted} bytes, {written} could be written")


def read_redo(path: Path, table_id: str, words: int) -> tuple[int, Tensor, Tensor] | None:
    """``(number, rows, block)`` of the latest recorded commit; ``None``: no record, a torn one, another table's."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < HEADER.size:
        return None
    magic, owner, number, count, width, crc = HEADER.unpack_from(raw)
    end = HEADER.size + count * (8 + 16 * words)
    if magic != MAGIC or owner.hex() != table_id or width != words or len(raw) < end:
        return None
    if zlib.crc32(memoryview(raw)[HEADER.size : end]) != crc:
        return None
    split = HEADER.size + 8 * count
    rows = torch.from_numpy(np.frombuffer(raw[HEADER.size : split], dtype="<i8").copy())
    block = torch.from_numpy(np.frombuffer(raw[split:end], dtype="<c16").copy()).view(count, words)
    return number, rows, block


def read_table(directory: str | os.PathLike[str], name: str, rows: Tensor) -> dict[str, Tensor]:
    """Columns of some rows of a table file, such as a killed run left, by name.

    Changes no file. The values are those after the run's last complete commit; of a table whose run is still
    going, one commit may be seen in part.

    Args:
        directory: the ``offload_dir`` of the run.
        name: of the table in it, ``"rows"`` unless said otherwise.
        rows: row numbers, ``(R,)`` int64.

    Returns:
        ``{column: (R, width)}``.

    Raises:
        ValueError: there is no such table, it is damaged, or its run was killed while it loaded a checkpoint.
        IndexError: a row outside the table.
    """
    base = Path(directory) / name
    content = read_json(base.with_name(name + ".json"))
    if content["state"] != READY:
        raise ValueError(f"{base}.rows was left while a checkpoint was loaded into it; use that checkpoint")
    n, words = content["n"], content["words"]
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < n):
        raise IndexError(f"rows must lie in 0..{n - 1}, got {int(rows.min())}..{int(rows.max())}")
    block = _pread(base.with_name(name + ".rows"), n, words, rows)
    record = read_redo(base.with_name(name + ".redo"), content["id"], words)
    if record is not None:
        _, changed, values = record
        order = torch.argsort(changed, stable=True)
        at = torch.searchsorted(changed[order], rows).clamp_(max=max(0, len(changed) - 1))
        if len(changed):
            block = torch.where((changed[order][at] == rows)[:, None], values[order][at], block)
    columns = content["description"]["columns"].items()
    layout = RowLayout(tuple(Column(column, width, getattr(torch, dtype)) for column, (width, dtype) in columns))
    return {column: view.clone() for column, view in layout.unpack(block).items()}


def _pread(path: Path, n: int, words: int, rows: Tensor) -> Tensor:
    """Rows of a table file, without changing or mapping it for writing."""
    if path.stat().st_size < n * words * 16:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, {n} rows of {words * 16} bytes need more: truncated")
    if n == 0:
        return torch.empty(len(rows), words, dtype=WORD, device="cpu")
    if in_memory(path):  # a mapping would fill the holes of the file
        with open(path, "rb") as file:
            raw = b"".join(os.pread(file.fileno(), 16 * words, 16 * words * row) for row in rows.tolist())
        return torch.from_numpy(np.frombuffer(raw, dtype="<c16").copy()).view(len(rows), words)
    table = np.memmap(path, dtype="<c16", mode="r", shape=(n, words))
    return torch.from_numpy(np.take(table, rows.numpy(), axis=0))
