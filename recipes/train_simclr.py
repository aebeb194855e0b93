"""Self-supervised training on images (SimCLR): views of one image, or faces of one character, with any estimator.

Glyphs need no download; icons are downloaded from a package registry. The loop is ``recipes.engine.Run``; this file
selects the task, the methods and the pictures::

    python -m recipes.train_simclr --estimator sogclr --batch-size 64
    python -m recipes.train_simclr --data icons --epochs 5 --optimizer lars --schedule cosine --warmup 1
    python -m recipes.train_simclr --data folder --folder photos --head 128 128 128
    python -m recipes.train_simclr --compare infonce infonce-no-positive sogclr isogclr
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes import augment, experiment, folder, glyphs, icons, launch, pictures
from recipes.cache import Unavailable
from recipes.icon_task import LABELS, PARTS, icon_views
from recipes.tasks import GlyphFaces, ImageViews, Views


def _views(args: argparse.Namespace) -> Views:
    augmented = None if args.augment is None else tuple(args.augment)
    return Views(augmented, args.head and tuple(args.head))


def _icons(args: argparse.Namespace) -> ImageViews:
    data = icons.load(args.cache_dir, args.icons, progress=args.progress and launch.is_main(), coloured=True)
    part, labels = args.held_out or PARTS[0], args.labels or LABELS[0]
    return icon_views(data, labels, part, args.split_seed, views=_views(args), device=args.device)


def _folder(args: argparse.Namespace) -> ImageViews:
    if args.folder is None:
        raise Unavailable("--data folder needs --folder DIR")
    return folder.folder_views(args.folder, args.cache_dir, args.split_seed, _views(args), args.device)


TASKS: dict[str, Callable[[argparse.Namespace], ImageViews]] = {
    "glyphs": lambda args: GlyphFaces(glyphs.load(args.cache_dir), args.split_seed, args.device, _views(args)),
    "icons": _icons,
    "folder": _folder,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    root = experiment.parser(
        "recipes.train_simclr",
        "Train an image tower on pairs of views of one image, and tell labels of held-out images by the nearest "
        "neighbour and by linear probes, from features before and after the head.",
        ImageViews.mode,
        epochs=20,
        output="runs/simclr",
    )
    own = root.add_argument_group("only here")
    icons.add_data(own, tuple(TASKS))
    own.add_argument("--folder", type=Path, metavar="DIR", help="images; names of sub-folders are the labels")
    own.add_argument("--labels", choices=LABELS, help=f"what the probes tell of icons; default {LABELS[0]}")
    own.add_argument("--held-out", choices=PARTS, help=f"icons to measure: validation to choose by; default {PARTS[0]}")
    augmented = "operations on views; default: shift for glyphs, all the others for images in colour"
    own.add_argument("--augment", choices=augment.NAMES, nargs="*", metavar="NAME", help=augmented)
    head = "widths of the layers after the encoder, such as 8192 8192 8192; default: 128, for images in colour 128 128"
    own.add_argument("--head", type=int, nargs="+", metavar="WIDTH", help=head)
    return root


def main(argv: Sequence[str] | None = None) -> None:
    """Train and evaluate the methods that the arguments select, and report the results."""
    root = parser()
    args = experiment.parse(root, argv, ImageViews.mode)
    task = icons.data_or_exit(root, TASKS[args.data], args)
    finished = experiment.train_all(args, task)
    experiment.finish(finished, args.output)
    measured = [run for run in finished if run.final]
    if args.plots and measured:
        with launch.results_folder(args.output) as output:
            experiment.list_files([pictures.recall(measured, output / "accuracy.png")])


if __name__ == "__main__":
    main()
