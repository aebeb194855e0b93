"""Global batch of one call: the tensors, by name, that every step from the arguments to the rows reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

COUNT = "count"
# Offset between the numbers of two ranks' samples if they have no index; larger than any batch. The numbers distinguish
# samples within one batch only (Batch.named).
RANK_STRIDE = 1 << 40


@dataclass
class Rows:
    """Committed rows of one object for the samples of a batch.

    Attributes:
        columns: committed values by name, ``(B, D)``, in the working dtype of the call; empty without rows.
        counted: visits so far, ``(B, D)`` int32; without rows, row numbers ``(B, R)``.
        block: the rows in their stored form, ``(B * R, 2 * words)`` int64; ``None`` without rows.
    """

    columns: dict[str, Tensor]
    counted: Tensor
    block: Tensor | None = None

    @cached_property
    def count(self) -> Tensor:
        """Visits so far, ``(B, D)`` int32; zeros without rows."""
        return self.counted if self.columns else torch.zeros_like(self.counted, dtype=torch.int32)

    @cached_property
    def unseen(self) -> Tensor:
        """Mask of the samples that were never visited, ``(B, D)``."""
        return self.count == 0


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
        tables: committed rows of each object with rows, by its name; ``""`` for an object that is used alone.
        distinct: True if it is known on the host that no sample occurs twice and only the index excludes pairs.
        bad: 0-d flag on the device: an index is out of range, or the batch is a single sample.
        dtype: working dtype of the call.
        depositing: the call is in training mode with gradients enabled.
        constant_key: on a device, it is known on the host that a key has one value for the whole batch.
        named: ``index`` was passed; otherwise its numbers are those of this batch only.
    """

    keys: dict[str, Tensor]
    values: dict[str, Tensor]
    sizes: list[int]
    more: list[int]
    own: slice
    rows: Tensor
    host_rows: Tensor | None
    tables: dict[str, Rows]
    distinct: bool
    bad: Tensor | None
    dtype: torch.dtype
    depositing: bool
    constant_key: bool = False
    named: bool = True

    def of(self, name: str = "") -> Rows:
        """Return the committed rows of one object."""
        found = self.tables.get(name)
        return Rows({}, self.rows) if found is None else found

    @property
    def visits(self) -> Tensor | None:
        """Visits of each sample by the first object with rows, ``(B, D)``; ``None`` without rows."""
        for rows in self.tables.values():
            return rows.count
        return None

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
        return (self.values["k1"], self.values["k2"]) if "k1" in self.values else ()

    def nan_if_bad(self, value: Tensor) -> Tensor:
        """Return a value, or NaN if the flag ``bad`` is set on the device."""
        return value if self.bad is None else torch.where(self.bad, torch.nan, value)
