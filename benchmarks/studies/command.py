"""What the commands of the studies share: arguments, and the lines that say where the figures come from."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.report import environment, machine
from benchmarks.studies.search import Job, Search


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


def stamp() -> dict[str, Any]:
    """Where and when a run was made, of what."""
    env = environment()
    known = {key: env[key] for key in ("python", "torch", "commit", "threads")}
    return {**known, "machine": machine(env), "date": time.strftime("%Y-%m-%d")}


def command(
    module: str,
    description: str | None,
    study: Search[Any],
    run_one: Callable[[Job, Path | None, int], dict[str, Any]],
    write: Callable[[dict[str, dict[str, Any]]], None],
    reads_words: Callable[[str], bool],
    argv: Sequence[str] | None,
) -> None:
    """The command of a study over several data sets, of which one may be WordNet.

    Args:
        module, description: see :func:`parser`.
        study: its arms and results.
        run_one: what ``run-one`` does with a job, the folder of WordNet's files and a number of threads.
        write: makes the page from the finished runs.
        reads_words: whether an arm needs that folder.
        argv: arguments of the command line.
    """
    root = parser(module, description, study.path)
    root.add_argument("--wordnet", type=Path, help="folder of WordNet's files")
    root.add_argument("--arms", nargs="+", default=["*"], metavar="PATTERN", help="which, in this order")
    args = root.parse_args(argv)
    if args.command == "report":
        write(study.finished(args.results))
    elif args.command == "run-one":
        print(json.dumps(run_one(Job(**json.loads(args.job)), args.wordnet, args.threads)))
    else:
        arms = [arm for pattern in args.arms for arm in study.arms if fnmatch(arm, pattern)]
        if args.wordnet is None and any(map(reads_words, arms)):
            root.error("--wordnet FOLDER")
        flags = ["--wordnet", str(args.wordnet)] if args.wordnet else []
        study.carry_out(arms, module, flags, args.command == "final", args.workers, args.threads, args.results)
