"""Learn glyphs without names: two faces of one character as two views (SimCLR) with any estimator.

The loop is ``recipes.engine.Run``; this file picks the task, the methods and the pictures::

    python -m recipes.train_simclr --estimator sogclr --batch-size 64
    python -m recipes.train_simclr --compare infonce infonce-no-positive sogclr isogclr
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from recipes import cli, glyphs, launch, report
from recipes.tasks import GlyphFaces


def parser() -> argparse.ArgumentParser:
    """The recipe's command line."""
    return cli.parser(
        "python -m recipes.train_simclr",
        "Train an image tower on pairs of faces of one character, and tell the script of held-out characters by "
        "the nearest neighbour and by a linear probe.",
        GlyphFaces.mode,
        epochs=20,
        output_dir="runs/simclr",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, report."""
    args = cli.parse(parser(), argv, GlyphFaces.mode)
    task = GlyphFaces(glyphs.load(args.cache_dir), split_seed=args.split_seed, device=args.device)
    runs = cli.train_all(args, task)
    report.finish(runs, args.output_dir)
    measured = [run for run in runs if run.final]
    if args.plots and measured:
        from recipes import plots

        with launch.results_folder(args.output_dir) as folder:
            pictures = [plots.recall(measured, folder / "accuracy.png")]
            learned = next((run for run in measured if plots.learned_temperatures(run) is not None), None)
            if learned is not None:
                pictures.append(plots.temperatures(learned, folder / "temperatures.png"))
            report.list_files(pictures)


if __name__ == "__main__":
    main()
