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


def anchors(z1, z2, index, mode, normalize=True, index2=None, group=None) -> list[Anchor]:
    """All 2 B anchors: direction 0 starts from z1, direction 1 from z2."""
    views = (
        unit_rows(z1) if normalize else list(z1.unbind(0)),
        unit_rows(z2) if normalize else list(z2.unbind(0)),
    )
    result = []
    for direction in (0, 1):
        own, other = views[direction], views[1 - direction]
        for i in range(len(index)):
            negatives = []
            for j in range(len(index)):
                if not may_be_negative(i, j, index, index2, group):
                    continue
                negatives.append((own[i] * other[j]).sum())
                if mode == "unimodal":
                    negatives.append((own[i] * own[j]).sum())
            result.append(Anchor(direction, i, (own[i] * other[i]).sum(), negatives))
    return result
