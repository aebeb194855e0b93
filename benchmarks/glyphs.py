"""The study behind the table of methods: glyphs, every method at its best setting, over several seeds.

::

    python -m benchmarks.glyphs tune      # each method's grid, over one common grid of temperatures
    python -m benchmarks.glyphs final     # each method's best setting, on other seeds and another split
    python -m benchmarks.glyphs regimes   # both steps, where state should pay: small batches, small tau, more epochs
    python -m benchmarks.glyphs report    # results/glyphs.md and .png from what there is

Each finished run is one line of ``results/glyphs.jsonl``; a configuration that is there already is not run again,
so any command can be stopped and repeated.  Settings are tuned on seed 100 and split 1 and then reported on seeds
0, 1, 2 and split 0, so that the choice cannot profit from the held-out pairs that judge it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "glyphs.jsonl"
TUNE_SEED, TUNE_SPLIT = 100, 1
FINAL_SEEDS, FINAL_SPLIT = (0, 1, 2), 0
METRIC = "r1"

Grid = dict[str, tuple[Any, ...]]
TAUS = (0.05, 0.08, 0.12)  # common to all; a method whose best lay at an edge got one value more beyond it
REGIME_TAUS = (0.05, 0.08)


@dataclass(frozen=True)
class Arm:
    """One method in one regime, with the grid its setting is chosen from."""

    regime: str
    method: str
    grid: Grid
    batch_size: int = 64
    epochs: int = 2
    limit: int = 0  # training pairs; 0: all
    variant: str = ""

    def jobs(self) -> list[Job]:
        """One tuning run per point of the grid."""
        points = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [Job(self.method, options, self.batch_size, self.epochs, limit=self.limit) for options in points]


@dataclass(frozen=True)
class Job:
    """One training run: everything its result depends on."""

    method: str
    options: dict[str, Any]
    batch_size: int = 64
    epochs: int = 2
    seed: int = TUNE_SEED
    split: int = TUNE_SPLIT
    limit: int = field(default=0)
    errors: int = 0  # how many times the error of the normalizers is measured on the way

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def main_arms() -> list[Arm]:
    """Batch 64, two epochs, and InfoNCE with four times the batch for comparison."""
    gammas = (0.5, 0.8, 0.95)
    rho = {"rho": (1.0, 2.5)}
    dual = {"tau": TAUS, **rho, "tau_lr": (0.002, 0.01)}
    return [
        Arm("main", "infonce", {"tau": (*TAUS, 0.18)}),
        Arm("main", "infonce-no-positive", {"tau": (0.03, *TAUS)}),
        Arm("main", "clip", {"tau": (*TAUS, 0.18)}),
        Arm("main", "sogclr", {"tau": TAUS, "gamma": gammas, "reference": ("none",)}),
        Arm("main", "sogclr", {"tau": TAUS, "gamma": gammas, "reference": ("positive",)}, variant="reference positive"),
        Arm("main", "isogclr", {**dual, "reference": ("positive",)}, variant="reference positive"),
        Arm("main", "isogclr", {**dual, "reference": ("none",)}, variant="reference none"),
        Arm("main", "fastclip-v3", {"tau": TAUS, **rho, "tau_lr": (1e-4, 1e-3)}),
        Arm("main", "neuclip", {"tau": TAUS, "through_alpha": (0, 1)}),
        Arm("main", "residual", {"tau": TAUS, "gamma": (0.3, 0.5, 0.8)}),
        Arm("main", "emc2", {"tau": (0.03, *TAUS), "burn_in": (0.5, 0.9), "encode": (0,)}),
        Arm("main", "emc2", {"tau": TAUS, "burn_in": (0.5,), "encode": (1,)}, variant="encode"),
        Arm("main", "infonce", {"tau": (*TAUS, 0.18)}, batch_size=256),
    ]


def caption_arms() -> list[Arm]:
    """Pairs with the same caption, false negatives that an exact softmax finds first, are told to the estimator."""
    taus, group = {"tau": REGIME_TAUS}, {"group": (1,)}
    arms = {
        "infonce": {"tau": (0.08, 0.12)},
        "infonce-no-positive": taus,
        "sogclr": {**taus, "gamma": (0.5,), "reference": ("none",)},
        "residual": {**taus, "gamma": (0.8,)},
        "emc2": {**taus, "burn_in": (0.5,), "encode": (0,)},
    }
    encode = {"tau": (*REGIME_TAUS, 0.12), "burn_in": (0.5,), "encode": (1,), "rescore": (1,), **group}
    regime = "captions as groups"
    return [
        *(Arm(regime, method, {**grid, **group}) for method, grid in arms.items()),
        Arm(regime, "emc2", encode, variant="encode, rescored"),
    ]


def regime_arms() -> list[Arm]:
    """Where state should pay: few negatives per batch, a sharp softmax, rows visited more often."""
    regimes: dict[str, tuple[dict[str, int], tuple[float, ...]]] = {
        "batch 8, 8k pairs, 4 epochs": ({"batch_size": 8, "limit": 8192, "epochs": 4}, REGIME_TAUS),
        "batch 32": ({"batch_size": 32}, TAUS),
        "batch 16": ({"batch_size": 16}, REGIME_TAUS),
        "batch 16, 8k pairs, 12 epochs": ({"batch_size": 16, "limit": 8192, "epochs": 12}, REGIME_TAUS),
        "tau 0.02": ({}, (0.02,)),
    }
    arms = []
    for regime, (setting, taus) in regimes.items():
        arms += [Arm(regime, method, {"tau": taus}, **setting) for method in ("infonce", "infonce-no-positive")]
        arms += [Arm(regime, "sogclr", {"tau": taus, "gamma": (0.3, 0.8), "reference": ("none",)}, **setting)]
        arms += [Arm(regime, "neuclip", {"tau": taus, "through_alpha": (0, 1)}, **setting)]
        arms += [Arm(regime, "residual", {"tau": taus, "gamma": (0.5, 0.8)}, **setting)]
        if regime == "batch 32":
            arms += [Arm(regime, "emc2", {"tau": taus, "burn_in": (0.5, 0.9), "encode": (0,)}, **setting)]
            encode = {"tau": taus, "burn_in": (0.5,), "encode": (1,)}
            arms += [Arm(regime, "emc2", encode, **setting, variant="encode")]
            rescore = {**encode, "tau": taus[1:2], "rescore": (1,)}
            arms += [Arm(regime, "emc2", rescore, **setting, variant="encode, rescored")]
        dual = {"tau": taus[-1:], "rho": (1.0, 2.5), "tau_lr": (0.002,), "reference": ("none",)}
        arms += [Arm(regime, "isogclr", dual, **setting, variant="reference none")] if regime != "tau 0.02" else []
    return arms


# -- running -------------------------------------------------------------------------------------------------------


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """Results by job key; a line cut short by a kill is skipped."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[Job(**result["job"]).key] = result
    return results


