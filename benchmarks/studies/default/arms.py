"""Arms of the study: a loss on a data set at a batch size, and the grids of its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from benchmarks.report import RESULTS, stored
from benchmarks.studies.default.tasks import SAMPLES
from benchmarks.studies.default.training import WARMUP
from benchmarks.studies.search import Arm, Search
from recipes.batches import ORDERED, RANDOM, SPECTRAL

DEFAULT = "recommended"
SETS = ("glyphs", "icons", "words", "faces")
SMALL_SETS, SMALL_BATCHES = ("few", "digits"), (16, 64)  # with about a thousand samples, each seen some fifty times
UNSEEN_SETS, UNSEEN_BATCHES = ("packages", "emoji"), (16,)  # first used when the default was finished
RATES, TAUS = (1e-3, 2e-3, 4e-3, 8e-3), (0.05, 0.07, 0.1)
LARGE_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)  # for batches of 256 and more
LARGEST_RATE = 1.6e-2  # of the default: InfoNCE at batch 1,024 is worse with more, on all four sets (validation data)
WIDEN = {"lr": 2.0, "tau": 1.5, "rho": 2.0, "skip": 3.0, "length": 2.0}
BATCHES = (8, 16, 64, 256, 1024)
# also compared at equal time, with as many samples as fit into the time of REFERENCE (default_time.json)
TIMED = tuple(f"{loss}, {batch}" for loss in ("InfoNCE", "DCL", "MoCo", DEFAULT) for batch in (16, 64, 256))
REFERENCE, TIMES, IN_TIME = "InfoNCE, 256", "default_time", "equal time"
# initial settings in addition to learning rate and temperature
FIRST: dict[str, dict[str, Any]] = {
    "InfoNCE": {},
    "CLIP": {},
    "SigLIP": {},
    "DCL": {},
    "DCLW": {},
    "XBM": {"length": 128, "warmup": 100},
    "XBM, DCL": {"length": 128, "warmup": 100},
    "ContAccum": {"length": 128},
    "MoCo": {"length": 1024, "momentum": 0.99},
    "MoCo, DCL": {"length": 1024, "momentum": 0.99},
    "MoCo, DCL, moved": {"length": 1024, "momentum": 0.99},
    "SogCLR": {"gamma": 0.8},
    "SogCLR, positive": {"gamma": 0.8},
    "Residual": {},
    "Memory": {"length": 128},
}
# the best of the peers at batch 16, and its variant with a moved queue: their queues are tuned there too
QUEUES = ("MoCo, DCL", "MoCo, DCL, moved")
QUEUE_GRIDS = {"length": (256, 1024), "momentum": (0.98, 0.99, 0.995, 0.998, 0.999)}
# batches mined by a teacher: benchmarks/studies/default/mining.py
MINED, MINED_GRIDS = "mined", {"cluster": (16, 4), "skip": (30, 10, 100)}
FURTHEST = 900  # largest number of skipped ranks; samples of higher ranks are not hard
# additional rows: losses in batches that a sampler or the teacher chooses
CHOSEN = {
    f"{loss}, {kind} batches": (loss, kind) for loss in ("InfoNCE", "DCL", "Memory") for kind in (ORDERED, SPECTRAL)
} | {f"{loss}, {MINED} batches": (loss, MINED) for loss in ("InfoNCE", "DCL")}
ROWS = (*FIRST, *CHOSEN)
# the default with one change, not tuned either
MOMENTUM, MOMENTUM_BATCHES, VARIED, TWICE = "momentum features", (8, 16, 64), 16, "twice the rate"
MOMENTUM_RATES = {MOMENTUM: 1.0, f"{MOMENTUM}, {TWICE}": 2.0}  # multiples of the rule's learning rate
UNTUNED = {DEFAULT: DEFAULT, f"{DEFAULT}, {MOMENTUM}": MOMENTUM}  # name in the arms -> loss
# momentum features with longer queues than the 128 of the arms above: title -> length; NEW is that of the library
LENGTHS = {f"{length} {MOMENTUM}": length for length in (512, 1024)}
NEW, THRICE = f"512 {MOMENTUM}", "three times the rate"
# warm-ups that are longer than those of all other arms: title -> share of the run in which the learning rate rises
LONG, LONG_WARMUP = "warm-up 75 %", 0.75
WARMUPS = {"warm-up 50 %": (0.5, (1.0, 2.0, 4.0)), LONG: (LONG_WARMUP, (1.0, 2.0, 3.0, 4.0))}  # share, factors
# runs of four times the samples: the longest warm-up as a share of the run, or with the number of samples that it had
LONG_RUN, LONG_RUN_BATCH = "4 x samples", 64
LONG_RUN_WARMUPS = {"warm-up 10 %": WARMUP, "warm-up 19 %": LONG_WARMUP / 4, LONG: LONG_WARMUP}
# the longest one at a multiple of the rule's rate, and peers that are tuned with it
LONG_UNTUNED = {**dict.fromkeys(UNTUNED, TWICE), f"{DEFAULT}, {NEW}": THRICE}
LONG_TUNED, LONG_RATES, LONG_BATCHES = ("InfoNCE", "DCL", *QUEUES), (4e-3, 8e-3, 1.6e-2), (8, 16, 64)
# methods with a learned temperature in the forms of the papers, with this warm-up at one batch size: loss -> settings
PUBLISHED: dict[str, dict[str, Any]] = {
    "iSogCLR": {"gamma": 0.8, "rho": 1.0},
    "FastCLIP v3": {"gamma": 0.2, "rho": 1.0},  # the last gamma
    "NeuCLIP, Algorithm 1": {"rho": 1.0},
}
LONG_PUBLISHED = ("SogCLR", *PUBLISHED)
RHOS, LARGEST_TAU = (0.5, 1.0, 2.0), 0.5  # LARGEST_TAU: the largest initial temperature of these losses
VARIANTS = ("features as they were", "forces out of balance", "32 features", "512 features")
# the default with the positive in the denominator, among so many candidates: title -> number
CANDIDATES, CANDIDATES_BATCHES = {f"{number} candidates": number for number in (150, 500, 1000)}, (16, 64)
# arms that explain the gap between accumulated micro-batches and a gradient cache, on the data sets with such a gap
MICRO, WINDOW, HALF, GAPPED = 16, "256 features", "half the rate", ("glyphs", "icons")
IDEAL = ("DCL, micro-batches", "DCL, micro-batches, balanced")
SHORT = "32 features"  # the variant that also runs on small data sets


@dataclass(frozen=True, kw_only=True)
class Cell(Arm):
    """A loss in a cell of the table.

    Attributes:
        task: name of the data set.
        loss: name of the loss.
        batch: samples per call.
        accumulate: calls per update.
        forward: samples per forward pass, if fewer than those of a call (gradient cache).
        batches: kind of batches.
        samples: number of training samples seen.
        warmup: share of the run in which the learning rate rises.
    """

    task: str
    loss: str
    batch: int
    accumulate: int = 1
    forward: int = 0
    batches: str = RANDOM
    samples: int = SAMPLES
    warmup: float = WARMUP


def _cell(task: str, row: str, batch: int, accumulate: int = 1, forward: int = 0) -> Cell:
    loss, kind = CHOSEN.get(row, (row, RANDOM))
    rates = LARGE_RATES if batch * accumulate >= 256 else RATES
    mined = MINED_GRIDS if kind == MINED else {}
    first = {"lr": 4e-3, "tau": 0.07, **FIRST[loss], **{name: values[0] for name, values in mined.items()}}
    taus = {} if loss in ("CLIP", "SigLIP") else {"tau": TAUS}
    queues = QUEUE_GRIDS if loss in QUEUES and (batch, accumulate) == (16, 1) else {}
    grids = {**mined, "lr": rates, **taus, **queues}
    where = {"batch": batch, "accumulate": accumulate, "forward": forward, "batches": kind}
    return Cell(task=task, loss=loss, first=first, grids=grids, widen=WIDEN, most={"skip": FURTHEST}, **where)


def default_rate(samples: int) -> float:
    """Return the default's learning rate for a number of samples per update."""
    return min(1e-3 * samples**0.5, LARGEST_RATE)


