"""Pending proposals for rows, and how several of them become one value per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.draws import below, scramble_, streams
from compopt.rows import RowLayout

COUNT = "count"


@dataclass
class Deposit:
    """What one forward call would write.

    Attributes:
        rows: row numbers, ``(R,)`` int64, on the features' device.
        old: the committed rows as read, ``(R, words)``.
        proposals: new values by column, ``(R, width)``.
        valid: which directions of which row were really visited, ``(R, D)``; ``None``: all.
        distinct: known on the host: no row occurs twice.
        host_rows: ``rows`` on the CPU, where they are known there.
    """

    rows: Tensor
    old: Tensor
    proposals: dict[str, Tensor]
    valid: Tensor | None
    distinct: bool
    host_rows: Tensor | None = None


def merge(deposits: Sequence[Deposit], layout: RowLayout) -> tuple[Tensor, Tensor, Tensor]:
    """All deposits of a window -> ``(rows, old, new)``, ready to scatter.

    A row with several proposals gets their mean (``log_mean_exp`` for logarithms), its count grows by one, and
    it keeps its old value if any of its proposals is not finite. The reduction is a sort and a segmented sum:
    no atomics, no host synchronisation, the same bits every time. A row that occurs several times is returned
    several times with the same values.
    """
    rows = torch.cat([d.rows for d in deposits])
    old = torch.cat([d.old for d in deposits])
    proposals = {
        name: torch.cat([d.proposals[name].to(layout[name].dtype) for d in deposits]) for name in deposits[0].proposals
    }
    valid = _joined_validity(deposits, layout[COUNT].width)
    if not (len(deposits) == 1 and deposits[0].distinct):
        rows, order = torch.sort(rows, stable=True)
        old, valid = old[order], None if valid is None else valid[order]
        proposals = {name: value[order] for name, value in proposals.items()}
        proposals, finite, valid = _reduce(rows, layout.unpack(old)[COUNT], proposals, valid, layout)
    else:
        finite = _finite(proposals, valid)
    if valid is not None:
        before = layout.unpack(old)
        proposals = {name: torch.where(valid, value, before[name]) for name, value in proposals.items()}
    visited = finite[:, None] if valid is None else valid & finite[:, None]
    proposals[COUNT] = layout.unpack(old)[COUNT] + visited
    new = layout.pack(proposals, base=old)
    return rows, old, torch.where(finite[:, None], new, old)


def _joined_validity(deposits: Sequence[Deposit], width: int) -> Tensor | None:
    if all(d.valid is None for d in deposits):
        return None
    return torch.cat(
        [
            torch.ones(len(d.rows), width, dtype=torch.bool, device=d.rows.device) if d.valid is None else d.valid
            for d in deposits
        ]
    )


def _finite(proposals: Mapping[str, Tensor], valid: Tensor | None) -> Tensor:
    """Rows all of whose (valid) proposals are finite, ``(R,)``."""
    finite = None
    for value in proposals.values():
        ok = value.isfinite()
        ok = (ok if valid is None else ok | ~valid).all(dim=1)
        finite = ok if finite is None else finite & ok
    assert finite is not None
    return finite


def _reduce(
    rows: Tensor, count: Tensor, proposals: Mapping[str, Tensor], valid: Tensor | None, layout: RowLayout
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Reduce runs of equal (sorted) rows; every member of a run receives the run's result."""
    first = torch.searchsorted(rows, rows)
    length = torch.searchsorted(rows, rows, right=True) - first
    starts = first == torch.arange(len(rows), device=rows.device)
    lengths = torch.where(starts, length, 0)

    def over_run(x: Tensor, kind: str) -> Tensor:
        return torch.segment_reduce(x.contiguous(), kind, lengths=lengths, axis=0, unsafe=True)[first]

    finite = over_run(_finite(proposals, valid).to(torch.float32)[:, None], "min")[:, 0] > 0
    reduced, chosen = {}, None
    for name, x in proposals.items():
        if layout[name].reduce == "one":
            if chosen is None:
                alike = {key: value for key, value in proposals.items() if layout[key].reduce == "one"}
                chosen = _choice(rows, count, alike, valid, over_run)
            reduced[name] = x.gather(0, chosen)
            continue
        weight = torch.ones_like(x) if valid is None else valid.to(x.dtype)
        visits = over_run(weight, "sum").clamp_(min=1)
        if layout[name].reduce == "log_mean_exp":
            top = over_run(torch.where(weight > 0, x, -torch.inf), "max")
            top = torch.where(top.isfinite(), top, 0)  # an all-invalid or non-finite run is masked later
            total = over_run(torch.where(weight > 0, (x - top).exp(), 0), "sum")
            reduced[name] = top + total.log() - visits.log()
        else:
            reduced[name] = over_run(torch.where(weight > 0, x, 0), "sum") / visits
    any_valid = None if valid is None else over_run(valid.to(torch.float32), "max") > 0
    return reduced, finite, any_valid


def _choice(
    rows: Tensor,
    count: Tensor,
    proposals: Mapping[str, Tensor],
    valid: Tensor | None,
    over_run: Callable[[Tensor, str], Tensor],
) -> Tensor:
    """Which proposal of each run is taken where only one can be, ``(R, width)``.

    They are put in order, and a hash of row and visits says which: the same one in whatever order they came, each as
    often as any other.
    """
    length = torch.searchsorted(rows, rows, right=True) - (first := torch.searchsorted(rows, rows))
    chosen = []
    for direction, visits in enumerate(count.unbind(1)):
        order, left = torch.arange(len(rows), device=rows.device), length
        keys = [x[:, direction] for x in reversed(list(proposals.values()))]
        if valid is not None:  # those that are not come last, and are not among those to choose from
            keys.append(~valid[:, direction])
            left = over_run(valid[:, direction : direction + 1].to(torch.float32), "sum")[:, 0].to(torch.int64)
        for key in (*keys, rows):
            order = order[torch.argsort(key[order], stable=True)]
        number = below(scramble_(streams((), rows) + visits), left.clamp(min=1))
        chosen.append(order[first + number])
    return torch.stack(chosen, dim=1)
