"""Studies: arms whose settings are tuned one after another, their runs, and the command line that runs them.

The command of a study is ``python -m MODULE tune``, ``final`` or ``report``. ``tune`` chooses the settings of each arm
on validation data, ``final`` trains with the chosen settings on other seeds, and ``report`` writes the page. Each
run is made by ``MODULE run-one JOB`` in a separate process and stored as a line of the study's file; stored runs are
not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from benchmarks.report import ROOT, append_run, environment, machine, paired, read_runs, table

TUNE_SEED, SEEDS = 100, (0, 1, 2)

Results = dict[str, dict[str, Any]]  # key of a job -> its result
Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Job:
    """One training run, with everything that its result depends on."""

    arm: str
    options: dict[str, Any]
    seed: int

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def final(self) -> bool:
        """Return whether the run is evaluated on test data."""
        return self.seed != TUNE_SEED


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A contender and the search for its settings.

    Attributes:
        first: initial settings.
        grids: setting -> values; settings are chosen one after another while the others stay fixed.
        widen: setting -> factor; while the best value is at an end of the grid, the grid gets one more value there.
        most: setting -> the largest value that the method accepts.
        after: another arm, with whose chosen settings the search begins, before the arm's own grids, if there are any.
    """

    first: Mapping[str, Any] = field(default_factory=dict)
    grids: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    widen: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    after: str = ""


A = TypeVar("A", bound=Arm)


class Search(Generic[A]):
    """Arms of a study, the file of its finished runs, and the score by which settings are chosen.

    Args:
        arms: arms by name.
        path: file of the finished runs, one line of JSON each.
        score: function from a run's result to its score; the settings with the highest score are chosen.
        seeds: seeds of the final runs.
    """

    def __init__(
        self,
        arms: Mapping[str, A],
        path: Path,
        score: Callable[[dict[str, Any]], float],
        seeds: Sequence[int] = SEEDS,
    ) -> None:
        self.arms, self.path, self.score, self.seeds = arms, path, score, seeds

    def beside(self, suffix: str) -> Path:
        """Return the path of the page (``.md``) or picture (``.png``) that belongs to the file of runs."""
        return self.path.with_name(self.path.name.partition(".")[0] + suffix)

    def finished(self) -> Results:
        """Return the results by the keys of their jobs."""
        return {Job(**run["job"]).key: run for run in read_runs(self.path)}

    def best(self, arm: str, results: Results) -> dict[str, Any] | None:
        """Return the chosen settings if all grids are complete, else None."""
        chosen, missing = self._search(arm, results)
        return None if missing else chosen

    def validation(self, arm: str, results: Results) -> float:
        """Return the score of the chosen settings of a tuned arm."""
        return self.score(results[Job(arm, self._search(arm, results)[0], TUNE_SEED).key])

    def next_jobs(self, arm: str, results: Results, final: bool = False) -> list[Job]:
        """Return the runs that can start: those of the first incomplete grid, or the final runs after all grids."""
        chosen, missing = self._search(arm, results)
        if missing:
            return missing
        return [job for seed in self.seeds if final and (job := Job(arm, chosen, seed)).key not in results]

    def finals(self, results: Results) -> dict[str, list[dict[str, Any]]]:
        """Return the finished final runs of every arm that has any."""
        found = {}
        for arm in self.arms:
            chosen = self.best(arm, results)
            jobs = [Job(arm, chosen, seed) for seed in self.seeds] if chosen is not None else []
            if runs := [results[job.key] for job in jobs if job.key in results]:
                found[arm] = runs
        return found

    def _search(self, arm: str, results: Results) -> tuple[dict[str, Any], list[Job]]:
        """Return the best settings so far, and the missing runs of the current grid."""
        after = self.arms[arm].after
        chosen, missing = self._search(after, results) if after else ({}, [])
        if missing:
            return chosen, missing
        chosen = {**self.arms[arm].first, **chosen}
        for name, values in self.arms[arm].grids.items():
            while True:
                jobs = [Job(arm, {**chosen, name: value}, TUNE_SEED) for value in values]
                if missing := [job for job in jobs if job.key not in results]:
                    return chosen, missing
                best = max(jobs, key=lambda job: self.score(results[job.key])).options
                wider = _beyond(values, best[name], self.arms[arm].widen.get(name), self.arms[arm].most.get(name))
                if wider == values:
                    break
                values = wider
            chosen = best
        return chosen, []

    def carry_out(self, arms: Iterable[str], command: Sequence[str], final: bool, workers: int) -> None:
        """Tune some arms and make their final runs, several runs at a time.

        Args:
            arms: names of the arms.
            command: arguments of the interpreter for one run, without the job.
            final: whether to make the final runs too.
            workers: number of parallel runs.
        """
        with ThreadPoolExecutor(workers) as pool, tqdm(unit="run") as bar:
            running: dict[str, Future[dict[str, Any]]] = {}
            while True:
                results = self.finished()
                waiting = {job.key: job for arm in arms for job in self.next_jobs(arm, results, final)}
                todo = [key for key in waiting if key not in running]
                running |= {key: pool.submit(run_job, command, key) for key in todo[: workers - len(running)]}
                if not running:
                    return
                result = next(as_completed(running.values())).result()
                job = Job(**result["job"])
                del running[job.key]
                append_run(self.path, result)
                bar.set_postfix_str(job.arm + ("" if job.final else f" {self.score(result):.4f}"))
                bar.update()


