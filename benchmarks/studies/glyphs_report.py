"""Table and picture of the glyph study, from the runs that ``glyphs.py`` has finished."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.jobs import METRIC, RESULTS, Arm, Results, best, final_jobs, finished, provenance
from recipes.methods import METHODS
from recipes.plots import COLOURS, STYLE, plt, save_figure
from recipes.report import mean_spread, paired, table

BASELINES = ("infonce", "infonce-no-positive")
# Runs of SogCLR and iSogCLR, reference "none", when their positives were pulled with the sum of the weights: commits
# before 02a11b1. Nothing writes to this file any more.
SUMMED = RESULTS.with_name("glyphs_summed_positive.jsonl")


def write(arms: Sequence[Arm], args: argparse.Namespace) -> None:
    """Write ``glyphs.md`` and ``glyphs.png`` beside the file of results."""
    results = finished(args.results)
    text = [
        _head(results),
        *regime_sections(arms, results, args.trial),
        forms_section(arms, results, args.trial),
        tuning_section(arms, results, args.trial),
    ]
    path = args.results.with_suffix(".md")
    path.write_text("\n\n".join(text) + "\n")
    pictures = _draw(arms, results, args.trial, args.results.with_suffix(".png"))
    print("\n".join(f"wrote {file}" for file in (path, pictures)))


def _head(results: Results) -> str:
    return "\n".join(
        [
            "# Glyphs: every method at its best setting",
            "",
            *provenance(results),
            "- **commands**: `python -m benchmarks.studies.glyphs tune`, `final`, `regimes`, `report`",
            "",
            "R@1 on held-out pairs in percent, mean ± standard deviation over seeds. Settings were chosen on another",
            "seed and another split. The gain is against the better of the two stateless baselines, InfoNCE and DCL",
            "(decoupled contrastive learning, Yeh et al., ECCV 2022: the positive is not in the denominator), ± the",
            "standard error of the difference. Two epochs at a peak learning rate of 1e-3, batch 64, unless stated.",
            "Seconds are of two runs at a time, a thread each; those of EMC2 and of batch 32 come from a machine that",
            "was busy with other work and cannot be compared.",
        ]
    )


def regime_sections(arms: Sequence[Arm], results: Results, limit: int) -> list[str]:
    sections = []
    for regime in dict.fromkeys(arm.regime for arm in arms):
        members = [arm for arm in arms if arm.regime == regime]
        finals = {arm_name(arm): _finals(arm, results, limit) for arm in members}
        if any(finals.values()):
            sections.append(f"## {regime[0].upper()}{regime[1:]}\n\n{_table(members, finals)}")
    return sections


def arm_name(arm: Arm) -> str:
    """Title of the method, with its variant, and the batch size where it is not the usual one of its regime."""
    variant = f", {arm.variant}" if arm.variant else ""
    big = f", batch {arm.batch_size}" if arm.regime == "main" and arm.batch_size != 64 else ""
    return METHODS[arm.method].title + variant + big


def _finals(arm: Arm, results: Results, limit: int) -> list[dict[str, Any]]:
    return [results[job.key] for job in final_jobs(arm, results, limit) if job.key in results]


def _values(finals: Sequence[dict[str, Any]], metric: str = METRIC) -> list[float]:
    return [100 * result["final"][metric] for result in finals]


def _table(arms: Sequence[Arm], finals: dict[str, list[dict[str, Any]]]) -> str:
    size = arms[0].batch_size
    baselines = [arm for arm in arms if arm.method in BASELINES and arm.batch_size == size and not arm.batches]
    stateless = [_values(finals[arm_name(arm)]) for arm in baselines]
    rival = max((values for values in stateless if values), key=statistics.mean, default=[])
    head = ["method", "setting (tuned)", "image to name", "name to image", "gain", "seeds", "s per run"]
    lines = []
    for arm in arms:
        own = finals[arm_name(arm)]
        if not own:
            continue
        setting = " ".join(f"{name} {value}" for name, value in own[0]["job"]["options"].items())
        both = [mean_spread(_values(own, metric)) for metric in (METRIC, "r1_text_to_image")]
        gain = "" if arm.method in BASELINES and not arm.batches else _gain(_values(own), rival)
        seconds = f"{statistics.mean(result['seconds'] for result in own):.0f}"
        lines.append([arm_name(arm), setting, *both, gain, str(len(own)), seconds])
    return table(head, lines, "l")


def _gain(own: Sequence[float], rival: Sequence[float]) -> str:
    if not rival:
        return "-"
    difference = statistics.mean(own) - statistics.mean(rival)
    if min(len(own), len(rival)) < 2:
        return f"{difference:+.1f}"
    error = sum(statistics.variance(values) / len(values) for values in (own, rival)) ** 0.5
    return f"{difference:+.1f} ± {error:.1f}"


def forms_section(arms: Sequence[Arm], results: Results, limit: int) -> str:
    """SogCLR's two forms of the positive beside each other, each tuned over the same grid."""
    summed = finished(SUMMED)
    titles = ["regime", "method", "weight 1 (eq. 10)", "sum of the weights (h)", "difference"]
    lines = []
    for arm in arms:
        own, other = _finals(arm, results, limit), _finals(arm, summed, limit)
        if own and other:
            gaps = [a - b for a, b in zip(_values(own), _values(other), strict=True)]
            cells = [mean_spread(_values(own)), mean_spread(_values(other)), paired(gaps)]
            lines.append([arm.regime, arm_name(arm), *cells])
    head = "\n".join(
        [
            'SogCLR\'s eq. 10 pulls every positive with weight 1 (`reference="none"`). Before commit 02a11b1 it was',
            "pulled with the sum of the pair weights, as in iSogCLR. R@1 from image to name, the same grid, seeds and",
            "split; the difference is paired by seed, ± its standard error.",
        ]
    )
    return f"## The weight of the positive\n\n{head}\n\n{table(titles, lines, 'l')}"