def _default(
    task: str,
    batch: int,
    accumulate: int = 1,
    loss: str = DEFAULT,
    factor: float = 1.0,
    warmup: float = WARMUP,
    **options: int,
) -> Cell:
    """Return an arm without tuning, whose learning rate is ``factor`` times that of the rule."""
    first = {"lr": factor * default_rate(batch * accumulate), **options}
    return Cell(task=task, loss=loss, batch=batch, accumulate=accumulate, first=first, warmup=warmup)


def _arms(task: str) -> dict[str, Cell]:
    losses = [loss for loss in ROWS if (task, loss) != ("faces", "SigLIP")]
    cells = {f"{loss}, {batch}": _cell(task, loss, batch) for batch in BATCHES for loss in losses}
    cells |= {f"{DEFAULT}, {batch}": _default(task, batch) for batch in BATCHES}
    cells |= {f"{DEFAULT}, {change}, {VARIED}": _default(task, VARIED, loss=change) for change in VARIANTS}
    cells |= {
        f"{DEFAULT}, {title}, {batch}": _default(task, batch, loss=title)
        for title, batch in product(CANDIDATES, CANDIDATES_BATCHES)
    }
    cells |= _with_momentum(task, MOMENTUM_BATCHES)
    cells |= _warmups(task) | _published(task) | _long(task, LONG_BATCHES) | _untuned(task, MOMENTUM_BATCHES)
    cells |= {f"{loss}, 16 x 16": _cell(task, loss, 16, 16) for loss in ("InfoNCE", "DCL", "Residual")}
    cells |= {f"{DEFAULT}, 16 x 16": _default(task, 16, 16)}
    cells |= {f"{loss}, 256 cached": _cell(task, loss, 256, forward=16) for loss in ("InfoNCE", "DCL")}
    cells |= _explaining(task) if task in GAPPED else {}
    timed = [name for name in TIMED if name in _times(task) and name != REFERENCE]
    return cells | {f"{name}, {IN_TIME}": _in_time(task, name, cells[name]) for name in timed}


