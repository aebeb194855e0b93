"""Command line of the experiments: arguments, the runs that they specify, and the table and metrics of these runs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import compopt
from recipes import batches, checkpoints, launch, optimizers
from recipes.engine import Config, Control, Run
from recipes.make_shards import positive
from recipes.methods import BIMODAL, HYPERPARAMETERS, METHODS, PUBLISHED, UNIMODAL, method_of

EPILOG = """several ranks, with the results of one:
  torchrun --nproc_per_node 2 -m {module}
  accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \\
      -m {module}
  torchrun --nproc_per_node 2 -m {module} --deepspeed-config recipes/deepspeed/zero2.json
  DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 --module {module} \\
      --deepspeed-config recipes/deepspeed/zero2.json
On GPUs: --device cuda, without DS_ACCELERATOR. (accelerate's --multi_gpu starts several processes on CPUs too.)"""


# -- arguments -----------------------------------------------------------------------------------------------------


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults other than None and False."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parser(module: str, description: str, mode: str, epochs: int, output: str) -> argparse.ArgumentParser:
    """Return a parser with the common arguments of all experiments, in groups."""
    root = argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage="%(prog)s [options]",
        description=description,
        formatter_class=_Help,
        epilog=EPILOG.format(module=module),
    )
    what = root.add_argument_group("what to train", f"Methods: {', '.join(METHODS)}.").add_mutually_exclusive_group()
    what.add_argument(
        "--estimator", choices=METHODS, metavar="METHOD", default="recommended", help="method of a single run"
    )
    what.add_argument(
        "--compare", choices=METHODS, metavar="METHOD", nargs="+", help="several methods, one after another"
    )
    what.add_argument(
        "--settings",
        type=partial(_of_mode, mode),
        choices=[name for name in PUBLISHED if _mode(name) == mode],
        metavar="NAME:SCALE",
        help="a paper's experiment, such as neuclip:cc3m (compopt.presets.settings): estimator, and defaults of the "
        "options below; another --batch-size keeps the rate; what is used is printed",
    )
    group = root.add_argument_group("hyper-parameters of the method", "The defaults are those of the preset.")
    for name, (kind, meaning) in HYPERPARAMETERS.items():
        takers = ", ".join(label for label, method in METHODS.items() if name in method.known(mode))
        if takers:
            group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=f"{meaning}: {takers}")

    add = root.add_argument_group("training").add_argument
    add("--batch-size", type=int, metavar="N", default=64, help="samples per forward, over all ranks")
    add("--accumulate", type=positive, metavar="N", default=1, help="batches per update")
    add("--mixed-precision", choices=("no", "bf16"), default="no", help="autocast; the estimator computes in float32")
    add("--epochs", type=int, metavar="N", default=epochs, help="passes over the training set")
    add("--optimizer", choices=optimizers.OPTIMIZERS, default="adamw", help="sgd and lars have momentum 0.9")
    rates, decays = (
        ", ".join(f"{name} {getattr(kind, field)}" for name, kind in optimizers.OPTIMIZERS.items())
        for field in ("lr", "weight_decay")
    )
    rules = "a number, root (0.002 sqrt(B)), sqrt (0.075 sqrt(B)) or linear (0.3 B / 256) for updates of B samples"
    add("--lr", type=optimizers.rate, metavar="X", help=f"highest learning rate: {rules}; default {rates}")
    add("--weight-decay", type=float, metavar="X", help=f"decay of weight matrices; default {decays}")
    add("--schedule", choices=optimizers.SCHEDULES, default="one-cycle", help="of the learning rate")
    add("--warmup", type=float, metavar="N", default=0.0, help="epochs in which the rate of cosine rises")
    seeds: dict[str, Any] = {"type": int, "metavar": "N", "nargs": "+", "default": [0]}
    add("--seed", "--seeds", **seeds, dest="seeds", help="one run per seed and method")
    add("--split-seed", type=int, metavar="N", default=0, help="which samples are held out")

    captions = "; with --group 1 samples that have the same caption do not count as hard for each other"
    add = root.add_argument_group(
        "which samples share a batch",
        f"Chosen batches begin once every sample has been trained on{captions if mode == 'bimodal' else ''}.",
    ).add_argument
    add("--batches", choices=batches.KINDS, default=batches.RANDOM, help="how they are chosen")
    for name, option in batches.OPTIONS.items():
        text = f"{option.meaning}: {', '.join(option.kinds)}"
        add(f"--{name.replace('_', '-')}", type=option.type, metavar="X", help=text)

    add = root.add_argument_group("measures and output").add_argument
    add("--eval-every", type=int, metavar="N", default=0, help="steps between measures (0: eight per run)")
    add("--output", type=Path, metavar="DIR", default=Path(output), help="for metrics, pictures, checkpoints")
    add("--plots", action=argparse.BooleanOptionalAction, default=True, help="draw the pictures")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")

    add = root.add_argument_group("checkpoints").add_argument
    add("--checkpoint-every", type=int, metavar="N", default=0, help="steps between them (0: at the end only)")
    add("--resume", action="store_true", help="continue from the checkpoints in --output")
    add("--max-steps", type=int, metavar="N", help="stop each run here; --resume then continues it")

    add = root.add_argument_group("machine").add_argument
    add("--device", type=torch.device, default="cpu", help="cpu, cuda, xpu, mps, ...")
    add("--threads", type=int, metavar="N", help="CPU threads; the same number gives the same bits")
    add("--cache-dir", type=Path, metavar="DIR", help="folder of the drawn data sets; default $COMPOPT_CACHE or .cache")
    zero = "train with DeepSpeed, e.g. recipes/deepspeed/zero2.json"
    add("--deepspeed-config", type=Path, metavar="FILE", help=zero)
    add("--timeout", type=float, metavar="S", default=launch.TIMEOUT, help="seconds that a rank waits for another one")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it

    add = root.add_argument_group("where the estimator's rows live", "No choice here changes the results.").add_argument
    add("--offload", choices=("cpu", "disk"), help="host memory or a file; default: beside the features")
    add("--offload-dir", type=Path, metavar="DIR", help="folder of that file, on a local disk; default: --output")
    add("--shard", action="store_true", help="each rank keeps its share of the rows")
    add("--prefetch", action="store_true", help="fetch the next batch's rows while this one trains")
    return root


