"""Page of the study of the default, from the finished runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks.report import mean_spread, table
from benchmarks.studies.default import arms
from benchmarks.studies.default.arms import (
    BATCHES,
    DEFAULT,
    IN_TIME,
    QUEUES,
    REFERENCE,
    ROWS,
    SETS,
    SHORT,
    STUDY,
    TIMED,
    VARIED,
)
from benchmarks.studies.default.tasks import DIM, PAIRS, SAMPLES
from benchmarks.studies.default.training import WARMUP
from benchmarks.studies.search import SEEDS, Job, Results, by_seed, difference, provenance, settings

MEASURES = {
    "glyphs": "R@1 among the held-out pairs, mean of image to name and name to image",
    "icons": "zero-shot accuracy among 500 names, on families of icons that are not in the training data",
    "words": "R@1 among 1,024 held-out synsets, mean of words to definition and definition to words, and of four such "
    "pools",
    "faces": "R@1 from one face of a held-out character to another one, among all characters; one modality",
    "unseen": "`packages`: short descriptions of Debian packages and first paragraphs of long ones, with the measure "
    "of the words. `emoji`: two designs of an emoji, 1,195 emoji in training (one modality); share of held-out images "
    "whose nearest image in another design is the same emoji.",
    "small": "`few`: 1,024 of the glyphs, with the measure of the glyphs. `digits`: R@1 between the left and the right "
    "halves of 256 written digits, mean of both directions, after training on 1,285 others. Each sample is seen 64 "
    "times (`few`) or 51 times (`digits`).",
}
AGAINST = (
    "Recall of the default minus that of each loss at its best setting, in percentage points: mean of the differences "
    "by seed ± their standard error."
)
BRACKETS = "The values in brackets are the recall of the default minus that of the row."
RECALL = "test/recall"
WITH_MOMENTUM = (
    f"`{arms.MOMENTUM}`: features of a momentum copy with the decay 0.99, in a memory of 128 samples, at the learning "
    "rate of the rule and at twice this rate. All other settings are those of the library. The losses with a queue of "
    f"a momentum encoder are tuned, at batch {VARIED} also their queues. The values in brackets are differences from "
    "the better of these two losses."
)
WITH_LONG = (
    f"In all other sections the learning rate rises during the first {100 * WARMUP:.0f} % of a run and then falls to "
    "zero. The first table shows longer warm-ups: validation recall, one seed, at multiples of the learning rate of "
    f"the rule. `{arms.LONG_RUN}`: runs of {4 * SAMPLES:,} samples; 19 % of these are as many as 75 % of the other "
    "runs. The second table has the recall on the test half with a warm-up over "
    f"{100 * arms.LONG_WARMUP:.0f} % of the run. `recommended` has twice the rule's rate there, without tuning, and "
    f"three times with `{arms.NEW}`, which is `compopt.recommended(..., candidates=None, momentum=True)`. For other "
    "losses, learning rate and temperature are chosen again, starting from the settings that were chosen with the "
    f"short warm-up, and at batch {VARIED} also the queues. iSogCLR, FastCLIP and NeuCLIP are those of the papers "
    "(the reference is the positive; gamma falls along a cosine; Algorithm 1 with a learned temperature), and their "
    "rho is chosen too. The values in brackets are the gain over the same loss with the short warm-up, where "
    "`recommended` has the rule's rate. The third table compares "
    "`compopt.recommended(..., candidates=None, momentum=True)` with the best tuned loss of each cell, chosen by its "
    "recall on the test half among all but the default's own estimator with tuned settings, and has their differences "
    "in brackets."
)
WITH_PUBLISHED = (
    f"The methods of the papers at batch {VARIED} with {arms.LONG}, 2 visits per row (faces: 10.6), and in brackets "
    "their difference from DCL with the same warm-up. Rate, temperature and `rho` are tuned. Not tuned: gamma, 0.8 for "
    "SogCLR and iSogCLR, and from 1 to 0.2 along the cosine for FastCLIP; the step size of iSogCLR's temperatures, "
    "0.01 (faces: 0.03); NeuCLIP's 1,024 prototypes."
)
WITH_CANDIDATES = (
    "`K candidates`: the positive counts in the denominator, as one of so many candidates. "
    "`compopt.recommended(dim, n, batch_size, mode)` has 1,000, and `recommended` of this page none."
)
UNSEEN = (
    "Neither data set was used to choose the default, its momentum features or the learning rates. "
    "Each of the other losses is tuned on the validation half, as above."
)
EXPLAINED = (
    f"The table shows why accumulated micro-batches of {arms.MICRO} have a lower recall than DCL on the whole window "
    f"of 256. `{arms.IDEAL[0]}`: DCL on the window, with gradients of the candidates only in their own micro-batch, at "
    "the settings of `DCL, 256 cached`. This is the limit of a memory of the whole window, with features of the "
    "current weights. `balanced`: the gradient of the positive with respect to a candidate is multiplied by the share "
    f"of the negatives that have a gradient, as in the default. `{arms.WINDOW}`: the default with a memory of the "
    f"length of the window. `{arms.HALF}`: the default with half its learning rate. The values in brackets are "
    f"differences from `DCL, 256 cached`, in rows with `{arms.LONG}` from DCL with this warm-up."
)
# losses whose learning rates are compared with the rule, at the batch sizes whose rate by the rule is on the grids
RULED, RULED_BATCHES, FACTORS = ("DCL", "Memory", "MoCo, DCL, moved"), (16, 64, 256, 1024), (0.25, 0.5, 1.0, 2.0, 4.0)
MULTIPLES = sorted({*FACTORS, 3.0})  # of the rule's rate, in any table
RULE = (
    "The learning rate of the default is 0.001 times the square root of the number of samples per update, at most "
    f"{arms.LARGEST_RATE:g}. The first table has the recall that this rule loses: validation recall at the best rate "
    "of the grid minus that at the rate of the rule, in percentage points; the number in brackets is the best rate as "
    "a multiple of that of the rule. One seed, temperature 0.07, all other settings at the initial values of the "
    "search. `Memory` is the estimator of the default. Two seeds differ by about one point. The second table has the "
    "mean and the largest loss of recall over all cells, if all rates are multiplied by a factor, and if each data set "
    "has a separate factor, which is the best on average over its batch sizes."
)
Finals = Mapping[str, list[dict[str, Any]]]
OURS = ("Memory", "MoCo, DCL, moved")  # the default itself with tuned settings
# for the tables on other pages
OVERVIEW, SMALL = ("InfoNCE", "DCL", DEFAULT), 16
# title of a row -> loss, in the first table of README
FIRST = {
    "InfoNCE": "InfoNCE",
    "DCL: InfoNCE without the positive in the denominator": "DCL",
    "MoCo with DCL: momentum encoder, queue tuned": "MoCo, DCL",
    "`compopt.recommended(candidates=None)`, not tuned": f"{DEFAULT}, {arms.LONG}, {arms.TWICE}",
    "`recommended(candidates=None, momentum=True)`, not tuned": f"{DEFAULT}, {arms.NEW}, {arms.LONG}, {arms.THRICE}",
}
COLUMNS = {**{f"batch {batch}": str(batch) for batch in BATCHES}, "16 x 16": "16 x 16", "256 cached": "256 cached"}


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals = STUDY.finals(results)
    known = [run for run in results.values() if run["job"]["arm"] in STUDY.arms]
    about = (
        f"Every run trains small encoders from scratch (features of dimension {DIM}) on {SAMPLES:,} samples, drawn "
        f"from {PAIRS:,} pairs (faces: 6,167 characters). The tables have recall in per cent on the test half: mean ± "
        f"standard deviation of the seeds {', '.join(map(str, SEEDS))}. For every loss in every cell, the learning "
        "rate and then the temperature are chosen on the validation half with another seed, from grids that extend "
        f"beyond the best value on both sides. `{DEFAULT}`, which is `compopt.recommended(dim, n, batch_size, mode, "
        "candidates=None)`, is not tuned: its learning rate is 0.001 times the square root of the number of samples "
        f"per update, at most {arms.LARGEST_RATE:g}. `16 x 16`: micro-batches of 16, accumulated to 256. `256 cached`: "
        "a batch of 256 with forward passes of 16 samples, as in a gradient cache. `mined batches`: batches of hard "
        "negatives that a teacher selects before training, similar to B3 (Thirukovalluru et al., 2025); the teacher is "
        f"another run of `{DEFAULT}`, whose samples are not counted. The size of the clusters (16 or 4) and the "
        f"number of nearest neighbours that are skipped (at most {arms.FURTHEST}) are chosen before the learning rate "
        "(`benchmarks/studies/default/mining.py`). `MoCo, DCL, moved`: the queue stores each key minus the mean of "
        "the keys of its batch and adds the mean of the current keys, as the memory of the default does with "
        f"features. Length and momentum of this queue, and of that of `MoCo, DCL`, are chosen at batch {SMALL}, after "
        "the temperature; at other batch sizes, and for `MoCo`, they are 1,024 and 0.99. Empty cells have not been "
        "run."
    )
    parts = [
        "# Comparison of losses on four data sets",
        provenance(known, "benchmarks/studies/default/__main__.py"),
        about,
    ]
    for task in SETS:
        parts += [f"## {task.capitalize()}", f"Measure: {MEASURES[task]}.", _of_task(finals, task)]
    parts += ["## Differences from the default", AGAINST, _differences(finals), *_at_equal_time(finals)]
    parts += ["## Accumulation and a gradient cache", EXPLAINED, _accumulation(finals)]
    more = (
        f"Batch {VARIED}, without tuning. The values in brackets are the recall of the default minus that of the "
        "variant."
    )
    parts += ["## Variants of the default", more, variants()]
    parts += ["## The positive in the denominator", WITH_CANDIDATES, candidates()]
    parts += ["## Momentum features", WITH_MOMENTUM, momentum()]
    parts += ["## A longer warm-up", WITH_LONG, by_warmup(), long_warmup(), best_peers(), long_warmup_unseen()]
    parts += ["### Methods of the papers", WITH_PUBLISHED, published()]
    parts += ["## Data sets that were not used before", f"{MEASURES['unseen']} {UNSEEN} {BRACKETS}", unseen_sets()]
    parts += ["## Small data sets", f"{MEASURES['small']} {BRACKETS}", small_sets()]
    parts += ["## The rule for the learning rate", RULE, *_regrets(results)]
    chosen = "Validation recall in per cent. The chosen settings are bold."
    return "\n\n".join([*parts, settings(STUDY, results, chosen, "recall", 1)])


def overview() -> str:
    """Return a table of InfoNCE, DCL and the default, by data set and batch size."""
    finals = _complete()
    body = [
        [task, loss, *(_recall(finals.get(f"{task}: {loss}, {batch}", [])) for batch in BATCHES)]
        for task in SETS
        for loss in OVERVIEW
    ]
    return table(["", "", *(f"batch {batch}" for batch in BATCHES)], body, "ll" + "r" * len(BATCHES))


def first() -> str:
    """Return a table of recall at the small batch size: common losses, the best other one and the default."""
    results = STUDY.finished()
    finals = _complete()
    body = []
    for title, loss in FIRST.items():
        arms_of = [_better_warmup(finals, results, f"{task}: {loss}") for task in SETS]
        body.append([title, *(_recall(finals.get(arm, [])) for arm in arms_of)])
    return table([f"batch {SMALL}", *SETS], body)


def _better_warmup(finals: Finals, results: Results, loss: str) -> str:
    """Return the arm of a loss at the small batch size, with the warm-up that is better on validation data."""
    found = [arm for name in (loss, f"{loss}, {arms.LONG}") if (arm := f"{name}, {SMALL}") in finals]
    tuned = [arm for arm in found if STUDY.arms[arm].grids]
    return max(tuned, key=lambda arm: STUDY.validation(arm, results)) if tuned else f"{loss}, {SMALL}"


def variants() -> str:
    """Return a table of recall of the default with one change."""
    return _variants(arms.VARIANTS)


def candidates() -> str:
    """Return a table of recall of the default with the positive in the denominator."""
    return _variants(arms.CANDIDATES)


def _variants(changes: Iterable[str]) -> str:
    return _beside_default({DEFAULT: DEFAULT, **{change: f"{DEFAULT}, {change}" for change in changes}}, VARIED)


def _beside_default(rows: Mapping[str, str], batch: int) -> str:
    """Return a table of recall, with the default's advantage, on all data sets; ``rows``: title -> name of the loss."""
    finals, body = _complete(), []
    for told, loss in rows.items():
        cells = [_with_gap(finals, task, loss, batch) for task in SETS]
        if any(cells):
            body.append([told, *cells])
    return table(["", *SETS], body)


