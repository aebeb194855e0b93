"""Pictures of one or more runs; each function draws one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import torch
from torch import Tensor

from compopt import TemperatureDual, curation
from recipes.engine import Run
from recipes.experiment import by_method
from recipes.methods import title_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4c566a", "#b48ead", "#d08770", "#2e7d6b", "#1f6fb2", "#c0392b", "#8a6d1d", "#6a51a3", "#1b9e77")
STYLE = {
    **{"figure.dpi": 140, "savefig.dpi": 140, "font.size": 10, "font.family": "DejaVu Sans"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25},
    **{"axes.titleweight": "bold", "axes.titlesize": 11, "legend.frameon": False, "lines.linewidth": 2.0},
}


def new_axis(width: float = 7.2, height: float = 4.4) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def _curves(axis: Axes, runs: Sequence[Run], metric: str, scale: float) -> None:
    """Draw one line per method, mean over seeds with the range shaded; the legend has its last value."""
    for colour, (method, group) in zip(COLOURS, by_method(runs).items(), strict=False):
        records = [[record for record in run.history if metric in record] for run in group]
        length = min(len(record) for record in records)
        if not length:
            continue
        x = [record["samples"] for record in records[0][:length]]
        y = scale * np.array([[r[metric] for r in record[:length]] for record in records])
        label = f"{title_of(method, group[0].config.options)} ({y.mean(0)[-1]:.1f})"
        axis.plot(x, y.mean(0), color=colour, marker="o", markersize=3.5, label=label)
        if len(group) > 1:
            axis.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
    axis.set_xlabel("training samples seen")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
    axis.legend()


@plt.rc_context(STYLE)
def recall(runs: Sequence[Run], path: Path) -> Path:
    """Draw the headline metric against samples seen, one line per method."""
    figure, axis = new_axis()
    task = runs[0].task
    _curves(axis, runs, task.headline, 100)
    axis.set_ylabel(f"{task.labels[task.headline]} (%)")
    axis.set_title(f"Held-out {task.labels[task.headline]}, batch {runs[0].config.batch_size}", loc="left")
    return save_figure(figure, path)


@plt.rc_context(STYLE)
def normalizer_error(runs: Sequence[Run], path: Path) -> Path | None:
    """Draw the mean squared error of the log-normalizers against samples seen, where it was measured."""
    runs = [run for run in runs if any("normalizer_error" in record for record in run.history)]
    if not runs:
        return None
    figure, axis = new_axis()
    _curves(axis, runs, "normalizer_error", 1.0)
    axis.set(ylabel="mean squared error of log-normalizers", yscale="log")
    axis.set_title("How well the normalizers are known", loc="left")
    return save_figure(figure, path)


@plt.rc_context(STYLE)
def learning_curve(records: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw the loss, and the measures in per cent whose names begin with "recall", against steps.

    Args:
        records: lines of the log of a run, see ``recipes/run_log.py``.
        path: the file.
    """
    figure, axis = new_axis()
    axis.plot(*_points(records, "loss"), color=COLOURS[0], linewidth=1.2, label="loss")
    axis.set(xlabel="steps", ylabel="loss")
    right = axis.twinx()
    right.grid(False)
    names = dict.fromkeys(name for record in records for name in record if name.startswith("recall"))
    for name, colour in zip(names, COLOURS[1:], strict=False):
        steps, values = _points(records, name)
        right.plot(steps, [100 * value for value in values], color=colour, marker="o", markersize=3.5, label=name)
    right.set_ylabel("recall on held-out data (%)")
    right.set_ylim(bottom=0)
    figure.legend(loc="outside upper center", ncols=3)
    return save_figure(figure, path)


