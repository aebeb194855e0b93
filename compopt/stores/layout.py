"""Layout of a row, which contains all columns of one sample.

A row is padded to a multiple of 16 bytes (a word). A block is a tensor of rows as int64, ``(R, 2 * words)``. Blocks are
copied bitwise, independently of the columns' dtypes, so that integers, NaN, -0.0 and denormals are preserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.batch import COUNT
from compopt.checks import values

ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class Column:
    """Column of the table: a named quantity per sample.

    Attributes:
        name: key in :meth:`Estimator.read` and in checkpoints.
        width: number of values per sample; ``D``, one per direction.
        dtype: dtype of the stored values; integers are stored bitwise.
        reduce: reduction of several proposals for one row: ``"mean"``, ``"log_mean_exp"``, or ``"one"``, which selects
            the same proposal in all such columns.
        initial: name of the hyper-parameter that is read in place of the column before the first visit; ``None``: zero.
        positions: the values are positions of samples, and a load refuses others.
    """

    name: str
    width: int
    dtype: torch.dtype = torch.float32
    reduce: str = "mean"
    initial: str | None = None
    positions: bool = False


class RowLayout:
    """Offsets of the columns in a row; wider types come first, so that every column is aligned.

    Args:
        columns: columns of a row.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self.dtypes = {column.dtype for column in columns}
        self.offsets: dict[str, int] = {}  # in bytes
        self.spans: list[tuple[torch.dtype, int, int]] = []  # runs of adjacent floating-point columns of one dtype
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
        """Number of 16-byte words per row."""
        return self.row_bytes // ROW_ALIGNMENT

    def zeros(self, count: int, device: torch.device) -> Tensor:
        """Return a block of ``count`` rows that were never visited."""
        return torch.zeros(count, 2 * self.words, dtype=torch.int64, device=device)

    def unpack(self, block: Tensor) -> dict[str, Tensor]:
        """Return views of the columns of a block, ``{name: (R, width)}``."""
        by_dtype = {dtype: block.view(dtype) for dtype in self.dtypes}
        return {
            column.name: by_dtype[column.dtype].narrow(
                1, self.offsets[column.name] // column.dtype.itemsize, column.width
            )
            for column in self.columns
        }

    def floats(self, block: Tensor) -> list[Tensor]:
        """Return views of all floating-point columns of a block, ``(R, values)``; adjacent columns share a view."""
        return [block.view(dtype)[:, start:stop] for dtype, start, stop in self.spans]

    def check_values(self, columns: Mapping[str, Tensor], n: int, first: int = 0) -> None:
        """Refuse rows that no run can have written, such as negative counts, NaN logarithms or a temperature of 0.

        Args:
            columns: columns of successive rows, ``(R, width)`` each.
            n: number of samples.
            first: number of the first row, for error messages.
        """
        never = columns[COUNT] == 0 if COUNT in columns else None
        for column in self.columns:
            if column.name not in columns:
                continue
            value, allowed = columns[column.name], (values.bound(column.name), n if column.positions else None)
            outside = values.outside(value, *allowed)
            if outside is None:
                continue
            if never is not None:
                outside &= (value != 0) | ~(never if never.shape == value.shape else never.any(dim=1, keepdim=True))
            for row in outside.any(dim=1).nonzero().flatten()[:1].tolist():
                raise ValueError(
                    f"column {column.name!r} of the checkpoint must be {values.described(column.dtype, *allowed)}, row "
                    f"{first + row} has {value[row].tolist()}"
                )

    def write(self, block: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Overwrite some columns of a block, in place, and return views of all columns."""
        columns = self.unpack(block)
        for name, value in values.items():
            columns[name].copy_(value)
        return columns
