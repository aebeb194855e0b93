"""Features of a call as the statistics of several matrices of similarities are made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.kernel.pairs import PairOptions, PairStatistics

Build = Callable[[Tensor, Sequence[Tensor], "float | Tensor", PairOptions], PairStatistics]


@dataclass(frozen=True)
class Source:
    """Features of one call, and what sweeps them.

    Attributes:
        own: this process's features, ``(V, b, d)``.
        everyone: those of all ranks, ``(B, d)`` each.
        place: where this process's samples are among all.
        tau: temperatures, a number or broadcastable to ``(B, A)``.
        build: makes statistics of own features, everyone's, temperatures and options.
        gather: from values of the own samples to those of all.
    """

    own: Tensor
    everyone: Sequence[Tensor]
    place: slice
    tau: float | Tensor
    build: Build
    gather: Callable[[Tensor], Tensor]

    def pairs(
        self, options: PairOptions, views: Sequence[int] | None = None, tau: float | Tensor | None = None
    ) -> PairStatistics:
        """Sweep the pairs of all views, or of two of them, at these temperatures or at another one."""
        own, everyone = self.own, self.everyone
        if views is not None:
            own, everyone = torch.stack([own[view] for view in views]), [everyone[view] for view in views]
        return self.build(own, everyone, self.tau if tau is None else tau, options)