def carry_out(jobs: Iterable[Job], args: argparse.Namespace) -> None:
    """Run the jobs that have no result yet, several at a time, each in a process of its own."""
    done = finished(args.results)
    todo = {job.key: job for job in jobs if job.key not in done}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()
    with ThreadPoolExecutor(args.workers) as pool, tqdm(total=len(todo), unit="run") as bar:
        futures = [pool.submit(_subprocess, job, args.threads) for job in todo.values()]
        try:
            for future in as_completed(futures):
                result = future.result()
                with lock, open(args.results, "a") as file:
                    file.write("\n" * _cut_short(args.results) + json.dumps(result) + "\n")
                bar.set_postfix_str(f"{result['job']['method']} {100 * result['final'][METRIC]:.1f}%")
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _cut_short(path: Path) -> bool:
    """Whether the file ends in the middle of a line."""
    text = path.read_bytes()
    return bool(text) and not text.endswith(b"\n")


def _subprocess(job: Job, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.glyphs", "run-one", job.key, "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{job.key} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def run_one(job: Job, threads: int) -> dict[str, Any]:
    """Train and measure, in this process."""
    import torch

    from recipes import glyphs
    from recipes.engine import Config, Control, Run
    from recipes.methods import METHODS
    from recipes.tasks import GlyphNames

    torch.set_num_threads(threads)
    task = GlyphNames(glyphs.load(), split_seed=job.split, limit=job.limit)
    options = METHODS[job.method].options(task.mode, job.options)
    config = Config(job.method, options, job.batch_size, job.epochs, seed=job.seed, data=task.description)
    steps = task.n // job.batch_size * job.epochs
    control = Control(eval_every=0, error_every=steps // job.errors if job.errors else 0)
    run = Run(task, config, control).train()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    facts = {
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "threads": threads,
        "date": time.strftime("%Y-%m-%d"),
    }
    if job.errors:
        facts["errors"] = [record["normalizer_error"] for record in run.history if "normalizer_error" in record]
    return {"job": asdict(job), "final": run.final, "seconds": round(run.seconds, 2), "steps": run.step, **facts}


# -- choosing ------------------------------------------------------------------------------------------------------


def best(arm: Arm, results: dict[str, dict[str, Any]], limit: int = 0) -> dict[str, Any] | None:
    """The result of the arm's best finished tuning run, None before the first."""
    tuned = [results[key] for job in arm.jobs() if (key := replace(job, limit=limit or job.limit).key) in results]
    return max(tuned, key=lambda result: result["final"][METRIC], default=None)


def final_jobs(arm: Arm, results: dict[str, dict[str, Any]], limit: int = 0) -> list[Job]:
    """The arm's best setting on the seeds and the split that are reported."""
    chosen = best(arm, results, limit)
    if chosen is None:
        return []
    job = Job(**chosen["job"])
    return [replace(job, seed=seed, split=FINAL_SPLIT) for seed in FINAL_SEEDS]


def _limited(arms: Iterable[Arm], limit: int) -> list[Job]:
    return [replace(job, limit=limit or job.limit) for arm in arms for job in arm.jobs()]


def _chosen(arms: list[Arm], args: argparse.Namespace) -> list[Arm]:
    """The arms that the arguments ask for, their grids cut short in a trial."""
    arms = [arm for arm in arms if not args.methods or arm.method in args.methods]
    arms = [arm for arm in arms if not args.regimes or arm.regime in args.regimes]
    if not args.trial:
        return arms
    return [replace(arm, epochs=1, grid={name: values[:1] for name, values in arm.grid.items()}) for arm in arms]


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="python -m benchmarks.glyphs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    main_, regimes = _chosen(main_arms(), args), _chosen([*regime_arms(), *caption_arms()], args)
    if args.command in ("tune", "regimes"):
        carry_out(_limited(main_ if args.command == "tune" else regimes, args.trial), args)
    if args.command in ("final", "regimes"):
        arms, results = (main_ if args.command == "final" else regimes), finished(args.results)
        carry_out([job for arm in arms for job in final_jobs(arm, results, args.trial)], args)
    if args.command == "report":
        from benchmarks.glyphs_report import write

        write([*main_, *regimes], args)


if __name__ == "__main__":
    main()
