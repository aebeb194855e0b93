"""EMC2's chains: what they cost per call, and how far the mean of their weights is from the data set's softmax.

    python -m benchmarks.chains              # both, writes benchmarks/results/chains.md (about ten minutes)
    python -m benchmarks.chains --quick      # small, printed only

Contenders of one size run round-robin in one process on the same features.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import compopt
from benchmarks.machine import timed
from benchmarks.saved import save
from compopt.negatives import chains
from compopt.negatives.walk import Walk
from recipes.report import environment, heading, quartiles, spread, table

SIZES = [("unimodal", 32), ("unimodal", 64), ("unimodal", 256), ("bimodal", 256), ("bimodal", 1024)]
DIM = 128
SAMPLES, BATCH, TAUS = 1000, 63, (0.05, 0.1, 0.3, 1.0)
KINDS = ("pool", "batch alone", "sweep", "in-batch softmax")
COST = f"""Milliseconds per training step of the estimator alone (forward, backward, commit; d = {DIM}, float32, tau
0.1), median (first to third quartile). *Chains*: the walks of all anchors by themselves, random numbers included; R is
the number of proposals to each chain."""
BIAS = f"""{SAMPLES} samples, uniform batches of {BATCH}, bimodal, d = 16, no burn-in. Chains start at the softmax over
the data set and move through {{epochs}} epochs. *Bias*: norm of the mean weights less the softmax, divided by the
softmax's norm, without the part that is noise: the errors of the two halves of the run are multiplied with each other,
chain by chain. Of the mean over all chains the root is shown, with what two standard errors more and less of the mean
make of it; a dash: the mean is not two of them above zero.
At the smallest tau chains that stay where they are through both halves count as bias, which longer runs take away.
*Batch alone*: the same chains, never proposed their stored sample. *Outside*: visits to a stored sample that is not in
the batch; *unused*: anchors all of whose visits are outside
and which without `encode` only pull their positive."""


@contextmanager
def watched(spare: int | None = None) -> Iterator[list[tuple[Any, Walk, float]]]:
    """Record every walk and its milliseconds; ``spare`` overrides how often the stored sample is proposed."""
    seen: list[tuple[Any, Walk, float]] = []
    original = chains.walk

    def walk(candidates: Any, scores: Tensor, start: Tensor, burn_in: Tensor, streams: Tensor, own: Any) -> Walk:
        begin = time.perf_counter()
        pool = own if spare is None or own is None else torch.full_like(own, spare)
        found = original(candidates, scores, start, burn_in, streams, pool)
        seen.append((candidates, found, 1e3 * (time.perf_counter() - begin)))
        return found

    chains.walk = walk
    try:
        yield seen
    finally:
        chains.walk = original


# -- cost ----------------------------------------------------------------------------------------------------------


def cost(mode: str, batch: int, rounds: int) -> dict[str, Any]:
    """Time the chains, EMC2, SogCLR and InfoNCE at one size."""
    n = 16 * batch
    z = [torch.randn(2, batch, DIM).unbind() for _ in range(3)]
    made: dict[str, compopt.ContrastiveEstimator] = {
        "EMC2": compopt.EMC2Estimator(n, tau=0.1, mode=mode),
        "SogCLR": compopt.SogCLREstimator(n, tau=0.1, mode=mode),
        "InfoNCE": compopt.InfoNCEEstimator(tau=0.1, mode=mode),
    }
    times: dict[str, list[float]] = {name: [] for name in (*made, "chains")}
    for number in range(rounds + 3):
        index = torch.randperm(n)[:batch]

        def step(est: compopt.ContrastiveEstimator, number: int = number, index: Tensor = index) -> None:
            a, b = (x.clone().requires_grad_() for x in z[number % 3])
            est(a, b, index).backward()
            est.step()

        with watched() as seen:
            found = {name: 1e3 * timed(lambda est=est: step(est)) for name, est in made.items()}
        found["chains"] = sum(each[2] for each in seen)
        if number >= 3:  # the first rounds warm up
            for name, value in found.items():
                times[name].append(value)
    return {"mode": mode, "batch": batch, "proposals": (2 if mode == "unimodal" else 1) * (batch - 1), "times": times}


def cost_table(results: list[dict]) -> str:
    names = ["chains", "EMC2", "SogCLR", "InfoNCE"]
    lines = [
        [r["mode"], str(r["batch"]), str(r["proposals"]), *(spread(quartiles(r["times"][k])) for k in names)]
        for r in results
    ]
    return table(["mode", "B", "R", *names], lines)


# -- bias ----------------------------------------------------------------------------------------------------------


class Mean:
    """Sums of the weights of every chain, in the two halves of a run: ``(2, 2, n, n)`` by half and direction."""

    def __init__(self, n: int) -> None:
        self.sums, self.visited = torch.zeros(2, 2, n, n, dtype=torch.float64), torch.zeros(2, 2, n, 1)
        self.outside: list[float] = []
        self.unused: list[float] = []

    def add(self, half: int, direction: int, index: Tensor, weights: Tensor, stored: Tensor, outside: Tensor) -> None:
        """Add a batch: ``weights`` ``(b, B)`` are those of its samples, ``outside`` those of the stored ones."""
        total = self.sums[half, direction]
        total[index[:, None], index[None]] += weights
        total[index, stored] += outside
        self.visited[half, direction, index] += 1
        self.outside.append(float(outside.mean()))
        self.unused.append(float((outside >= 1).double().mean()))

    def bias(self, p: Tensor) -> tuple[float, float]:
        """Square of the relative norm of the mean's error, noise taken off, and its standard error over chains."""
        error = self.sums / self.visited - p
        squares = (error[0] * error[1]).sum(2).flatten() / p.square().sum() * p[..., 0].numel()
        return float(squares.mean()), float(squares.std() / len(squares) ** 0.5)


