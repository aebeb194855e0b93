"""Table and picture of :mod:`recipes.emc2_convergence`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes import plots, report

Result = dict[str, Any]


def panel(result: Result) -> tuple[str, str]:
    """What runs of one panel share: the problem, and the schedule."""
    o = result["setting"]
    return (
        f"n {o['n']}, batch {o['batch_size']}, tau {o['tau']}",
        f"{o['steps']:,} steps of {o['lr']}, {result['schedule']}",
    )


def curves(results: Iterable[Result]) -> dict[tuple[str, str], dict[str, list[Result]]]:
    """Seeds of one curve together, by panel and name."""
    found: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        found.setdefault(panel(result), {}).setdefault(result["name"], []).append(result)
    return found


def mean(values: Iterable[float]) -> float:
    """Geometric, as the axis is."""
    return statistics.geometric_mean(values)


def table(results: Iterable[Result]) -> list[str]:
    """The end of every curve."""
    lines = [
        "| problem | steps | method | squared gradient norm | global loss | seeds |",
        "|---|---|---|---:|---:|---:|",
    ]
    for (problem, schedule), members in curves(results).items():
        for name, runs in members.items():
            norm = mean(run["trace"][-1][2] for run in runs)
            loss = statistics.mean(run["trace"][-1][1] for run in runs)
            lines.append(f"| {problem} | {schedule} | {name} | {norm:.2e} | {loss:.3f} | {len(runs)} |")
    return lines


def write(results: list[Result], folder: Path) -> None:
    """``emc2_convergence.md`` and ``.png``, of everything in the folder's file of runs."""
    text = ["# How near each method comes to a stationary point", "", *report.provenance(), *table(results), ""]
    (folder / "emc2_convergence.md").write_text("\n".join(text))
    print("\n".join(table(results)))
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
                axis.plot(steps, norms, label=name, color=colours[name])
            axis.set(xscale="symlog", yscale="log", xlabel="steps", title=f"{problem}\n{schedule}")
        axes[0][0].set_ylabel("squared norm of the global gradient")
        axes[0][0].legend(fontsize=8)
        figure.savefig(folder / "emc2_convergence.png")
    print(f"wrote {folder}/emc2_convergence.md and .png")
