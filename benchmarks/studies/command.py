"""What the commands of the studies share: arguments, and the lines that say where the figures come from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parser(module: str, description: str | None, path: Path) -> argparse.ArgumentParser:
    """Arguments of every study: what to do, how many runs at a time, and the file of the finished runs."""
    root = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("command", choices=("tune", "final", "report", "run-one"))
    root.add_argument("job", nargs="?", help="run-one: a job as JSON")
    root.add_argument("--workers", type=int, default=2, help="runs at a time (default 2)")
    root.add_argument("--threads", type=int, default=1, help="CPU threads of each run (default 1)")
    root.add_argument("--results", type=Path, default=path, help="file of the finished runs")
    return root


def provenance(runs: Sequence[dict[str, Any]], script: str, packages: Sequence[str] = ()) -> list[str]:
    """Machines, versions, commits and times of the runs; ``packages``: keys whose values are versions too."""
    known = {
        name: ", ".join(dict.fromkeys(str(run[name]) for run in runs))
        for name in ("machine", "threads", "python", "torch", "commit", *packages)
    }
    versions = "".join(f", {name.replace('sentence_', 'sentence-')} {known[name]}" for name in packages)
    dates = sorted(run["date"] for run in runs) or ["-"]
    hours = sum(run["seconds"] for run in runs) / 3600
    return [
        f"- **hardware**: {known['machine']}; threads per run: {known['threads']}",
        f"- **versions**: Python {known['python']}, torch {known['torch']}{versions}; **commit** {known['commit']}",
        f"- **runs**: {len(runs)}, {dates[0]} to {dates[-1]}; {hours:.1f} hours of training",
        f"- **commands**: at the top of `{script}`",
    ]
