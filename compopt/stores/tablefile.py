"""The files that describe a table on disk.

Two files in one directory, little-endian like every machine that torch supports:

- ``<name>.rows``: ``n`` rows of ``words`` 16-byte words, sparse until written.
- ``<name>.json``: format version, ``id`` (new whenever all rows are overwritten), ``state`` (``"loading"`` while
  they are), ``n``, ``words``, ``row_bytes`` and ``description``: which columns a row holds.

Commits are not atomic: a process that is killed may leave one in part. Its table is refused until a checkpoint is
loaded into it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compopt.stores.layout import RowLayout

FORMAT = 1
READY, LOADING = "ready", "loading"


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
