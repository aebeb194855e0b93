"""A picture of retrieval itself: held-out query images and the names that came back."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import torch

from recipes.engine import Run
from recipes.methods import METHODS
from recipes.plots import RIGHT, STYLE, WRONG, new_figure, save_figure
from recipes.tasks import GlyphNames

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@matplotlib.rc_context(STYLE)
@torch.no_grad()
def gallery(run: Run, task: GlyphNames, path: Path, columns: int = 8, rows: int = 4, seed: int = 0) -> Path:
    """A random choice of queries, the upper half retrieved rightly, the lower half wrongly.

    Under each image stands the retrieved name, green if right; if wrong, red with the true name below it.
    """
    run.model.eval()
    found = task.retrieve(run.model)
    hit = (found.caption_of_image == task.right).cpu()
    order = torch.randperm(len(hit), generator=torch.Generator().manual_seed(seed))
    half = columns * rows // 2
    chosen = torch.cat([order[hit[order]][:half], order[~hit[order]][:half]])
    figure, axes = new_figure(1.5 * columns, 2.05 * rows, rows, columns)
    for axis in axes.flat:
        axis.axis("off")
    for axis, query in zip(axes.flat, chosen.tolist(), strict=False):
        axis.set_anchor("S")
        axis.imshow(255 - task.held_out_images[query].cpu(), cmap="gray", vmin=0, vmax=255)
        retrieved, true = (_name(task, positions[query]) for positions in (found.caption_of_image, task.right))
        _write(axis, retrieved, RIGHT if hit[query] else WRONG)
        if not hit[query]:
            _write(axis, true, "#777777", skip=retrieved.count("\n") + 1)
    title = f"{METHODS[run.config.method].title}: retrieved names, R@1 {100 * found.image_to_text:.1f} %"
    figure.get_layout_engine().set(h_pad=0.02, hspace=0.0, rect=(0, 0.03, 1, 0.97))
    figure.suptitle(f"{title} (green right; red wrong, true name in grey)", fontweight="bold", fontsize=12)
    return save_figure(figure, path)


def _name(task: GlyphNames, position: torch.Tensor) -> str:
    """A candidate caption in at most three short lines."""
    name = task.names[task.candidates[int(position)]]
    return "\n".join(textwrap.wrap(name, width=21, max_lines=3, placeholder=" ..."))


def _write(axis: Axes, text: str, colour: str, skip: int = 0) -> None:
    """Write below the image, ``skip`` lines down."""
    place = {"xytext": (0, -3 - 7.6 * skip), "xycoords": "axes fraction", "textcoords": "offset points"}
    axis.annotate(text, (0.5, 0), color=colour, fontsize=6.2, ha="center", va="top", linespacing=1.05, **place)
