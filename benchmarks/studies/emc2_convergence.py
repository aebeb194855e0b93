"""How close each method comes to a stationary point of the global objective: EMC2's Figure 7 on glyphs.

A few hundred characters with two fixed views each, a small perceptron, plain SGD, batches of four: the setting in
which the gradient over the whole data set can be computed exactly at any time. Plotted is its squared norm::

    python -m benchmarks.studies.emc2_convergence                       # 2 processes, about twenty minutes
    python -m benchmarks.studies.emc2_convergence --steps 2000 --lr 0.3 # a glimpse

Finished runs are lines of ``emc2_convergence.jsonl``; a command that was stopped can be repeated, and the table and the
picture show all runs of the file.

The views are two modalities with one encoder: an anchor's negatives are the other view of all other characters, as in
the paper's eq. 1, and there is a chain per view. Loss and gradient are in its units:
``mean_i log sum_j exp((s_ij - s_ii) / tau)``, over both directions.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import compopt
from benchmarks.saved import append_run, read_runs
from benchmarks.studies.emc2_report import write
from compopt import diagnostics
from recipes import glyphs
from recipes.tasks import GlyphFaces

CHECKPOINTS = 24
SCHEDULES = ("decaying", "constant")
Build = Callable[[int, float, int], compopt.ContrastiveEstimator]
Job = tuple[str, str, dict[str, Any]]  # contender, schedule, setting


@dataclass(frozen=True)
class Contender:
    """One curve: its name, its estimator ``(n, tau, seed)``, and whether it asks for samples outside the batch.

    Without an estimator: the batch's anchors against all negatives.
    """

    name: str
    build: Build | None
    encode: bool = False


def _sogclr(gamma: float) -> Contender:
    return Contender(
        f"SogCLR, gamma {gamma}",
        lambda n, tau, seed: compopt.SogCLREstimator(n, gamma=gamma, tau=tau),
    )


def _emc2(name: str, **options: Any) -> Contender:
    return Contender(
        name,
        lambda n, tau, seed: compopt.EMC2Estimator(n, tau=tau, seed=seed, **options),
        encode=True,
    )


CONTENDERS = [  # their names are keys in files of runs; emc2_report.py has titles
    Contender("InfoNCE", lambda n, tau, seed: compopt.InfoNCEEstimator(tau=tau)),
    Contender(
        "InfoNCE without the positive",
        lambda n, tau, seed: compopt.DCLEstimator(tau=tau),
    ),
    _sogclr(0.1),
    _sogclr(0.5),
    _emc2("EMC2, no burn-in", burn_in=0),
    _emc2("EMC2, burn-in 0.5"),
    _emc2("EMC2, burn-in 0.5, rescored", rescore=True),
    Contender("all negatives", None),
]
BY_NAME = {contender.name: contender for contender in CONTENDERS}


@dataclass(frozen=True)
class Setting:
    """What all curves of a figure share."""

    n: int = 500
    batch_size: int = 4
    tau: float = 0.2
    steps: int = 20_000
    lr: float = 0.1
    seed: int = 0


class Problem:
    """Two fixed views of ``n`` characters, flattened, and a perceptron whose first weights the seed decides."""

    def __init__(self, setting: Setting) -> None:
        self.setting, n = setting, setting.n
        torch.manual_seed(setting.seed)
        faces = GlyphFaces(glyphs.load(None))
        chosen = torch.linspace(0, faces.n - 1, n).long()
        views = faces.inputs(chosen, torch.Generator().manual_seed(0))
        self.views = [view.flatten(1).float().div(255).sub(0.1) for view in views]
        self.model = nn.Sequential(nn.Linear(self.views[0].shape[1], 256), nn.ReLU(), nn.Linear(256, 64))
        self.order = torch.Generator().manual_seed(setting.seed)

    def batch(self) -> Tensor:
        """A uniform batch."""
        return torch.randperm(self.setting.n, generator=self.order)[: self.setting.batch_size]

    def features(self, index: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (self.model(view[index]) for view in self.views)
        return first, second

    def measure(self) -> tuple[float, float]:
        """Global loss, and the squared norm of its gradient with respect to the weights."""
        loss, gradient = self.exact()
        return loss, float(gradient.square().sum())

    def exact(self) -> tuple[float, Tensor]:
        """Global loss, and its gradient with respect to the weights, ``(p,)`` float64."""
        n, tau = self.setting.n, self.setting.tau
        z1, z2 = self.features(torch.arange(n))
        loss = diagnostics.global_loss(z1.detach(), z2.detach(), tau)
        gradients = diagnostics.global_gradient(z1.detach(), z2.detach(), tau)
        weights = list(self.model.parameters())
        found = torch.autograd.grad((z1, z2), weights, gradients)
        gradient = torch.cat([g.double().flatten() for g in found]) / tau
        return float(loss) / tau + math.log(n - 1), gradient

    def estimate(self, contender: Contender, est: compopt.ContrastiveEstimator | None, index: Tensor) -> Tensor:
        """A contender's loss on a batch: tau times the paper's."""
        if est is None:
            return self.all_negatives(index)
        return est(*self.features(index), index, encode=self.features if contender.encode else None)

    def all_negatives(self, index: Tensor) -> Tensor:
        """The batch's anchors against everything: what no method with small batches can do better than."""
        first, second = (nn.functional.normalize(self.model(view), dim=1) for view in self.views)
        own = torch.arange(self.setting.n) == index[:, None]
        terms = []
        for x, y in ((first, second), (second, first)):
            s = x[index] @ y.T / self.setting.tau
            terms.append(s.masked_fill(own, -torch.inf).logsumexp(1) - s[own])
        return torch.cat(terms).mean() * self.setting.tau


