"""Rows: their layout, pending proposals, and the reduction of several proposals to one value per row.

A row contains all columns that one object keeps for a sample, padded to a multiple of 16 bytes (a word). A block is a
tensor of rows as int64, ``(R, 2 * words)``. Blocks are copied bitwise, independently of the columns' dtypes, so that
integers, NaN, -0.0 and denormals are preserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt import checks
from compopt.batch import COUNT, Batch, Rows
from compopt.checks import values
from compopt.functional import all_finite
from compopt.rng import below, scramble_, streams

ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class Column:
    """Column of the table: a named quantity per sample.

    Example:
        >>> import torch, compopt
        >>> column = compopt.estimator.Column("log_u", 2, torch.float32, reduce="log_mean_exp")  # two directions

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

    def __post_init__(self) -> None:
        checks.one_of(f"reduce of column {self.name!r}", self.reduce, ("mean", "log_mean_exp", "one"))


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
        self.column_bytes = end
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
            c.name: by_dtype[c.dtype].narrow(1, self.offsets[c.name] // c.dtype.itemsize, c.width) for c in self.columns
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


# -- proposals -----------------------------------------------------------------------------------------------------


@dataclass
class Deposit:
    """Proposals of one call that wait for a commit, without references to the batch's features.

    Attributes:
        rows: row numbers, ``(R,)`` int64, on the features' device.
        old: the committed rows as read, ``(R, 2 * words)``.
        proposals: new values by column, ``(R, width)``.
        valid: mask of the visited directions of each row, ``(R, D)``; ``None``: all.
        distinct: whether the host knows that no row occurs twice.
        host_rows: ``rows`` on the CPU, or ``None`` if they are only on a device.
    """

    rows: Tensor
    old: Tensor
    proposals: dict[str, Tensor]
    valid: Tensor | None
    distinct: bool
    host_rows: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, read: Rows, proposals: Mapping[str, Tensor], valid: Tensor | None) -> Deposit:
        """Return the deposit of one call with ``(B, D)`` values; ``valid`` is ``(B, D)`` or ``(B, 1)``."""
        assert read.block is not None
        if batch.rows.shape[1] == 2:  # index2: each direction writes a row of its own
            proposals = {name: value.repeat_interleave(2, dim=0) for name, value in proposals.items()}
            own = torch.eye(2, dtype=torch.bool, device=batch.rows.device).repeat(len(batch.rows), 1)
            valid = own if valid is None else own & valid.repeat_interleave(2, dim=0)
        if batch.bad is not None:  # mask a bad batch on the device, so that the host does not wait for the flag
            valid = torch.ones_like(read.count, dtype=torch.bool) if valid is None else valid
            valid = valid & ~batch.bad
        # Detached and without a reference to the batch, so that graph and features can be freed before the commit.
        values = {name: value.detach() for name, value in proposals.items()}
        host_rows = None if batch.host_rows is None else batch.host_rows.flatten()
        return cls(batch.rows.flatten(), read.block, values, valid, batch.distinct, host_rows)