def small_sets() -> str:
    """Return a table of recall on small data sets, with the advantage of the default."""
    return _by_set(arms.SMALL_SETS, arms.SMALL_BATCHES, ("InfoNCE", "DCL", f"{DEFAULT}, {SHORT}", DEFAULT))


def _by_set(sets: Sequence[str], batches: Sequence[int], losses: Sequence[str]) -> str:
    """Return a table of recall by data set and batch size, with the advantage of the default."""
    finals, body = _complete(), []
    for task, loss in product(sets, losses):
        cells = [_with_gap(finals, task, loss, batch) for batch in batches]
        if any(cells):
            body.append([task, loss, *cells])
    return table(["", "", *(f"batch {batch}" for batch in batches)], body, "ll" + "r" * len(batches))


def momentum() -> str:
    """Return a table of recall with momentum features, with their advantage over the best tuned momentum encoder."""
    finals, body = _complete(), []
    for task, loss in product(SETS, (*QUEUES, DEFAULT, *(f"{DEFAULT}, {name}" for name in arms.MOMENTUM_RATES))):
        row = []
        for batch in arms.MOMENTUM_BATCHES:
            runs = finals.get(f"{task}: {loss}, {batch}", [])
            rivals = [by_seed(finals.get(f"{task}: {rival}, {batch}", []), RECALL) for rival in QUEUES]
            best = max(rivals, key=lambda found: sum(found.values()))
            row.append(_with(runs, "" if loss in QUEUES else difference(by_seed(runs, RECALL), best)))
        if any(row):
            body.append([task, loss, *row])
    return table(["", "", *(f"batch {batch}" for batch in arms.MOMENTUM_BATCHES)], body, "llrrr")


