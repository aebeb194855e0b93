"""The newest features of the other modality, from which prototypes start again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compopt.distributed.ranks import Part


@dataclass(frozen=True)
class Queue:
    """A ring of ``m`` slots per network; each rank keeps the features of its own prototypes' slots.

    A value: :meth:`push` returns another queue and leaves this one as it was, because a batch may be discarded.

    Attributes:
        features: this rank's slots, ``(D, m_k, d)``.
        active: which of all slots hold a feature, ``(m,)``, on the device.
        place: next slot to fill, number of slots filled, and number of commits at the last restart (-1: none), as the
            host counts them, ``(3,)`` int64 on the CPU. They advance even if a batch on a device turns out to be
            unusable; its slots then keep what they held.
    """

    features: Tensor
    active: Tensor
    place: Tensor

    @classmethod
    def empty(cls, networks: int, width: int, dim: int, part: Part, dtype: torch.dtype) -> Queue:
        """No features."""
        return cls(
            torch.zeros(networks, part.size, dim, dtype=dtype, device="cpu"),
            torch.zeros(width, dtype=torch.bool, device="cpu"),
            torch.tensor([0, 0, -1], device="cpu"),
        )

    @classmethod
    def of(cls, prototypes: Tensor, width: int) -> Queue:
        """Slots in use that hold no features yet, but prototypes."""
        active = torch.ones(width, dtype=torch.bool, device="cpu")
        return cls(prototypes.clone(), active, torch.tensor([0, 0, -1], device="cpu"))

    @property
    def full(self) -> bool:
        """Every slot has been filled (the host's count)."""
        return bool(self.place.tolist()[1] == len(self.active))

    def is_due(self, t: int, every: int | None) -> bool:
        """Whether the period of ``every`` commits that ``t`` lies in has not seen a restart."""
        return every is not None and bool(t // every != self.place.tolist()[2] // every)

    def restarted(self, t: int) -> Queue:
        """The same, with the note that prototypes restarted at ``t``."""
        return replace(self, place=torch.tensor([*self.place[:2].tolist(), t], device="cpu"))

    def fill(self, prototypes: Tensor, written: list[tuple[slice, Tensor]], part: Part) -> Tensor:
        """Prototypes in slots that held nothing before become the features that were written there."""
        active = part.of(self.active)
        if active.device.type == "cpu" and active.all():
            return prototypes
        prototypes = prototypes.clone()
        for own, features in written:
            known = active[own].unsqueeze(1)
            prototypes[:, own] = torch.where(known, prototypes[:, own], features)
        return prototypes

    def push(self, new: Tensor, usable: Tensor, part: Part) -> tuple[Queue, list[tuple[slice, Tensor]]]:
        """Add the features of a batch, oldest first out.

        Args:
            new: ``(D, P, d)``; of more than ``m`` the last ``m`` are kept, in slots 0 to m - 1.
            usable: 0-d flag; if False the slots keep their content.
            part: the slots of this rank.

        Returns:
            The new queue, and what was written where: slices of this rank's slots with their new content.
        """
        width = len(self.active)
        start, filled, restart = self.place.tolist()
        if new.shape[1] >= width:
            new, start = new[:, -width:], 0
        size = new.shape[1]
        features, active = self.features.clone(), self.active.clone()
        written = []
        for first, stop in ((start, min(start + size, width)), (0, max(0, start + size - width))):
            if first == stop:
                continue
            offset = 0 if first == start else width - start  # the second piece wraps around
            active[first:stop].logical_or_(usable)
            low, high = max(first, part.start), min(stop, part.stop)
            if low >= high:
                continue
            own = slice(low - part.start, high - part.start)
            batch = new[:, offset + low - first : offset + high - first].to(features.dtype)
            torch.where(usable, batch, features[:, own], out=features[:, own])
            written.append((own, features[:, own]))
        place = torch.tensor([(start + size) % width, min(width, filled + size), restart], device="cpu")
        return Queue(features, active, place), written