def tuning_section(arms: Sequence[Arm], results: Results, limit: int) -> str:
    """Every grid and its best; * where that lies at an edge."""
    titles, lines = ["regime", "method", "grid", "best R@1 in tuning", "at"], []
    for arm in arms:
        chosen = best(arm, results, limit)
        if chosen:
            grid = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in arm.grid.items())
            at = _chosen(arm, chosen["job"]["options"])
            lines.append([arm.regime, arm_name(arm), grid, f"{100 * chosen['final'][METRIC]:.1f}", at])
    head = "Every combination of the values listed, one run each. *: the best lies at an edge of its grid."
    return f"## What was tuned\n\n{head}\n\n{table(titles, lines, 'l')}"


def _chosen(arm: Arm, options: dict[str, Any]) -> str:
    """The numbers that were chosen in tuning, those at an edge marked."""
    numbers = {name: values for name, values in arm.grid.items() if len(values) > 1 and not isinstance(values[0], str)}
    return " ".join(
        f"{name} {options[name]}{'*' * (options[name] in (min(values), max(values)))}"
        for name, values in numbers.items()
    )


@plt.rc_context(STYLE)
def _draw(arms: Sequence[Arm], results: Results, limit: int, path: Path) -> Path:
    """Left: R@1 against temperature while tuning.  Right: the final runs of each method and regime."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    main = [arm for arm in arms if arm.regime == "main"]
    names = list(dict.fromkeys(arm_name(arm) for arm in [*main, *arms]))
    colour = {name: COLOURS[position % len(COLOURS)] for position, name in enumerate(names)}
    for arm in main:
        points = _best_by_tau(arm, results, limit)
        left.plot(points.keys(), points.values(), "o-", color=colour[arm_name(arm)], label=arm_name(arm))
    left.set(xlabel="temperature (initial where learned)", ylabel="R@1 image to name (%)", xscale="log")
    left.set_title("Tuning: best over the other settings", loc="left")
    left.set_xticks(sorted({tau for arm in main for tau in arm.grid["tau"]}))
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter("")
    left.legend()
    drawn = [arm for arm in arms if not arm.regime.startswith("chosen")]  # those have a table
    regimes = list(dict.fromkeys(arm.regime for arm in drawn))
    for arm in drawn:
        values = _values(_finals(arm, results, limit))
        if values:
            siblings = [other for other in arms if other.regime == arm.regime]
            offset = 0.1 * (siblings.index(arm) - (len(siblings) - 1) / 2)
            place = regimes.index(arm.regime) + offset
            right.plot([place] * len(values), values, "o", color=colour[arm_name(arm)], alpha=0.35, markersize=4)
            right.plot([place - 0.045, place + 0.045], [statistics.mean(values)] * 2, color=colour[arm_name(arm)])
    right.set_xticks(range(len(regimes)), regimes)
    right.set_title("Best setting, reported seeds: each run and the mean", loc="left")
    return save_figure(figure, path)


def _best_by_tau(arm: Arm, results: Results, limit: int) -> dict[float, float]:
    """Best tuning result at each temperature of the grid, in percent."""
    points = {}
    for tau in arm.grid["tau"]:
        chosen = best(Arm(**{**vars(arm), "grid": {**arm.grid, "tau": (tau,)}}), results, limit)
        if chosen:
            points[tau] = 100 * chosen["final"][METRIC]
    return points
