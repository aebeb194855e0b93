"""The memory of past features in float64: one anchor at a time, gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """What :class:`compopt.MemoryNormalizer` keeps, and its loss, spelled out.

    Args:
        length: samples kept.
        mean_over: samples that the running mean covers.
        mode: ``"bimodal"`` or ``"unimodal"``.
        directions: that have anchors.
    """

    def __init__(self, length: int, mean_over: int = 64, mode: str = "bimodal", directions: int = 2) -> None:
        self.length, self.over, self.mode, self.directions = length, mean_over, mode, directions
        self.past: list[tuple[int, Tensor, Tensor]] = []  # index, and both features less the mean of their time
        self.mean: list[Tensor] = []

    def loss(self, z1: Tensor, z2: Tensor, index: Tensor, tau: float | Tensor) -> Tensor:
        """Its value is the mean of ``tau alpha``, its gradient that of the weights."""
        z = [torch.nn.functional.normalize(side, dim=1) for side in (z1, z2)]
        means = [side.detach().mean(0) for side in z]
        if self.mode == "unimodal":
            means = [(means[0] + means[1]) / 2] * 2
        rate = min(1.0, len(index) / self.over)
        self.mean = [old + rate * (new - old) for old, new in zip(self.mean, means, strict=True)] if self.past else means
        total = z1.new_zeros(())
        for direction in range(self.directions):
            for i in range(len(index)):
                total = total + self._anchor(z, index, i, direction, tau)
        kept = [(int(k), *(side[i].detach() - m for side, m in zip(z, self.mean, strict=True))) for i, k in enumerate(index)]
        self.past = [*self.past, *kept][-self.length :]
        return total / (self.directions * len(index))

    def _anchor(self, z: list[Tensor], index: Tensor, i: int, direction: int, tau: float | Tensor) -> Tensor:
        own, partner = z[direction][i], z[1 - direction][i]
        sides = (0, 1) if self.mode == "unimodal" else (1 - direction,)
        inside = torch.stack([own @ z[s][j] for s in sides for j in range(len(index)) if index[j] != index[i]])
        queue = [kept[1 + s] + self.mean[s] for s in sides for kept in self.past if kept[0] != int(index[i])]
        outside = torch.stack([own @ q for q in queue]) if queue else own.new_zeros(0)
        every = torch.cat([inside, outside])
        weights = torch.softmax(every.detach() / tau, 0)
        of_batch = weights[: len(inside)].sum()
        pull = of_batch * (own @ partner) + (1 - of_batch) * (own @ partner.detach())
        moved = (weights * every).sum() - pull
        value = tau * ((every - own @ partner) / tau).logsumexp(0) - tau * torch.tensor(len(every)).log()
        return value.detach() + moved - moved.detach()
