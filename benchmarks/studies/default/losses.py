"""Contenders: estimators of the library, and other methods for small batches with the same interface."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compopt
from benchmarks.studies.default.arms import CANDIDATES, DEFAULT, LARGEST_TAU, MICRO, MOMENTUM, VARIED, Cell
from benchmarks.studies.default.tasks import DIM, SAMPLES, Task
from benchmarks.studies.default.training import Loss

Settings = Mapping[str, Any]
Build = Callable[[Task, Settings], Loss]


def in_batch(own: Tensor, sides: list[Tensor]) -> list[Tensor]:
    """Return similarities with the samples of the batch on each side, ``-inf`` on the diagonal."""
    itself = torch.eye(len(own), dtype=torch.bool)
    return [(own @ side.T).masked_fill(itself, -math.inf) for side in sides]


class DCLW(nn.Module):
    """Weighted form of DCL (Yeh et al., ECCV 2022, section 4): dissimilar positives have larger weights.

    The positive is multiplied by ``w = 2 - exp(<z1, z2> / sigma) / mean exp(<z1, z2> / sigma)``; sigma is 0.5 as there.
    """

    sigma = 0.5

    def __init__(self, tau: float, unimodal: bool) -> None:
        super().__init__()
        self.tau, self.unimodal = tau, unimodal

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        z = [F.normalize(z1), F.normalize(z2)]
        positive = torch.linalg.vecdot(*z)
        weight = 2 - len(z1) * torch.softmax(positive / self.sigma, 0)
        negatives = [self._negatives(own, other) for own, other in (z, z[::-1])]
        return torch.cat(negatives).mean() - (weight * positive).mean()

    def _negatives(self, own: Tensor, other: Tensor) -> Tensor:
        similar = torch.cat(in_batch(own, [other, own] if self.unimodal else [other]), 1)
        return self.tau * torch.logsumexp(similar / self.tau, 1)

    def step(self) -> None:
        """Do nothing, as the loss has no state."""


class MicroBatches(nn.Module):
    """DCL on a whole window whose candidates have a gradient only in their own micro-batch: an ideal memory.

    It corresponds to a memory of all micro-batches of an update, with features of the current weights.

    Args:
        tau: temperature.
        size: samples per micro-batch.
        balanced: whether the gradient of the positive with respect to a candidate is scaled by the share of the
            negatives' weights that have a gradient, as in :class:`~compopt.MemoryNormalizer`.
    """

    def __init__(self, tau: float, size: int, balanced: bool) -> None:
        super().__init__()
        self.tau, self.size, self.balanced = tau, size, balanced

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        z = [F.normalize(z1), F.normalize(z2)]
        return (self._direction(*z) + self._direction(*z[::-1])) / 2

    def _direction(self, own: Tensor, other: Tensor) -> Tensor:
        group = torch.arange(len(own)) // self.size
        inside = group[:, None] == group
        (similar,), (fixed,) = in_batch(own, [other]), in_batch(own, [other.detach()])
        logits = torch.where(inside, similar, fixed) / self.tau
        anchors, positives = torch.linalg.vecdot(own, other.detach()), torch.linalg.vecdot(own.detach(), other)
        share = (logits.detach().softmax(1) * inside).sum(1) if self.balanced else 1.0
        positive = anchors + share * (positives - positives.detach())
        return (self.tau * torch.logsumexp(logits, 1) - positive).mean()

    def step(self) -> None:
        """Do nothing, as the loss has no state."""


class CrossBatchMemory(nn.Module):
    """Queue of unchanged past features as additional negatives (XBM, Wang et al., CVPR 2020).

    Args:
        tau: temperature.
        length: number of features kept per side.
        positive: whether the positive is in the denominator.
        warmup: updates before the queue is used.
        unimodal: whether both views of the other samples are negatives.
    """

    def __init__(self, tau: float, length: int, positive: bool, warmup: int, unimodal: bool) -> None:
        super().__init__()
        self.tau, self.length, self.positive, self.warmup, self.unimodal = tau, length, positive, warmup, unimodal
        self.queue: list[Tensor] = []
        self.updates = 0

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        z = [F.normalize(z1), F.normalize(z2)]
        keys = self._keys(z)
        past, new = self._past(keys), [side.detach() for side in self._kept(keys)]
        loss = (self._direction(z, keys, past, 0) + self._direction(z, keys, past, 1)) / 2
        self._append(new)
        return loss

    def _append(self, new: list[Tensor]) -> None:
        self.queue = [side[-self.length :] for side in _joined(self.queue, new)]

    def _keys(self, z: list[Tensor]) -> list[Tensor]:
        """Return the candidates of the anchors, of both sides."""
        return z

    def _past(self, keys: list[Tensor]) -> list[Tensor]:
        """Return the features of the queue as they are used, of both sides."""
        return self.queue

    def _kept(self, keys: list[Tensor]) -> list[Tensor]:
        """Return the features that enter the queue."""
        return keys

    def _direction(self, z: list[Tensor], keys: list[Tensor], queue: list[Tensor], direction: int) -> Tensor:
        own, other = z[direction], keys[1 - direction]
        inside = [other, keys[direction]] if self.unimodal else [other]
        past = queue if self.unimodal else queue[1 - direction :][:1]
        parts = in_batch(own, inside)
        positive = torch.linalg.vecdot(own, other)
        parts += [own @ side.T for side in past] if self.updates >= self.warmup else []
        parts += [positive[:, None]] if self.positive else []
        return (self.tau * torch.logsumexp(torch.cat(parts, 1) / self.tau, 1) - positive).mean()

    def step(self) -> None:
        """Count updates."""
        self.updates += 1


class DualMemory(CrossBatchMemory):
    """Queue of past pairs that are anchors as well as candidates (ContAccum, Kim et al., NeurIPS 2024).

    The loss is InfoNCE of the pairs of the batch and of the queue together. Only the features of the batch have a
    gradient.
    """

    def __init__(self, tau: float, length: int, unimodal: bool) -> None:
        super().__init__(tau, length, True, 0, unimodal)

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        z = [F.normalize(z1), F.normalize(z2)]
        pairs = _joined(self.queue, z)
        loss = (self._direction(pairs, pairs, [], 0) + self._direction(pairs, pairs, [], 1)) / 2
        self._append([side.detach() for side in z])
        return loss


def _joined(queue: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    return [torch.cat(pair) for pair in zip(queue, new, strict=True)] if queue else new


class MomentumQueue(CrossBatchMemory):
    """Keys and their queue from a momentum copy of the model (MoCo, He et al., CVPR 2020).

    The other keys of the batch are also negatives, whereas in MoCo they are negatives only in the next step.

    Args:
        momentum: momentum of the copy.
    """

    def __init__(self, tau: float, length: int, momentum: float, positive: bool, unimodal: bool) -> None:
        super().__init__(tau, length, positive, 0, unimodal)
        self.momentum = momentum
        self.models: list[nn.Module] = []  # the user's model and its copy; no submodules of the loss

    def watch(self, model: nn.Module) -> None:
        """Observe the inputs of the model from now on."""
        self.models = [model, copy.deepcopy(model).requires_grad_(False)]
        model.register_forward_hook(self._encode)

    def _encode(self, model: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        with torch.no_grad():
            self.encoded = [F.normalize(side) for side in self.models[1](*inputs)]

    def _keys(self, z: list[Tensor]) -> list[Tensor]:
        return self.encoded

    @torch.no_grad()
    def step(self) -> None:
        """Count updates, and update the copy."""
        super().step()
        followed, follower = (list(model.parameters()) for model in self.models)
        torch._foreach_lerp_(follower, followed, 1 - self.momentum)


class MovedQueue(MomentumQueue):
    """Momentum queue that is moved with the mean of the batch's keys, as in :class:`compopt.MemoryNormalizer`."""

    def _past(self, keys: list[Tensor]) -> list[Tensor]:
        return [side + mean for side, mean in zip(self.queue, self._means(keys), strict=False)]  # empty at first

    def _kept(self, keys: list[Tensor]) -> list[Tensor]:
        return [side - mean for side, mean in zip(keys, self._means(keys), strict=True)]

    def _means(self, keys: list[Tensor]) -> list[Tensor]:
        means = [side.mean(0) for side in keys]
        return [(means[0] + means[1]) / 2] * 2 if self.unimodal else means


