"""Studies whose settings are chosen one after another: arms, runs, what comes next, and processes that do it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from benchmarks.report import ROOT, append_run, paired, read_runs, table

TUNE_SEED, SEEDS = 100, (0, 1, 2)

Results = dict[str, dict[str, Any]]  # key of a job -> its result


@dataclass(frozen=True)
class Job:
    """One training run: everything its result depends on."""

    arm: str
    options: dict[str, Any]
    seed: int

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is compared.

    Attributes:
        first: settings to begin with.
        grids: setting -> values; one setting after another is chosen, the others stay.
        widen: setting -> factor; while the best value is the grid's first or last, the grid gets one more beyond it.
        most: setting -> the largest value that the method takes.
        as_arm: take what was chosen for another arm.
    """

    first: Mapping[str, Any] = field(default_factory=dict)
    grids: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    widen: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    as_arm: str = ""


A = TypeVar("A", bound=Arm)


class Search(Generic[A]):
    """A study: its arms, the file of its finished runs, and what a run is judged by.

    Args:
        arms: by name.
        path: file of the finished runs, a line of JSON each.
        score: of a run; the highest setting is chosen.
    """

    def __init__(self, arms: Mapping[str, A], path: Path, score: Callable[[dict[str, Any]], float]) -> None:
        self.arms, self.path, self.score = arms, path, score

    def finished(self, path: Path | None = None) -> Results:
        """Results by the keys of their jobs."""
        return {Job(**run["job"]).key: run for run in read_runs(path or self.path)}

    def best(self, arm: str, results: Results) -> dict[str, Any] | None:
        """The settings that are chosen when all grids are done, else None."""
        chosen, missing = self._search(self.arms[arm].as_arm or arm, results)
        return None if missing else chosen

    def next_jobs(self, arm: str, results: Results, final: bool = False) -> list[Job]:
        """Runs that can begin: those of the first grid that is not done, or the final ones once all are."""
        chosen, missing = self._search(self.arms[arm].as_arm or arm, results)
        if missing:
            return [] if self.arms[arm].as_arm else missing
        return [job for seed in SEEDS if final and (job := Job(arm, chosen, seed)).key not in results]

    def finals(self, results: Results) -> dict[str, list[dict[str, Any]]]:
        """The finished final runs of every arm that has any."""
        found = {}
        for arm in self.arms:
            chosen = self.best(arm, results)
            jobs = [Job(arm, chosen, seed) for seed in SEEDS] if chosen is not None else []
            if runs := [results[job.key] for job in jobs if job.key in results]:
                found[arm] = runs
        return found

    def tuning_table(self, results: Results, title: str, digits: int) -> str:
        """Every tuning run's settings and its score in per cent; the chosen ones are bold."""
        body = []
        for arm in self.arms:
            runs = [run for run in results.values() if run["job"]["arm"] == arm and run["job"]["seed"] not in SEEDS]
            for run in runs:
                options = ", ".join(f"{name} {value:g}" for name, value in run["job"]["options"].items())
                chosen = run["job"]["options"] == self.best(arm, results)
                told = f"{100 * self.score(run):.{digits}f}"
                body.append([arm, f"**{options}**" if chosen else options, told])
        return table(["", "settings", title], body, "llr")

    def settings(self, results: Results, said: str, title: str, digits: int) -> list[str]:
        """The end of a study's page: every tuning run."""
        return ["## Settings", "", said, "", self.tuning_table(results, title, digits)]

    def _search(self, arm: str, results: Results) -> tuple[dict[str, Any], list[Job]]:
        """The best settings so far, and the runs that the present grid still lacks."""
        chosen = dict(self.arms[arm].first)
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

    def carry_out(
        self,
        arms: Iterable[str],
        module: str,
        flags: Sequence[str],
        final: bool,
        workers: int,
        threads: int,
        path: Path,
    ) -> None:
        """Tune or finish the arms, several runs at a time, each in a process of its own.

        Args:
            arms: their names.
            module: whose command ``run-one`` takes the job as JSON.
            flags: further ones of it.
            final: the final runs too.
            workers: runs at a time.
            threads: of each.
            path: file that gets the results.
        """
        with ThreadPoolExecutor(workers) as pool, tqdm(unit="run") as bar:
            running: dict[str, Future[dict[str, Any]]] = {}
            while True:
                results = self.finished(path)
                waiting = [job for arm in arms for job in self.next_jobs(arm, results, final)]
                waiting = [job for job in {job.key: job for job in waiting}.values() if job.key not in running]
                for job in waiting[: workers - len(running)]:
                    running[job.key] = pool.submit(run_job, module, job.key, threads, flags)
                if not running:
                    return
                result = next(as_completed(running.values())).result()
                del running[Job(**result["job"]).key]
                append_run(path, result)
                final_run = result["job"]["seed"] in SEEDS  # and has no validation
                bar.set_postfix_str(result["job"]["arm"] + ("" if final_run else f" {self.score(result):.4f}"))
                bar.update()


def by_seed(runs: Sequence[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """A metric of some runs, in per cent."""
    return {run["job"]["seed"]: 100 * run["metrics"][metric] for run in runs}


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Compare two arms by the seeds that both have; empty for fewer than two."""
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return paired(gaps) if len(gaps) > 1 else ""


def _beyond(values: tuple[Any, ...], best: Any, factor: float | None, most: float | None) -> tuple[Any, ...]:
    """The values and one more, if the best is the smallest or the largest, and not the largest that there can be."""
    if factor is None or min(values) < best < max(values) or best == most:
        return values
    further = float(f"{best * factor if best == max(values) else best / factor:.3g}")
    return (*values, further if most is None else min(further, most))


def run_job(module: str, key: str, threads: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """What ``module run-one`` prints on its last line, as JSON."""
    command = [sys.executable, "-m", module, "run-one", key, "--threads", str(threads), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{key} failed:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])
