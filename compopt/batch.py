"""Global batch of one call: the tensors, by name, that every step from the arguments to the rows reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

COUNT = "count"
# Offset between the numbers of two ranks' samples if they have no index; larger than any batch. The numbers distinguish
# samples within one batch only (Batch.named).
RANK_STRIDE = 1 << 40


@dataclass
class Batch:
    """Global batch of one call: the samples of all ranks, in the order of the ranks.

    ``B`` is the number of samples on all ranks together, ``D`` the number of directions with columns of their own (2
    in bimodal mode with both directions, else 1).

    Attributes:
        keys: ``index`` and, if given, ``index2`` and ``labels``, ``(B,)`` int64, on the features' device.
        values: tensors of the call, by name, ``(B, ...)`` each: the features ``z1``, ``z2`` in the form that the
            kernel expects, ``k1``, ``k2`` of a momentum copy, ``guide1`` etc. of a policy, and ``tau`` if it is given
            per sample.
        sizes: number of samples of every rank.
        more: number of further candidates of every rank.
        own: slice of this rank's samples.
        rows: row numbers, ``(B, 1)``, or ``(B, 2)`` if the second modality has rows of its own.
        host_rows: the same on the CPU; ``None`` if reading them would wait for a device.
        columns: committed values, ``(B, D)``, with ``count``, the visits so far; empty without rows.
        blank: mask by column, ``(B, D)``: True where the sample was visited but the part that keeps the column was
            not. Contains all columns of a part, and only if such rows exist (:meth:`Component.load_state_dict`).
        block: the rows in their stored form, ``(B * R, 2 * words)`` int64; ``None`` without rows.
        distinct: True if it is known on the host that no sample occurs twice and only the index excludes pairs.
        bad: 0-d flag on the device: an index is out of range, or the batch is a single sample.
        dtype: working dtype of the call.
        depositing: the call is in training mode with gradients enabled.
        named: ``index`` was passed; otherwise its numbers are those of this batch only.
        alike: it is known on the host that a key has one value for the whole batch.
    """

    keys: dict[str, Tensor]
    values: dict[str, Tensor]
    sizes: list[int]
    more: list[int]
    own: slice
    rows: Tensor
    host_rows: Tensor | None
    columns: dict[str, Tensor]
    block: Tensor | None
    distinct: bool
    bad: Tensor | None
    dtype: torch.dtype
    depositing: bool
    blank: dict[str, Tensor] = field(default_factory=dict)
    named: bool = True
    alike: bool = False

    @cached_property
    def _new(self) -> Tensor:
        return self.count == 0

    def unseen(self, column: str) -> Tensor:
        """Return a mask of the samples that the part which keeps a column has never visited, ``(B, D)``."""
        return self._new | self.blank[column] if column in self.blank else self._new

    def seen(self, column: str) -> Tensor:
        """Return a mask of the samples that the part which keeps a column has visited, ``(B, D)``."""
        seen = self.count > 0
        return seen & ~self.blank[column] if column in self.blank else seen

    @property
    def count(self) -> Tensor:
        """Visits so far, ``(B, D)``; zeros without rows."""
        return self.columns[COUNT] if COUNT in self.columns else torch.zeros_like(self.rows, dtype=torch.int32)

    @property
    def visits(self) -> Tensor | None:
        """Visits of each sample, ``(B, D)``; 0 if any part has not visited it; ``None`` without rows."""
        count = self.columns.get(COUNT)
        for blank in {id(blank): blank for blank in self.blank.values()}.values():
            count = None if count is None else count.masked_fill(blank, 0)
        return count

    @cached_property
    def features(self) -> tuple[Tensor, ...]:
        """``z1, z2`` of all ranks, ``(B, d)`` each."""
        return self.values["z1"], self.values["z2"]

    @cached_property
    def views(self) -> Tensor:
        """:attr:`features` as one tensor, ``(2, B, d)``: a copy, unless the caller has set it."""
        return torch.stack(self.features)

    @property
    def momentum(self) -> tuple[Tensor, ...]:
        """``k1, k2`` of all ranks, ``(B, d)`` each; empty without ``keys=``."""
        return tuple(self.values[name] for name in ("k1", "k2") if name in self.values)

    def nan_if_bad(self, value: Tensor) -> Tensor:
        """Return a value, or NaN if the flag ``bad`` is set on the device."""
        return value if self.bad is None else torch.where(self.bad, torch.nan, value)
