"""EMC2's Figure 7 on glyphs: distance of each method from a stationary point of the global objective.

The setting is that of the paper with other images and a smaller model: 500 samples with two fixed views each, 2 m - 2
candidates per anchor, batches of four, plain SGD, beta = 5, burn-in 3. The gradient over the whole data set is exact::

    python -m benchmarks.studies.emc2                  # three seeds, some ten minutes on one core
    python -m benchmarks.studies.emc2 --steps 200 --seeds 0

The estimators are compared with the Negative Cache (Lindgren et al., NeurIPS 2021), which draws one negative by the
Gumbel-max trick from stale features of all candidates and encodes it again, and with the loss of the batch's anchors
against all candidates, whose gradient no method with small batches can improve. Losses and gradients are those of the
paper, per direction: the mean of ``log sum_j exp((s_ij - s_ii) / tau)``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import compopt
from benchmarks.report import environment, finish, table
from compopt import diagnostics
from recipes import glyphs
from recipes.tasks import GlyphFaces

N, BATCH, TAU = 500, 4, 0.2
REFRESHED = 0.1  # share of the cache that is encoded again in every step, rho of the paper's Table 3
Loss = Callable[[Tensor], Tensor]


class Problem:
    """Two fixed views of some characters, a perceptron with initial weights by ``seed``, and uniform batches."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        faces = GlyphFaces(glyphs.load(None))
        views = faces.inputs(torch.linspace(0, faces.n - 1, N).long(), torch.Generator().manual_seed(0))
        self.views = torch.stack([view.flatten(1).float().div(255).sub(0.1) for view in views])
        self.model = nn.Sequential(nn.Linear(self.views.shape[2], 128), nn.ReLU(), nn.Linear(128, 64))
        self.draws = torch.Generator().manual_seed(seed)

    def batch(self) -> Tensor:
        return torch.randperm(N, generator=self.draws)[:BATCH]

    def features(self, index: Tensor) -> Tensor:
        """Return the features of both views, ``(2, b, d)``."""
        return self.model(self.views[:, index])

    def one_view(self, index: Tensor) -> Tensor:
        """Return the features of a random view of each sample, for ``encode``."""
        return self.model(self.views[torch.randint(2, index.shape, generator=self.draws), index])

    def measure(self) -> tuple[float, float]:
        """Return the squared norm of the exact gradient with respect to the weights, and the global loss."""
        z = self.features(torch.arange(N))
        known: dict[str, Any] = {"tau": TAU, "mode": "unimodal", "views": "separate"}
        loss = float(diagnostics.global_loss(*z.detach(), **known)) / TAU + math.log(2 * N - 2)
        exact = torch.stack(diagnostics.global_gradient(*z.detach(), **known)) / TAU
        found = torch.autograd.grad(z, list(self.model.parameters()), exact)
        return sum(float(g.double().square().sum()) for g in found), loss


def estimated(problem: Problem, est: compopt.ContrastiveEstimator) -> Loss:
    def loss(index: Tensor) -> Tensor:
        value = est(*problem.features(index), index)
        est.step()
        return value

    return loss


def all_candidates(problem: Problem) -> Loss:
    """Return the loss of the batch's anchors against both views of all other samples."""

    def loss(index: Tensor) -> Tensor:
        own, every = (normalize(problem.features(x), dim=2) for x in (index, torch.arange(N)))
        s = own.flatten(0, 1) @ every.flatten(0, 1).T / TAU
        same = (torch.arange(N) == index[:, None]).repeat(2, 2)
        positive = (own[0] * own[1]).sum(1).repeat(2) / TAU
        return TAU * (s.masked_fill(same, -torch.inf).logsumexp(1) - positive).mean()

    return loss


def negative_cache(problem: Problem) -> Loss:
    """Return the loss with one negative per anchor, drawn from the softmax over stale features by Gumbel-max."""
    every, position = torch.arange(2 * N), 0
    cache = normalize(problem.features(torch.arange(N)), dim=2).detach().flatten(0, 1)

    def loss(index: Tensor) -> Tensor:
        nonlocal position
        fresh = (every + position)[: int(REFRESHED * 2 * N)] % (2 * N)
        position += len(fresh)
        flat = problem.views.flatten(0, 1)
        with torch.no_grad():
            cache[fresh] = normalize(problem.model(flat[fresh]), dim=1)
        own = normalize(problem.features(index), dim=2)
        s = own.detach().flatten(0, 1) @ cache.T / TAU
        same = (torch.arange(N) == index[:, None]).repeat(2, 2)
        gumbel = -torch.rand(s.shape, generator=problem.draws).log().neg().log()
        chosen = (s + gumbel).masked_fill(same, -torch.inf).argmax(1)
        negative = normalize(problem.model(flat[chosen]), dim=1)
        return ((own.flatten(0, 1) * negative).sum(1) - (own[0] * own[1]).sum(1).repeat(2)).mean()

    return loss


def _estimator(kind: Callable[..., compopt.ContrastiveEstimator], encode: bool = False, **options: Any) -> Any:
    def build(problem: Problem) -> Loss:
        given = {**options, "encode": problem.one_view} if encode else options
        return estimated(problem, kind(tau=TAU, mode="unimodal", **given))

    return build


EMC2 = {"kind": compopt.EMC2Estimator, "n": N, "burn_in": BATCH - 1}
METHODS: dict[str, Callable[[Problem], Loss]] = {
    "SimCLR": _estimator(compopt.InfoNCEEstimator),
    "DCL": _estimator(compopt.DCLEstimator),
    "SogCLR, gamma 0.1": _estimator(compopt.SogCLREstimator, n=N, gamma=0.1),
    "Negative Cache": negative_cache,
    "EMC2, the batch swept (the authors')": _estimator(**EMC2, proposals="sweep"),
    "EMC2, pool, encoded": _estimator(**EMC2, encode=True),
    "EMC2, data set (Algorithm 1)": _estimator(**EMC2, encode=True, proposals="dataset"),
    "all candidates": all_candidates,
}


def run(method: str, seed: int, steps: int, lr: float) -> tuple[float, float]:
    """Train with a cosine-decayed step size; return the final squared gradient norm and loss."""
    problem = Problem(seed)
    loss = METHODS[method](problem)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=lr / TAU)  # losses here are tau times the paper's
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(problem.batch()).backward()
        optimizer.step()
        schedule.step()
    return problem.measure()


def row(method: str, runs: Sequence[tuple[float, float]]) -> list[str]:
    """Return the table row with both figures of every seed."""
    norms, losses = zip(*runs, strict=True)
    return [method, ", ".join(f"{x:.1e}" for x in norms), ", ".join(f"{x:.3f}" for x in losses)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, env = parser.parse_args(argv), environment()
    results = {name: [run(name, seed, args.steps, args.lr) for seed in args.seeds] for name in METHODS}
    head = ["method", "squared gradient norm, by seed", "global loss"]
    note = (
        f"{N} samples with two fixed views, batch {BATCH}, tau {TAU}, {args.steps:,} steps of SGD with the initial "
        f"step size {args.lr} and cosine decay."
    )
    text = table(head, [row(name, runs) for name, runs in results.items()], "lll")
    finish(
        "emc2", "EMC2's Figure 7: distance from a stationary point", env, [note, "", text], results, args.steps < 1000
    )


if __name__ == "__main__":
    main()
