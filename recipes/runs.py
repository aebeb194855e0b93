"""The runs that a command line asks for: they are carried out with a progress bar, and leave a table and metrics."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes import checkpoints, launch
from recipes.config import Config, Control, Task
from recipes.engine import Run
from recipes.methods import METHODS
from recipes.report import environment, mean_spread, table

# -- carried out ---------------------------------------------------------------------------------------------------


def train_all(args: argparse.Namespace, task: Task, error_count: int = 0) -> list[Run]:
    """Carry out every run that the arguments ask for; ``error_count`` normalizer errors in each."""
    names = ("batch_size", "epochs", "lr", "weight_decay", "accumulate", "mixed_precision", "batches")
    shared = {name: getattr(args, name) for name in names}
    runs = []
    for method, options in args.methods.items():
        for seed in args.seeds:
            config = Config(method, options, seed=seed, data=task.description, **shared)
            runs.append(_train(Run(task, config, _control(args, task, config, error_count)), args.progress))
    return runs


def _control(args: argparse.Namespace, task: Task, config: Config, error_count: int) -> Control:
    steps = task.n // (config.batch_size * config.accumulate) * config.epochs
    own = Path(f"{config.method}-seed{config.seed}")
    checkpoint, resume = args.output_dir / own / "checkpoints", args.resume or launch.restarted()
    return Control(
        eval_every=args.eval_every or max(1, steps // 8),
        error_every=max(1, steps // error_count) if error_count else 0,
        checkpoint_every=args.checkpoint_every,
        max_steps=args.max_steps,
        checkpoint=checkpoint,
        resume=resume,
        device=args.device,
        placement=_placement(args, own, continued=resume and checkpoints.latest(checkpoint) is not None),
        prefetch=args.prefetch,
        deepspeed=args.deepspeed_config,
        timeout=args.timeout,
    )


def _placement(args: argparse.Namespace, own: Path, continued: bool) -> dict[str, Any]:
    """Where this run's rows live; the file of a former run is removed, unless a checkpoint will be loaded into it."""
    folder = None
    if args.offload == "disk":
        folder = (args.offload_dir or args.output_dir) / own / "rows"
        if launch.is_local_main():  # the folder may be on each node's own disk
            if not continued:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        launch.barrier()
    return {"offload": args.offload, "offload_dir": folder, "shard": args.shard}


def _train(run: Run, progress: bool) -> Run:
    """Train with a progress bar that shows the loss and the headline metric."""
    title = METHODS[run.config.method].title
    with tqdm(
        total=run.total_steps, desc=f"{title}, seed {run.config.seed}", disable=not progress or not launch.is_main()
    ) as bar:
        run.control.on_step = lambda run: _show(bar, run)
        run.train()
        _show(bar, run)
    return run


def _show(bar: tqdm, run: Run) -> None:
    if run.step % 10 == 0 or run.finished:
        label = run.task.labels[run.task.headline].split()[0]
        known = {label: f"{100 * run.final[run.task.headline]:.1f}%"} if run.final else {}
        loss = f"{run.recent_loss:.4f}" if run.loss_count else f"{run.final.get('loss', 0.0):.4f}"
        bar.set_postfix(loss=loss, **known, refresh=False)
        bar.update(run.step - bar.n)


# -- reported ------------------------------------------------------------------------------------------------------


def finish(runs: Sequence[Run], output_dir: Path) -> None:
    """Write the metrics, print the table and where things are; on the main process only."""
    if not launch.is_main():
        return
    save_metrics(runs, output_dir / "metrics.json")
    head, *body = rows(runs)
    print("\n" + table(head, body, "llr", pad=True))
    for run in runs:
        if not run.finished:
            print(f"{run.config.method}, seed {run.config.seed}: stopped at step {run.step} of {run.total_steps}")
    print("")
    list_files([output_dir / "metrics.json"])


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by method, in order of appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config.method, []).append(run)
    return groups


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A header and one line per method: hyper-parameters, measures in percent (mean and spread), speed."""
    labels = runs[0].task.labels
    lines = [["method", "hyper-parameters", "seeds", *(f"{label} (%)" for label in labels.values()), "s", "ms/step"]]
    for method, group in by_method(runs).items():
        options = " ".join(f"{name}={value}" for name, value in group[0].config.options.items())
        measures = [mean_spread([r.final[name] for r in group if name in r.final], 100) for name in labels]
        seconds = statistics.mean(run.seconds for run in group)
        per_step = statistics.mean(1e3 * run.seconds / max(1, run.step) for run in group)
        cells = [METHODS[method].title, options, str(len(group)), *measures, f"{seconds:.0f}", f"{per_step:.1f}"]
        lines.append(cells)
    return lines


def save_metrics(runs: Sequence[Run], path: Path) -> None:
    """Write ``metrics.json``: environment, processes, and configuration, final measures and history of every run."""
    record = {
        "environment": environment(),
        "processes": launch.world_size(),
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


def list_files(paths: Sequence[Path]) -> None:
    """Say where things are; on the main process only."""
    if launch.is_main():
        for path in paths:
            print(f"wrote {path}")
