"""Tables and picture of the study of normalizers, from the runs that it has finished."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.jobs import METRIC, Results, finished, provenance
from benchmarks.studies.normalizers_cells import SETTINGS, TAU, Cell
from recipes.plots import COLOURS, STYLE, plt, save_figure
from recipes.report import mean_spread, table

ERRORS = """Mean squared error of the log-normalizers that an estimator has stored, against the exact ones of the
features of the moment (all pairs as negatives, 4,096 random anchors): the mean over five checkpoints, and each of
them. The in-batch estimate, which stores nothing, is judged on random batches of its size. tau is {tau} for all, 1,024
prototypes, one seed; the same number of samples is seen in each column. NeuCLIP, section 5.2 and Figure 2c."""
ABLATION = """R@1 on held-out pairs, mean ± standard deviation over three seeds; 16,384 pairs, two epochs (512 commits),
batch 64, tau {tau}. Where not stated: unified, prototypes, 1,024 of them, lr 1, 10 updates, a restart every 100
commits, no gradient through alpha. *Error*: squared error of the stored log-normalizers at the end."""
RESIDUAL = """The same for 8,192 pairs, four epochs, batch 16, tau {tau}. Where not stated: gamma 0.5, a queue of 1,024
features as the network, predicting before it meets the batch, gradient through alpha, a row per sample."""


def write(cells: Sequence[Cell], path: Path) -> None:
    """Write ``normalizers.md`` and ``.png`` beside the file of results."""
    results = finished(path)
    text = [
        _head(results),
        "## Errors of the normalizers\n\n" + ERRORS.format(tau=TAU),
        _errors([cell for cell in cells if cell.study == "errors"], results),
        f"![errors]({path.with_suffix('.png').name})",
        "## NeuCLIP, one thing at a time\n\n" + ABLATION.format(tau=TAU),
        *_tables([cell for cell in cells if cell.study == "ablation"], results),
        "## The residual normalizer, one thing at a time\n\n" + RESIDUAL.format(tau=TAU),
        *_tables([cell for cell in cells if cell.study == "residual"], results),
    ]
    path.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    _draw([cell for cell in cells if cell.study == "errors"], results, path.with_suffix(".png"))
    print("\n".join(f"wrote {path.with_suffix(suffix)}" for suffix in (".md", ".png")))


def _head(results: Results) -> str:
    return "\n".join(
        [
            "# Normalizers: how exact, and what it is worth",
            "",
            *provenance(results),
            "- **commands**: `python -m benchmarks.studies.normalizers errors`, `ablation`, `residual`, `report`",
        ]
    )


def _of(cell: Cell, results: Results) -> list[dict[str, Any]]:
    return [results[job.key] for job in cell.jobs if job.key in results]


def _mean_error(cell: Cell, results: Results) -> list[float]:
    """Errors at the checkpoints."""
    runs = _of(cell, results)
    return runs[0]["errors"][:5] if runs else []


def _errors(cells: Sequence[Cell], results: Results) -> str:
    titles = [title for title, *_ in SETTINGS]
    lines = []
    for name in dict.fromkeys(cell.name for cell in cells):
        line = [name]
        for title in titles:
            values = next(_mean_error(cell, results) for cell in cells if cell.name == name and cell.table == title)
            steps = ", ".join(f"{value:.2f}" for value in values)
            line.append(f"**{statistics.mean(values):.2f}** ({steps})" if values else "-")
        lines.append(line)
    return table(["estimate", *titles], lines, "l")


def _tables(cells: Sequence[Cell], results: Results) -> list[str]:
    texts = []
    for title in dict.fromkeys(cell.table for cell in cells):
        lines = []
        for cell in cells:
            runs = _of(cell, results) if cell.table == title else []
            if runs:
                both = [mean_spread([100 * r["final"][m] for r in runs]) for m in (METRIC, "r1_text_to_image")]
                error = f"{statistics.mean(run['errors'][-1] for run in runs):.2f}"
                pace = f"{statistics.median(1e3 * run['seconds'] / run['steps'] for run in runs):.0f}"
                lines.append([cell.name, *both, error, str(len(runs)), pace])
        if lines:
            head = [title.lower(), "image to name", "name to image", "error", "seeds", "ms per step"]
            texts.append(table(head, lines, "l"))
    return texts


@plt.rc_context(STYLE)
def _draw(cells: Sequence[Cell], results: Results, path: Path) -> None:
    """Left: a smaller batch. Right: a larger data set."""
    titles = [title for title, *_ in SETTINGS]
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    names = list(dict.fromkeys(cell.name for cell in cells))
    for axis, pair in zip(axes, ((titles[0], titles[1]), (titles[2], titles[1])), strict=True):
        for number, name in enumerate(names):
            series = [
                _mean_error(cell, results)
                for title in pair
                for cell in cells
                if (cell.name, cell.table) == (name, title)
            ]
            if all(series):
                axis.plot(
                    pair, [statistics.mean(s) for s in series], "o-", color=COLOURS[number % len(COLOURS)], label=name
                )
        axis.set(yscale="log", ylabel="squared error of log-normalizers")
        axis.margins(x=0.2)
    axes[0].set_title("A smaller batch", loc="left")
    axes[1].set_title("A larger data set", loc="left")
    axes[1].legend(fontsize=7)
    save_figure(figure, path)
