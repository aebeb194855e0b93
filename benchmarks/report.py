"""Reports of benchmarks and studies: environment, tables, spreads, result files and files of runs.

The module imports neither accelerate nor matplotlib, so that memory benchmarks can import it.
"""

from __future__ import annotations

import gzip
import json
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

BENCHMARKS = Path(__file__).resolve().parent
ROOT, RESULTS = BENCHMARKS.parent, BENCHMARKS / "results"
CODE = ("compopt", "recipes", "benchmarks", ":!benchmarks/results")  # code that a result depends on


# -- environment ---------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Return hardware, versions, commit, date, load and command, which are needed to repeat a measurement."""
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
    """Return system, processor and number of cores in one phrase."""
    return f"{env['system']}, {env['cpu']}, {env['cores']} cores"


def commit() -> str:
    """Return the commit of the checkout, and note uncommitted changes of its code."""
    changed = _git("status", "--porcelain", "--", *CODE)
    return (_git("rev-parse", "--short", "HEAD") or "none") + (" and uncommitted changes" if changed else "")


def command() -> str:
    """Return the command of this process, as ``python -m ...`` if it runs a module."""
    main = sys.modules["__main__"].__spec__
    start = ["-m", main.name.removesuffix(".__main__")] if main is not None else [sys.argv[0]]
    return shlex.join(["python", *start, *sys.argv[1:]])


def _git(*arguments: str) -> str:
    """Return the output of git; empty outside a repository."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    """Return the model name of the processor, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# -- tables --------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], body: Sequence[Sequence[str]], align: str = "lr") -> str:
    """Return a Markdown table.

    Args:
        head: titles of the columns.
        body: cells, a sequence per row.
        align: ``l`` or ``r`` per column; the last letter applies to all remaining columns.
    """
    sides = align.ljust(len(head), align[-1])
    rule = "|" + "|".join("---:" if side == "r" else "---" for side in sides) + "|"
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    return "\n".join([lines[0], rule, *lines[1:]])


def heading(title: str, env: dict[str, Any]) -> list[str]:
    """Return the first lines of a result page: its title and a table of the environment."""
    return [f"# {title}", "", table(["", ""], [[key, str(value)] for key, value in env.items()], "l"), ""]


# -- spreads -------------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> list[float]:
    """Return [first quartile, median, third quartile], by linear interpolation between the sorted values.

    The method is "inclusive", as in numpy, torch and pandas: the quartiles always lie within the range of the values,
    whereas those of the "exclusive" method may lie outside if there are few values.
    """
    return statistics.quantiles(values, n=4, method="inclusive")


def spread(three: Sequence[float], digits: int = 2, unit: float = 1.0) -> str:
    """Format the result of :func:`quartiles` as ``median (first to third quartile)``, in multiples of ``unit``."""
    low, median, high = (f"{value / unit:,.{digits}f}" for value in three)
    return f"{median} ({low} to {high})"


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two values."""
    return statistics.stdev(values) / len(values) ** 0.5


def paired(gaps: Sequence[float]) -> str:
    """Format the mean of per-seed differences ± its standard error."""
    return f"{statistics.mean(gaps):+.1f} ± {standard_error(gaps):.1f}"


def mean_spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Format one value as ``mean``, several as ``mean ± standard deviation``, none as ``-``."""
    if not values:
        return "-"
    scaled = [scale * value for value in values]
    mean = f"{statistics.mean(scaled):.{digits}f}"
    return mean if len(scaled) == 1 else f"{mean} ± {statistics.stdev(scaled):.{digits}f}"


# -- files ---------------------------------------------------------------------------------------------------------


def finish(
    name: str, title: str, env: dict[str, Any], parts: Sequence[str], results: object, quick: bool = False
) -> None:
    """Print a page and, unless ``quick``, write it and its figures to the folder of results.

    Args:
        name: stem of the files ``NAME.md`` and ``NAME.json``.
        title: title of the page.
        env: result of :func:`environment`, taken before the measurement.
        parts: paragraphs and tables.
        results: the figures, serializable as JSON.
        quick: whether to print only.
    """
    text = "\n\n".join(["\n".join(heading(title, env)).rstrip(), *parts])
    print(text)
    if not quick:
        save(name, text, env, results)


def save(name: str, text: str, env: dict[str, Any], results: object, folder: Path | None = None) -> None:
    """Write a page to ``NAME.md`` and its figures to ``NAME.json``."""
    folder = RESULTS if folder is None else folder
    (folder / f"{name}.md").write_text(text.rstrip() + "\n")
    (folder / f"{name}.json").write_text(json.dumps({"environment": env, "results": results}, indent=1) + "\n")


def stored(name: str) -> dict[str, Any]:
    """Return the content of ``NAME.json``: ``environment`` and ``results``."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path.name} is missing; benchmarks/README.md says which script writes it")
    return json.loads(path.read_text())


def _text(path: Path) -> str:
    """Return the text of a file of runs, which may be compressed; nothing if there is no file."""
    if not path.exists():
        return ""
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return all finished runs, or none if there is no file; lines truncated by a kill are skipped."""
    runs = []
    for line in _text(path).splitlines():
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return runs


def append_run(path: Path, run: dict[str, Any]) -> None:
    """Append a run on a new line, also after a truncated line, since a study can be stopped at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _text(path)
    line = "\n" * (bool(text) and not text.endswith("\n")) + json.dumps(run) + "\n"
    if path.suffix == ".gz":
        partial = path.with_suffix(".partial")
        partial.write_bytes(gzip.compress((text + line).encode(), mtime=0))
        partial.replace(path)
    else:
        with open(path, "a") as file:
            file.write(line)