def by_warmup() -> str:
    """Return a table of validation recall by warm-up and learning rate."""
    results = STUDY.finished()
    short = f"warm-up {100 * WARMUP:.0f} %"  # the search of `Memory` begins with the settings of the default
    rows = {"Memory": (DEFAULT, short)}
    rows |= {f"{loss}, {name}": (loss, name) for loss, name in product(arms.UNTUNED, arms.WARMUPS)}
    rows |= {f"{DEFAULT}, {queue}, {arms.LONG}": (f"{DEFAULT}, {queue}", arms.LONG) for queue in arms.LENGTHS}
    body = _by_rate(results, rows, VARIED)
    many = f"{DEFAULT}, {arms.LONG_RUN}"
    rows = {f"{many}, {name}": (many, name) for name in arms.LONG_RUN_WARMUPS}
    body += _by_rate(results, rows, arms.LONG_RUN_BATCH)
    return table(["batch", "", "", "rate", *SETS], body, "rllr" + "r" * len(SETS))


def _by_rate(results: Results, rows: Mapping[str, tuple[str, str]], batch: int) -> list[list[str]]:
    """Return lines of validation recall by learning rate; ``rows``: name of the loss in the arms -> its titles."""
    body = []
    for name, titles in rows.items():
        found = {task: _by_factor(results, f"{task}: {name}, {batch}", batch) for task in SETS}
        for factor in MULTIPLES:
            cells = [f"{found[task][factor]:.1f}" if factor in found[task] else "" for task in SETS]
            if factor >= 1 and any(cells):
                body.append([str(batch), *titles, f"{factor:g}", *cells])
    return body


