"""Table and picture of :mod:`benchmarks.studies.emc2_convergence`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes import plots
from recipes.report import environment, heading, table

Result = dict[str, Any]
# Names of contenders in files of runs, which must keep matching, and what tables and pictures call them.
TITLES = {"InfoNCE without the positive": "DCL"}


def title(name: str) -> str:
    """What tables and pictures call a contender."""
    return TITLES.get(name, name)


def panel(result: Result) -> tuple[str, str]:
    """The panel of a run: its problem, and its schedule."""
    o = result["setting"]
    return (
        f"n {o['n']}, batch {o['batch_size']}, tau {o['tau']}",
        f"{o['steps']:,} steps of {o['lr']}, {result['schedule']}",
    )


def curves(results: Iterable[Result]) -> dict[tuple[str, str], dict[str, list[Result]]]:
    """Group the seeds of one curve, by panel and name."""
    found: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        found.setdefault(panel(result), {}).setdefault(result["name"], []).append(result)
    return found


def mean(values: Iterable[float]) -> float:
    """The geometric mean, since the axis is logarithmic."""
    return statistics.geometric_mean(values)


def ends_table(results: Iterable[Result]) -> str:
    """The end of every curve."""
    body = []
    for (problem, schedule), members in curves(results).items():
        for name, runs in members.items():
            norm = mean(run["trace"][-1][2] for run in runs)
            loss = statistics.mean(run["trace"][-1][1] for run in runs)
            body.append([problem, schedule, title(name), f"{norm:.2e}", f"{loss:.3f}", str(len(runs))])
    return table(["problem", "steps", "method", "squared gradient norm", "global loss", "seeds"], body, "lllr")


def write(results: list[Result], folder: Path) -> None:
    """Write ``emc2_convergence.md`` and ``.png``, of everything in the folder's file of runs."""
    text = [*heading("How near each method comes to a stationary point", environment()), ends_table(results), ""]
    (folder / "emc2_convergence.md").write_text("\n".join(text))
    print(ends_table(results))
    draw(results, folder / "emc2_convergence.png")
    print(f"wrote {folder}/emc2_convergence.md and .png")


def draw(results: list[Result], path: Path) -> None:
    """A panel per problem and schedule, a curve per contender."""
    found = curves(results)
    colours: dict[str, str] = {}
    for result in results:
        colours.setdefault(result["name"], plots.COLOURS[len(colours) % len(plots.COLOURS)])
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(5.2 * columns, 4.2 * rows, rows, columns)
        for axis in axes.flat[len(found) :]:
            axis.set_axis_off()
        for axis, ((problem, schedule), members) in zip(axes.flat, found.items(), strict=False):
            for name, runs in members.items():
                steps = [point[0] for point in runs[0]["trace"]]
                norms = [mean(run["trace"][k][2] for run in runs) for k in range(len(steps))]
                axis.plot(steps, norms, label=title(name), color=colours[name])
            axis.set(xscale="symlog", yscale="log", xlabel="steps", title=f"{problem}\n{schedule}")
        axes[0][0].set_ylabel("squared norm of the global gradient")
        axes[0][0].legend(fontsize=8)
        plots.save_figure(figure, path)
