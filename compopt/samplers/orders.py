"""Random orders of the samples: functions of the seed, the epoch and what they are for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compopt import rng


class Orders:
    """Permutations and random batches.

    Args:
        n, batch_size: samples, and how many a batch has.
        seed: of all of them.
    """

    def __init__(self, n: int, batch_size: int, seed: int) -> None:
        self.n, self.batch_size, self.seed = n, batch_size, seed

    def draw(self, *counters: int) -> int:
        """63 random bits that belong to the counters."""
        return rng.fold(self.seed, *counters) >> 1

    def permutation(self, count: int, *counters: int) -> Tensor:
        """A random permutation that belongs to the counters, ``(count,)``."""
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.draw(*counters)), device="cpu")

    def batches(self, count: int, epoch: int, first: Tensor | None = None) -> Tensor:
        """``count`` full batches from as many permutations of the samples as it takes: ``(count, B)``.

        Args:
            count: number of batches.
            epoch: whose.
            first: True for samples that the first permutation begins with, ``(n,)``.
        """
        size = self.n // self.batch_size * self.batch_size
        orders = []
        for number in range(math.ceil(count * self.batch_size / size)):
            order = self.permutation(self.n, epoch, number)
            if first is not None and number == 0:
                order = torch.cat([order[first[order]], order[~first[order]]])
            orders.append(order[:size])
        return torch.cat(orders).view(-1, self.batch_size)[:count]