class Followed(nn.Module):
    """Estimator of the library with features of a momentum copy of the model."""

    def __init__(self, est: compopt.ContrastiveEstimator, decay: float = 0.99) -> None:
        super().__init__()
        self.est, self.decay = est, decay

    def watch(self, model: nn.Module) -> None:
        """Observe the inputs of the model from now on, and create its momentum copy."""
        self.encoder = compopt.MomentumEncoder(model, self.decay)
        self.encoder.attach(self.est)
        model.register_forward_hook(self._encode)

    def _encode(self, model: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if model.training:
            self.encoded = self.encoder(*inputs)

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        return self.est(z1, z2, index, keys=self.encoded)

    def step(self) -> None:
        """Commit, which also updates the copy."""
        self.est.step()


class Annealed(nn.Module):
    """Estimator whose gamma falls from 1 to ``gamma`` along a cosine in the first half of a run at batch 16."""

    def __init__(self, est: compopt.ContrastiveEstimator, gamma: float) -> None:
        super().__init__()
        self.est, self.schedule = est, compopt.schedules.CosineGamma(est, SAMPLES // VARIED // 2, gamma)

    def forward(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        return self.est(z1, z2, index)

    def step(self) -> None:
        """Commit, and step the schedule."""
        self.est.step()
        self.schedule.step()


def _momentum_queue(positive: bool, kind: type[MomentumQueue] = MomentumQueue) -> Build:
    return lambda task, o: kind(o["tau"], int(o["length"]), o["momentum"], positive, task.mode == "unimodal")


def _queue(positive: bool) -> Build:
    return lambda task, o: CrossBatchMemory(
        o["tau"], int(o["length"]), positive, int(o["warmup"]), task.mode == "unimodal"
    )


# Builders of the losses by name, from a task and the chosen settings.
LOSSES: dict[str, Build] = {
    "InfoNCE": lambda task, o: compopt.InfoNCEEstimator(o["tau"], mode=task.mode),
    "CLIP": lambda task, o: compopt.InfoNCEEstimator(o["tau"], learn_tau=True, multiply_tau=False, mode=task.mode),
    "SigLIP": lambda task, o: compopt.SigLIPEstimator(o["tau"]),
    "DCL": lambda task, o: compopt.DCLEstimator(o["tau"], mode=task.mode),
    "DCL, micro-batches": lambda task, o: MicroBatches(o["tau"], MICRO, balanced=False),
    "DCL, micro-batches, balanced": lambda task, o: MicroBatches(o["tau"], MICRO, balanced=True),
    "DCLW": lambda task, o: DCLW(o["tau"], task.mode == "unimodal"),
    "XBM": _queue(positive=True),
    "XBM, DCL": _queue(positive=False),
    "ContAccum": lambda task, o: DualMemory(o["tau"], int(o["length"]), task.mode == "unimodal"),
    "MoCo": _momentum_queue(positive=True),
    "MoCo, DCL": _momentum_queue(positive=False),
    "MoCo, DCL, moved": _momentum_queue(positive=False, kind=MovedQueue),
    "SogCLR": lambda task, o: compopt.SogCLREstimator(task.n, o["gamma"], o["tau"], mode=task.mode),
    "SogCLR, positive": lambda task, o: compopt.SogCLREstimator(
        task.n, o["gamma"], o["tau"], reference="positive", mode=task.mode
    ),
    "iSogCLR": lambda task, o: compopt.ISogCLREstimator(
        task.n, o["gamma"], o["rho"], tau_init=o["tau"], tau_max=LARGEST_TAU, mode=task.mode
    ),
    "FastCLIP v3": lambda task, o: Annealed(
        compopt.FastCLIPEstimator(task.n, "v3", tau=o["tau"], rho=o["rho"], mode=task.mode), o["gamma"]
    ),
    "NeuCLIP, Algorithm 1": lambda task, o: compopt.NeuCLIPEstimator(
        DIM, tau=o["tau"], prototypes=1024, rho=o["rho"], learn_tau=True, mode=task.mode
    ),
    "Memory": lambda task, o: compopt.MemoryEstimator(DIM, int(o["length"]), o["tau"], mode=task.mode),
}


def loss_of(cell: Cell, settings: Settings, task: Task) -> Loss:
    """Return a new loss of a cell.

    Raises:
        ValueError: the code of the loss was removed.
    """
    if cell.loss == DEFAULT:
        return compopt.recommended(DIM, task.n, cell.batch, task.mode, candidates=None)
    if cell.loss in CANDIDATES:
        return compopt.recommended(DIM, task.n, cell.batch, task.mode, candidates=CANDIDATES[cell.loss])
    if cell.loss == MOMENTUM:
        length = min(settings.get("length", 128), task.n // 4)
        return Followed(compopt.MemoryEstimator(DIM, length, momentum=True, mode=task.mode))
    if cell.loss in LOSSES:
        return LOSSES[cell.loss](task, settings)
    if cell.loss == "Residual":
        raise ValueError("'Residual' ran with compopt.ResidualEstimator of commit 95c7f8b6")
    length, _, what = cell.loss.partition(" ")
    if what != "features":
        raise ValueError(f"{cell.loss!r} ran in benchmarks/studies/default/variants.py of commit 2310a77")
    return compopt.MemoryEstimator(DIM, int(length), mode=task.mode)
