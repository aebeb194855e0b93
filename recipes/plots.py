"""The look of every picture: colours, style, an empty figure and a saved one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#4c566a", "#b48ead", "#d08770", "#2e7d6b", "#1f6fb2", "#c0392b", "#8a6d1d", "#6a51a3", "#1b9e77")
RIGHT, WRONG = "#2e7d6b", "#c0392b"
STYLE = {
    **{"figure.dpi": 140, "savefig.dpi": 140, "font.size": 10, "font.family": "DejaVu Sans"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25},
    **{"axes.titleweight": "bold", "axes.titlesize": 11, "legend.frameon": False, "lines.linewidth": 2.0},
}


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path
