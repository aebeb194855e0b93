"""Learn glyphs without names: two faces of one character as two views (SimCLR) with any estimator.

The loop is ``recipes.engine.Run``; this file picks the task, the methods and the pictures::

    python -m recipes.train_simclr --estimator sogclr --batch-size 64
    python -m recipes.train_simclr --compare infonce infonce-no-positive sogclr isogclr
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from recipes import experiment, glyphs, launch, pictures
from recipes.tasks import GlyphFaces


def parser() -> argparse.ArgumentParser:
    """The recipe's command line."""
    return experiment.parser(
        "recipes.train_simclr",
        "Train an image tower on pairs of faces of one character, and tell the script of held-out characters by "
        "the nearest neighbour and by a linear probe.",
        GlyphFaces.mode,
        epochs=20,
        output_dir="runs/simclr",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train what the arguments ask for, measure it, and report."""
    args = experiment.parse(parser(), argv, GlyphFaces.mode)
    task = GlyphFaces(glyphs.load(args.cache_dir), split_seed=args.split_seed, device=args.device)
    finished = experiment.train_all(args, task)
    experiment.finish(finished, args.output_dir)
    measured = [run for run in finished if run.final]
    if args.plots and measured:
        with launch.results_folder(args.output_dir) as folder:
            experiment.list_files([pictures.recall(measured, folder / "accuracy.png")])


if __name__ == "__main__":
    main()