def _beyond(values: tuple[Any, ...], best: Any, factor: float | None, most: float | None) -> tuple[Any, ...]:
    """Append a value beyond the best one if that is the smallest or largest, unless it is the largest allowed value."""
    if factor is None or min(values) < best < max(values) or best == most:
        return values
    further = float(f"{best * factor if best == max(values) else best / factor:.3g}")
    return (*values, further if most is None else min(further, most))


def run_job(command: Sequence[str], key: str) -> dict[str, Any]:
    """Run one job in a process and return its result, the last line that the process prints."""
    process = subprocess.run([sys.executable, *command, key], cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{key} failed:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])


# -- the command ---------------------------------------------------------------------------------------------------


def main(
    study: Search[Any],
    module: str,
    description: str | None,
    run_one: Callable[[Job, Path | None], dict[str, Any]],
    page: Callable[[Results], str],
    data: str = "--wordnet",
    needs_data: Callable[[str], bool] = lambda arm: True,
    argv: Sequence[str] | None = None,
) -> None:
    """Run the command line of a study.

    Args:
        study: arms and runs of the study.
        module, description: module name and help text; the runs are processes of the same module.
        run_one: function that trains and evaluates a job with a folder of data; returns ``metrics``, ``seconds`` and
            further facts.
        page: function that creates the page from the finished runs.
        data: name of the option for the folder of data.
        needs_data: function that returns whether an arm reads that folder.
        argv: arguments of the command line.
    """
    root = argparse.ArgumentParser(
        f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("command", choices=("tune", "final", "report", "run-one"))
    root.add_argument("job", nargs="?", help="job of run-one, as JSON")
    root.add_argument("--workers", type=int, default=2, help="number of parallel runs (default 2)")
    root.add_argument("--threads", type=int, default=1, help="CPU threads of each run (default 1)")
    root.add_argument(
        "--arms", nargs="+", default=["*"], metavar="PATTERN", help="patterns of the arms to run, in this order"
    )
    root.add_argument(data, dest="data", type=Path, metavar="FOLDER", help="folder of the data")
    args = root.parse_args(argv)
    if args.command == "report":
        target = study.beside(".md")
        target.write_text(page(study.finished()).rstrip() + "\n")
        print(f"wrote {target}")
    elif args.command == "run-one":
        import torch

        torch.set_num_threads(args.threads)
        job = Job(**json.loads(args.job))
        print(json.dumps({"job": asdict(job), **run_one(job, args.data), **stamp()}))
    else:
        arms = [arm for pattern in args.arms for arm in study.arms if fnmatch(arm, pattern)]
        if args.data is None and any(map(needs_data, arms)):
            root.error(f"{data} FOLDER")
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
        flags = [data, str(args.data)] if args.data else []
        command = ["-m", module, "--threads", str(args.threads), *flags, "run-one"]
        study.carry_out(arms, command, args.command == "final", args.workers)


def stamp() -> dict[str, Any]:
    """Return machine, date and versions of a run."""
    env = environment()
    known = {key: env[key] for key in ("python", "torch", "commit", "threads")}
    return {**known, "machine": machine(env), "date": time.strftime("%Y-%m-%d")}


# -- parts of a page -----------------------------------------------------------------------------------------------


def provenance(runs: Runs, script: str, packages: Sequence[str] = ()) -> str:
    """Format machines, versions, commits and times of the runs; ``packages``: further keys with versions."""
    known = {
        name: ", ".join(dict.fromkeys(str(run[name]) for run in runs))
        for name in ("machine", "threads", "python", "torch", "commit", *packages)
    }
    versions = "".join(f", {name.replace('sentence_', 'sentence-')} {known[name]}" for name in packages)
    dates = sorted(run["date"] for run in runs) or ["-"]
    hours = sum(run["seconds"] for run in runs) / 3600
    lines = [
        f"- **hardware**: {known['machine']}; threads per run: {known['threads']}",
        f"- **versions**: Python {known['python']}, torch {known['torch']}{versions}; **commit** {known['commit']}",
        f"- **runs**: {len(runs)}, {dates[0]} to {dates[-1]}; {hours:.1f} hours of training",
        f"- **commands**: at the top of `{script}`",
    ]
    return "\n".join(lines)


def settings(study: Search[Any], results: Results, about: str, title: str, digits: int) -> str:
    """Return the last section of a page: settings and score in per cent of every tuning run; chosen ones are bold."""
    body = []
    for arm in study.arms:
        best = study.best(arm, results)
        for run in results.values():
            job = run["job"]
            if job["arm"] == arm and job["seed"] == TUNE_SEED:
                options = ", ".join(f"{name} {value:g}" for name, value in job["options"].items())
                score = f"{100 * study.score(run):.{digits}f}"
                body.append([arm, f"**{options}**" if job["options"] == best else options, score])
    return "\n\n".join(["## Settings", about, table(["", "settings", title], body, "llr")])


def by_seed(runs: Runs, metric: str) -> dict[int, float]:
    """Return a metric of some runs by seed, in per cent."""
    return {run["job"]["seed"]: 100 * run["metrics"][metric] for run in runs}


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Format the difference of two arms over their common seeds; empty for fewer than two common seeds."""
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return paired(gaps) if len(gaps) > 1 else ""