def long_warmup(sets: Sequence[str] = SETS, batches: Sequence[int] = arms.MOMENTUM_BATCHES, gains: bool = True) -> str:
    """Return a table of recall with a long warm-up, and the gains over the short one."""
    finals, body = _complete(), []
    rates = {name: f", {title}" for name, title in arms.LONG_UNTUNED.items()}
    for batch, loss in product(batches, (*arms.LONG_TUNED, *arms.LONG_PUBLISHED, *arms.LONG_UNTUNED)):
        row = []
        for task in sets:
            names = (loss, f"{loss}, {arms.LONG}{rates.get(loss, '')}")
            before, after = (finals.get(f"{task}: {name}, {batch}", []) for name in names)
            row.append(_compared(after, before if gains else []))
        if any(row):
            body.append([str(batch), loss, *row])
    return table(["batch", "", *sets], body, "rl" + "r" * len(sets))


def small_batches() -> str:
    """Return the table of :func:`long_warmup` without the gains."""
    return long_warmup(gains=False)


def published() -> str:
    """Return a table of recall of the papers' methods, with their difference from DCL with the long warm-up."""
    finals, body = _complete(), []
    names = {"DCL": f"DCL, {arms.LONG}", "DCL, warm-up 10 %": "DCL"}
    for title, name in (names | {loss: f"{loss}, {arms.LONG}" for loss in arms.LONG_PUBLISHED}).items():
        row = []
        for task in SETS:
            runs, base = (finals.get(f"{task}: {each}, {VARIED}", []) for each in (name, names["DCL"]))
            row.append(_compared(runs, [] if title == "DCL" else base))
        body.append([title, *row])
    return table([f"batch {VARIED}", *SETS], body)


