"""Pictures of what was measured: time of a loss by batch size, added time of a step by estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.losses import PRODUCTS


def save(results: dict[str, Any], device: str, path: Path) -> bool:
    """Write the picture; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    curves: dict[str, list[tuple[int, float]]] = {}
    for r in [*results.get("losses", []), *results.get("largest", [])]:
        for name, cell in r["rows"].items():
            if "seconds" in cell and r["precision"] == "TF32":
                curves.setdefault(name, []).append((r["B"], 1e3 * cell["seconds"][1]))
    for name, points in curves.items():
        style = {"color": "black", "linestyle": "--"} if name == PRODUCTS else {"marker": "o", "markersize": 3}
        left.plot(*zip(*sorted(points), strict=True), label=name, **style)
    left.set(xscale="log", yscale="log", xlabel="B", ylabel="ms", title="loss and gradients, TF32")
    if curves:
        left.legend(fontsize=7)
    cells = {name: cell for name, cell in results.get("steps", {}).get("rows", {}).items() if "seconds" in cell}
    base = cells.pop("no loss (a sum)", None)
    if base:
        added = {name: 1e3 * (cell["seconds"][1] - base["seconds"][1]) for name, cell in cells.items()}
        right.barh(list(added), list(added.values()))
        right.invert_yaxis()
    right.set(xlabel="ms", title="what a loss adds to a training step")
    figure.suptitle(device, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
