"""Learn to name glyphs: image-text training (CLIP) with any estimator, on real data that needs no download.

The loop is ``recipes.engine.Run``; this file picks the task, the methods and the pictures::

    python -m recipes.train_clip --estimator sogclr --batch-size 64
    python -m recipes.train_clip --compare infonce infonce-no-positive clip sogclr isogclr fastclip-v3
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from recipes import cli, glyphs, launch, pictures, runs
from recipes.engine import Run
from recipes.tasks import GlyphNames

ERROR_TIMES = 3


def parser() -> argparse.ArgumentParser:
    """The recipe's command line."""
    root = cli.parser(
        "python -m recipes.train_clip",
        "Train an image tower and a text tower on glyphs and their Unicode names, and measure retrieval of "
        "held-out pairs (R@1).",
        GlyphNames.mode,
        epochs=2,
        output_dir="runs/clip",
    )
    own = root.add_argument_group("only here")
    own.add_argument("--limit", type=int, metavar="N", default=0, help="train on this many pairs only (0: all)")
    own.add_argument(
        "--normalizer-error",
        type=int,
        metavar="TIMES",
        help="how often per run the estimator's log-normalizers are held against the exact ones of the training set, "
        f"which costs some seconds each time (default: {ERROR_TIMES} with --compare, else 0)",
    )
    return root


def draw(finished: Sequence[Run], task: GlyphNames, folder: Path) -> list[Path]:
    """Draw the pictures that these runs allow."""
    measured = [run for run in finished if run.final]
    if not measured:
        return []
    drawn: list[Path | None] = [
        pictures.recall(measured, folder / "recall.png"),
        pictures.normalizer_error(measured, folder / "normalizer_error.png"),
    ]
    learned = next((run for run in measured if pictures.learned_temperatures(run) is not None), None)
    if learned is not None:
        drawn.append(pictures.temperatures(learned, folder / "temperatures.png"))
        frequency = task.caption_frequency()
        drawn.append(pictures.temperature_frequency(learned, frequency, folder / "temperature_frequency.png"))
    best = max(measured, key=lambda run: run.final[task.headline])
    drawn.append(pictures.gallery(best, task, folder / "gallery.png"))
    return [picture for picture in drawn if picture is not None]


def main(argv: Sequence[str] | None = None) -> None:
    """Train what the arguments ask for, measure it, and report."""
    args = cli.parse(parser(), argv, GlyphNames.mode)
    times = args.normalizer_error if args.normalizer_error is not None else ERROR_TIMES * bool(args.compare)
    data = glyphs.load(args.cache_dir)
    task = GlyphNames(data, split_seed=args.split_seed, limit=args.limit, device=args.device)
    finished = runs.train_all(args, task, error_count=times)
    runs.finish(finished, args.output_dir)
    if args.plots:
        with launch.results_folder(args.output_dir) as folder:
            runs.list_files(draw(finished, task, folder))


if __name__ == "__main__":
    main()
