"""The default with one thing changed, to see what that thing is worth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import compopt
from benchmarks.studies.default.tasks import DIM, Task
from compopt.presets.memory import LENGTH, TAU


class NotMoved(compopt.MemoryNormalizer):
    """Past features are used as they were."""

    def _mean(self, candidates: Tensor) -> Tensor:
        return torch.zeros_like(super()._mean(candidates))


class NotBalanced(compopt.MemoryNormalizer):
    """An anchor and its positive pull each other with equal strength; past features push the anchor alone."""

    def _feature_gradients(
        self, z: Tensor, queue: Tensor, weights: Tensor, total: Tensor, scale: Tensor, slope: Tensor
    ) -> Tensor:
        gradient = super()._feature_gradients(z, queue, weights, total, scale, slope)
        pull = (total * self._by_queue(slope * scale).unsqueeze(2) * self._anchors(z)).view(-1, *z.shape[1:])
        return gradient - (pull if len(pull) == 2 else torch.cat([pull, torch.zeros_like(pull)])).flip(0)


def _memory(kind: type[compopt.MemoryNormalizer], length: int = LENGTH) -> Callable[[Task], compopt.Estimator]:
    def build(task: Task) -> compopt.Estimator:
        temperature = compopt.FixedTemperature(TAU)
        return compopt.ContrastiveEstimator(kind(DIM, length), temperature, mode=task.mode)

    return build


CHANGED: dict[str, Callable[[Task], compopt.Estimator]] = {
    "features as they were": _memory(NotMoved),
    "forces out of balance": _memory(NotBalanced),
    "32 features": _memory(compopt.MemoryNormalizer, 32),
    "512 features": _memory(compopt.MemoryNormalizer, 512),
}
"""What is changed, and how the estimator with that is made."""
