"""The study behind the table of methods: glyphs, every method at its best setting, over several seeds.

::

    python -m benchmarks.studies.glyphs tune      # each method's grid, over one common grid of temperatures
    python -m benchmarks.studies.glyphs final     # each method's best setting, on other seeds and another split
    python -m benchmarks.studies.glyphs regimes   # both, where state should pay: small batches, small tau, more epochs
    python -m benchmarks.studies.glyphs report    # results/glyphs.md and .png from what there is

Each finished run is one line of ``results/glyphs.jsonl``; a configuration that is there already is not run again,
so any command can be stopped and repeated.  Settings are tuned on seed 100 and split 1 and then reported on seeds
0, 1, 2 and split 0, so that the choice cannot profit from the held-out pairs that judge it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.saved import append_run
from benchmarks.studies import perceptron
from benchmarks.studies.command import stamp
from benchmarks.studies.glyphs_arms import Arm, batch_arms, caption_arms, main_arms, regime_arms
from benchmarks.studies.glyphs_report import write
from benchmarks.studies.jobs import METRIC, RESULTS, Job, final_jobs, finished, tuning_jobs
from benchmarks.studies.search import run_job
from recipes.config import Config, Control
from recipes.engine import Run
from recipes.glyphs import load
from recipes.methods import METHODS
from recipes.tasks import GlyphNames

# -- running -------------------------------------------------------------------------------------------------------


def carry_out(jobs: Iterable[Job], args: argparse.Namespace, module: str = "benchmarks.studies.glyphs") -> None:
    """Run the jobs that have no result yet, several at a time, each in a process of its own: ``module run-one``."""
    done = finished(args.results)
    todo = {job.key: job for job in jobs if job.key not in done}
    with ThreadPoolExecutor(args.workers) as pool, tqdm(total=len(todo), unit="run") as bar:
        futures = [pool.submit(run_job, module, key, args.threads) for key in todo]
        try:
            for future in as_completed(futures):
                result = future.result()
                append_run(args.results, result)
                bar.set_postfix_str(f"{result['job']['method']} {100 * result['final'][METRIC]:.1f}%")
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_one(job: Job, threads: int) -> dict[str, Any]:
    """Train and measure, in this process."""
    torch.set_num_threads(threads)
    perceptron.register()
    task = GlyphNames(load(), split_seed=job.split, limit=job.limit)
    options = METHODS[job.method].options(task.mode, job.options)
    shared = {"seed": job.seed, "data": task.description, "batches": job.batches}
    config = Config(job.method, options, job.batch_size, job.epochs, **shared)
    steps = task.n // job.batch_size * job.epochs
    control = Control(eval_every=0, error_every=steps // job.errors if job.errors else 0)
    run = Run(task, config, control).train()
    chosen = getattr(run.batches, "sampler", None)
    facts = stamp()
    if job.errors:
        facts["errors"] = [record["normalizer_error"] for record in run.history if "normalizer_error" in record]
    if chosen is not None:
        facts["sampler"] = chosen.metrics
    return {"job": asdict(job), "final": run.final, "seconds": round(run.seconds, 2), "steps": run.step, **facts}


# -- the command line ----------------------------------------------------------------------------------------------


def select(arms: list[Arm], args: argparse.Namespace) -> list[Arm]:
    """The arms that the arguments ask for, their grids cut short in a trial."""
    arms = [arm for arm in arms if not args.methods or arm.method in args.methods]
    arms = [arm for arm in arms if not args.regimes or arm.regime in args.regimes]
    if not args.trial:
        return arms
    return [replace(arm, epochs=1, grid={name: values[:1] for name, values in arm.grid.items()}) for arm in arms]


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.glyphs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("command", choices=("tune", "final", "regimes", "report", "run-one"))
    root.add_argument("job", nargs="?", help="run-one: a job as JSON")
    root.add_argument("--workers", type=int, default=2, help="runs at a time (default 2)")
    root.add_argument("--threads", type=int, default=1, help="CPU threads of each run (default 1)")
    root.add_argument("--methods", nargs="+", help="only these methods")
    root.add_argument("--regimes", nargs="+", help="only these regimes, for example 'batch 8'")
    root.add_argument("--results", type=Path, default=RESULTS, help="file of the finished runs")
    root.add_argument("--trial", type=int, default=0, metavar="N", help="N pairs, one epoch, one setting per method")
    return root


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.command == "run-one":
        print(json.dumps(run_one(Job(**json.loads(args.job)), args.threads)))
        return
    main_, regimes = select(main_arms(), args), select([*regime_arms(), *caption_arms(), *batch_arms()], args)
    if args.command in ("tune", "regimes"):
        carry_out(tuning_jobs(main_ if args.command == "tune" else regimes, args.trial), args)
    if args.command in ("final", "regimes"):
        arms, results = (main_ if args.command == "final" else regimes), finished(args.results)
        carry_out([job for arm in arms for job in final_jobs(arm, results, args.trial)], args)
    if args.command == "report":
        write([*main_, *regimes], args)


if __name__ == "__main__":
    main()