def _explaining(task: str) -> dict[str, Cell]:
    """Return an ideal memory with the settings of cached DCL, and the default with a longer memory or smaller rate."""
    cached = _cell(task, "DCL", 256, forward=MICRO)
    queue = {"loss": MOMENTUM, "length": LENGTHS[NEW], "warmup": LONG_WARMUP}
    ideal = {
        f"{loss}, 256 cached": replace(cached, loss=loss, after=f"{task}: DCL, 256 cached", grids={}) for loss in IDEAL
    }
    return {
        **ideal,
        f"DCL, {LONG}, 256 cached": _warmed(cached, after=f"{task}: DCL, 256 cached"),
        f"{DEFAULT}, {LONG}, 16 x 16": _default(task, MICRO, 16, warmup=LONG_WARMUP),
        f"{DEFAULT}, {LONG}, {TWICE}, 16 x 16": _default(task, MICRO, 16, factor=2.0, warmup=LONG_WARMUP),
        f"{DEFAULT}, {NEW}, {LONG}, 16 x 16": _default(task, MICRO, 16, **queue),
        f"{DEFAULT}, {NEW}, {LONG}, {TWICE}, 16 x 16": _default(task, MICRO, 16, factor=2.0, **queue),
        f"{DEFAULT}, {WINDOW}, 16 x 16": _default(task, MICRO, 16, loss=WINDOW),
        f"{DEFAULT}, {HALF}, 16 x 16": _default(task, MICRO, 16, factor=0.5),
    }


def _small_arms(task: str) -> dict[str, Cell]:
    cells = {}
    for batch in SMALL_BATCHES:
        cells |= {f"{loss}, {batch}": _cell(task, loss, batch) for loss in ("InfoNCE", "DCL")}
        cells |= {f"{DEFAULT}, {SHORT}, {batch}": _default(task, batch, loss=SHORT)}
        cells |= {f"{DEFAULT}, {batch}": _default(task, batch)}
    return cells


def _unseen_arms(task: str) -> dict[str, Cell]:
    losses = ("InfoNCE", "DCL", *QUEUES)
    cells = {f"{loss}, {batch}": _cell(task, loss, batch) for batch in UNSEEN_BATCHES for loss in losses}
    cells |= {f"{DEFAULT}, {batch}": _default(task, batch) for batch in UNSEEN_BATCHES}
    return cells | _with_momentum(task, UNSEEN_BATCHES) | _long(task, UNSEEN_BATCHES) | _untuned(task, UNSEEN_BATCHES)


def _with_momentum(task: str, batches: Sequence[int]) -> dict[str, Cell]:
    return {
        f"{DEFAULT}, {name}, {batch}": _default(task, batch, loss=MOMENTUM, factor=factor)
        for batch, (name, factor) in product(batches, MOMENTUM_RATES.items())
    }


def _warmed(cell: Cell, after: str) -> Cell:
    """Return a tuned arm with the long warm-up, whose search begins with the settings of the arm ``after``."""
    queues = {name: values for name, values in cell.grids.items() if name in QUEUE_GRIDS}
    return replace(cell, warmup=LONG_WARMUP, after=after, grids={"lr": LONG_RATES, "tau": TAUS, **queues})


