"""Pictures of one or more runs, each function one file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import torch
from torch import Tensor

from compopt import TemperatureDual
from recipes.engine import Run
from recipes.experiment import by_method
from recipes.methods import METHODS
from recipes.tasks import NamedImages

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4c566a", "#b48ead", "#d08770", "#2e7d6b", "#1f6fb2", "#c0392b", "#8a6d1d", "#6a51a3", "#1b9e77")
RIGHT, WRONG = "#2e7d6b", "#c0392b"
STYLE = {
    **{"figure.dpi": 140, "savefig.dpi": 140, "font.size": 10, "font.family": "DejaVu Sans"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25},
    **{"axes.titleweight": "bold", "axes.titlesize": 11, "legend.frameon": False, "lines.linewidth": 2.0},
}


def new_axis(width: float, height: float) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def _curves(axis: Axes, runs: Sequence[Run], metric: str, scale: float, dodge: bool = True) -> list[float]:
    """Draw one line per method, mean over seeds with the range shaded, its last value written at its end."""
    ends = []
    for colour, (method, group) in zip(COLOURS, by_method(runs).items(), strict=False):
        records = [[record for record in run.history if metric in record] for run in group]
        length = min(len(record) for record in records)
        if not length:
            continue
        x = [record["samples"] for record in records[0][:length]]
        y = scale * np.array([[r[metric] for r in record[:length]] for record in records])
        axis.plot(x, y.mean(0), color=colour, marker="o", markersize=3.5, label=METHODS[method].title)
        if len(group) > 1:
            axis.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
        ends.append((float(x[-1]), float(y.mean(0)[-1]), colour))
    if dodge and ends:
        _label_ends(axis, ends)
    return [end[1] for end in ends]


def _label_ends(axis: Axes, ends: list[tuple[float, float, str]]) -> None:
    """Write the last values beside the lines, pushed apart where they would overlap."""
    low, high = axis.get_ylim()
    gap, previous = 0.045 * (high - low), -np.inf
    for x, y, colour in sorted(ends, key=lambda end: end[1]):
        previous = max(y, previous + gap)
        place = {"xytext": (x, previous), "textcoords": "data", "va": "center", "annotation_clip": False}
        axis.annotate(f"  {y:.1f}", (x, y), color=colour, fontsize=9, fontweight="bold", **place)


@plt.rc_context(STYLE)
def recall(runs: Sequence[Run], path: Path) -> Path:
    """Draw the headline metric against samples seen, one line per method."""
    figure, axis = new_axis(7.2, 4.4)
    task = runs[0].task
    _curves(axis, runs, task.headline, 100)
    axis.set(xlabel="training samples seen", ylabel=f"{task.labels[task.headline]} (%)")
    axis.set_title(f"Held-out {task.labels[task.headline]}, batch {runs[0].config.batch_size}", loc="left")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
    axis.legend(loc="lower right")
    return save_figure(figure, path)


@plt.rc_context(STYLE)
def normalizer_error(runs: Sequence[Run], path: Path) -> Path | None:
    """Draw the mean squared error of the log-normalizers against samples seen, where it was measured."""
    runs = [run for run in runs if any("normalizer_error" in record for record in run.history)]
    if not runs:
        return None
    figure, axis = new_axis(7.2, 4.4)
    _curves(axis, runs, "normalizer_error", 1.0, dodge=False)
    axis.set(xlabel="training samples seen", ylabel="mean squared error of log-normalizers", yscale="log")
    axis.set_title("How well the normalizers are known", loc="left")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
    axis.legend()
    return save_figure(figure, path)


def learned_temperatures(run: Run) -> tuple[Tensor, Tensor] | None:
    """``tau`` (n, D) of the samples seen and their positions, if the run's estimator learns one per sample."""
    temperature = run.est.temperature
    if not isinstance(temperature, TemperatureDual) or temperature.mode != "individual":
        return None
    values = run.est.read(torch.arange(run.task.n))
    seen = (values["count"] > 0).nonzero().flatten()
    return values["tau"][seen].cpu(), seen.cpu()


@plt.rc_context(STYLE)
def temperatures(run: Run, path: Path) -> Path | None:
    """Draw the distribution of the learned temperatures, per direction."""
    learned = learned_temperatures(run)
    if learned is None:
        return None
    tau = learned[0].numpy()
    figure, axis = new_axis(6.4, 3.8)
    bins = np.linspace(tau.min(), np.quantile(tau, 0.999), 60)
    names = ("image anchors", "text anchors") if tau.shape[1] == 2 else ("samples",)
    for direction, (name, colour) in enumerate(zip(names, (COLOURS[4], COLOURS[2]), strict=False)):
        axis.hist(tau[:, direction], bins, color=colour, alpha=0.55, label=name)
        axis.axvline(np.median(tau[:, direction]), color=colour, linewidth=1.5, linestyle="--")
    axis.axvline(run.config.options["tau"], color="black", linewidth=1, linestyle=":", label="start")
    axis.set(xlabel="temperature", ylabel="training samples")
    axis.set_title(f"Learned temperatures, {METHODS[run.config.method].title} (dashed: median)", loc="left")
    axis.legend()
    return save_figure(figure, path)


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


def _rank(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation, ties given their mean rank."""
    ranks = []
    for values in (a, b):
        _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum(0) - counts.double() / 2)[inverse])
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


@plt.rc_context(STYLE)
@torch.no_grad()
def gallery(run: Run, task: NamedImages, path: Path, columns: int = 8, rows: int = 4, seed: int = 0) -> Path:
    """Draw a random choice of queries, the upper half retrieved rightly, the lower half wrongly.

    Under each image stands the retrieved name, green if right; if wrong, red with the true name below it.
    """
    run.model.eval()
    found = task.retrieve(run.model)
    hit = (found.caption_of_image == task.right).cpu()
    order = torch.randperm(len(hit), generator=torch.Generator().manual_seed(seed))
    half = columns * rows // 2
    chosen = torch.cat([order[hit[order]][:half], order[~hit[order]][:half]])
    figure, axes = plt.subplots(rows, columns, figsize=(1.5 * columns, 2.05 * rows), layout="constrained")
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


def _name(task: NamedImages, position: torch.Tensor) -> str:
    """A candidate caption in at most three short lines."""
    name = task.names[task.candidates[int(position)]]
    return "\n".join(textwrap.wrap(name, width=21, max_lines=3, placeholder=" ..."))


def _write(axis: Axes, text: str, colour: str, skip: int = 0) -> None:
    """Write below the image, ``skip`` lines down."""
    place = {"xytext": (0, -3 - 7.6 * skip), "xycoords": "axes fraction", "textcoords": "offset points"}
    axis.annotate(text, (0.5, 0), color=colour, fontsize=6.2, ha="center", va="top", linespacing=1.05, **place)