def parse(root: argparse.ArgumentParser, argv: Sequence[str] | None, mode: str) -> argparse.Namespace:
    """Parse arguments, set up the machine, and fill ``args.methods`` (method -> hyper-parameters), ``args.batches``."""
    args = root.parse_args(argv)
    if args.settings:
        root.set_defaults(**_defaults(args.settings))
        args = root.parse_args(argv)
    try:
        args.methods = _methods(args, mode)
        if (args.offload or args.shard) and [*args.methods] == ["recommended"]:
            raise ValueError("--offload and --shard place rows, and recommended keeps none; give another --estimator")
        given = {name: getattr(args, name) for name in batches.OPTIONS if getattr(args, name) is not None}
        batches.arguments(args.batches, given)
        args.batches = {} if args.batches == batches.RANDOM else {"kind": args.batches, **given}
        _fill_optimizer(args)
    except ValueError as error:
        root.error(str(error))
    args.device = launch.local_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device.type != "cpu":  # deterministic kernels
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    return args


def _mode(name: str) -> str:
    return _settings(name).get("mode", BIMODAL)


def _of_mode(mode: str, name: str) -> str:
    """Return the name of a paper's experiment; refuse one of the other mode, and name the recipe for it."""
    if name in PUBLISHED and _mode(name) != mode:
        other = "train_clip" if mode == UNIMODAL else "train_simclr"
        raise argparse.ArgumentTypeError(f"{name} is {_mode(name)}, for recipes.{other}")
    return name


def _settings(name: str) -> compopt.presets.published.Settings:
    return compopt.presets.settings(*name.split(":"))


def _defaults(name: str) -> dict[str, Any]:
    """Return the arguments for a paper's experiment, which those of the command line override."""
    training = _settings(name).training
    names = ("optimizer", "batch_size", "lr", "weight_decay", "epochs")
    found = {name: training[name] for name in names if name in training}
    return {**found, "estimator": name, "schedule": "cosine" if "lr" in training else "one-cycle"}


def _warmup(args: argparse.Namespace, n: int) -> float:
    """Return the epochs of the warm-up: those of the command line, or those of a paper's experiment, at most all."""
    training = _settings(args.settings).training if args.settings else {}
    if args.warmup or not training:
        return args.warmup
    epochs = training.get("warmup_epochs", 0.0)
    if "samples" in training:  # of larger data: the same fraction of this run
        epochs = args.epochs * training["warmup_steps"] * training["batch_size"] / training["samples"]
    elif "warmup_steps" in training:
        epochs = training["warmup_steps"] * args.batch_size * args.accumulate / n
    return min(epochs, args.epochs)


def _fill_optimizer(args: argparse.Namespace) -> None:
    """Fill in the optimizer's defaults, and replace a rule for the learning rate by its number."""
    kind = optimizers.OPTIMIZERS[args.optimizer]
    lr = kind.lr if args.lr is None else args.lr
    args.lr = optimizers.RULES[lr](args.batch_size * args.accumulate) if isinstance(lr, str) else lr
    args.weight_decay = kind.weight_decay if args.weight_decay is None else args.weight_decay
    if args.warmup and args.schedule != "cosine":
        raise ValueError(f"--warmup belongs to --schedule cosine, got --schedule {args.schedule}")


def _methods(args: argparse.Namespace, mode: str) -> dict[str, dict[str, Any]]:
    """Return the options of each chosen method; raise ValueError for a given option that none of them has."""
    given = {name: getattr(args, name, None) for name in HYPERPARAMETERS}
    given = {name: value for name, value in given.items() if value is not None}
    known = {name: method_of(name).known(mode) for name in args.compare or [args.estimator]}
    every = {option for options in known.values() for option in options}
    if unknown := sorted(set(given) - every):
        raise ValueError(f"{', '.join(known)}: none takes {', '.join(unknown)}; known: {', '.join(sorted(every))}")
    return {
        name: method_of(name).options(mode, {key: value for key, value in given.items() if key in options})
        for name, options in known.items()
    }


