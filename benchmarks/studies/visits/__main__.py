"""Study of many visits per row: gain of methods with state per sample over InfoNCE and DCL.

    python -m benchmarks.studies.visits tune   [--data digits ...] [--methods ...] [--minutes 60]
    python -m benchmarks.studies.visits final  [--data ...] [--methods ...] [--batches ...] [--visits ...]
    python -m benchmarks.studies.visits gamma  [--data digits glyphs]   # further runs of SogCLR, for its gamma
    python -m benchmarks.studies.visits report   # results/visits.md, with the hours that are left
    python -m benchmarks.studies.visits plot     # results/visits.png

``benchmarks.studies.visits.data`` describes the data sets; ``icons`` needs npm once. Every epoch visits each row once,
so that the number of epochs is that of visits. Each length is a run of its own, with a cosine of its own length.

Learning rate, temperature, and gamma, rho, prototypes, length and decay where they exist are chosen one after another,
for each method and data set, at batch 8 with 20 epochs, by the mean recall of two seeds on other pairs than those held
out for the final runs. All batch sizes and lengths use them. ``docstrings`` and ``icons`` come last: no default is
chosen with them. Each finished run is a line of ``results/visits.jsonl.gz`` and is not run again; all runs are made by
one process with one thread, which can be stopped at any moment.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import paired, standard_error, table
from benchmarks.studies.search import TUNE_SEED, Job, Results, by_seed, provenance, settings
from benchmarks.studies.visits.data import DATA, HELD_OUT, SIZES
from benchmarks.studies.visits.runs import (
    ARMS,
    BASES,
    BATCHES,
    FURTHER,
    GRIDS,
    METHODS,
    PAPERS,
    STUDY,
    TUNED_AT,
    VISITS,
    WEIGHED_AT,
    WEIGHT_SEEDS,
    WEIGHTS,
    carry_out,
    missing_weights,
    name,
    plan,
    score,
    waiting,
    weights,
)

LARGEST, FEWEST = 16, 20  # batch, and visits per row, of the cells of the goal
ABOUT = """\
R@1 among the held-out pairs, mean of both directions, in per cent: mean ± standard error over five seeds, by the number
of visits of each row, which is that of epochs; each is a run of its own (80 visits: batch 16 and 64 only). The
incomplete batch of an epoch is left out.
In parentheses: difference from the better one of InfoNCE and DCL in the same column, mean of the differences by seed ±
standard error; bold: more than two standard errors above both.

