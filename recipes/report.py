"""The parts of a report: where it was measured, its tables, and the spread of the measured values.

Recipes and benchmarks share this module. It loads neither accelerate nor matplotlib, so that a benchmark of memory can
import it.
"""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import compopt

ROOT = Path(__file__).resolve().parent.parent
# what a result depends on
CODE = ("compopt", "recipes", "benchmarks", ":!benchmarks/results", ":!benchmarks/history/results")


# -- where ---------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, date, load and command: what a reader needs to repeat a measurement."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory, GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compopt": compopt.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load average before": round(os.getloadavg()[0], 2),
        "command": command(),
    }


def machine(env: dict[str, Any]) -> str:
    """System, processor and cores in one phrase."""
    return f"{env['system']}, {env['cpu']}, {env['cores']} cores"


def commit() -> str:
    """The commit of the checkout, and whether its code has changed since."""
    changed = _git("status", "--porcelain", "--", *CODE)
    return (_git("rev-parse", "--short", "HEAD") or "none") + (" and uncommitted changes" if changed else "")


def command() -> str:
    """The command of this process, as ``python -m ...`` where it was started so."""
    main = sys.modules["__main__"].__spec__
    start = ["-m", main.name.removesuffix(".__main__")] if main is not None else [sys.argv[0]]
    return shlex.join(["python", *start, *sys.argv[1:]])


def _git(*arguments: str) -> str:
    """What git prints; nothing outside a repository."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    """The processor's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# -- tables --------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], body: Sequence[Sequence[str]], align: str = "lr", pad: bool = False) -> str:
    """A table in Markdown.

    Args:
        head: titles of the columns.
        body: cells, a sequence per row.
        align: ``l`` or ``r`` per column; the last letter holds for the columns that remain.
        pad: make the columns equally wide, for the screen.
    """
    sides = align.ljust(len(head), align[-1])
    if not pad:
        rule = "|" + "|".join("---:" if side == "r" else "---" for side in sides) + "|"
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
        return "\n".join([lines[0], rule, *lines[1:]])
    widths = [max(3, *map(len, column)) for column in zip(head, *body, strict=True)]
    rules = ["-" * (width - 1) + (":" if side == "r" else "-") for side, width in zip(sides, widths, strict=True)]
    padded = [
        [cell.rjust(width) if side == "r" else cell.ljust(width) for cell, side, width in zip(*row, strict=True)]
        for row in ((cells, sides, widths) for cells in (head, rules, *body))
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)


def heading(title: str, env: dict[str, Any]) -> list[str]:
    """The top of a result page, in lines: its title and where it was measured."""
    return [f"# {title}", "", table(["", ""], [[key, str(value)] for key, value in env.items()], "l"), ""]


# -- spreads -------------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> list[float]:
    """[first quartile, median, third quartile], by linear interpolation between the sorted values.

    These are the quartiles of the values themselves ("inclusive"), as in numpy, torch and pandas. They never lie
    outside of the values, which the other definition's do where there are few.
    """
    return statistics.quantiles(values, n=4, method="inclusive")


def spread(three: Sequence[float], digits: int = 2, unit: float = 1.0) -> str:
    """``median (first to third quartile)`` of what :func:`quartiles` gives, in multiples of ``unit``."""
    low, median, high = (f"{value / unit:,.{digits}f}" for value in three)
    return f"{median} ({low} to {high})"


def paired(gaps: Sequence[float]) -> str:
    """Mean of differences by seed ± its standard error."""
    return f"{statistics.mean(gaps):+.1f} ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.1f}"


def mean_spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """``mean`` of one value, ``mean ± standard deviation`` of several, ``-`` of none."""
    if not values:
        return "-"
    scaled = [scale * value for value in values]
    mean = f"{statistics.mean(scaled):.{digits}f}"
    return mean if len(scaled) == 1 else f"{mean} ± {statistics.stdev(scaled):.{digits}f}"