# -- runs ----------------------------------------------------------------------------------------------------------


def train_all(args: argparse.Namespace, task: Any, error_count: int = 0) -> list[Run]:
    """Carry out every run that the arguments specify, with ``error_count`` normalizer errors in each."""
    names = ("batch_size", "epochs", "lr", "weight_decay", "accumulate", "mixed_precision", "batches")
    names += ("optimizer", "schedule")
    shared = {**{name: getattr(args, name) for name in names}, "warmup": _warmup(args, task.n)}
    if args.settings and launch.is_main():
        used = json.dumps({"estimator": args.methods[args.settings], **shared})  # both may have an lr
        print(f"{args.settings}, {_settings(args.settings).source}: {used}")
    runs = []
    for method, options in args.methods.items():
        for seed in args.seeds:
            config = Config(method, options, seed=seed, data=task.description, **shared)
            runs.append(_train(Run(task, config, _control(args, task, config, error_count)), args.progress))
    return runs


def _control(args: argparse.Namespace, task: Any, config: Config, error_count: int) -> Control:
    steps = task.n // (config.batch_size * config.accumulate) * config.epochs
    own = Path(f"{config.method}-seed{config.seed}")
    checkpoint, resume = args.output / own / "checkpoints", args.resume or launch.restarted()
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
    """Return the placement of this run's rows; remove the file of an earlier run, unless this run continues it."""
    folder = None
    if args.offload == "disk":
        folder = (args.offload_dir or args.output) / own / "rows"
        if launch.is_local_main():  # the folder may be on each node's own disk
            if not continued:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        launch.barrier()
    return {"offload": args.offload, "offload_dir": folder, "shard": args.shard}


def _train(run: Run, progress: bool) -> Run:
    """Train with a progress bar that shows the loss and the headline metric."""
    name = f"{method_of(run.config.method).title}, seed {run.config.seed}"
    label = run.task.labels[run.task.headline].split()[0]

    def show(run: Run) -> None:
        if run.step % 10 == 0 or run.finished:
            known = {label: f"{100 * run.final[run.task.headline]:.1f}%"} if run.final else {}
            loss = f"{run.recent_loss:.4f}" if run.loss_count else f"{run.final.get('loss', 0.0):.4f}"
            bar.set_postfix(loss=loss, **known, refresh=False)
            bar.update(run.step - bar.n)

    with tqdm(total=run.total_steps, desc=name, disable=not progress or not launch.is_main()) as bar:
        run.control.on_step = show
        return run.train()


# -- results -------------------------------------------------------------------------------------------------------


def finish(runs: Sequence[Run], output_dir: Path) -> None:
    """Write the metrics, print the table and the paths, on the main process only."""
    if not launch.is_main():
        return
    save_metrics(runs, output_dir / "metrics.json")
    lines = rows(runs)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    print()
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    for run in runs:
        if not run.finished:
            print(f"{run.config.method}, seed {run.config.seed}: stopped at step {run.step} of {run.total_steps}")
    print()
    list_files([output_dir / "metrics.json"])


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by method, in order of appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config.method, []).append(run)
    return groups


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a header and one line per method: hyper-parameters, measures in percent (mean and spread), speed."""
    labels = runs[0].task.labels
    lines = [["method", "hyper-parameters", "seeds", *(f"{label} (%)" for label in labels.values()), "s", "ms/step"]]
    for method, group in by_method(runs).items():
        options = " ".join(f"{name}={value}" for name, value in group[0].config.options.items())
        measures = [mean_spread([100 * r.final[name] for r in group if name in r.final]) for name in labels]
        seconds = statistics.mean(run.seconds for run in group)
        per_step = statistics.mean(1e3 * run.seconds / max(1, run.step) for run in group)
        cells = [method_of(method).title, options, str(len(group)), *measures, f"{seconds:.0f}", f"{per_step:.1f}"]
        lines.append(cells)
    return lines


def mean_spread(values: Sequence[float]) -> str:
    """Format one value as ``mean``, several as ``mean ± standard deviation``, none as ``-``."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def save_metrics(runs: Sequence[Run], path: Path) -> None:
    """Write ``metrics.json``: processes, and configuration, final measures and history of every run."""
    found = [
        {
            "config": vars(run.config),
            "steps": run.step,
            "finished": run.finished,
            "seconds": round(run.seconds, 3),
            "final": run.final,
            "history": run.history,
        }
        for run in runs
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    record = {"torch": torch.__version__, "processes": launch.world_size(), "runs": found}
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)


def list_files(paths: Sequence[Path]) -> None:
    """Print the paths of written files, on the main process only."""
    if launch.is_main():
        for path in paths:
            print(f"wrote {path}")