def best_peers(sets: Sequence[str] = SETS, batches: Sequence[int] = arms.MOMENTUM_BATCHES) -> str:
    """Return a table of the best tuned loss of every cell, and of momentum features, with their difference from it."""
    finals, body, ours = _complete(), [], f"{DEFAULT}, {arms.NEW}"
    new = f"{ours}, {arms.LONG}, {arms.LONG_UNTUNED[ours]}"
    peers = [name for loss in (*ROWS, *arms.PUBLISHED) if loss not in OURS for name in (loss, f"{loss}, {arms.LONG}")]
    for task in sets:
        best, mine = [], []
        for batch in batches:
            found = {name: finals[arm] for name in peers if (arm := f"{task}: {name}, {batch}") in finals}
            name = max(found, key=lambda name: sum(by_seed(found[name], RECALL).values()), default="")
            best.append(f"{_recall(found[name])}: {name}" if name else "")
            runs = finals.get(f"{task}: {new}, {batch}", [])
            mine.append(_compared(runs, found.get(name, [])))
        body += [[task, "best tuned loss", *best], [task, ours, *mine]]
    return table(["", "", *(f"batch {batch}" for batch in batches)], body, "ll" + "r" * len(batches))


def long_warmup_unseen() -> str:
    """Return the table of :func:`long_warmup` for the data sets that were not used before."""
    return long_warmup(arms.UNSEEN_SETS, arms.UNSEEN_BATCHES)


def unseen_sets() -> str:
    """Return a table of recall on the data sets that were not used before, with the advantage of the default."""
    changed = (f"{DEFAULT}, {name}" for name in arms.MOMENTUM_RATES)
    return _by_set(arms.UNSEEN_SETS, arms.UNSEEN_BATCHES, ("InfoNCE", "DCL", *QUEUES, *changed, DEFAULT))


def _with_gap(finals: Finals, task: str, loss: str, batch: int) -> str:
    """Format the recall of a cell and the advantage of the default there."""
    ours, theirs = (finals.get(f"{task}: {name}, {batch}", []) for name in (DEFAULT, loss))
    gap = difference(by_seed(ours, RECALL), by_seed(theirs, RECALL)) if loss != DEFAULT else ""
    return _with(theirs, gap)


def _complete() -> Finals:
    """Return the final runs of the arms that have all of them."""
    return {arm: runs for arm, runs in STUDY.finals(STUDY.finished()).items() if len(runs) == len(SEEDS)}


def _recall(runs: list[dict[str, Any]]) -> str:
    """Format mean and spread of recall over the seeds; empty without runs."""
    return mean_spread(list(by_seed(runs, RECALL).values()), digits=1) if runs else ""


def _with(runs: list[dict[str, Any]], gap: str) -> str:
    """Format the recall of some runs, with a difference from others in brackets if there is one."""
    return f"{_recall(runs)} ({gap})" if gap else _recall(runs)