def _long(task: str, batches: Sequence[int]) -> dict[str, Cell]:
    """Return the tuned arms with the long warm-up at some batch sizes."""
    return {
        f"{loss}, {LONG}, {batch}": _warmed(_cell(task, loss, batch), after=f"{task}: {loss}, {batch}")
        for batch, loss in product(batches, LONG_TUNED)
    }


def _published(task: str) -> dict[str, Cell]:
    """Return the published methods with the long warm-up; "SogCLR" also has arms with the short one."""
    cells = {}
    for loss in LONG_PUBLISHED:
        further = {**FIRST, **PUBLISHED}[loss]
        rhos = {"rho": RHOS} if "rho" in further else {}
        cells[f"{loss}, {LONG}, {VARIED}"] = Cell(
            task=task,
            loss=loss,
            batch=VARIED,
            warmup=LONG_WARMUP,
            first={"lr": 4e-3, "tau": 0.07, **further},
            grids={"lr": LONG_RATES, "tau": TAUS, **rhos},
            widen=WIDEN,
            most={"tau": LARGEST_TAU},
        )
    return cells


def _untuned(task: str, batches: Sequence[int]) -> dict[str, Cell]:
    """Return the arms with the long warm-up and without tuning at some batch sizes."""
    cells = {}
    for batch in batches:
        for name, loss in UNTUNED.items():
            cells[f"{name}, {LONG}, {TWICE}, {batch}"] = _default(
                task, batch, loss=loss, factor=2.0, warmup=LONG_WARMUP
            )
        longer = {"loss": MOMENTUM, "length": LENGTHS[NEW], "factor": 3.0, "warmup": LONG_WARMUP}
        cells[f"{DEFAULT}, {NEW}, {LONG}, {THRICE}, {batch}"] = _default(task, batch, **longer)
    return cells


def _warmups(task: str) -> dict[str, Cell]:
    """Return arms that only tune the default's rate, for each warm-up and length of the queue."""
    cells = {}
    for (title, (share, factors)), (name, loss) in product(WARMUPS.items(), UNTUNED.items()):
        cell = _default(task, VARIED, loss=loss, warmup=share)
        cells[f"{name}, {title}, {VARIED}"] = replace(cell, grids=_multiples(cell, factors))
    for title, length in LENGTHS.items():
        cell = _default(task, VARIED, loss=MOMENTUM, factor=2.0, warmup=LONG_WARMUP, length=length)
        cells[f"{DEFAULT}, {title}, {LONG}, {VARIED}"] = replace(cell, grids=_multiples(cell, (1.0, 1.5, 2.0)))
    for title, share in LONG_RUN_WARMUPS.items():
        cell = replace(_default(task, LONG_RUN_BATCH, warmup=share), samples=4 * SAMPLES)
        name = f"{DEFAULT}, {LONG_RUN}, {title}, {LONG_RUN_BATCH}"
        cells[name] = replace(cell, grids=_multiples(cell, (1.0, 2.0)))
    return cells


def _multiples(cell: Cell, factors: Sequence[float]) -> dict[str, tuple[float, ...]]:
    return {"lr": tuple(factor * cell.first["lr"] for factor in factors)}


@cache
def _times(task: str) -> dict[str, float]:
    """Return the measured seconds per sample of the arms compared at equal time; empty before the measurement."""
    return stored(TIMES)["results"].get(task, {}) if (RESULTS / f"{TIMES}.json").exists() else {}


def _in_time(task: str, name: str, cell: Cell) -> Cell:
    """Return an arm with the tuned settings of ``cell``, and as many whole updates as fit into the reference's time."""
    times = _times(task)
    samples = int(SAMPLES * times[REFERENCE] / times[name]) // cell.batch * cell.batch
    return replace(cell, after=f"{task}: {name}", grids={}, samples=samples)


ARMS: Mapping[str, Cell] = {
    f"{task}: {name}": cell
    for sets, arms in ((SETS, _arms), (SMALL_SETS, _small_arms), (UNSEEN_SETS, _unseen_arms))
    for task in sets
    for name, cell in arms(task).items()
}


def score(result: dict[str, Any]) -> float:
    """Return recall on the validation half."""
    return result["metrics"]["validation/recall"]


STUDY = Search(ARMS, RESULTS / "default.jsonl.gz", score)
