"""The contenders: estimators of the library, and peers of the small batch that are written like one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compopt
from benchmarks.studies.default.tasks import DIM, Task
from benchmarks.studies.default.training import Loss


class SigLIP(nn.Module):
    """The sigmoid loss with a learned scale and bias: Zhai et al., ICCV 2023, Algorithm 1 (bimodal)."""

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(math.log(1 / tau)))
        self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        logits = F.normalize(z1) @ F.normalize(z2).T * self.scale.exp() + self.bias
        sign = 2 * torch.eye(len(z1)) - 1
        return -F.logsigmoid(sign * logits).sum() / len(z1)

    def step(self) -> None:
        """It keeps nothing."""


class CrossBatchMemory(nn.Module):
    """A queue of past features as they were, as further negatives (XBM, Wang et al., CVPR 2020).

    Args:
        tau: temperature.
        length: features kept of each side.
        positive: whether the positive is in the denominator.
        warmup: updates before the queue is used.
        unimodal: negatives are both views of the other samples.
    """

    def __init__(self, tau: float, length: int, positive: bool, warmup: int, unimodal: bool) -> None:
        super().__init__()
        self.tau, self.length, self.positive, self.warmup, self.unimodal = tau, length, positive, warmup, unimodal
        self.queue: list[Tensor] = []
        self.updates = 0

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        z = [F.normalize(z1), F.normalize(z2)]
        loss = (self._direction(z, 0) + self._direction(z, 1)) / 2
        new = [side.detach() for side in z]
        pairs = zip(self.queue, new, strict=True)
        self.queue = [torch.cat(pair)[-self.length :] for pair in pairs] if self.queue else new
        return loss

    def _direction(self, z: list[Tensor], direction: int) -> Tensor:
        own, other = z[direction], z[1 - direction]
        inside = [other, own] if self.unimodal else [other]
        past = self.queue if self.unimodal else self.queue[1 - direction :][:1]
        itself = torch.eye(len(own), dtype=torch.bool)
        parts = [(own @ side.T).masked_fill(itself, -math.inf) for side in inside]
        positive = torch.linalg.vecdot(own, other)
        parts += [own @ side.T for side in past] if self.updates >= self.warmup else []
        parts += [positive[:, None]] if self.positive else []
        return (self.tau * torch.logsumexp(torch.cat(parts, 1) / self.tau, 1) - positive).mean()

    def step(self) -> None:
        """Count updates."""
        self.updates += 1


Options = Mapping[str, Any]


def _queue(positive: bool) -> Callable[[Task, Options], Loss]:
    def build(task: Task, o: Options) -> Loss:
        return CrossBatchMemory(o["tau"], int(o["length"]), positive, int(o["warmup"]), task.mode == "unimodal")

    return build


LOSSES: dict[str, Callable[[Task, Options], Loss]] = {
    "InfoNCE": lambda task, o: compopt.InfoNCEEstimator(o["tau"], mode=task.mode),
    "CLIP": lambda task, o: compopt.InfoNCEEstimator(o["tau"], learn_tau=True, multiply_tau=False, mode=task.mode),
    "SigLIP": lambda task, o: SigLIP(o["tau"]),
    "DCL": lambda task, o: compopt.DCLEstimator(o["tau"], mode=task.mode),
    "XBM": _queue(positive=True),
    "XBM, DCL": _queue(positive=False),
    "SogCLR": lambda task, o: compopt.SogCLREstimator(task.n, o["gamma"], o["tau"], mode=task.mode),
    "iSogCLR": lambda task, o: compopt.ISogCLREstimator(
        task.n, o["gamma"], o["rho"], tau_init=o["tau"], tau_min=0.01, tau_max=0.5, reference="none", mode=task.mode
    ),
    "FastCLIP v3": lambda task, o: compopt.FastCLIPEstimator(
        task.n, "v3", gamma=o["gamma"], tau=o["tau"], rho=o["rho"], mode=task.mode
    ),
    "NeuCLIP": lambda task, o: compopt.NeuCLIPEstimator(
        DIM, tau=o["tau"], prototypes=1024, restart_every=100, mode=task.mode
    ),
    "Residual": lambda task, o: compopt.ResidualEstimator(DIM, tau=o["tau"], mode=task.mode),
    "Memory": lambda task, o: compopt.MemoryEstimator(DIM, int(o["length"]), o["tau"], mode=task.mode),
}
"""Loss by name: from a task and the settings that the search has chosen."""