def run(job: Job) -> dict[str, Any]:
    """Train one contender on one schedule; loss and squared gradient norm on the way."""
    name, schedule, options = job
    torch.set_num_threads(1)
    contender, setting = BY_NAME[name], Setting(**options)
    problem = Problem(setting)
    est = contender.build(setting.n, setting.tau, setting.seed) if contender.build else None
    rate = setting.lr / setting.tau  # est's loss is tau times the paper's
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=rate)
    if est is not None:
        est.attach(optimizer)
    marks = {round(setting.steps ** (k / (CHECKPOINTS - 1))) for k in range(CHECKPOINTS)}
    trace = [(0, *problem.measure())]
    for step in range(1, setting.steps + 1):
        if schedule == "decaying":
            factor = 0.5 * (1 + math.cos(math.pi * (step - 1) / setting.steps))
            optimizer.param_groups[0]["lr"] = rate * factor
        index = problem.batch()
        optimizer.zero_grad()
        problem.estimate(contender, est, index).backward()
        optimizer.step()
        if step in marks:
            trace.append((step, *problem.measure()))
    return {"name": name, "schedule": schedule, "setting": options, "trace": trace}


def parser() -> argparse.ArgumentParser:
    """The study's command line."""
    result = argparse.ArgumentParser(
        "python -m benchmarks.studies.emc2_convergence", description=__doc__.split("::")[0]
    )
    result.add_argument("--steps", type=int, default=Setting.steps)
    result.add_argument("--lr", type=float, nargs="+", default=[Setting.lr], help="step sizes, a panel each")
    result.add_argument("--tau", type=float, default=Setting.tau)
    result.add_argument("--samples", type=int, default=Setting.n)
    result.add_argument("--batch-size", type=int, default=Setting.batch_size)
    result.add_argument("--seeds", type=int, nargs="+", default=[0])
    result.add_argument(
        "--schedules", choices=SCHEDULES, nargs="+", default=list(SCHEDULES), help="schedules of the step size"
    )
    result.add_argument("--only", nargs="+", help="contenders whose name begins like this")
    result.add_argument("--workers", type=int, default=2)
    result.add_argument("--output-dir", type=Path, default=Path("runs/emc2_convergence"))
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Run all contenders that have no result yet, write a table and a picture."""
    args = parser().parse_args(argv)
    chosen = [name for name in BY_NAME if not args.only or name.startswith(tuple(args.only))]
    jobs: list[Job] = [
        (name, schedule, asdict(Setting(args.samples, args.batch_size, args.tau, args.steps, lr, seed)))
        for lr in args.lr
        for seed in args.seeds
        for schedule in args.schedules
        for name in chosen
    ]
    glyphs.load(None)  # rendered once, before the workers want it
    file = args.output_dir / "emc2_convergence.jsonl"
    results = {_key(result): result for result in read_runs(file)}
    left = [job for job in jobs if json.dumps(job) not in results]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for result in tqdm(pool.imap_unordered(run, left), total=len(left), unit="run"):
            append_run(file, result)
            results[_key(result)] = result
    write(list(results.values()), args.output_dir)


def _key(result: dict[str, Any]) -> str:
    """The key of the job whose result this is."""
    return json.dumps([result["name"], result["schedule"], result["setting"]])


if __name__ == "__main__":
    main()
