"""NeuCLIP: fixed or learned temperature, gradient through alpha or not, Algorithm 3, comparison at equal compute.

    python -m benchmarks.studies.neuclip final --wordnet FOLDER    # three seeds
    python -m benchmarks.studies.neuclip report                    # results/neuclip.md

Data, FOLDER, encoders and training are those of ``benchmarks.studies.default`` at batch 64.  The learning rate is the
one that was chosen there for DCL at this batch size, on both data sets.  Each finished run is a line of
``results/neuclip.jsonl`` and is not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import compopt
from benchmarks.report import RESULTS, mean_spread, table
from benchmarks.studies.default.tasks import DIM, SAMPLES, Task, load
from benchmarks.studies.default.training import Setting, train
from benchmarks.studies.search import Arm, Job, Results, Search, by_seed, difference, main, provenance

BATCH, RATE = 64, 1.6e-2
TAU, TAU_RATE = 0.07, 1e-4  # TAU_RATE: step size of learned temperatures, relative to tau about 1/8 of RATE (Table 3)
PROTOTYPES, RESTART_EVERY = 1024, 100
RHO, OTHER_RHOS = 3.0, (1.0, 6.5)  # with RHO, tau stays near its initial value on glyphs; 6.5: Table 3, CC3M
# Share of the samples that Algorithm 1 processes in FastCLIP's processor time: 17.0 of 38.4 ms, 22.9 of 44.5 ms per
# update, medians of three interleaved measurements.
EQUAL_SHARE = {"glyphs": 0.44, "words": 0.51}

Options = Mapping[str, float]


# -- losses --------------------------------------------------------------------------------------------------------


def dual(options: Options) -> compopt.TemperatureDual:
    """Return a learned global temperature."""
    bounds = {"tau_init": TAU, "tau_min": 0.01, "tau_max": 0.5}
    return compopt.TemperatureDual(None, options["rho"], TAU_RATE, **bounds, mode="global", optimizer="adam")


def neuclip(through_alpha: bool, task: Task, options: Options) -> compopt.ContrastiveEstimator:
    network = compopt.NeuralNormalizer(DIM, PROTOTYPES, restart_every=RESTART_EVERY, through_alpha=through_alpha)
    temperature = compopt.FixedTemperature(options["tau"]) if "tau" in options else dual(options)
    return compopt.ContrastiveEstimator(network, temperature)


def fastclip(task: Task, options: Options) -> compopt.ContrastiveEstimator:
    """Return FastCLIP v3 with a constant gamma."""
    average = compopt.MovingAverageEstimator(task.n, 0.8, reference="positive", eps=1e-14)
    return compopt.ContrastiveEstimator(average, dual(options))


def openclip(task: Task, options: Options) -> compopt.ContrastiveEstimator:
    """Return the cross-entropy whose scale AdamW learns with the encoders."""
    return compopt.InfoNCEEstimator(TAU, learn_tau=True, multiply_tau=False)


class Simultaneous(nn.Module):
    """Algorithm 3: eq. 12 as one graph, through which AdamW updates encoders and prototypes in the same step."""

    def __init__(self, task: Task, options: Options) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(2, PROTOTYPES, DIM) / DIM**0.5)
        self.dual, self.rho = dual(options), options["rho"]

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Return the median temperature, like ``metrics`` of an estimator."""
        return {"tau_median": self.dual.tau}

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        self.tau = self.dual.tau.float().requires_grad_()
        z = normalize(torch.stack([z1, z2]), dim=2)
        positive = torch.linalg.vecdot(z[0], z[1])[:, None]
        itself = torch.eye(len(z1), dtype=torch.bool)
        h = (z @ z.flip(0).mT - positive).masked_fill(itself, 0)
        log_g = (h / self.tau).masked_fill(itself, -math.inf).logsumexp(2) - math.log(len(z1) - 1)
        to_prototypes = z @ normalize(self.prototypes, dim=2).mT - positive
        alpha = (to_prototypes / self.tau).logsumexp(2) - math.log(PROTOTYPES)
        return self.tau * ((log_g - alpha).exp() + alpha + self.rho - 1).mean()

    def step(self) -> None:
        """Update the temperature."""
        self.dual.update(self.tau.grad[None])
        self.dual.step()


# -- arms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NeuArm(Arm):
    """A loss on a data set.

    Attributes:
        task: name of the data set.
        build: function from the data set and the arm's settings to the loss.
        samples: number of training samples seen.
    """

    task: str
    build: Callable[[Task, Options], Any]
    samples: int = SAMPLES


HELD, THROUGH = "alpha held", "through alpha"
BASE, ALGORITHM_1 = f"fixed, {HELD}", f"learned, {THROUGH}"