def merge(deposits: Sequence[Deposit], layout: RowLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Merge all deposits of a window to ``(rows, old, new)``, ready to scatter.

    A row with several proposals is set to their mean (``log_mean_exp`` for logarithms; see :attr:`Column.reduce`), and
    its count increases by one. A row with a proposal that is not finite keeps its old values. The reduction is a sort
    and a segmented sum, without atomics or host synchronisation, and bitwise reproducible. A row that occurs several
    times is returned several times with the same values.
    """
    rows, old = _cat([d.rows for d in deposits]), _cat([d.old for d in deposits])
    # From here on, each position is one occurrence of a row: of several calls, or of several samples of a batch.
    proposals = {name: _cat([d.proposals[name] for d in deposits]) for name in deposits[0].proposals}
    valid = None
    if any(d.valid is not None for d in deposits):
        all_of_row = torch.ones(1, layout[COUNT].width, dtype=torch.bool, device=rows.device)
        valid = torch.cat([all_of_row.expand(len(d.rows), -1) if d.valid is None else d.valid for d in deposits])
    kept: Tensor | None = None
    if not (len(deposits) == 1 and deposits[0].distinct):
        # Rows may repeat, and the host does not wait to find out. Repeated rows are not removed either, because the
        # size of the result would be known on the device only.
        proposals = {name: value.to(layout[name].dtype) for name, value in proposals.items()}
        rows, order = torch.sort(rows, stable=True)  # stable: a reproducible order of summation
        old, valid = old[order], None if valid is None else valid[order]
        proposals = {name: value[order] for name, value in proposals.items()}
        proposals, kept, valid = _reduce(rows, layout.unpack(old)[COUNT], proposals, valid, layout)
    if valid is not None:
        before = layout.unpack(old)
        proposals = {name: torch.where(valid, value, before[name]) for name, value in proposals.items()}
    new = old.clone()
    layout.write(new, proposals)[COUNT].add_(1 if valid is None else valid)  # once per row: `old` has the count before
    # One value that is not finite keeps the whole row unchanged, since the columns of a row must be consistent. The
    # packed row is checked, because a proposal can overflow in the stored dtype.
    for floats in layout.floats(new):
        finite = all_finite(floats, dim=1)
        kept = finite if kept is None else kept & finite
    return rows, old, new if kept is None else torch.where(kept[:, None], new, old)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Runs:
    """Runs of equal rows in a sorted list; ``first`` and ``length`` describe the run of each member, ``(R,)``."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.first = rows, torch.searchsorted(rows, rows)
        self.length = torch.searchsorted(rows, rows, right=True) - self.first
        # One segment per member, so that the host knows their number; all but the first segment of a run are empty.
        starts = self.first == torch.arange(len(rows), device=rows.device)
        self._lengths = torch.where(starts, self.length, 0)

    def over(self, x: Tensor, kind: str) -> Tensor:
        """Reduce ``(R, D)`` over runs, and return the result of its run for every member, ``(R, D)``."""
        # `unsafe` skips the check of the lengths, which would wait for the device.
        return torch.segment_reduce(x.contiguous(), kind, lengths=self._lengths, axis=0, unsafe=True)[self.first]


def _reduce(
    rows: Tensor, count: Tensor, proposals: Mapping[str, Tensor], valid: Tensor | None, layout: RowLayout
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Reduce runs of equal (sorted) rows to ``(values, mask of finite runs, mask of visited directions)``."""
    runs = Runs(rows)
    single_choice = {name: x for name, x in proposals.items() if layout[name].reduce == "one"}
    chosen = _choice(runs, count, single_choice, valid) if single_choice else None
    finite = torch.ones_like(rows, dtype=torch.bool)
    reduced = {}
    for name, x in proposals.items():
        finite &= (x.isfinite() if valid is None else x.isfinite() | ~valid).all(dim=1)
        if chosen is not None and name in single_choice:
            reduced[name] = x.gather(0, chosen)
            continue
        # Weights of 0 or 1 instead of a selection, since the host would wait for its size; `where` instead of a
        # product below, because 0 * inf is NaN.
        weight = torch.ones_like(x) if valid is None else valid.to(x.dtype)
        visits = runs.over(weight, "sum").clamp_(min=1)
        if layout[name].reduce == "log_mean_exp":
            # log-mean-exp around the largest proposal, so that exp() neither overflows nor vanishes
            top = runs.over(torch.where(weight > 0, x, -torch.inf), "max")
            top = torch.where(top.isfinite(), top, 0)  # an all-invalid or non-finite run is masked later
            total = runs.over(torch.where(weight > 0, (x - top).exp(), 0), "sum")
            reduced[name] = top + total.log() - visits.log()
        else:
            reduced[name] = runs.over(torch.where(weight > 0, x, 0), "sum") / visits
    kept = runs.over(finite.to(torch.float32)[:, None], "min")[:, 0] > 0
    any_valid = None if valid is None else runs.over(valid.to(torch.float32), "max") > 0
    return reduced, kept, any_valid


def _choice(runs: Runs, count: Tensor, proposals: Mapping[str, Tensor], valid: Tensor | None) -> Tensor:
    """Choose one proposal per run for columns with ``reduce="one"``, as positions ``(R, width)``.

    The proposals of a run are sorted by value, and a hash of row number and visits selects one of them uniformly. The
    choice does not depend on the order of the proposals.
    """
    # A hash instead of a generator: all ranks and all restarts make the same choice without messages or saved state.
    keys, chosen = streams((), runs.rows), []
    for direction, visits in enumerate(count.unbind(1)):
        order, left = torch.arange(len(keys), device=keys.device), runs.length
        columns = [x[:, direction] for x in reversed(list(proposals.values()))]
        if valid is not None:  # invalid proposals are sorted to the end of the run and excluded from the choice
            columns.append(~valid[:, direction])
            left = runs.over(valid[:, direction : direction + 1].to(torch.float32), "sum")[:, 0].to(torch.int64)
        # Stable sorts from the least significant key to the rows: each run keeps its place and is sorted by value, so
        # that the choice is independent of positions in the batch.
        for column in (*columns, runs.rows):
            order = order[torch.argsort(column[order], stable=True)]
        number = below(scramble_(keys + visits), left.clamp(min=1))
        chosen.append(order[runs.first + number])
    return torch.stack(chosen, dim=1)
