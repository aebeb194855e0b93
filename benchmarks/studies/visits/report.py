"""Page and picture of the study of visits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.report import paired, table
from benchmarks.studies.search import Results, by_seed, provenance, settings
from benchmarks.studies.visits.__main__ import (
    BATCHES,
    HELD_OUT,
    SEEDS,
    STUDY,
    TUNE_SEEDS,
    TUNED_AT,
    VISITS,
    hours,
    name,
)
from benchmarks.studies.visits.data import DATA, SIZES
from benchmarks.studies.visits.training import DCL, INFONCE, METHODS, STATELESS

BASES = (INFONCE, DCL)
PAPERS = tuple(method for method in METHODS if method not in (*BASES, *STATELESS))
LARGEST, FEWEST = 16, 20  # batch, and visits per row, of the cells in which the papers' methods should gain
Recall = dict[str, dict[int, float]]  # method -> seed -> per cent


def recalls(finals: Mapping[str, Any], data: str, batch: int, visits: int) -> Recall:
    """Return the recall on test pairs of the methods with at least two finished seeds."""
    found = {method: by_seed(finals.get(name(data, method, batch, visits), []), "test/recall") for method in METHODS}
    return {method: seeds for method, seeds in found.items() if len(seeds) > 1}


def gaps(recall: Recall, method: str, base: str) -> list[float]:
    """Return the differences of two methods over their common seeds."""
    return [value - recall[base][seed] for seed, value in recall[method].items() if seed in recall[base]]


def better(recall: Recall) -> str | None:
    """Return the better one of InfoNCE and DCL, or None if one of them has not finished."""
    if any(base not in recall for base in BASES):
        return None
    return max(BASES, key=lambda base: mean(recall[base].values()))


def above(recall: Recall, method: str) -> bool:
    """Return whether a method is two standard errors above both InfoNCE and DCL."""
    return all(_clear(gaps(recall, method, base)) for base in BASES)


def _clear(differences: Sequence[float]) -> bool:
    return len(differences) > 1 and mean(differences) > 2 * _error(differences)


def _error(values: Sequence[float]) -> float:
    return stdev(values) / sqrt(len(values))


# -- the page ------------------------------------------------------------------------------------------------------

ABOUT = (
    "R@1 among the held-out pairs, mean of both directions, in per cent: mean ± standard error over the seeds "
    f"{SEEDS[0]} to {SEEDS[-1]}, by the number of visits of each row, which is that of epochs; each is a run of its "
    "own. Below, the differences by seed from the better one of InfoNCE and DCL in the same column, mean ± standard "
    "error; bold: more than two standard errors above both."
)
TUNED = (
    f"Learning rate, temperature and the other settings of a method are chosen one after another on each data set, at "
    f"batch {TUNED_AT[0]} with {TUNED_AT[1]} visits, by the mean recall of the seeds {TUNE_SEEDS[0]} and "
    f"{TUNE_SEEDS[1]} on pairs that are not among those of the final runs, except for digits: there they are the "
    "training pairs, 300 of which are held out, others with each seed. All batch sizes and numbers of visits use these "
    "settings."
)
CHOSEN = "R@1 in per cent, mean of the two seeds of the tuning. The chosen settings are bold."


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals = STUDY.finals(results)
    count, left, _ = hours(results)
    tuned = sum(run["job"]["seed"] == TUNE_SEEDS[0] for run in results.values())
    parts = [
        "# Many visits per row",
        provenance([*results.values()], "benchmarks/studies/visits/__main__.py"),
        f"{tuned} runs with {len(TUNE_SEEDS)} seeds each choose settings, {len(results) - tuned} are final; {count} "
        f"final runs, about {left:.1f} hours, are missing.",
        ABOUT,
        TUNED,
        goal(finals),
        "![Gain over the better one of InfoNCE and DCL against visits per row](visits.png)",
    ]
    for data in DATA:
        sections = [_of_batch(finals, data, batch) for batch in sorted(BATCHES)]
        if any(sections):
            kept = " Held out: no default was chosen with it." if data in HELD_OUT else ""
            n, m = SIZES[data]
            parts += [f"## {data.capitalize()}", f"{n:,} training pairs, {m:,} held-out pairs.{kept}"]
            parts += [section for section in sections if section]
    return "\n\n".join([*parts, settings(STUDY, results, CHOSEN, "validation", 1)])


def _of_batch(finals: Mapping[str, Any], data: str, batch: int) -> str:
    """Return the tables of a data set and batch size; empty without finished runs."""
    columns = {visits: found for visits in sorted(VISITS) if (found := recalls(finals, data, batch, visits))}
    if not columns:
        return ""
    first, second = [], []
    for method in METHODS:
        cells = [found.get(method, {}).values() for found in columns.values()]
        first.append([method, *(f"{mean(x):.1f} ± {_error([*x]):.1f}" if x else "" for x in cells)])
        second.append([method, *(_gain(found, method) for found in columns.values())])
    head = [*map(str, columns)]
    return "\n\n".join(
        [
            f"### {data.capitalize()}, batch {batch}",
            table(["visits per row", *head], first),
            table(["minus the better", *head], second),
        ]
    )


def _gain(recall: Recall, method: str) -> str:
    base = better(recall)
    if base is None or method not in recall or method == base:
        return ""
    differences = gaps(recall, method, base)
    if len(differences) < 2:
        return ""
    return f"**{paired(differences)}**" if above(recall, method) else paired(differences)


def goal(finals: Mapping[str, Any]) -> str:
    """Return the shares of cells with small batches and many visits in which each method is above both baselines."""
    cells = [
        found
        for data in DATA
        for batch in BATCHES
        for visits in VISITS
        if batch <= LARGEST
        and visits >= FEWEST
        and better(found := recalls(finals, data, batch, visits)) is not None
        and any(method in found for method in PAPERS)
    ]
    won = sum(any(method in found and above(found, method) for method in PAPERS) for found in cells)
    body = []
    for method in METHODS:
        own = [found for found in cells if method in found]
        if own and method not in BASES:
            gain = mean(mean(gaps(found, method, str(better(found)))) for found in own)
            body.append([method, f"{sum(above(found, method) for found in own)} of {len(own)}", f"{gain:+.1f}"])
    about = (
        f"In {won} of {len(cells)} finished cells with batch {LARGEST} or less and {FEWEST} visits or more, at least "
        f"one of the papers' {len(PAPERS)} methods is more than two standard errors above both InfoNCE and DCL. By "
        "method, with its mean difference from the better one of the two:"
    )
    return about + "\n\n" + table(["", "cells above both", "mean difference"], body)


# -- the picture ---------------------------------------------------------------------------------------------------


def plot(results: Results, target: Path) -> None:
    """Draw the gain over the better one of InfoNCE and DCL against visits, a panel per data set and batch size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    finals, shown = STUDY.finals(results), [method for method in METHODS if method not in BASES]
    figure, axes = plt.subplots(len(DATA), len(BATCHES), figsize=(13, 11), sharex=True, sharey="row", squeeze=False)
    for row, data in zip(axes, DATA, strict=True):
        for panel, batch in zip(row, sorted(BATCHES), strict=True):
            panel.axhline(0, color="black", linewidth=0.8)
            for number, method in enumerate(shown):
                points = _points(finals, data, batch, method)
                style = {"marker": "o", "markersize": 3, "linestyle": "-" if method in PAPERS else ":"}
                panel.errorbar(*points, color=f"C{number}", label=method, linewidth=1, **style)
            panel.set_title(f"{data}, batch {batch}", fontsize=9)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sorted(VISITS), [*map(str, sorted(VISITS))])
            panel.minorticks_off()
    figure.supxlabel("visits per row")
    figure.supylabel("R@1 minus that of the better one of InfoNCE and DCL, points")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=8)
    figure.set_layout_engine("constrained")
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _points(finals: Mapping[str, Any], data: str, batch: int, method: str) -> tuple[list[float], ...]:
    """Return visits, mean differences and their standard errors."""
    found = []
    for visits in sorted(VISITS):
        recall = recalls(finals, data, batch, visits)
        base = better(recall)
        if base is not None and method in recall and len(differences := gaps(recall, method, base)) > 1:
            found.append((visits, mean(differences), _error(differences)))
    return tuple([*column] for column in zip(*found, strict=True)) if found else ([], [], [])
