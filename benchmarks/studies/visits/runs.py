"""Methods, cells and runs of the study of visits."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import compopt
from benchmarks.report import RESULTS, append_run
from benchmarks.studies.default.losses import Followed, MomentumQueue
from benchmarks.studies.search import TUNE_SEED, Arm, Job, Results, Search, stamp
from benchmarks.studies.visits.data import DATA, DIM, SIZES, Pairs, load

BATCHES, VISITS, SEEDS = (8, 16, 4, 64), (20, 40, 80, 10, 5), range(5)  # in the order of the runs
TUNED_AT, TUNE_SEEDS = (8, 20), (TUNE_SEED, TUNE_SEED + 1)
# further runs of SogCLR on the pairs of the tuning, for its gamma: batch sizes and visits, values, and their seeds
WEIGHED_AT = ((4, 20), (8, 20), (8, 40), (8, 5), (16, 20), (64, 20), (64, 40), (16, 40))
WEIGHTS = (0.1, 0.3, 0.5, 0.8, 0.9)
WEIGHT_SEEDS = range(TUNE_SEED + 10, TUNE_SEED + 15)
START = {
    "lr": 3e-3, "tau": 0.1, "gamma": 0.3, "rho": 1.0, "tau_lr": 2e-3, "prototypes": 256, "length": 64, "decay": 0.97
}  # fmt: skip
GRIDS: dict[str, tuple[float, ...]] = {
    "lr": (1e-3, 3e-3, 1e-2),
    "tau": (0.05, 0.1, 0.2),
    "gamma": (0.1, 0.3, 0.5, 0.8),
    "rho": (0.5, 1.0, 2.0),
    "tau_lr": (2e-3, 1e-2),
    "prototypes": (64, 256, 1024),
    "length": (64, 256),
    "decay": (0.9, 0.97, 0.99),
}
WIDEN, MOST = {"lr": 3.0, "tau": 2.0, "rho": 2.0}, {"tau": 0.4}  # iSogCLR's temperatures stay below 0.5


# -- methods -------------------------------------------------------------------------------------------------------

BASES = INFONCE, DCL = "InfoNCE", "DCL"
OURS, MOMENTUM, MOCO = "recommended", "recommended, momentum", "MoCo with DCL"
ISOGCLR, FASTCLIP, NEUCLIP, EMC2 = "iSogCLR", "FastCLIP v3", "NeuCLIP, Algorithm 1", "EMC2, Algorithm 1"
SOGCLR, POSITIVE = "SogCLR", "SogCLR, positive"
PAPERS = (SOGCLR, POSITIVE, ISOGCLR, FASTCLIP, NEUCLIP, EMC2)
Encode = Callable[[Tensor], tuple[Tensor, Tensor]]
# builders from settings, number of training pairs, batch size, and a function that encodes training pairs
METHODS: dict[str, Callable[[Mapping[str, float], int, int, Encode], Any]] = {
    INFONCE: lambda o, n, batch, encode: compopt.InfoNCEEstimator(o["tau"]),
    DCL: lambda o, n, batch, encode: compopt.DCLEstimator(o["tau"]),
    OURS: lambda o, n, batch, encode: compopt.recommended(DIM, n, batch, tau=o["tau"]),
    MOMENTUM: lambda o, n, batch, encode: Followed(
        compopt.recommended(DIM, n, batch, momentum=True, tau=o["tau"]), o["decay"]
    ),
    MOCO: lambda o, n, batch, encode: MomentumQueue(o["tau"], int(o["length"]), o["decay"], False, unimodal=False),
    SOGCLR: lambda o, n, batch, encode: compopt.SogCLREstimator(n, o["gamma"], o["tau"]),
    POSITIVE: lambda o, n, batch, encode: compopt.SogCLREstimator(n, o["gamma"], o["tau"], reference="positive"),
    ISOGCLR: lambda o, n, batch, encode: compopt.ISogCLREstimator(n, o["gamma"], o["rho"], o["tau_lr"], o["tau"]),
    FASTCLIP: lambda o, n, batch, encode: compopt.FastCLIPEstimator(n, "v3", tau=o["tau"], rho=o["rho"]),
    NEUCLIP: lambda o, n, batch, encode: compopt.NeuCLIPEstimator(
        DIM, tau=o["tau"], prototypes=int(o["prototypes"]), rho=o["rho"], learn_tau=True, through_alpha=True
    ),
    EMC2: lambda o, n, batch, encode: compopt.EMC2Estimator(n, tau=o["tau"], proposals="dataset", encode=encode),
}
FURTHER: dict[str, tuple[str, ...]] = {  # settings beside learning rate and temperature
    MOMENTUM: ("decay",),
    MOCO: ("decay", "length"),
    SOGCLR: ("gamma",),
    POSITIVE: ("gamma",),
    ISOGCLR: ("gamma", "rho", "tau_lr"),
    FASTCLIP: ("gamma", "rho"),
    NEUCLIP: ("rho", "prototypes"),
}


# -- cells ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell(Arm):
    """A method on a data set, with a batch size and a number of visits per row."""

    data: str
    method: str
    batch: int
    visits: int


def name(data: str, method: str, batch: int, visits: int) -> str:
    return f"{data}: {method}, {batch}, {visits}"


def _cell(data: str, method: str, batch: int, visits: int) -> Cell:
    where: dict[str, Any] = {"data": data, "method": method, "batch": batch, "visits": visits}
    if (batch, visits) != TUNED_AT:
        return Cell(**where, after=name(data, method, *TUNED_AT))
    grids = {key: GRIDS[key] for key in ("lr", "tau", *FURTHER.get(method, ()))}
    return Cell(**where, first={key: START[key] for key in grids}, grids=grids, widen=WIDEN, most=MOST)


def exists(batch: int, visits: int) -> bool:
    """Return whether a batch size is run with so many visits: 80 visits of small batches take half of all hours."""
    return batch > 8 or visits < max(VISITS)


CELLS = (cell for cell in itertools.product(DATA, METHODS, BATCHES, VISITS) if exists(*cell[2:]))
ARMS = {name(*cell): _cell(*cell) for cell in CELLS}


def score(result: dict[str, Any]) -> float:
    """Return recall on the pairs of the tuning."""
    return result["metrics"]["validation/recall"]


STUDY = Search(ARMS, RESULTS / "visits.jsonl.gz", score, SEEDS)


# -- runs ----------------------------------------------------------------------------------------------------------


def train(cell: Cell, options: Mapping[str, float], pairs: Pairs, seed: int) -> nn.Module:
    """Train with Adam and a cosine from the learning rate to 0.

    FastCLIP's gamma falls from 1 to its final value in the first half of the epochs, once per epoch.
    """
    torch.manual_seed(seed)
    model, (one, two), steps, done = pairs.model(), pairs.train, pairs.n // cell.batch, 0
    loss = METHODS[cell.method](options, pairs.n, cell.batch, lambda index: model(one[index], two[index]))
    getattr(loss, "watch", lambda model: None)(model)
    gamma = None
    if cell.method == FASTCLIP:
        gamma = compopt.schedules.CosineGamma(loss, max(1, cell.visits // 2), gamma_min=options["gamma"])
    (group,) = (optimizer := torch.optim.Adam(model.parameters(), options["lr"], fused=True)).param_groups
    for _ in range(cell.visits):
        for index in torch.randperm(pairs.n)[: steps * cell.batch].split(cell.batch):
            group["lr"] = options["lr"] * (1 + math.cos(math.pi * done / (cell.visits * steps))) / 2
            loss(*model(one[index], two[index]), index).backward()
            optimizer.step()
            loss.step()
            optimizer.zero_grad()
            done += 1
        if gamma is not None:
            gamma.step()
    return model.eval()


def run_one(job: Job) -> dict[str, Any]:
    """Train and evaluate; a run of the tuning has the means of its seeds."""
    final, seeds = job.seed in SEEDS, TUNE_SEEDS if job.seed == TUNE_SEED else (job.seed,)
    cell, part = ARMS[job.arm], "test" if final else "validation"
    pairs, began = load(cell.data, final), time.process_time()
    found = [pairs.recall(train(cell, job.options, pairs, seed)) for seed in seeds]
    steps = len(seeds) * cell.visits * (pairs.n // cell.batch)
    metrics = {f"{part}/{key}": round(mean(run[key] for run in found), 6) for key in found[0]}
    return {"job": asdict(job), "metrics": metrics, "seconds": round(time.process_time() - began, 2), "steps": steps}


def waiting(arms: Sequence[str], final: bool, results: Results) -> Iterator[Job]:
    """Yield the missing runs, the tuning first; ``results`` must contain each one before the next is asked for."""
    for arm in dict.fromkeys(ARMS[arm].after or arm for arm in arms):
        while missing := STUDY.next_jobs(arm, results):
            yield from missing
    for arm in arms if final else ():
        yield from STUDY.next_jobs(arm, results, final=True)


def weights(data: str, batch: int, visits: int, gamma: float, results: Results) -> list[Job]:
    """Return the further runs of SogCLR with one gamma, with the chosen rate and temperature."""
    chosen = STUDY.best(name(data, SOGCLR, *TUNED_AT), results)
    options = {**chosen, "gamma": gamma} if chosen else {}
    return [Job(name(data, SOGCLR, batch, visits), options, seed) for seed in WEIGHT_SEEDS if options]


def missing_weights(names: Sequence[str], results: Results) -> Iterator[Job]:
    """Yield the missing ones of the further runs of SogCLR."""
    for data, at, gamma in itertools.product(names, WEIGHED_AT, WEIGHTS):
        yield from (job for job in weights(data, *at, gamma, results) if job.key not in results)


def carry_out(jobs: Callable[[Results], Iterator[Job]], minutes: float) -> None:
    """Make the runs of ``jobs(results)`` in this process, and begin none after some minutes."""
    torch.set_num_threads(1)
    results, end, told = STUDY.finished(), time.monotonic() + 60 * minutes, stamp()
    for job in tqdm(jobs(results), unit="run"):
        if time.monotonic() > end:
            return
        results[job.key] = {**run_one(job), **told}
        append_run(STUDY.path, results[job.key])


def plan(results: Results) -> tuple[int, float]:
    """Return the number of missing final runs, and their hours at the pace of finished runs of the method."""
    pace: dict[str, list[float]] = {}
    for run in results.values():
        pace.setdefault(ARMS[run["job"]["arm"]].method, []).append(run["seconds"] / run["steps"])
    count, seconds = 0, 0.0
    for arm, cell in ARMS.items():
        chosen = STUDY.best(cell.after or arm, results)
        left = sum(chosen is None or Job(arm, chosen, seed).key not in results for seed in SEEDS)
        steps = cell.visits * SIZES[cell.data][0] // cell.batch
        count, seconds = count + left, seconds + left * steps * mean(pace.get(cell.method, [2.5e-3]))
    return count, seconds / 3600
