"""The arguments that the recipes' command lines share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from recipes import batches, cache, launch
from recipes.methods import BIMODAL, HYPERPARAMETERS, METHODS

T = TypeVar("T")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, except where there is none to show; room for long option names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def _epilog(prog: str) -> str:
    """How to start a recipe on several ranks."""
    module = prog.removeprefix("python -m ")
    return f"""several ranks, with the results of one:
  torchrun --nproc_per_node 2 -m {module}
  accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \\
      -m {module}
  torchrun --nproc_per_node 2 -m {module} --deepspeed-config recipes/deepspeed/zero2.json
  DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 --module {module} \\
      --deepspeed-config recipes/deepspeed/zero2.json
On GPUs: --device cuda, without DS_ACCELERATOR. (accelerate's --multi_gpu starts several processes on CPUs too.)"""


def parser(prog: str, description: str, mode: str, epochs: int, output_dir: str) -> argparse.ArgumentParser:
    """The arguments that every recipe has, in groups."""
    root = argparse.ArgumentParser(
        prog=prog, usage="%(prog)s [options]", description=description, formatter_class=_Help, epilog=_epilog(prog)
    )
    what = root.add_argument_group("what to train", f"Methods: {', '.join(METHODS)}.").add_mutually_exclusive_group()
    what.add_argument("--estimator", choices=METHODS, metavar="METHOD", default="sogclr", help="method of a single run")
    what.add_argument(
        "--compare", choices=METHODS, metavar="METHOD", nargs="+", help="several methods, one after another"
    )
    _add_hyperparameters(root, mode)

    training = root.add_argument_group("training")
    training.add_argument("--batch-size", type=int, metavar="N", default=64, help="samples per forward, over all ranks")
    training.add_argument("--accumulate", type=positive, metavar="N", default=1, help="batches per update")
    training.add_argument(
        "--mixed-precision", choices=("no", "bf16"), default="no", help="autocast; the estimator computes in float32"
    )
    training.add_argument("--epochs", type=int, metavar="N", default=epochs, help="passes over the training set")
    training.add_argument(
        "--lr", type=float, metavar="X", default=1e-3, help="peak of the one-cycle learning rate (AdamW)"
    )
    training.add_argument("--weight-decay", type=float, metavar="X", default=0.1, help="decay of weight matrices")
    training.add_argument(
        *("--seed", "--seeds"),
        type=int,
        metavar="N",
        nargs="+",
        default=[0],
        dest="seeds",
        help="one run per seed and method",
    )
    training.add_argument("--split-seed", type=int, metavar="N", default=0, help="which samples are held out")

    _add_batches(root, mode)
    measures = root.add_argument_group("measures and output")
    measures.add_argument(
        "--eval-every", type=int, metavar="N", default=0, help="steps between measures (0: eight per run)"
    )
    measures.add_argument(
        "--output-dir", type=Path, metavar="DIR", default=Path(output_dir), help="for metrics, pictures, checkpoints"
    )
    measures.add_argument("--plots", action=argparse.BooleanOptionalAction, default=True, help="draw the pictures")
    measures.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")

    checkpoints = root.add_argument_group("checkpoints")
    checkpoints.add_argument(
        "--checkpoint-every", type=int, metavar="N", default=0, help="steps between them (0: at the end only)"
    )
    checkpoints.add_argument("--resume", action="store_true", help="continue from the checkpoints in --output-dir")
    checkpoints.add_argument(
        "--max-steps", type=int, metavar="N", help="stop each run here; --resume then continues it"
    )

    machine = root.add_argument_group("machine")
    machine.add_argument("--device", type=torch.device, default="cpu", help="cpu, cuda, xpu, mps, ...")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads; the same number gives the same bits")
    machine.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="folder of the drawn data sets; default $COMPOPT_CACHE or .cache"
    )
    machine.add_argument(
        "--deepspeed-config", type=Path, metavar="FILE", help="train with DeepSpeed, e.g. recipes/deepspeed/zero2.json"
    )
    machine.add_argument(
        "--timeout", type=float, metavar="S", default=launch.TIMEOUT, help="seconds that a rank waits for another one"
    )
    machine.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    _add_placement(root)
    return root


def add_data(group: argparse._ActionsContainer, choices: Sequence[str]) -> None:
    """Add which data set, and where the one that needs a download comes from."""
    group.add_argument("--data", choices=choices, default=choices[0], help="data set; icons are fetched with npm once")
    group.add_argument(
        "--icons", type=Path, metavar="FILE", help="the icons' package, packed with npm; default: npm fetches it"
    )