Learning rate, temperature and the other settings of a method are chosen one after another on each data set, at batch 8
with 20 visits, by the mean recall of two other seeds on other pairs, which on digits differ only in those held out. All
cells use these settings."""
WON = (
    f"finished cells with batch {LARGEST} or less and {FEWEST} visits or more, at least one of the papers' "
    f"{len(PAPERS)} methods is more than two standard errors above both InfoNCE and DCL. By method: mean difference "
    "from the better one of the two, least to greatest, and the number of cells above both. The first table has the "
    f"cells with {FEWEST} visits or more; the second one those of them with batch {LARGEST} or less, by data set; the "
    f"third one all cells with batch {LARGEST} or less, by visits."
)
TRIED = "R@1 in per cent at batch 8 with 20 visits, mean of the two seeds of the tuning (FastCLIP: the final gamma)."
WEIGHED = (
    "SogCLR again, with the other settings as chosen: mean ± standard error of five more seeds, on the pairs of the "
    "tuning. In parentheses: differences from gamma 0.9 by seed. The means are over "
    f"the rows with batch {LARGEST} or less and {FEWEST} visits or more."
)
CHOSEN = "R@1 in per cent, mean of the two seeds of the tuning. The chosen settings are bold."


class Column:
    """Recall by method and seed at one number of visits, of the methods with at least two finished seeds."""

    def __init__(self, finals: Mapping[str, Any], data: str, batch: int, visits: int) -> None:
        found = {m: by_seed(finals.get(name(data, m, batch, visits), []), "test/recall") for m in METHODS}
        self.data, self.batch, self.visits = data, batch, visits
        self.recall = {method: seeds for method, seeds in found.items() if len(seeds) > 1}
        bases = [base for base in BASES if base in self.recall]
        # the better one of InfoNCE and DCL, once both have finished
        self.base = max(bases, key=lambda base: mean(self.recall[base].values())) if len(bases) == 2 else None

    def gaps(self, method: str, base: str | None = None) -> list[float]:
        """Return the differences from ``base``, by default the better one; empty for fewer than two common seeds."""
        ours, theirs = self.recall.get(method, {}), self.recall.get(base or self.base or "", {})
        gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        return gaps if len(gaps) > 1 else []

    def above(self, method: str) -> bool:
        """Return whether a method is more than two standard errors above both InfoNCE and DCL."""
        return all((gaps := self.gaps(method, base)) and mean(gaps) > 2 * standard_error(gaps) for base in BASES)

    def cell(self, method: str) -> str:
        if method not in self.recall:
            return ""
        values = [*self.recall[method].values()]
        shown, gaps = f"{mean(values):.1f} ± {standard_error(values):.1f}", self.gaps(method)
        gain = f" ({paired(gaps)})" if gaps and method not in BASES else ""
        return f"**{shown}{gain}**" if gain and self.above(method) else shown + gain


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals, (count, left) = STUDY.finals(results), plan(results)
    seeds = [run["job"]["seed"] for run in results.values()]
    tuned, weighed = (sum(map(is_one, seeds)) for is_one in (TUNE_SEED.__eq__, WEIGHT_SEEDS.__contains__))
    parts = [
        "# Many visits per row",
        provenance([*results.values()], "benchmarks/studies/visits/__main__.py"),
        f"{tuned} of the runs, with two seeds each, choose settings, and {weighed} more are for gamma; the others are "
        f"final. {f'{count:,} final runs are missing, about {left:.1f} hours' if count else 'None is missing'}.",
        ABOUT,
        goal(finals),
        "![Gain over the better one of InfoNCE and DCL against visits per row](visits.png)",
    ]
    for data, batch in itertools.product(DATA, sorted(BATCHES)):
        columns = [column for visits in sorted(VISITS) if (column := Column(finals, data, batch, visits)).recall]
        if columns:
            kept = "; no default was chosen with these pairs" if data in HELD_OUT else ""
            n, m = SIZES[data]
            rows = [[method, *(column.cell(method) for column in columns)] for method in METHODS]
            head = ["visits per row", *(str(column.visits) for column in columns)]
            parts += [f"## {data.capitalize()}, batch {batch}", f"{n:,} training pairs, {m:,} held-out pairs{kept}."]
            parts += [table(head, rows)]
    parts += ["## Weight of the newest value", TRIED, gammas(results), WEIGHED, further_gammas(results)]
    return "\n\n".join([*parts, settings(STUDY, results, CHOSEN, "validation", 1)])


def cells(finals: Mapping[str, Any]) -> list[Column]:
    """Return the cells in which a method of the papers and both baselines have finished."""
    every = (Column(finals, *cell) for cell in itertools.product(DATA, sorted(BATCHES), sorted(VISITS)))
    return [column for column in every if any(map(column.gaps, PAPERS))]


def goal(finals: Mapping[str, Any]) -> str:
    """Return the number of cells with small batches and many visits in which methods are above both baselines."""
    every = cells(finals)
    small = [column for column in every if column.batch <= LARGEST]
    many = [column for column in small if column.visits >= FEWEST]
    won = sum(any(map(column.above, PAPERS)) for column in many)
    by_data = {data: [column for column in many if column.data == data] for data in DATA}
    by_visits = {
        f"{visits} visits": [column for column in small if column.visits == visits] for visits in sorted(VISITS)
    }
    tables = [_by_batch(every), _gains_table(by_data), _gains_table(by_visits)]
    return "\n\n".join([f"In {won} of {len(many)} {WON}", *tables])


def summary() -> str:
    """Return the table of the gains over the better one of InfoNCE and DCL, by method and batch size."""
    return _by_batch(cells(STUDY.finals(STUDY.finished())))


def _by_batch(every: Sequence[Column]) -> str:
    many = [column for column in every if column.visits >= FEWEST]
    found = {f"batch {batch}": [column for column in many if column.batch == batch] for batch in sorted(BATCHES)}
    small = {f"4 to {LARGEST}": [column for column in many if column.batch <= LARGEST]}
    return _gains_table({**found, **small})


def _gains_table(found: Mapping[str, Sequence[Column]]) -> str:
    found = {head: columns for head, columns in found.items() if columns}
    body = [[m, *(_gain(m, columns) for columns in found.values())] for m in METHODS if m not in BASES]
    return table(["", *(f"{head}, {len(columns)} cells" for head, columns in found.items())], body)


def _gain(method: str, columns: Sequence[Column]) -> str:
    if not (gains := [mean(gaps) for column in columns if (gaps := column.gaps(method))]):
        return ""
    won = sum(column.above(method) for column in columns)
    return f"{mean(gains):+.1f} ({min(gains):+.1f} to {max(gains):+.1f}), {won}"


def gammas(results: Results) -> str:
    """Return a table of the weights of the newest value that were tried, at the chosen rate and temperature."""
    body, grid = [], GRIDS["gamma"]
    for data, method in itertools.product(DATA, (m for m, more in FURTHER.items() if "gamma" in more)):
        arm = name(data, method, *TUNED_AT)
        if chosen := STUDY.best(arm, results):
            at = {**ARMS[arm].first, "lr": chosen["lr"], "tau": chosen["tau"]}
            jobs = [Job(arm, {**at, "gamma": gamma}, TUNE_SEED) for gamma in grid]
            body.append([data, method, *(f"{100 * score(results[job.key]):.1f}" for job in jobs)])
    means = [f"{mean(float(row[column]) for row in body):.1f}" for column in range(2, 2 + len(grid))] if body else []
    return table(["", "gamma", *map(str, grid)], [*body, ["mean", "", *means]])


def further_gammas(results: Results) -> str:
    """Return the table of the further runs of SogCLR by gamma."""
    body, means = [], []
    for data in DATA:
        total: dict[float, list[float]] = {gamma: [] for gamma in WEIGHTS}
        for batch, visits in sorted(WEIGHED_AT):
            runs = {gamma: weights(data, batch, visits, gamma, results) for gamma in WEIGHTS}
            if all(runs.values()) and all(job.key in results for jobs in runs.values() for job in jobs):
                found = {gamma: [100 * score(results[job.key]) for job in jobs] for gamma, jobs in runs.items()}
                shown = [f"{mean(values):.1f} ± {standard_error(values):.1f}" for values in found.values()]
                gains = [f" ({gain})" if gain else "" for gain in _gains(found)]
                body.append([data, str(batch), str(visits), *map("".join, zip(shown, gains, strict=True))])
                if batch <= LARGEST and visits >= FEWEST:
                    total = {gamma: total[gamma] + found[gamma] for gamma in WEIGHTS}
        if all(total.values()):
            means.append([f"{data}, mean", "", "", *_gains(total)])
    return table(["", "batch", "visits", *map(str, WEIGHTS)], [*body, *means], "lrrr")


def _gains(found: Mapping[float, Sequence[float]]) -> list[str]:
    """Format the differences of recall from that with the largest gamma, which has none."""
    base = max(found)
    gaps = {gamma: [one - other for one, other in zip(found[gamma], found[base], strict=True)] for gamma in found}
    return ["" if gamma == base else paired(gaps[gamma]) for gamma in found]


def plot(results: Results, target: Path) -> None:
    """Draw the gain over the better one of InfoNCE and DCL against visits, a panel per data set and batch size."""
    import matplotlib.pyplot as plt

    finals, ticks = STUDY.finals(results), sorted(VISITS)
    sets = [data for data in DATA if any(arm.startswith(f"{data}: ") for arm in finals)]
    options: dict[str, Any] = {"sharex": True, "sharey": "row", "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(len(sets), len(BATCHES), figsize=(13, 2.5 + 2.2 * len(sets)), **options)
    for panel, (data, batch) in zip(axes.flat, itertools.product(sets, sorted(BATCHES)), strict=True):
        columns = [Column(finals, data, batch, visits) for visits in ticks]
        panel.axhline(0, color="black", linewidth=0.8)
        for number, method in enumerate(method for method in METHODS if method not in BASES):
            points = [(c.visits, mean(gaps), standard_error(gaps)) for c in columns if (gaps := c.gaps(method))]
            style = {"color": f"C{number}", "linestyle": "-" if method in PAPERS else ":", "label": method}
            panel.errorbar(*zip(*points, strict=True) if points else ([], []), marker=".", linewidth=1, **style)
        panel.set_title(f"{data}, batch {batch}", fontsize=9)
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(visits) for visits in ticks])
    figure.supxlabel("visits per row")
    figure.supylabel("gain over the better one\nof InfoNCE and DCL, points", fontsize=9)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=8)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    describe: dict[str, Any] = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    root = argparse.ArgumentParser("python -m benchmarks.studies.visits", **describe)
    root.add_argument("command", choices=("tune", "final", "gamma", "report", "plot"))
    for option, values, kind in (
        ("--data", DATA, str), ("--methods", METHODS, str), ("--batches", BATCHES, int), ("--visits", VISITS, int)
    ):  # fmt: skip
        root.add_argument(option, nargs="+", type=kind, choices=values, default=[*values])
    root.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this time")
    args = root.parse_args(argv)
    print("{:,} final runs are missing, about {:.1f} hours".format(*plan(STUDY.finished())))
    if args.command in ("tune", "final"):
        cells = itertools.product(args.data, args.batches, args.visits, args.methods)
        named = (name(data, method, batch, visits) for data, batch, visits, method in cells)
        arms = [arm for arm in named if arm in ARMS]
        carry_out(lambda results: waiting(arms, args.command == "final", results), args.minutes)
    elif args.command == "gamma":
        carry_out(lambda results: missing_weights(args.data, results), args.minutes)
    elif args.command == "report":
        STUDY.beside(".md").write_text(page(STUDY.finished()).rstrip() + "\n")
    else:
        plot(STUDY.finished(), STUDY.beside(".png"))


if __name__ == "__main__":
    main()
