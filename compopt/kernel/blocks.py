"""Pieces of a block of similarities: masks, exponentials of one side, positives, further candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Stands for "not a pair" among similarities. Finite, so that 0 * MASKED is 0 and not NaN; far below any s / tau.
MASKED = -1e30


class Exponentials(NamedTuple):
    """One block of ``exp((s_ij - shift_i) / tau_i)`` seen by the anchors of one side (matrix rows or columns).

    ``dot`` is the sum of ``s_ij exp(...)`` over the block's candidates, or ``None``; ``excluded`` is the number of
    candidates that are no negatives, where a policy decides for this side alone.
    """

    exp: Tensor
    shift: Tensor | None
    dot: Tensor | None
    excluded: Tensor | None = None


def positives(z: Tensor, directions: int) -> Tensor:
    """``s_ii`` of all ordered pairs of views ``z``, ``(V, B, d)``: ``(B, A)``, see :class:`PairStatistics`."""
    if z.shape[0] == 2:
        return torch.linalg.vecdot(*z).unsqueeze(1).expand(-1, directions)
    return torch.cat([torch.linalg.vecdot(z, z.roll(-r, 0))[:directions] for r in range(1, len(z))]).T


@dataclass(frozen=True)
class Extra:
    """Further candidates of the anchors of direction 1, beside the batch's features.

    Attributes:
        features: ``(M, d)``, no graph; of this process.
        everyone: those of all ranks, in the order of the ranks; with one process the same.
        positive: positions of the anchors' own positives, ``(B,)``, of all ranks.
        positions: of ``everyone``, in the second modality, ``(M,)`` int64; ``None``: none of them is a positive.
        own: where this process's are among all.
        guide, key: what a policy of pairs asks of ``everyone``, ``(M, g)`` and ``(M,)``, or ``None``.
        owner: anchors that they were mined for, positions in the global batch, ``(M,)``, or ``None``.
        apart: they are no candidates of these anchors.
    """

    features: Tensor
    everyone: Tensor
    positive: Tensor
    positions: Tensor | None
    own: slice
    guide: Tensor | None = None
    key: Tensor | None = None
    owner: Tensor | None = None
    apart: bool = False

    @property
    def excludes(self) -> bool:
        """True if some of them are no candidates of some anchors."""
        return self.apart or self.positions is not None

    def same(self, anchors: slice, candidates: slice = slice(None)) -> Tensor:
        """True where a candidate is a positive of an anchor, or its own if ``apart``, ``(anchors, candidates)``."""
        positive = self.positive[anchors, None]
        if self.positions is None:
            same = positive.new_zeros(len(positive), len(self.everyone[candidates]), dtype=torch.bool)
        else:
            same = positive == self.positions[None, candidates]
        if self.apart and self.owner is not None:
            names = torch.arange(len(self.positive), device=positive.device)
            same |= names[anchors, None] == self.owner[None, candidates]
        return same
