"""Compare the memory and the time per step of our tables of n rows with LibAUC's.

    python -m benchmarks.peers.rows    # writes benchmarks/results/peers_rows.md (a few minutes; 12 GiB of memory)

Memory: each contender of each size runs in a separate process, which constructs it, trains on random samples and
measures the resident memory. Time: all contenders of a size run in one process, in turns on the same features. LibAUC
keeps one tensor per quantity and writes all of it at construction; ours keeps one row per sample, whose memory pages
are allocated at first access. Therefore the first steps are timed separately.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import compopt
from benchmarks.contenders import TAU
from benchmarks.machine import MIB, on_ranks, status, timed
from benchmarks.peers import losses, packages
from benchmarks.report import environment, finish, quartiles, spread, table

SIZES, FIRST = (10**5, 10**6, 10**7, 10**8), 5
Step = Callable[[Tensor, Tensor, Tensor], None]


def _ours(est: compopt.ContrastiveEstimator) -> Step:
    def step(z1: Tensor, z2: Tensor, index: Tensor) -> None:
        est(z1, z2, index).backward()
        est.step()

    return step


def _theirs(individual: bool, n: int) -> Step:
    loss = losses.gcl_bimodal(n, TAU, individual=individual)
    return lambda z1, z2, index: loss(z1, z2, index).backward()


CONTENDERS: dict[str, Callable[[int], Step]] = {
    "compopt SogCLR": lambda n: _ours(compopt.SogCLREstimator(n, tau=TAU)),
    "compopt iSogCLR": lambda n: _ours(compopt.ISogCLREstimator(n, tau_init=TAU, rho=1.0)),
    "LibAUC GCLoss_v2": lambda n: _theirs(False, n),
    "LibAUC GCLoss_v2, individual": lambda n: _theirs(True, n),
}


class Batches:
    """Random features and samples, which all contenders of a round share."""

    def __init__(self, n: int, batch: int, dim: int) -> None:
        self.n, self.batch, self._generator = n, batch, torch.Generator().manual_seed(0)
        self._features = torch.randn(2, batch, dim, generator=self._generator)

    def index(self) -> Tensor:
        return torch.randint(0, self.n, (self.batch,), generator=self._generator)

    def seconds(self, step: Step, index: Tensor) -> float:
        z1, z2 = (z.clone().requires_grad_() for z in self._features)
        return timed(lambda: step(z1, z2, index))


def memory(rank: int, ranks: int, name: str, n: int, batch: int, dim: int, rounds: int) -> int:
    """Return the resident bytes after the steps, minus those before construction."""
    batches = Batches(n, batch, dim)
    losses.gcl_bimodal(2, TAU)  # import packages before the construction
    before = status("RssAnon")
    step = CONTENDERS[name](n)
    for _ in range(rounds):
        batches.seconds(step, batches.index())
    return status("RssAnon") - before


def times(rank: int, ranks: int, n: int, batch: int, dim: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return seconds of construction and of the first steps, and milliseconds of later steps, of every contender."""
    batches, steps = Batches(n, batch, dim), {}
    found: dict[str, dict[str, Any]] = {}
    losses.gcl_bimodal(2, TAU)
    for name, build in CONTENDERS.items():
        construction = timed(lambda name=name, build=build: steps.update({name: build(n)}))
        found[name] = {"construction": construction, "first": 0.0, "ms": []}
    for number in range(FIRST + rounds):
        index = batches.index()
        for name, step in random.Random(number).sample(list(steps.items()), len(steps)):
            taken = batches.seconds(step, index)
            if number < FIRST:
                found[name]["first"] += taken
            else:
                found[name]["ms"].append(1e3 * taken)
    return found


def line(r: dict[str, Any]) -> list[str]:
    seconds = [f"{1e3 * r[key]:.0f}" for key in ("first", "construction")]
    return [r["name"], f"{r['n']:,}", spread(quartiles(r["ms"])), *seconds, f"{r['resident'] / MIB:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    env, shape = {**environment(), **packages.versions()}, (args.batch_size, args.dim, args.rounds)
    results = []
    for n in args.sizes:
        taken = on_ranks(1, times, n, *shape)[0]
        results += [
            {"name": name, "n": n, "resident": on_ranks(1, memory, name, n, *shape)[0], **taken[name]}
            for name in CONTENDERS
        ]
    about = (
        f"Steps consist of loss, gradients and rows; B = {args.batch_size}, d = {args.dim}, {args.rounds} steps on "
        "random samples."
    )
    head = [
        "",
        "n",
        "ms per step",
        f"first {FIRST} steps, ms",
        "construction, ms",
        "resident memory after the steps, MiB",
    ]
    parts = [about, table(head, list(map(line, results)))]
    finish("peers_rows", "Tables of rows", env, parts, {"steps": results})


if __name__ == "__main__":
    main()
