"""The page and the picture of the study on text, from the runs that are finished."""

from __future__ import annotations

from statistics import mean
from typing import Any

from benchmarks.report import RESULTS as FOLDER
from benchmarks.report import mean_spread, table
from benchmarks.studies.command import provenance
from benchmarks.studies.search import SEEDS, Results
from benchmarks.studies.text_arms import BATCHES, EPOCHS, LOSSES, PAIRS, POOL, STUDY, VARIED

VARIANTS = {
    "pairs": "{loss}, 64",
    "with a hard negative": "{loss}, hard negatives",
    "repeated texts": "{loss}, repeated",
    "repeated texts, told": "{loss}, repeated and told",
}
METRICS = {"R@1": "test/recall@1", "R@10": "test/recall@10", "mean reciprocal rank": "test/mrr"}


def write(results: Results) -> None:
    """``results/text.md`` and ``text.png``."""
    finals = STUDY.finals(results)
    lines = [
        "# Text retrieval with sentence-transformers",
        "",
        *provenance(list(results.values()), "benchmarks/studies/text.py", ["sentence_transformers"]),
        "",
        f"WordNet 3.0: the words of a synset against its definition, {PAIRS:,} pairs, {EPOCHS} epochs, one small "
        f"transformer from scratch (a layer of width 64, 24 tokens), the trainer of sentence-transformers, anchors in "
        f"one direction. Test: 4,000 other synsets, each definition among {POOL:,}; in per cent, mean ± standard "
        f"deviation of the seeds {', '.join(map(str, SEEDS))}. Learning rate, then scale (1 / temperature), are chosen "
        f"on other 4,000 synsets and another seed, for each loss at each batch size; `Cached MNRL` takes those of "
        f"`MNRL`, whose gradient it has.",
        "",
        *(line for title, name in METRICS.items() for line in _by_batch(finals, title, name)),
        "## Hard negatives, and texts that repeat",
        "",
        "Batch 64, R@1, with the settings of the pairs. *Hard negative*: for every anchor the definition whose words "
        "are most like its own's (tf-idf). *Repeated texts*: every word of a synset is a pair with its definition, so "
        "that definitions and words repeat. *Told*: `add_index(data, anchors=, positives=)`, by which equal texts are "
        "never each other's negatives; for MNRL the sampler `no_duplicates`.",
        "",
        _variants(finals),
        "",
        *STUDY.settings(results, "R@10 of the validation pairs, in per cent; the chosen ones are bold.", "R@10", 1),
    ]
    (FOLDER / "text.md").write_text("\n".join(lines) + "\n")
    if finals:
        _draw(finals)


def _cell(runs: list[dict[str, Any]], metric: str = "test/recall@1") -> str:
    told = mean_spread([run["metrics"][metric] for run in runs], 100, 1)
    return told if len(runs) in (0, len(SEEDS)) else f"{told} ({len(runs)})"


def _by_batch(finals: dict[str, list[dict[str, Any]]], title: str, metric: str) -> list[str]:
    body = [[loss, *(_cell(finals.get(f"{loss}, {batch}", []), metric) for batch in BATCHES)] for loss in LOSSES]
    return [f"## {title}", "", table(["", *(f"batch {batch}" for batch in BATCHES)], body), ""]


def _variants(finals: dict[str, list[dict[str, Any]]]) -> str:
    body = [[loss, *(_cell(finals.get(name.format(loss=loss), [])) for name in VARIANTS.values())] for loss in VARIED]
    return table(["", *VARIANTS], body)


def _draw(finals: dict[str, list[dict[str, Any]]]) -> None:
    """R@1 by batch size, and by variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    arms = {f"batch {batch}": f"{{loss}}, {batch}" for batch in BATCHES}
    for axis, columns, losses in ((axes[0], arms, LOSSES), (axes[1], VARIANTS, VARIED)):
        for number, loss in enumerate(losses):
            for place, name in enumerate(columns.values()):
                values = [100 * run["metrics"]["test/recall@1"] for run in finals.get(name.format(loss=loss), [])]
                at = place + (number - len(losses) / 2 + 0.5) * 0.8 / len(losses)
                colour = f"C{list(LOSSES).index(loss)}"
                label = loss if place == 0 else None
                axis.bar(at, mean(values) if values else 0, 0.8 / len(losses), color=colour, alpha=0.6, label=label)
                axis.plot([at] * len(values), values, "k.", markersize=3)
        axis.set_xticks(range(len(columns)), list(columns))
        axis.legend(fontsize=8, ncols=2)
    axes[0].set(ylabel="R@1 among 1,000, %", title="by batch size")
    axes[1].set(title="batch 64")
    axes[1].tick_params("x", labelsize=8)
    figure.tight_layout()
    figure.savefig(FOLDER / "text.png", dpi=110)