def _compared(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    """Format the recall of some runs, and in brackets the difference from others by seed, if there are any."""
    return _with(runs, difference(by_seed(runs, RECALL), by_seed(base, RECALL)))


def _of_task(finals: Finals, task: str) -> str:
    body = []
    for loss in (*ROWS, DEFAULT):
        cells = [finals.get(f"{task}: {loss}, {column}", []) for column in COLUMNS.values()]
        if any(cells):
            body.append([loss, *(_recall(runs) for runs in cells)])
    return table(["", *COLUMNS], body)


def _at_equal_time(finals: Finals) -> list[str]:
    """Return the section of the arms that trained for the reference's time; empty if none has run."""
    body = []
    for name in TIMED:
        arm = name if name == REFERENCE else f"{name}, {IN_TIME}"
        cells = [finals.get(f"{task}: {arm}", []) for task in SETS]
        if any(cells):
            body.append([name, *(_recall(runs) for runs in cells)])
    told = (
        f"Each run takes as long as `{REFERENCE}` takes for {SAMPLES:,} samples, according to the times in "
        "`default_time.md`, with the settings chosen above. Runs with small batches therefore see fewer samples."
    )
    return ["## Comparison at equal time", told, table(["", *SETS], body)] if len(body) > 1 else []


def _accumulation(finals: Finals) -> str:
    cached, long = "DCL, 256 cached", f"DCL, {arms.LONG}, 256 cached"
    names = [cached, *(f"{loss}, 256 cached" for loss in arms.IDEAL)]
    names += [f"{DEFAULT}{change}, 16 x 16" for change in ("", f", {arms.WINDOW}", f", {arms.HALF}")]
    rates = arms.LONG, f"{arms.LONG}, {arms.TWICE}"
    names += [long, *(f"{name}, {rate}, 16 x 16" for name in (DEFAULT, f"{DEFAULT}, {arms.NEW}") for rate in rates)]
    body = []
    for name in names:
        row, baseline = [name], long if arms.LONG in name else cached
        for task in arms.GAPPED:
            base, runs = finals.get(f"{task}: {baseline}", []), finals.get(f"{task}: {name}", [])
            gap = "" if name == baseline else difference(by_seed(runs, RECALL), by_seed(base, RECALL))
            row.append(_with(runs, gap))
        body.append(row)
    return table(["", *arms.GAPPED], body)


def _by_factor(results: Results, arm: str, batch: int) -> dict[float, float]:
    """Return validation recall in per cent by multiple of the rule's rate, at the initial settings of the search."""
    first, found = STUDY.arms[arm].first, {}
    for run in results.values():
        options = dict(run["job"]["options"])
        factor = options.pop("lr", 0.0) / arms.default_rate(batch)
        begins = all(options.get(name) == value for name, value in first.items() if name != "lr")
        if run["job"]["arm"] == arm and not Job(**run["job"]).final and begins:
            found |= {each: 100 * STUDY.score(run) for each in MULTIPLES if abs(factor / each - 1) < 0.02}
    return found


def _regrets(results: Results) -> list[str]:
    """Return tables of the recall that the rule for the learning rate loses, by cell and by loss."""
    cells, body = {}, []
    for loss, task in product(RULED, SETS):
        row = []
        for batch in RULED_BATCHES:
            found = _by_factor(results, arm, batch) if (arm := f"{task}: {loss}, {batch}") in STUDY.arms else {}
            if len(found) > 2 and 1.0 in found:
                cells[loss, task, batch] = {factor: max(found.values()) - found[factor] for factor in found}
            best = max(found, key=found.__getitem__, default=1.0)
            row.append(f"{cells[loss, task, batch][1.0]:.1f} ({best:g})" if (loss, task, batch) in cells else "")
        body.append([loss, task, *row])
    by_cell = table(["", "", *(f"batch {batch}" for batch in RULED_BATCHES)], body, "llrrrr")
    return [by_cell, _over_cells(cells)]


def _over_cells(cells: Mapping[tuple[str, str, int], dict[float, float]]) -> str:
    """Return a table of the mean and largest lost recall of every loss, by a factor on the rule's rate."""
    body = []
    for loss in RULED:
        mine = {key: losses for key, losses in cells.items() if key[0] == loss}
        row = []
        for factor in FACTORS[1:-1]:
            lost = [losses[factor] for losses in mine.values() if factor in losses]
            row.append(f"{sum(lost) / len(lost):.1f}, {max(lost):.1f}" if len(lost) == len(mine) else "")
        body.append([loss, str(len(mine)), *row, _best_by_task(mine)])
    return table(
        ["", "cells", *(f"x {factor:g}" for factor in FACTORS[1:-1]), "a factor for each data set"], body, "lrrrrr"
    )


def _best_by_task(mine: Mapping[tuple[str, str, int], dict[float, float]]) -> str:
    lost: list[float] = []
    for task in SETS:
        rows = [losses for (_, name, _), losses in mine.items() if name == task]
        shared = set.intersection(*map(set, rows)) if rows else set()
        if shared:
            lost += min(([losses[factor] for losses in rows] for factor in sorted(shared)), key=sum)
    return f"{sum(lost) / len(lost):.1f}, {max(lost):.1f}"


def _differences(finals: Finals) -> str:
    body = []
    for task in SETS:
        for loss in ROWS:
            cells = []
            for column in COLUMNS.values():
                pair = (finals.get(f"{task}: {name}, {column}", []) for name in (DEFAULT, loss))
                cells.append(difference(*(by_seed(runs, RECALL) for runs in pair)))
            if any(cells):
                body.append([task, loss, *cells])
    return table(["", "", *COLUMNS], body, "ll" + "r" * len(COLUMNS))