def _points(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a measure is known, and its values."""
    known = [record for record in records if name in record]
    return [record["step"] for record in known], [record[name] for record in known]


def learned_temperatures(run: Run) -> tuple[Tensor, Tensor] | None:
    """Return ``tau`` (n, D) of the visited samples and their positions, if the estimator learns one per sample."""
    temperature = run.est.temperature
    if not isinstance(temperature, TemperatureDual) or temperature.mode != "individual":
        return None
    values = run.est.read(torch.arange(run.task.n))
    seen = (values["count"] > 0).nonzero().flatten()
    return values["tau"][seen].cpu(), seen.cpu()


@plt.rc_context(STYLE)
def temperature_frequency(run: Run, frequency: Tensor, path: Path) -> Path | None:
    """Draw temperature against how often a sample's caption occurs: iSogCLR expects it to rise."""
    learned = learned_temperatures(run)
    if learned is None:
        return None
    tau, seen = learned
    times = frequency[seen]
    figure, axis = new_axis(6.4, 3.8)
    present = [k for k in times.unique().tolist() if (times == k).sum() >= 20]
    for direction, name in enumerate(("image anchors", "text anchors")[: tau.shape[1]]):
        colour = (COLOURS[4], COLOURS[2])[direction]
        low, middle, high = np.transpose([np.quantile(tau[times == k, direction], (0.25, 0.5, 0.75)) for k in present])
        axis.fill_between(present, low, high, color=colour, alpha=0.15, linewidth=0)
        label = f"{name} (r = {_rank(tau[:, direction], times):+.2f})"
        axis.plot(present, middle, color=colour, marker="o", markersize=4, label=label)
    axis.set(xlabel="training pairs that share the caption", ylabel="temperature")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title("Temperature and frequency: median, quartiles, rank correlation", loc="left")
    axis.legend()
    return save_figure(figure, path)


@plt.rc_context(STYLE)
def wrong_pairs(found: curation.Scores, pictures: Tensor, texts: Sequence[str], path: Path, count: int = 24) -> Path:
    """Draw one page: distributions of the scores of a ``ScoreKeeper``, and the pairs with the lowest scores.

    Args:
        found: result of :func:`compopt.curation.scores`.
        pictures, texts: pictures of all samples, ``(n, h, w)`` or ``(n, 3, h, w)``, and one text for each.
        count: number of pairs that are shown.
    """
    assert found.rank is not None and found.similarity is not None
    worst = curation.suspects(found, 1.0)[:count].tolist()
    rows = -(-len(worst) // 8)
    figure = plt.figure(figsize=(10.5, 3.2 + 1.6 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3.2, 1.6 * rows))
    share, seen = curation.wrong_share(found), found.visits > 0
    left, middle, right = above.subplots(1, 3)
    left.hist(found.score[seen].numpy(), bins=60, color=COLOURS[4])
    left.set(xlabel="score (nats)", ylabel="pairs", yscale="log")
    middle.hist(found.rank[seen].numpy(), bins=40, range=(0, 1), color=COLOURS[4])
    middle.axhline(share * int(seen.sum()) / 40, color=COLOURS[5], label=f"wrong pairs: {share:.1%}")
    middle.set(xlabel="rank of the partner among the negatives", yscale="log")
    middle.legend()
    right.hist(found.similarity[seen].numpy(), bins=60, color=COLOURS[4])
    right.set(xlabel="similarity of the pair", yscale="log")
    below.suptitle(f"The {len(worst)} pairs with the lowest scores", fontsize=11, fontweight="bold", x=0.01, ha="left")
    for axis, place in zip(below.subplots(rows, 8, squeeze=False).flat, [*worst, *[None] * 7], strict=False):
        axis.axis("off")
        if place is not None:
            picture = pictures[place] if pictures.dim() == 3 else pictures[place].movedim(0, -1)
            axis.imshow(picture.numpy(), cmap="gray_r")
            axis.set_title("\n".join(wrap(texts[place], 18)[:3]), fontsize=6.5, fontweight="normal")
    return save_figure(figure, path)


def _rank(a: Tensor, b: Tensor) -> float:
    """Return Spearman's rank correlation; ties get their mean rank."""
    ranks = []
    for values in (a, b):
        _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum(0) - counts.double() / 2)[inverse])
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
