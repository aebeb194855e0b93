"""Similarities by Python loops: for every direction and anchor the positive and the list of negatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Anchor:
    """One anchor and its positive; every similarity is a 0-d tensor with its autograd history.

    `direction` numbers the ordered pairs (anchor `view`, positive `partner`), of which two modalities have two.
    """

    direction: int
    view: int
    partner: int
    position: int
    positive: Tensor
    negatives: list[Tensor]

    @property
    def s(self) -> list[float]:
        """Similarities to the negatives, as floats."""
        return [x.item() for x in self.negatives]

    @property
    def h(self) -> list[float]:
        """h_ij = s_ij - s_ii, as floats."""
        return [x.item() - self.positive.item() for x in self.negatives]


def unit_rows(z: Tensor) -> list[Tensor]:
    """Rows of z divided by their length, one at a time."""
    return [row / torch.sqrt((row * row).sum()) for row in z.unbind(0)]


def may_be_negative(i, j, index, index2, group) -> bool:
    """Two batch positions are negatives of each other when nothing says they are the same sample."""
    if index[i] == index[j]:
        return False
    if index2 is not None and index2[i] == index2[j]:
        return False
    return group is None or group[i] != group[j]


def anchors(z, index, mode, normalize=True, index2=None, group=None, extra=None, extra_index=None, count=None):
    """All pairs of the first `count` views as anchors, nearest views first; view 0 has extra as candidates too."""
    rows = unit_rows if normalize else lambda z: list(z.unbind(0))
    views = [rows(view) for view in z]
    further = [] if extra is None else rows(extra)
    positive = index if index2 is None else index2
    count = 1 if mode == "forward" else len(views) if count is None else count
    pairs = [(v, (v + r) % len(views)) for r in range(1, len(views)) for v in range(count)]
    result = []
    for direction, (view, partner) in enumerate(pairs):
        own, other = views[view], views[partner]
        candidates = views if mode == "unimodal" else [other]
        for i in range(len(index)):
            negatives = []
            for j in range(len(index)):
                if may_be_negative(i, j, index, index2, group):
                    negatives += [(own[i] * side[j]).sum() for side in candidates]
            for j, candidate in enumerate(further if view == 0 else ()):
                if extra_index is None or extra_index[j] != positive[i]:
                    negatives.append((own[i] * candidate).sum())
            result.append(Anchor(direction, view, partner, i, (own[i] * other[i]).sum(), negatives))
    return result
