"""Tables and pictures of :mod:`benchmarks.studies.minibatch_geometry`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from recipes import plots
from recipes.report import environment, heading, table

Result = dict[str, Any]


def median_range(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1e} ({min(values):.1e} to {max(values):.1e})"


def fixed_table(results: list[Result]) -> str:
    """Theorems 1 to 5: distances for fixed sets of batches."""
    body = [
        [*(str(r[key]) for key in ("n", "batch_size", "dim", "batches", "count")), median_range(r["distance"])]
        for r in results
    ]
    return table(["n", "B", "d", "batches", "number", "distance from the optimum"], body, "rrrlr")


def stepwise_table(results: list[Result]) -> str:
    """The ends of the curves."""
    body = [
        [
            *(str(r[key]) for key in ("n", "batch_size", "dim", "method")),
            median_range([trace[-1] for trace in r["traces"]]),
        ]
        for r in results
    ]
    return table(["n", "B", "d", "batches", "distance from the optimum after the last step"], body, "rrrlr")


def panels(results: list[Result]) -> dict[tuple[int, int, int], list[Result]]:
    """Group results by problem."""
    found: dict[tuple[int, int, int], list[Result]] = {}
    for result in results:
        found.setdefault((result["n"], result["batch_size"], result["dim"]), []).append(result)
    return found


def draw_curves(results: list[Result], path: Path) -> None:
    """Figure 4e: distance against steps, the mean over seeds and their range."""
    found = panels(results)
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(3.8 * columns, 3.2 * rows, rows, columns)
        for axis, (problem, group) in zip(axes.flat, found.items(), strict=False):
            for colour, r in zip(plots.COLOURS[2:], group, strict=False):
                traces = np.array(r["traces"])
                axis.plot(traces.mean(0), color=colour, label=r["method"])
                axis.fill_between(range(traces.shape[1]), traces.min(0), traces.max(0), color=colour, alpha=0.15, lw=0)
            axis.set(title="n = {}, B = {}, d = {}".format(*problem), xlabel="steps", ylim=(0, None))
        axes[0, 0].set_ylabel("distance from the optimum")
        axes[0, 0].legend()
        plots.save_figure(figure, path)


def draw_grams(results: list[Result], path: Path) -> None:
    """Figure 4 a to d: Gram matrices of one seed, a problem per row."""
    found = panels(results)
    columns = max(len(group) for group in found.values())
    with plots.plt.rc_context({**plots.STYLE, "axes.grid": False}):
        figure, axes = plots.new_figure(2.1 * columns, 2.2 * len(found), len(found), columns)
        for axis in axes.flat:
            axis.set_axis_off()
        for row, (problem, group) in zip(axes, found.items(), strict=True):
            for axis, r in zip(row, group, strict=False):
                axis.imshow(r["gram"], cmap="RdBu_r", vmin=-1, vmax=1)
                axis.set_title("{}\nn = {}, B = {}, d = {}".format(r["batches"], *problem), fontsize=7)
        plots.save_figure(figure, path)


def write(fixed: list[Result], stepwise: list[Result], folder: Path) -> None:
    """Write ``minibatch_geometry.md`` and two pictures."""
    head = heading("Which geometry small batches find", environment())
    text = "\n".join([*head, fixed_table(fixed), "", stepwise_table(stepwise), ""])
    (folder / "minibatch_geometry.md").write_text(text)
    print(text)
    draw_curves(stepwise, folder / "minibatch_geometry_steps.png")
    draw_grams(fixed, folder / "minibatch_geometry_gram.png")
    print(f"wrote {folder}/minibatch_geometry.json, .md and two .png")
