"""Similarities by Python loops: for every direction and anchor the positive and the list of negatives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Anchor:
    """One anchor, a feature of `view`, and its positive of `partner`; similarities are 0-d tensors with a graph."""

    direction: int
    view: int
    partner: int
    position: int
    positive: Tensor
    negatives: list[Tensor]
    who: list[tuple]  # of each negative: (view, place in the batch), or ("extra", place)
    log_weights: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.log_weights = self.log_weights or [0.0] * len(self.negatives)

    def terms(self, tau) -> list[float]:
        """exp(h_ij / tau + b_ij), as floats."""
        return [math.exp(h / tau + b) for h, b in zip(self.h, self.log_weights, strict=True)]

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
    """Return True if no key marks two batch positions as the same sample."""
    if index[i] == index[j]:
        return False
    if index2 is not None and index2[i] == index2[j]:
        return False
    return group is None or group[i] != group[j]


def anchors(z, index, mode, normalize=True, index2=None, group=None, extra=None, extra_index=None):
    """Return the anchors of each direction; those of view 0 have extra as candidates too."""
    rows = unit_rows if normalize else lambda z: list(z.unbind(0))
    views = [rows(view) for view in z]
    further = [] if extra is None else rows(extra)
    positive = index if index2 is None else index2
    result = []
    for view in range(1 if mode == "forward" else 2):
        partner = 1 - view
        own, other = views[view], views[partner]
        candidates = list(enumerate(views)) if mode == "unimodal" else [(partner, other)]
        for i in range(len(index)):
            negatives, who = [], []
            for j in range(len(index)):
                if may_be_negative(i, j, index, index2, group):
                    negatives += [(own[i] * side[j]).sum() for _, side in candidates]
                    who += [(number, j) for number, _ in candidates]
            for j, candidate in enumerate(further if view == 0 else ()):
                if extra_index is None or extra_index[j] != positive[i]:
                    negatives.append((own[i] * candidate).sum())
                    who.append(("extra", j))
            result.append(Anchor(view, view, partner, i, (own[i] * other[i]).sum(), negatives, who))
    return result
