"""Pending proposals for rows, and how several of them become one value per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.batch import COUNT, Batch
from compopt.functional import all_finite
from compopt.rng import below, scramble_, streams
from compopt.stores.layout import RowLayout


@dataclass
class Deposit:
    """Proposals of one call, until they are committed; it holds none of the batch's features.

    Attributes:
        rows: row numbers, ``(R,)`` int64, on the features' device.
        old: the committed rows as read, ``(R, words)``.
        proposals: new values by column, ``(R, width)``.
        valid: the directions of each row that were really visited, ``(R, D)``; ``None``: all.
        distinct: known on the host: no row occurs twice.
        host_rows: ``rows`` on the CPU, where they are known there.
    """

    rows: Tensor
    old: Tensor
    proposals: dict[str, Tensor]
    valid: Tensor | None
    distinct: bool
    host_rows: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, proposals: Mapping[str, Tensor], valid: Tensor | None) -> Deposit:
        """Make one call's deposit of ``(B, D)`` values; ``valid`` is ``(B, D)`` or ``(B, 1)``."""
        assert batch.block is not None
        if batch.rows.shape[1] == 2:  # index2: each direction writes a row of its own
            proposals = {name: value.repeat_interleave(2, dim=0) for name, value in proposals.items()}
            own = torch.eye(2, dtype=torch.bool, device=batch.rows.device).repeat(len(batch.rows), 1)
            valid = own if valid is None else own & valid.repeat_interleave(2, dim=0)
        if batch.bad is not None:  # a batch that the device refuses proposes nothing; the host does not wait to know
            valid = torch.ones_like(batch.count, dtype=torch.bool) if valid is None else valid
            valid = valid & ~batch.bad
        # Detached, and no reference to the batch: the graph and the features can be freed before the commit.
        values = {name: value.detach() for name, value in proposals.items()}
        host_rows = None if batch.host_rows is None else batch.host_rows.flatten()
        return cls(batch.rows.flatten(), batch.block, values, valid, batch.distinct, host_rows)


def merge(deposits: Sequence[Deposit], layout: RowLayout, partial: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Merge all deposits of a window to ``(rows, old, new)``, ready to scatter.

    A row with several proposals gets their mean (``log_mean_exp`` for logarithms), its count grows by one, and
    it keeps its old value if any of its proposals is not finite. The reduction is a sort and a segmented sum:
    no atomics, no host synchronisation, the same bits every time. A row that occurs several times is returned
    several times with the same values. ``partial``: some rows have marks of parts that were never visited.
    """
    rows, old = _cat([d.rows for d in deposits]), _cat([d.old for d in deposits])
    # An occurrence of a row is a position from here on: several calls of a window, several positions in a batch.
    proposals = {name: _cat([d.proposals[name] for d in deposits]) for name in deposits[0].proposals}
    valid = None
    if any(d.valid is not None for d in deposits):
        all_of_row = torch.ones(1, layout[COUNT].width, dtype=torch.bool, device=rows.device)
        valid = torch.cat([all_of_row.expand(len(d.rows), -1) if d.valid is None else d.valid for d in deposits])
    kept: Tensor | None = None
    if not (len(deposits) == 1 and deposits[0].distinct):
        # Rows may repeat. The device alone may know if they do, and to ask it would wait; for the same reason repeated
        # rows stay where they are: the host does not know how many would be left.
        proposals = {name: value.to(layout[name].dtype) for name, value in proposals.items()}
        rows, order = torch.sort(rows, stable=True)  # stable: the same sums in the same order, every time
        old, valid = old[order], None if valid is None else valid[order]
        proposals = {name: value[order] for name, value in proposals.items()}
        proposals, kept, valid = _reduce(rows, layout.unpack(old)[COUNT], proposals, valid, layout)
    if valid is not None:
        before = layout.unpack(old)
        proposals = {name: torch.where(valid, value, before[name]) for name, value in proposals.items()}
    new = old.clone()
    layout.write(new, proposals)[COUNT].add_(1 if valid is None else valid)  # once per row: `old` has the count before
    # One value that is not finite withholds its whole row: columns are proposed together and must agree. The packed
    # row is looked at, since a proposal can leave the range of the stored dtype.
    read = layout.floats(old) if partial else []
    for number, values in enumerate(layout.floats(new)):
        # What was read is finite, or a mark: a value that is not was proposed.
        finite = (values.isfinite() | (values == read[number])).all(dim=1) if partial else all_finite(values, dim=1)
        kept = finite if kept is None else kept & finite
    return rows, old, new if kept is None else torch.where(kept[:, None], new, old)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Runs:
    """Runs of equal rows in a sorted list; ``first`` and ``length`` are those of each member's run, ``(R,)``."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.first = rows, torch.searchsorted(rows, rows)
        self.length = torch.searchsorted(rows, rows, right=True) - self.first
        # As many segments as members, so that their number is known on the host: all but a run's first are empty.
        starts = self.first == torch.arange(len(rows), device=rows.device)
        self._lengths = torch.where(starts, self.length, 0)

    def over(self, x: Tensor, kind: str) -> Tensor:
        """Reduce ``(R, D)`` over runs; every member receives its run's result."""
        # `unsafe` leaves out the check of the lengths, which would wait for the device.
        return torch.segment_reduce(x.contiguous(), kind, lengths=self._lengths, axis=0, unsafe=True)[self.first]


def _reduce(
    rows: Tensor, count: Tensor, proposals: Mapping[str, Tensor], valid: Tensor | None, layout: RowLayout
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Reduce runs of equal (sorted) rows to values, flags of finite runs, and flags of visited directions."""
    runs = Runs(rows)
    alike = {name: x for name, x in proposals.items() if layout[name].reduce == "one"}
    chosen = _choice(runs, count, alike, valid) if alike else None
    finite = torch.ones_like(rows, dtype=torch.bool)
    reduced = {}
    for name, x in proposals.items():
        finite &= (x.isfinite() if valid is None else x.isfinite() | ~valid).all(dim=1)
        if chosen is not None and name in alike:
            reduced[name] = x.gather(0, chosen)
            continue
        # Weights of 0 or 1 instead of a selection, whose size the host would have to wait for; `where` and not a
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
    """Choose the proposal of each run that is taken where only one can be, as positions ``(R, width)``.

    They are put in order, and a hash of row and visits chooses: the same one in whatever order they came, each as
    often as any other.
    """
    # Not at random: every rank and every restart must choose alike, with nothing communicated and no generator saved.
    keys, chosen = streams((), runs.rows), []
    for direction, visits in enumerate(count.unbind(1)):
        order, left = torch.arange(len(keys), device=keys.device), runs.length
        columns = [x[:, direction] for x in reversed(list(proposals.values()))]
        if valid is not None:  # those that are not come last, and are not among those to choose from
            columns.append(~valid[:, direction])
            left = runs.over(valid[:, direction : direction + 1].to(torch.float32), "sum")[:, 0].to(torch.int64)
        # Stable sorts from the least significant key to the rows: within a run by value, so that what a position in
        # the batch says is lost, and each run is where it was.
        for column in (*columns, runs.rows):
            order = order[torch.argsort(column[order], stable=True)]
        number = below(scramble_(keys + visits), left.clamp(min=1))
        chosen.append(order[runs.first + number])
    return torch.stack(chosen, dim=1)
