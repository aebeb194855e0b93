"""Image-text training (CLIP) with any estimator, on glyphs or icons and their names.

Glyphs need no download; icons are downloaded from a package registry.  The loop is ``recipes.engine.Run``; this file
selects the task, the methods and the pictures::

    python -m recipes.train_clip --estimator sogclr --batch-size 64
    python -m recipes.train_clip --data icons --epochs 1
    python -m recipes.train_clip --compare recommended infonce infonce-no-positive sogclr isogclr
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes import experiment, glyphs, icons, launch, pictures
from recipes.engine import Run
from recipes.icon_task import PARTS, IconNames
from recipes.tasks import GlyphNames, NamedImages

ERROR_TIMES = 3


def icon_names(args: argparse.Namespace) -> NamedImages:
    data = icons.load(args.cache_dir, args.icons, progress=args.progress and launch.is_main())
    return IconNames(data, args.held_out or PARTS[0], args.split_seed, args.limit, args.device)


TASKS: dict[str, Callable[[argparse.Namespace], NamedImages]] = {
    "glyphs": lambda args: GlyphNames(glyphs.load(args.cache_dir), args.split_seed, args.limit, args.device),
    "icons": icon_names,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    root = experiment.parser(
        "recipes.train_clip",
        "Train an image tower and a text tower on glyphs and their Unicode names, or on icons and theirs, and "
        "measure retrieval of held-out pairs (R@1).",
        NamedImages.mode,
        epochs=2,
        output="runs/clip",
    )
    own = root.add_argument_group("only here")
    icons.add_data(own, tuple(TASKS))
    own.add_argument(
        "--held-out", choices=PARTS, help=f"families of icons to measure: validation to choose by; default {PARTS[0]}"
    )
    own.add_argument("--limit", type=int, metavar="N", default=0, help="train on this many pairs only (0: all)")
    own.add_argument(
        "--normalizer-error",
        type=int,
        metavar="TIMES",
        help="how often per run the estimator's log-normalizers are held against the exact ones of the training set, "
        f"which costs some seconds each time (default: {ERROR_TIMES} with --compare, else 0)",
    )
    return root


def draw(finished: Sequence[Run], task: NamedImages, folder: Path) -> list[Path]:
    """Draw all pictures for which these runs have data."""
    measured = [run for run in finished if run.final]
    if not measured:
        return []
    drawn = [
        pictures.recall(measured, folder / "recall.png"),
        pictures.normalizer_error(measured, folder / "normalizer_error.png"),
    ]
    learned = next((run for run in measured if pictures.learned_temperatures(run) is not None), None)
    if learned is not None:
        frequency = task.caption_frequency()
        drawn.append(pictures.temperature_frequency(learned, frequency, folder / "temperature_frequency.png"))
    return [picture for picture in drawn if picture is not None]


def main(argv: Sequence[str] | None = None) -> None:
    """Train and evaluate the methods that the arguments select, and report the results."""
    root = parser()
    args = experiment.parse(root, argv, NamedImages.mode)
    times = args.normalizer_error if args.normalizer_error is not None else ERROR_TIMES * bool(args.compare)
    task = icons.data_or_exit(root, TASKS[args.data], args)
    finished = experiment.train_all(args, task, error_count=times)
    experiment.finish(finished, args.output)
    if args.plots:
        with launch.results_folder(args.output) as folder:
            experiment.list_files(draw(finished, task, folder))


if __name__ == "__main__":
    main()
