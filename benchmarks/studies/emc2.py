"""EMC2's Figure 7 on digits: distance of each method from a stationary point of the global objective.

    python -m benchmarks.studies.emc2 final [--workers 1] [--arms "*, 20000"]  # three seeds, two hours
    python -m benchmarks.studies.emc2 report                                   # results/emc2.md

The setting is that of the paper with other images and a smaller model: 500 samples with two fixed views each, 2 m - 2
candidates per anchor, batches of four, plain SGD with a cosine from 0.1 to 0, beta = 5, burn-in 3. The gradient over
the whole data set is exact. InfoNCE and DCL also have batches of 28, with about as many encoded images per step as
EMC2's Algorithm 1 at batch four. Nothing is tuned. Each finished run is a line of ``results/emc2.jsonl`` and is not run
again.

The estimators are compared with the Negative Cache (Lindgren et al., NeurIPS 2021), which draws one negative by the
Gumbel-max trick from stale features of all candidates and encodes it again, and with the loss of the batch's anchors
against all candidates, whose gradient no method with small batches can improve. Losses and gradients are those of the
paper, per direction: the mean of ``log sum_j exp((s_ij - s_ii) / tau)``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

import compopt
from benchmarks.report import RESULTS, standard_error, table
from benchmarks.studies.search import Arm, Job, Results, Search, main, provenance
from compopt import diagnostics

N, TAU, LR = 500, 0.2, 0.1
SMALL, LARGE = 4, 28  # batch of the paper; batch with as many encoded images per step as Algorithm 1 has at SMALL
STEPS = (20_000, 100_000)
NOISE = 0.1  # standard deviation of the noise of a view
REFRESHED = 0.1  # share of the cache that is encoded again in every step, rho of the paper's Table 3
Loss = Callable[[Tensor], Tensor]


class Problem:
    """Two fixed views of some digits, a perceptron with initial weights by ``seed``, and uniform batches.

    A view is a digit that is moved by at most one pixel, with noise. ``encoded`` counts the encoded images.
    """

    def __init__(self, seed: int, batch: int) -> None:
        from sklearn.datasets import load_digits

        images = torch.from_numpy(load_digits().images[:N]).float() / 16
        draws, padded = torch.Generator().manual_seed(0), pad(images, (1, 1, 1, 1))
        moves = torch.randint(3, (2, N, 2), generator=draws).tolist()
        views = [[padded[i, y : y + 8, x : x + 8] for i, (y, x) in enumerate(view)] for view in moves]
        self.views = torch.stack([torch.stack(view).flatten(1) for view in views])
        self.views += NOISE * torch.randn(self.views.shape, generator=draws)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(self.views.shape[2], 128), nn.ReLU(), nn.Linear(128, 64))
        self.draws, self.size, self.encoded = torch.Generator().manual_seed(seed), batch, 0

    def batch(self) -> Tensor:
        return torch.randperm(N, generator=self.draws)[: self.size]

    def encode(self, images: Tensor) -> Tensor:
        self.encoded += images.numel() // images.shape[-1]
        return self.model(images)

    def features(self, index: Tensor) -> Tensor:
        """Return the features of both views, ``(2, b, d)``."""
        return self.encode(self.views[:, index])

    def one_view(self, index: Tensor) -> Tensor:
        """Return the features of a random view of each sample, for ``encode`` of an estimator."""
        return self.encode(self.views[torch.randint(2, index.shape, generator=self.draws), index])

    def measure(self) -> dict[str, float]:
        """Return the squared norm of the exact gradient with respect to the weights, and the global loss."""
        z = self.model(self.views)
        known: dict[str, Any] = {"tau": TAU, "mode": "unimodal", "views": "separate"}
        loss = float(diagnostics.global_loss(*z.detach(), **known)) / TAU + math.log(2 * N - 2)
        exact = torch.stack(diagnostics.global_gradient(*z.detach(), **known)) / TAU
        found = torch.autograd.grad(z, list(self.model.parameters()), exact)
        return {"squared_norm": sum(float(g.double().square().sum()) for g in found), "loss": loss}


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
            cache[fresh] = normalize(problem.encode(flat[fresh]), dim=1)
        own = normalize(problem.features(index), dim=2)
        s = own.detach().flatten(0, 1) @ cache.T / TAU
        same = (torch.arange(N) == index[:, None]).repeat(2, 2)
        gumbel = -torch.rand(s.shape, generator=problem.draws).log().neg().log()
        chosen = (s + gumbel).masked_fill(same, -torch.inf).argmax(1)
        negative = normalize(problem.encode(flat[chosen]), dim=1)
        return ((own.flatten(0, 1) * negative).sum(1) - (own[0] * own[1]).sum(1).repeat(2)).mean()

    return loss


def _estimator(kind: Callable[..., compopt.ContrastiveEstimator], encode: bool = False, **options: Any) -> Any:
    def build(problem: Problem) -> Loss:
        given = {**options, "encode": problem.one_view} if encode else options
        return estimated(problem, kind(tau=TAU, mode="unimodal", **given))

    return build


EMC2 = {"kind": compopt.EMC2Estimator, "n": N, "burn_in": SMALL - 1}
METHODS: dict[str, Callable[[Problem], Loss]] = {
    "InfoNCE": _estimator(compopt.InfoNCEEstimator),
    "DCL": _estimator(compopt.DCLEstimator),
    "SogCLR, gamma 0.1": _estimator(compopt.SogCLREstimator, n=N, gamma=0.1),
    "Negative Cache": negative_cache,
    "EMC2, the batch swept (the authors')": _estimator(**EMC2, proposals="sweep"),
    "EMC2, pool, encoded": _estimator(**EMC2, encode=True),
    "EMC2, data set (Algorithm 1)": _estimator(**EMC2, encode=True, proposals="dataset"),
    "all candidates": all_candidates,
}


# -- arms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contender(Arm):
    """A method with a batch size and a number of steps."""

    method: str
    batch: int
    steps: int


ARMS = {
    f"{method}, {batch}, {steps}": Contender(method=method, batch=batch, steps=steps)
    for steps in STEPS
    for batch, methods in ((SMALL, [*METHODS]), (LARGE, ["InfoNCE", "DCL"]))
    for method in methods
    if (method, steps) != ("all candidates", STEPS[-1])
}
STUDY = Search(ARMS, RESULTS / "emc2.jsonl", lambda result: -result["metrics"]["loss"])


def run_one(job: Job, folder: Path | None) -> dict[str, Any]:
    """Train and measure."""
    arm = ARMS[job.arm]
    problem, began = Problem(job.seed, arm.batch), time.process_time()
    loss = METHODS[arm.method](problem)
    (group,) = (optimizer := torch.optim.SGD(problem.model.parameters(), lr=LR)).param_groups
    for step in range(arm.steps):
        # the losses of this library are tau times those of the paper
        group["lr"] = LR / TAU * (1 + math.cos(math.pi * step / arm.steps)) / 2
        loss(problem.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = round(time.process_time() - began, 1)
    return {"metrics": problem.measure(), "encoded": problem.encoded, "seconds": seconds}


# -- the page ------------------------------------------------------------------------------------------------------

ABOUT = (
    f"{N} digits with two fixed views, tau {TAU}, SGD with a cosine from {LR} to 0; squared norm of the gradient of "
    "the whole objective, and its value, with the weights at the end. *Encoded*: images that the model encodes per "
    f"step. The rows with batch {LARGE} are to be compared with Algorithm 1 at batch {SMALL}, whose steps encode as "
    "many images. The error is the standard error of the mean."
)


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals, parts = STUDY.finals(results), []
    for steps in STEPS:
        body = [row(arm, runs) for name, runs in finals.items() if (arm := ARMS[name]).steps == steps]
        if body:
            head = [
                "method",
                "batch",
                "encoded",
                "squared gradient norm, by seed",
                "global loss, by seed",
                "mean loss ± error",
            ]
            visits = " and ".join(f"{steps * batch // N:,} at batch {batch}" for batch in (SMALL, LARGE))
            parts += [f"## After {steps:,} steps", f"Visits per row: {visits}.", table(head, body, "lrrllr")]
    title = "# EMC2's Figure 7: distance from a stationary point"
    return "\n\n".join([title, provenance([*results.values()], "benchmarks/studies/emc2.py"), ABOUT, *parts])


def row(arm: Contender, runs: list[dict[str, Any]]) -> list[str]:
    """Return the table row with both figures of every seed."""
    norms, losses = ([run["metrics"][key] for run in runs] for key in ("squared_norm", "loss"))
    return [
        arm.method,
        str(arm.batch),
        f"{mean(run['encoded'] for run in runs) / arm.steps:.0f}",
        ", ".join(f"{value:.1e}" for value in norms),
        ", ".join(f"{value:.3f}" for value in losses),
        f"{mean(losses):.2f} ± {standard_error(losses):.2f}" if len(losses) > 1 else f"{losses[0]:.2f}",
    ]


if __name__ == "__main__":
    main(STUDY, "benchmarks.studies.emc2", __doc__, run_one, page, needs_data=lambda arm: False)