def bias(kind: str, tau: float, n: int, batch: int, epochs: int) -> dict[str, Any]:
    """Move chains of one kind at one temperature; the bias of their mean weights, and what they visit."""
    generator = torch.Generator().manual_seed(0)
    z1, z2 = (normalize(torch.randn(n, 16, generator=generator), dim=1) for _ in range(2))
    s = torch.stack([z1 @ z2.T, z2 @ z1.T])
    p = (s.double() / tau).masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf).softmax(2)
    est = compopt.EMC2Estimator(n, tau=tau, burn_in=0, proposals="sweep" if kind == "sweep" else "pool")
    state, mean = est.state_dict(), Mean(n)
    chain = torch.stack([torch.multinomial(p[d], 1, generator=generator)[:, 0] for d in (0, 1)], dim=1)
    score = torch.stack([s[d].gather(1, chain[:, d : d + 1])[:, 0] for d in (0, 1)], dim=1)
    state["rows"] = {"chain": chain, "score": score, "count": torch.ones_like(state["rows"]["count"])}
    est.load_state_dict(state)
    for epoch in range(epochs):
        half = int(epoch >= epochs // 2)
        for index in torch.randperm(n, generator=generator).split(batch):
            if len(index) < 2:
                continue
            if kind == "in-batch softmax":
                own = (s[:, index][:, :, index].double() / tau).diagonal_scatter(
                    torch.full((2, len(index)), -torch.inf, dtype=torch.float64), dim1=1, dim2=2
                )
                for direction in (0, 1):
                    none = torch.zeros(len(index), dtype=torch.float64)
                    mean.add(half, direction, index, own[direction].softmax(1), index, none)
                continue
            before = est.read(index)["chain"]
            with watched(0 if kind == "batch alone" else None) as seen:
                est(z1[index], z2[index], index)
            est.step()
            for direction, (_, found, _) in enumerate(seen):
                weights = (found.visits / found.visits.sum(0)).T.double()
                mean.add(half, direction, index, weights[:, :-1], before[:, direction], weights[:, -1])
    shares = (statistics.mean(mean.outside), statistics.mean(mean.unused))
    square, error = mean.bias(p)
    found = {"kind": kind, "tau": tau, "square": square, "error": error}
    return {**found, "outside": shares[0], "unused": shares[1]}


def root(result: dict[str, Any]) -> str:
    """The bias with its interval; a dash where it is not above zero."""
    square, error = result["square"], 2 * result["error"]
    if square <= error:
        return "-"
    return "{:.3f} ({:.3f} to {:.3f})".format(*(x**0.5 for x in (square, square - error, square + error)))


def bias_table(results: list[dict]) -> str:
    by = {(r["tau"], r["kind"]): r for r in results}
    taus = list(dict.fromkeys(r["tau"] for r in results))
    lines = []
    for tau in taus:
        pool = by[tau, "pool"]
        lines.append(
            [
                str(tau),
                *(root(by[tau, kind]) for kind in KINDS),
                f"{100 * pool['outside']:.0f} %",
                f"{100 * pool['unused']:.0f} %",
            ]
        )
    return table(["tau", *KINDS, "outside (pool)", "unused (pool)"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, printed only")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=600)
    args = parser.parse_args()
    torch.manual_seed(0)
    env = environment()
    sizes, rounds, epochs = (SIZES[:2], 5, 20) if args.quick else (SIZES, args.rounds, args.epochs)
    samples, taus = (200, TAUS[1:2]) if args.quick else (SAMPLES, TAUS)
    costs = [cost(*size, rounds) for size in sizes]
    biases = [bias(kind, tau, samples, BATCH, epochs) for tau in taus for kind in KINDS]
    parts = [COST, "", cost_table(costs), "", "## Bias", "", BIAS.format(epochs=epochs), "", bias_table(biases)]
    text = "\n".join([*heading("EMC2's chains", env), *parts])
    print(text)
    if not args.quick:
        save("chains", text, env, {"costs": costs, "biases": biases})


if __name__ == "__main__":
    main()
