"""Rows: all columns of a sample side by side in one row of one table.

A row is padded to a multiple of 16 bytes, a word. A block is rows as int64, ``(R, 2 * words)``: bits are copied,
whatever the columns mean, so that integers, NaN, -0.0 and denormals survive.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.batch import COUNT
from compopt.checks.values import FINITE, Range

ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class Column:
    """One named quantity per sample.

    Attributes:
        name: key in :meth:`Estimator.read` and in checkpoints.
        width: values per sample; ``D``, one per direction.
        dtype: of the stored values; integers are stored bitwise.
        reduce: how several proposals for one row become one value: ``"mean"``, ``"log_mean_exp"``, or
            ``"one"`` of them, the same for all such columns.
        initial: hyper-parameter whose value a row shows before its first visit; ``None``: zero.
        values: what a checkpoint may hold here; floating-point columns without it hold finite values. In rows that
            were never visited a zero is always accepted.
    """

    name: str
    width: int
    dtype: torch.dtype = torch.float32
    reduce: str = "mean"
    initial: str | None = None
    values: Range | None = None

    @property
    def blank(self) -> float | int:
        """Mark, in a part's first column, that the part was never visited although the sample was; never committed."""
        return -math.inf if self.dtype.is_floating_point else torch.iinfo(self.dtype).min


class RowLayout:
    """Place of each column inside a row; wider types first, so that every column is aligned.

    Args:
        columns: of a row.
        firsts: first columns of the parts, which may have a mark, see :attr:`Column.blank`.
    """

    def __init__(self, columns: Sequence[Column], firsts: Collection[str] = ()) -> None:
        self.columns, self.firsts = tuple(columns), frozenset(firsts)
        self.dtypes = {column.dtype for column in columns}
        self.offsets: dict[str, int] = {}  # in bytes
        self.spans: list[tuple[torch.dtype, int, int]] = []  # of floating-point columns that are neighbours
        end = 0
        for column in sorted(columns, key=lambda c: -c.dtype.itemsize):
            if column.name in self.offsets:
                raise ValueError(f"two columns are called {column.name!r}; give each its own name")
            self.offsets[column.name] = end
            start = end // column.dtype.itemsize
            if self.spans and self.spans[-1][::2] == (column.dtype, start):
                self.spans[-1] = (column.dtype, self.spans[-1][1], start + column.width)
            elif column.dtype.is_floating_point:
                self.spans.append((column.dtype, start, start + column.width))
            end += column.width * column.dtype.itemsize
        self.row_bytes = max(1, -(-end // ROW_ALIGNMENT)) * ROW_ALIGNMENT

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def words(self) -> int:
        """16-byte words per row."""
        return self.row_bytes // ROW_ALIGNMENT

    def zeros(self, count: int, device: torch.device) -> Tensor:
        """Make a block of rows that were never visited."""
        return torch.zeros(count, 2 * self.words, dtype=torch.int64, device=device)

    def unpack(self, block: Tensor) -> dict[str, Tensor]:
        """View the columns of a block: ``{name: (R, width)}``."""
        by_dtype = {dtype: block.view(dtype) for dtype in self.dtypes}
        return {
            column.name: by_dtype[column.dtype].narrow(
                1, self.offsets[column.name] // column.dtype.itemsize, column.width
            )
            for column in self.columns
        }

    def floats(self, block: Tensor) -> list[Tensor]:
        """View all floating-point columns of a block, neighbours in one view, ``(R, values)`` each."""
        return [block.view(dtype)[:, start:stop] for dtype, start, stop in self.spans]

    def check_values(self, columns: Mapping[str, Tensor], n: int, first: int = 0) -> None:
        """Refuse rows that no run can have written: negative counts, logarithms that are NaN, a temperature of 0.

        Args:
            columns: of successive rows, ``(R, width)``.
            n: number of samples.
            first: number of the first row, for the message.
        """
        never = columns[COUNT] == 0 if COUNT in columns else None
        for column in self.columns:
            allowed = column.values or (FINITE if column.dtype.is_floating_point else None)
            if allowed is None or column.name not in columns:
                continue
            value = columns[column.name]
            outside = allowed.outside(value, n)
            if outside is None:
                continue
            if never is not None:
                outside &= (value != 0) | ~(never if never.shape == value.shape else never.any(dim=1, keepdim=True))
            if column.name in self.firsts:
                outside &= value != column.blank
            for row in outside.any(dim=1).nonzero().flatten()[:1].tolist():
                raise ValueError(
                    f"column {column.name!r} of the checkpoint must be {allowed.describe(column.dtype, n)}, row "
                    f"{first + row} has {value[row].tolist()}"
                )

    def write(self, block: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Overwrite some columns of a block, in place, and return views of all."""
        columns = self.unpack(block)
        for name, value in values.items():
            columns[name].copy_(value)
        return columns
