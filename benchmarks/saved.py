"""Result files: pages with the figures they were made from, and finished runs as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
HISTORY = BENCHMARKS / "history" / "results"


def save(name: str, text: str, env: dict, results: object, folder: Path = RESULTS, indent: int | None = 1) -> None:
    """Write ``NAME.md``, and into ``NAME.json`` what it was made from; without ``indent`` where that is long."""
    (folder / f"{name}.md").write_text(text.rstrip() + "\n")
    (folder / f"{name}.json").write_text(json.dumps({"environment": env, "results": results}, indent=indent) + "\n")


def stored(name: str, folder: Path = RESULTS) -> dict:
    """What ``NAME.json`` holds: ``environment`` and ``results``."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path.name} is missing; benchmarks/README.md says which script writes it")
    return json.loads(path.read_text())


def read_runs(path: Path) -> list[dict[str, Any]]:
    """All finished runs, none if there is no file; a line that a kill has cut short is skipped."""
    runs = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return runs


def append_run(path: Path, run: dict[str, Any]) -> None:
    """Add a run, on a line of its own even after one that was cut short; a study can be stopped at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_bytes() if path.exists() else b""
    with open(path, "a") as file:
        file.write("\n" * (bool(text) and not text.endswith(b"\n")) + json.dumps(run) + "\n")
