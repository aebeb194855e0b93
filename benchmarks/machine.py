"""What every result states about where it was measured, and the form of its tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import compopt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CODE = ("compopt", "recipes", "benchmarks", ":!benchmarks/results")  # what a result depends on


def git(*arguments: str) -> str:
    """What git prints; nothing outside a repository."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()


def command() -> str:
    """This program's own, as `python -m ...` where it was started so."""
    main = sys.modules["__main__"].__spec__
    start = ["-m", main.name] if main is not None else [sys.argv[0]]
    return " ".join(["python", *start, *sys.argv[1:]])


def environment() -> dict:
    """Hardware, versions, commit, load."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", *CODE)
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory, GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compopt": compopt.__version__,
        "commit": (commit or "none") + (" and uncommitted changes" if changed else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load average before": round(os.getloadavg()[0], 2),
        "command": command(),
    }


def heading(title: str, env: dict) -> list[str]:
    """The top of a result file."""
    return [f"# {title}", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in env.items()), ""]


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    """A table whose first column is text."""
    body = ["| " + " | ".join(cells) + " |" for cells in [head, *lines]]
    return [body[0], "|---" + "|---:" * (len(head) - 1) + "|", *body[1:], ""]


def save(name: str, text: str, env: dict, results: object) -> None:
    """``results/NAME.md`` and what it was made from, ``results/NAME.json``."""
    (RESULTS / f"{name}.md").write_text(text.rstrip() + "\n")
    (RESULTS / f"{name}.json").write_text(json.dumps({"environment": env, "results": results}, indent=1) + "\n")


def stored(name: str) -> dict:
    """What ``results/NAME.json`` holds: ``environment`` and ``results``."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path.name} is missing; benchmarks/README.md says which script writes it")
    return json.loads(path.read_text())


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def cell(values: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def resident() -> dict[str, int]:
    """Bytes of this process in memory: of its own, of files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile")}