def data_or_exit(root: argparse.ArgumentParser, load: Callable[[argparse.Namespace], T], args: argparse.Namespace) -> T:
    """Load what ``--data`` names; what is missing for it ends the program with one line."""
    for name in ("icons", "held_out"):
        if getattr(args, name, None) is not None and args.data != "icons":
            root.error(f"--{name.replace('_', '-')} belongs to --data icons, got --data {args.data}")
    try:
        return load(args)
    except cache.Unavailable as error:
        root.error(str(error))


def positive(text: str) -> int:
    """A number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _add_batches(root: argparse.ArgumentParser, mode: str) -> None:
    captions = "; with --group 1 samples that have the same caption do not count as hard for each other"
    group = root.add_argument_group(
        "which samples share a batch",
        f"Chosen batches begin once every sample has been trained on{captions if mode == BIMODAL else ''}. Defaults "
        f"are the library's.",
    )
    group.add_argument("--batches", choices=batches.KINDS, default=batches.RANDOM, help="how they are chosen")
    for name, option in batches.OPTIONS.items():
        metavar, text = "X" if option.type is float else "N", f"{option.meaning}: {', '.join(option.kinds)}"
        group.add_argument(f"--{name.replace('_', '-')}", type=option.type, metavar=metavar, help=text)


def _batches(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the batches that the arguments name; {} for random ones."""
    given = {name: getattr(args, name) for name in batches.OPTIONS if getattr(args, name) is not None}
    batches.arguments(args.batches, given)
    return {} if args.batches == batches.RANDOM else {"kind": args.batches, **given}


def _add_placement(root: argparse.ArgumentParser) -> None:
    rows = root.add_argument_group("where the estimator's rows live", "No choice here changes the results.")
    rows.add_argument("--offload", choices=("cpu", "disk"), help="host memory or a file; default: beside the features")
    rows.add_argument(
        "--offload-dir", type=Path, metavar="DIR", help="folder of that file, on a local disk; default: in --output-dir"
    )
    rows.add_argument("--shard", action="store_true", help="each rank keeps its share of the rows")
    rows.add_argument("--prefetch", action="store_true", help="fetch the next batch's rows while this one trains")


def _add_hyperparameters(root: argparse.ArgumentParser, mode: str) -> None:
    """Add an option per hyper-parameter; its help lists the methods that take it and their defaults."""
    group = root.add_argument_group(
        "hyper-parameters of the method",
        "Each method has its own defaults, in parentheses. A value given here replaces them.",
    )
    for name, (kind, meaning) in HYPERPARAMETERS.items():
        values = {method: METHODS[method].options(mode) for method in METHODS}
        defaults = {method: options[name] for method, options in values.items() if name in options}
        if not defaults:  # nothing that this task's methods take
            continue
        metavar = name.split("_")[0].upper() if kind is str else "X"
        text = f"{meaning}: {_takers(defaults)}"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def _takers(defaults: dict[str, Any]) -> str:
    """``all (0.07)``, ``all fastclip (0.5)`` or a list: who takes a hyper-parameter, with which default."""
    family = [method for method in METHODS if method.startswith("fastclip")]
    for group, word in ((list(METHODS), "all"), (family, "all fastclip")):
        if list(defaults) == group and len(set(defaults.values())) == 1:
            return f"{word} ({next(iter(defaults.values()))})"
    return ", ".join(f"{method} ({value})" for method, value in defaults.items())


def parse(root: argparse.ArgumentParser, argv: Sequence[str] | None, mode: str) -> argparse.Namespace:
    """Parse, set the machine up, and fill ``args.methods``: method -> its hyper-parameters."""
    args = root.parse_args(argv)
    try:
        args.methods, args.batches = _methods(args, mode), _batches(args)
    except ValueError as error:
        root.error(str(error))
    _prepare_machine(args)
    return args


def _methods(args: argparse.Namespace, mode: str) -> dict[str, dict[str, Any]]:
    """Each chosen method takes those given options that it has; one that none of them has raises ValueError."""
    given = {name: getattr(args, name, None) for name in HYPERPARAMETERS}
    given = {name: value for name, value in given.items() if value is not None}
    chosen = args.compare or [args.estimator]
    known = {name for method in chosen for name in METHODS[method].options(mode)}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{', '.join(chosen)}: none takes {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    own = {method: METHODS[method].options(mode) for method in chosen}
    return {method: own[method] | {k: v for k, v in given.items() if k in own[method]} for method in chosen}


def _prepare_machine(args: argparse.Namespace) -> None:
    """Set the number of threads, and choose repeatable kernels where a device has others."""
    args.device = launch.local_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device.type != "cpu":
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
