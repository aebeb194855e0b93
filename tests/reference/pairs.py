"""Similarities by Python loops: for every direction and anchor the positive and the list of negatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Anchor:
    """One anchor of one direction; every similarity is a 0-d tensor with its autograd history."""

    direction: int
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


def anchors(z1, z2, index, mode, normalize=True, index2=None, group=None, extra=None, extra_index=None):
    """All anchors: direction 0 from z1, with extra as candidates too; direction 1, which "forward" lacks, from z2."""
    rows = unit_rows if normalize else lambda z: list(z.unbind(0))
    views = rows(z1), rows(z2)
    further = [] if extra is None else rows(extra)
    positive = index if index2 is None else index2
    result = []
    for direction in (0,) if mode == "forward" else (0, 1):
        own, other = views[direction], views[1 - direction]
        for i in range(len(index)):
            negatives = []
            for j in range(len(index)):
                if not may_be_negative(i, j, index, index2, group):
                    continue
                negatives.append((own[i] * other[j]).sum())
                if mode == "unimodal":
                    negatives.append((own[i] * own[j]).sum())
            for j, candidate in enumerate(further if direction == 0 else ()):
                if extra_index is None or extra_index[j] != positive[i]:
                    negatives.append((own[i] * candidate).sum())
            result.append(Anchor(direction, i, (own[i] * other[i]).sum(), negatives))
    return result
