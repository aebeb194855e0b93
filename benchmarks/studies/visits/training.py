"""Methods of the study of visits, and one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import compopt
from benchmarks.studies.default.losses import Followed, MomentumQueue
from benchmarks.studies.visits.data import DIM, Pairs, Towers

Options = Mapping[str, float]


@dataclass(frozen=True)
class Setup:
    """What a loss is built from: its settings, and the run."""

    options: Options
    pairs: Pairs
    model: Towers
    batch: int

    @property
    def n(self) -> int:
        return self.pairs.n

    def encode(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the current features of some training pairs."""
        one, two = self.pairs.train
        return self.model(one[index], two[index])


def _infonce(run: Setup) -> Any:
    return compopt.InfoNCEEstimator(run.options["tau"])


def _dcl(run: Setup) -> Any:
    return compopt.DCLEstimator(run.options["tau"])


def _recommended(run: Setup) -> Any:
    return compopt.recommended(DIM, run.n, run.batch, tau=run.options["tau"])


def _momentum(run: Setup) -> Any:
    loss = Followed(compopt.recommended(DIM, run.n, run.batch, momentum=True, tau=run.options["tau"]))
    loss.watch(run.model)
    loss.encoder.decay = run.options["decay"]
    return loss


def _moco(run: Setup) -> Any:
    loss = MomentumQueue(run.options["tau"], int(run.options["length"]), run.options["decay"], False, False)
    loss.watch(run.model)
    return loss


def _sogclr(run: Setup) -> Any:
    return compopt.SogCLREstimator(run.n, run.options["gamma"], run.options["tau"])


def _sogclr_positive(run: Setup) -> Any:
    return compopt.SogCLREstimator(run.n, run.options["gamma"], run.options["tau"], reference="positive")


def _isogclr(run: Setup) -> Any:
    o = run.options
    return compopt.ISogCLREstimator(run.n, o["gamma"], o["rho"], lr=o["tau_lr"], tau_init=o["tau"])


def _fastclip(run: Setup) -> Any:
    return compopt.FastCLIPEstimator(run.n, "v3", tau=run.options["tau"], rho=run.options["rho"])


def _neuclip(run: Setup) -> Any:
    o = run.options
    return compopt.NeuCLIPEstimator(DIM, tau=o["tau"], prototypes=int(o["prototypes"]), rho=o["rho"], learn_tau=True)


def _emc2(run: Setup) -> Any:
    return compopt.EMC2Estimator(run.n, tau=run.options["tau"], proposals="dataset", encode=run.encode)


INFONCE, DCL, FASTCLIP = "InfoNCE", "DCL", "FastCLIP v3"
STATELESS = ("recommended", "recommended, momentum", "MoCo with DCL")  # nor of the papers: queues
METHODS: dict[str, Callable[[Setup], Any]] = {
    INFONCE: _infonce,
    DCL: _dcl,
    **dict(zip(STATELESS, (_recommended, _momentum, _moco), strict=True)),
    "SogCLR": _sogclr,
    "SogCLR, positive": _sogclr_positive,
    "iSogCLR": _isogclr,
    FASTCLIP: _fastclip,
    "NeuCLIP, Algorithm 1": _neuclip,
    "EMC2, Algorithm 1": _emc2,
}


def train(method: str, options: Options, pairs: Pairs, batch: int, epochs: int, seed: int) -> tuple[Towers, float]:
    """Train with Adam and a cosine from the learning rate to 0; return the model and the seconds of processor time.

    FastCLIP's gamma falls from 1 to its final value in the first half of the epochs, once per epoch.
    """
    torch.manual_seed(seed)
    model = pairs.model()
    loss = METHODS[method](Setup(options, pairs, model, batch))
    gamma = None
    if method == FASTCLIP:
        gamma = compopt.schedules.CosineGamma(loss, max(1, epochs // 2), gamma_min=options["gamma"])
    optimizer = torch.optim.Adam(model.parameters(), options["lr"], fused=True)
    (group,), (one, two), steps = optimizer.param_groups, pairs.train, pairs.n // batch
    done, began = 0, time.process_time()
    for _ in range(epochs):
        for index in torch.randperm(pairs.n)[: steps * batch].split(batch):
            group["lr"] = options["lr"] * (1 + math.cos(math.pi * done / (epochs * steps))) / 2
            z1, z2 = model(one[index], two[index])
            loss(z1, z2, index).backward()
            optimizer.step()
            loss.step()
            optimizer.zero_grad()
            done += 1
        if gamma is not None:
            gamma.step()
    return model.eval(), time.process_time() - began
