"""Table and picture of :mod:`recipes.emc2_convergence`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes import plots

Result = dict[str, Any]


def curves(results: Iterable[Result]) -> dict[tuple[float, str, str], list[Result]]:
    """Seeds of one curve together, by step size, schedule and name."""
    found: dict[tuple[float, str, str], list[Result]] = {}
    for result in results:
        found.setdefault((result["setting"]["lr"], result["schedule"], result["name"]), []).append(result)
    return found


def mean(values: Iterable[float]) -> float:
    """Geometric, as the axis is."""
    return statistics.geometric_mean(values)


def table(results: Iterable[Result]) -> list[str]:
    """The end of every curve."""
    lines = ["| step size | method | squared gradient norm | global loss | seeds |", "|---|---|---:|---:|---:|"]
    for (lr, schedule, name), runs in curves(results).items():
        norm = mean(run["trace"][-1][2] for run in runs)
        loss = statistics.mean(run["trace"][-1][1] for run in runs)
        lines.append(f"| {lr}, {schedule} | {name} | {norm:.2e} | {loss:.3f} | {len(runs)} |")
    return lines


def write(results: list[Result], folder: Path) -> None:
    """``emc2_convergence.md`` and ``.png``."""
    (folder / "emc2_convergence.md").write_text("\n".join(table(results)) + "\n")
    print("\n".join(table(results)))
    found = curves(results)
    panels = list(dict.fromkeys((lr, schedule) for lr, schedule, _ in found))
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(5.2 * len(panels), 4.2, 1, len(panels))
        for axis, panel in zip(axes[0], panels, strict=True):
            names = [name for lr, schedule, name in found if (lr, schedule) == panel]
            for number, name in enumerate(names):
                runs = found[(*panel, name)]
                steps = [point[0] for point in runs[0]["trace"]]
                norms = [mean(run["trace"][k][2] for run in runs) for k in range(len(steps))]
                axis.plot(steps, norms, label=name, color=plots.COLOURS[number % len(plots.COLOURS)])
            axis.set(xscale="symlog", yscale="log", xlabel="steps", title=f"step size {panel[0]}, {panel[1]}")
        axes[0][0].set_ylabel("squared norm of the global gradient")
        axes[0][-1].legend(fontsize=8)
        figure.savefig(folder / "emc2_convergence.png")
    print(f"wrote {folder}/emc2_convergence.md and .png")
