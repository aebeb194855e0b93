"""What a recipe leaves behind: a table on the screen and ``metrics.json``."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from recipes import launch
from recipes.engine import Run
from recipes.methods import METHODS


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs grouped by method, in order of appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config.method, []).append(run)
    return groups


def mean_spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """``mean`` of one value, ``mean ± standard deviation`` of several, ``-`` of none."""
    if not values:
        return "-"
    scaled = [scale * value for value in values]
    mean = f"{statistics.mean(scaled):.{digits}f}"
    return mean if len(scaled) == 1 else f"{mean} ± {statistics.stdev(scaled):.{digits}f}"


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A header and one line per method: hyper-parameters, measures in percent (mean and spread), speed."""
    labels = runs[0].task.labels
    table = [["method", "hyper-parameters", "seeds", *(f"{label} (%)" for label in labels.values()), "s", "ms/step"]]
    for method, group in by_method(runs).items():
        options = " ".join(f"{name}={value}" for name, value in group[0].config.options.items())
        measures = [mean_spread([r.final[name] for r in group if name in r.final], 100) for name in labels]
        seconds = statistics.mean(run.seconds for run in group)
        per_step = statistics.mean(1e3 * run.seconds / max(1, run.step) for run in group)
        cells = [METHODS[method].title, options, str(len(group)), *measures, f"{seconds:.0f}", f"{per_step:.1f}"]
        table.append(cells)
    return table


def text_table(table: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a rule."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    """The same as a table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def environment() -> dict[str, Any]:
    """Versions, machine and date: what a reader needs to judge the numbers."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
    }


def provenance() -> list[str]:
    """The top of a result file: what a reader needs to repeat it."""
    facts = environment()
    return [
        f"`{facts['command']}`",
        "",
        f"{facts['date'][:10]}; {facts['machine']}; Python {facts['python']}, torch {facts['torch']}.",
        "",
    ]


def _processor() -> str:
    """The processor's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def save_metrics(runs: Sequence[Run], path: Path) -> None:
    """Write ``metrics.json``: environment, and configuration, final measures and history of every run."""
    record = {
        "environment": environment(),
        "runs": [
            {
                "config": vars(run.config),
                "steps": run.step,
                "finished": run.finished,
                "seconds": round(run.seconds, 3),
                "final": run.final,
                "history": run.history,
            }
            for run in runs
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)


def finish(runs: Sequence[Run], output_dir: Path) -> None:
    """Write the metrics, print the table and where things are; on the main process only."""
    if not launch.is_main():
        return
    save_metrics(runs, output_dir / "metrics.json")
    print("\n" + text_table(rows(runs)))
    for run in runs:
        if not run.finished:
            print(f"{run.config.method}, seed {run.config.seed}: stopped at step {run.step} of {run.total_steps}")
    print("")
    list_files([output_dir / "metrics.json"])


def list_files(paths: Sequence[Path]) -> None:
    """Say where things are; on the main process only."""
    if not launch.is_main():
        return
    for path in paths:
        print(f"wrote {path}")
