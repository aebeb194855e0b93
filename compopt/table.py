"""The rows of one estimator: layout, placement, reading and committing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compopt.component import Component
from compopt.deposits import COUNT, Deposit, merge
from compopt.groups import SampleGroups
from compopt.rows import Column, RowLayout
from compopt.stores import DirectRows, MemoryStore, Rows, RowStore

# Rows copied at a time, so that copying a large table needs little beside itself.
BLOCK_ROWS = 1 << 20


class RowTable:
    """All columns of all components, one row per sample.

    Args:
        components: by role.
        groups: sizes and initial values.
        directions: values per column.
        dtype: of the floating-point columns.
    """

    def __init__(
        self, components: Mapping[str, Component], groups: SampleGroups, directions: int, dtype: torch.dtype
    ) -> None:
        self._groups = groups
        self._owner = {c.name: role for role, part in components.items() for c in part.columns(directions, dtype)}
        columns = [c for part in components.values() for c in part.columns(directions, dtype)]
        self.layout = RowLayout((*columns, Column(COUNT, directions, torch.int32)))
        self.rows: Rows = DirectRows(MemoryStore(groups.n or 0, self.layout.words))

    @property
    def store(self) -> RowStore:
        """Where this process keeps its rows."""
        return self.rows.store

    def read(self, rows: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
        """Columns ``(B, D)`` in the working dtype (``count`` as stored) and the gathered blocks.

        Args:
            rows: ``(B, 1)``; or ``(B, 2)``: direction 1 lives in the first column's rows, direction 2 in the
                second's.
            dtype: of the returned columns.
        """
        block = self.rows.fetch(rows.flatten())
        views = self.layout.unpack(block)
        if rows.shape[1] == 2:
            views = {k: torch.stack([v[0::2, 0], v[1::2, 1]], dim=1) for k, v in views.items()}
        columns = {COUNT: views[COUNT]}
        for column in self.layout.columns:
            if column.name == COUNT:
                continue
            value = views[column.name].to(dtype)
            if column.initial is not None:
                initial = self._groups.hyper(self._owner[column.name], rows, dtype)(column.initial)
                value = torch.where(columns[COUNT] == 0, initial, value)
            columns[column.name] = value
        return columns, block

    def commit(self, deposits: Sequence[Deposit], found_inf: Tensor | None) -> None:
        """Write a window of deposits, unless ``found_inf`` (on the device) is positive."""
        rows, old, new = merge(deposits, self.layout)
        if found_inf is not None:
            new = torch.where(found_inf.to(new.device) > 0, old, new)
        self.rows.commit(rows, new)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of every column of every row, ``(n, D)``."""
        store = self.store
        full = {c.name: torch.empty(store.n, c.width, dtype=c.dtype, device=store.device) for c in self.layout.columns}
        for start in range(0, store.n, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, store.n)
            for name, view in self.layout.unpack(store.block(start, stop)).items():
                full[name][start:stop].copy_(view)
        return full

    def check_state(self, columns: Mapping[str, Tensor]) -> None:
        """Refuse columns of another shape or dtype, with both values."""
        for c in self.layout.columns:
            if c.name not in columns:
                raise ValueError(f"the checkpoint has no column {c.name!r}; it has {sorted(columns)}")
            given, needed = columns[c.name], (self.store.n, c.width)
            if tuple(given.shape) != needed or given.dtype != c.dtype:
                raise ValueError(
                    f"column {c.name!r} differs: the checkpoint has {tuple(given.shape)} of {given.dtype}, this "
                    f"estimator {needed} of {c.dtype}"
                )

    def load_state_dict(self, columns: Mapping[str, Tensor]) -> None:
        """Overwrite all rows."""
        for start in range(0, self.store.n, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self.store.n)
            values = {c.name: columns[c.name][start:stop].to(self.store.device) for c in self.layout.columns}
            self.store.write_block(start, self.layout.pack(values, base=self.store.block(start, stop)))
