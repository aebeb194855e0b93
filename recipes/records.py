"""Finished runs as lines of JSON, so that a study can be stopped at any moment and repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """All records, none if there is no file; a line that a kill has cut short is skipped."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one, on a line of its own even after one that was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_bytes() if path.exists() else b""
    with open(path, "a") as file:
        file.write("\n" * (bool(text) and not text.endswith(b"\n")) + json.dumps(record) + "\n")