def _arms(task: str) -> dict[str, NeuArm]:
    arm, fixed, learned = partial(NeuArm, task=task), {"tau": TAU}, {"rho": RHO}
    found = {
        f"{how}, {what}": arm(build=partial(neuclip, what == THROUGH), first=first)
        for how, first in (("fixed", fixed), ("learned", learned))
        for what in (HELD, THROUGH)
    }
    found |= {f"Algorithm 1, rho {rho:g}": arm(build=partial(neuclip, True), first={"rho": rho}) for rho in OTHER_RHOS}
    found["Algorithm 3"] = arm(build=Simultaneous, first=learned)
    found["OpenCLIP"] = arm(build=openclip)
    found["FastCLIP"] = arm(build=fastclip, first={"rho": 1.0})  # as tuned in glyphs.md
    fewer = int(SAMPLES * EQUAL_SHARE[task]) // BATCH * BATCH
    found["Algorithm 1, equal compute"] = arm(build=partial(neuclip, True), first=learned, samples=fewer)
    return found


ARMS: Mapping[str, NeuArm] = {f"{task}: {name}": arm for task in EQUAL_SHARE for name, arm in _arms(task).items()}


def score(result: dict[str, Any]) -> float:
    """Return recall on the test half; there is no tuning that would use it."""
    return result["metrics"][RECALL]


RECALL = "test/recall"
STUDY = Search(ARMS, RESULTS / "neuclip.jsonl", score)


def run_one(job: Job, wordnet: Path | None) -> dict[str, Any]:
    """Train and evaluate, in this process."""
    arm, part = ARMS[job.arm], "test" if job.final else "validation"
    task = load(arm.task, part, wordnet)
    started = time.process_time()
    model, loss, seconds = train(
        task, lambda task: arm.build(task, job.options), Setting(BATCH, RATE, samples=arm.samples, seed=job.seed)
    )
    cpu = time.process_time() - started
    metrics = {f"{part}/{name}": round(value, 6) for name, value in task.score(model).items()}
    tau = round(loss.metrics["tau_median"].item(), 4)
    return {"metrics": metrics, "tau": tau, "seconds": round(seconds, 1), "cpu": round(cpu, 1)}


# -- the page ------------------------------------------------------------------------------------------------------


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals = STUDY.finals(results)
    about = (
        f"Batch {BATCH}, {SAMPLES:,} samples, learning rate {RATE:g} (the one that was chosen for DCL at this batch "
        f"size in `default.md`, on both data sets), {PROTOTYPES:,} prototypes, ten updates per batch, a restart every "
        f"{RESTART_EVERY} commits. Recall is measured as in `default.md`, in per cent on the test half: mean ± "
        f"standard deviation of the seeds. *Fixed*: tau is {TAU}. *Learned*: one temperature for all samples, which "
        f"starts at {TAU} and is updated by Adam with the step size {TAU_RATE:g}. *{HELD.capitalize()}*: no gradient "
        f"through alpha. *{THROUGH.capitalize()}*: the gradients with respect to features and temperature are those of "
        f"eq. 12, including alpha (Algorithm 1, line 11). `{ALGORITHM_1}` is Algorithm 1. *Gain*: difference from the "
        "first row, mean over the seeds ± standard error. *CPU*: processor time in seconds."
    )
    parts = [
        "# NeuCLIP: variants of Algorithm 1",
        provenance(list(results.values()), "benchmarks/studies/neuclip.py"),
    ]
    return "\n\n".join([*parts, about, *(_of_task(finals, task) for task in EQUAL_SHARE)])


def _of_task(finals: dict[str, list[dict[str, Any]]], task: str) -> str:
    own = {name.removeprefix(f"{task}: "): runs for name, runs in finals.items() if name.startswith(task)}
    base, body = by_seed(own.get(BASE, []), RECALL), []
    for name, runs in own.items():
        found = by_seed(runs, RECALL)
        gain = "" if name == BASE else difference(found, base)
        options = " ".join(f"{key} {value:g}" for key, value in runs[0]["job"]["options"].items())
        taus, cpu = mean_spread([run["tau"] for run in runs], digits=3), f"{mean(run['cpu'] for run in runs):.0f}"
        body.append(
            [
                name,
                options,
                mean_spread(list(found.values())),
                gain,
                str(len(runs)),
                taus,
                f"{ARMS[f'{task}: {name}'].samples:,}",
                cpu,
            ]
        )
    head = ["", "setting", "recall", "gain", "seeds", "tau at the end", "samples", "CPU"]
    return f"## {task.capitalize()}\n\n" + table(head, body, "llr")


if __name__ == "__main__":
    module = "benchmarks.studies.neuclip"
    main(STUDY, module, __doc__, run_one, page, needs_data=lambda arm: ARMS[arm].task == "words")
