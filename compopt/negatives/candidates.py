"""Which candidates an anchor may draw, numbered from 0 to |N_i| - 1, and where in the batch a sample is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compopt.kernel.pairs import same_sample


class Samples:
    """The samples of a batch by data-set position.

    Args:
        names: data-set positions, ``(B,)``.
    """

    def __init__(self, names: Tensor) -> None:
        self.names = names
        self._sorted, self._place = torch.sort(names, stable=True)

    def find(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Column (in view 1) where the batch first has each sample, ``(b,)``, and whether it has."""
        at = torch.searchsorted(self._sorted, sample.contiguous()).clamp_(max=len(self.names) - 1)
        return self._place[at], self._sorted[at] == sample

    def name(self, column: Tensor) -> Tensor:
        """Data-set position of the sample in a column, of whichever view."""
        return self.names[column % len(self.names)]


class Candidates:
    """The candidates of some anchors, of either direction.

    Columns are the ``B`` features of the other modality, or in unimodal mode the ``2 B`` of both views.

    Args:
        keys: of the global batch, ``(B,)`` each, see :class:`~compopt.kernel.pairs.PairStatistics`.
        positions: of the anchors in the global batch, ``(b,)``.
        distinct: known on the host: all keys are one key without repeats.
        views: columns per sample, 1 or 2.

    Attributes:
        width: columns.
        most: no anchor has more negatives, known on the host.
        count: ``|N_i|``, ``(b,)`` int64, or ``(1,)`` where all have ``most``.
        alike: known on the host: all anchors have ``most`` negatives.
    """

    def __init__(self, keys: Sequence[Tensor], positions: Tensor, distinct: bool, views: int) -> None:
        self._positions, self._views, self._batch = positions, views, len(keys[0])
        self.width = views * self._batch
        self.most = self.width - views
        self._same: Tensor | None = None
        self.alike = distinct
        if distinct:
            self.count = torch.full_like(positions[:1], self.most)
        else:
            self._same = same_sample([key[positions] for key in keys], keys)  # (b, B)
            self.count = views * (~self._same).sum(1)
            # allowed columns first, in their order; sorting along the rows is five times as fast
            self._order = torch.argsort(self._same.to(torch.uint8).repeat(1, views), dim=1, stable=True).T

    def column(self, number: Tensor) -> Tensor:
        """Column of each negative by its number, ``(R, b)``; of numbers from ``count`` on, ``width``."""
        outside = number >= self.count
        if self._same is None:
            column = number - _below(self._positions - 1, number)
            if self._views == 2:
                column -= _below(self._positions + (self._batch - 1), column)
        else:
            column = self._order.gather(0, number.clamp(max=self.width - 1))
        return column.masked_fill_(outside, self.width)

    def allows(self, column: Tensor) -> Tensor:
        """Whether a column of view 1 is a negative of its anchor, ``(b,)``."""
        if self._same is None:
            return column != self._positions
        return ~self._same.gather(1, column[:, None])[:, 0]


class Pool:
    """Candidates that are the same for all anchors; in the place of :class:`Candidates`, whose attributes it has.

    Args:
        size: how many, ``M``.
        like: on the device of the batch.
    """

    alike = True

    def __init__(self, size: int, like: Tensor) -> None:
        self.width = self.most = size
        self.count = torch.full((1,), size, dtype=torch.int64, device=like.device)

    def column(self, number: Tensor) -> Tensor:
        """Column of each candidate by its number, ``(R, b)``."""
        return number.clamp(max=self.width)


def _below(a: Tensor, b: Tensor) -> Tensor:
    """-1 where ``a < b``, else 0; a comparison and its conversion to int64 take three times as long."""
    return torch.sub(a, b).bitwise_right_shift_(63)
