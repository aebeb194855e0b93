r"""Metropolis-Hastings with uniform proposals, vectorised over anchors, and the candidates for proposals.

Proposal ``r`` is accepted if ``U_r < exp((s_r - s) / tau)``, that is if its *key* ``s_r / tau - log U_r`` exceeds the
score ``s / tau`` of the current state. Keys do not depend on the state of the chain, so that everything except one
comparison per proposal is computed for all proposals at once, without exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compopt import accelerator, rng
from compopt.functional import Scalar
from compopt.kernel.block import same_sample


class Samples:
    """Look-up of the samples of a batch by data-set position ``names``, ``(B,)``."""

    def __init__(self, names: Tensor) -> None:
        self.names = names
        self._sorted, self._place = torch.sort(names, stable=True)

    def find(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first column (in view 1) of each sample, ``(b,)``, and a mask of the samples in the batch."""
        at = torch.searchsorted(self._sorted, sample.contiguous()).clamp_(max=len(self.names) - 1)
        return self._place[at], self._sorted[at] == sample

    def name(self, column: Tensor) -> Tensor:
        """Return the data-set position of the sample in a column, of either view."""
        return self.names[column % len(self.names)]


class Candidates:
    """Negatives of some anchors in one direction, numbered from 0 to ``|N_i| - 1``.

    Columns are the ``B`` features of the other modality, or in unimodal mode the ``2 B`` features of both views. No
    anchor has more than ``most`` negatives. With ``equal_counts`` it is known on the host that all anchors have
    ``most`` negatives, and ``count`` is ``(1,)`` instead of ``(b,)``.
    """

    def __init__(self, keys: Sequence[Tensor], positions: Tensor, distinct: bool, views: int) -> None:
        self._positions, self._views, self._batch = positions, views, len(keys[0])
        self.width = views * self._batch
        self.most = self.width - views
        self._same: Tensor | None = None
        self.equal_counts = distinct
        if distinct:
            self.count = torch.full_like(positions[:1], self.most)
        else:
            self._same = same_sample([key[positions] for key in keys], keys)  # (b, B)
            self.count = views * (~self._same).sum(1)
            # allowed columns first, in ascending order; sorting along the last dimension is five times as fast
            self._order = torch.argsort(self._same.to(torch.uint8).repeat(1, views), dim=1, stable=True).T

    def column(self, number: Tensor) -> Tensor:
        """Return the column of each negative by its number, ``(R, b)``; ``width`` for numbers >= ``count``."""
        outside = number >= self.count
        if self._same is None:  # skip the anchor's own columns
            column = number - _below(self._positions - 1, number)
            for view in range(1, self._views):
                column -= _below(self._positions + (view * self._batch - 1), column)
        else:
            column = self._order.gather(0, number.clamp(max=self.width - 1))
        return column.masked_fill_(outside, self.width)

    def allows(self, column: Tensor) -> Tensor:
        """Return a mask of the columns of view 1 that are negatives of their anchors, ``(b,)``."""
        if self._same is None:
            return column != self._positions
        return ~self._same.gather(1, column[:, None])[:, 0]


class Pool:
    """Candidates shared by all anchors, with the attributes of :class:`Candidates`."""

    equal_counts = True

    def __init__(self, size: int, like: Tensor) -> None:
        self.width = self.most = size
        self.count = torch.full((1,), size, dtype=torch.int64, device=like.device)

    def column(self, number: Tensor) -> Tensor:
        """Return the column of each candidate by its number."""
        return number.clamp(max=self.width)


def _below(a: Tensor, b: Tensor) -> Tensor:
    """Return -1 where ``a < b``, else 0; three times as fast as a comparison with conversion to int64."""
    return torch.sub(a, b).bitwise_right_shift_(63)


@dataclass
class Walk:
    """Result of one pass of the chains of some anchors.

    A *slot* is a state of a chain: a column (a candidate of the batch, ``0`` to ``Q - 1``); ``Q``, *outside*: the
    stored sample, which is not in the batch; or ``Q + 1``, *nowhere*: no proposal was accepted yet.

    Attributes:
        visits: number of proposals after burn-in for which each chain was in each slot except nowhere, ``(Q + 1, b)``.
        last: slot after the last proposal, ``(b,)``.
        accepted: number of accepted proposals, ``(b,)``.
    """

    visits: Tensor
    last: Tensor
    accepted: Tensor


def walk(
    candidates: Candidates | Pool,
    scores: Tensor,
    start: Tensor,
    burn_in: int | Tensor,
    streams: Tensor,
    spare: Tensor | None,
) -> Walk:
    """Advance every chain by ``|N_i|`` proposals.

    Args:
        candidates: candidates of the anchors, ``Q`` columns.
        scores: ``s / tau`` by slot, ``(Q + 2, b)``: of every column, of the stored sample outside the batch, and
            ``-inf`` for nowhere.
        start: initial slot of each chain, ``(b,)``.
        burn_in: number of initial proposals without visits, a number or ``(b,)`` int64.
        streams: streams of random numbers, ``(b,)`` int64.
        spare: multiplicity, in the pool of proposals, of the stored sample outside the batch, ``(b,)``; ``None``: no
            random draws, every negative is proposed once in the order of the batch.
    """
    step = torch.arange(candidates.most, device=start.device)[:, None]
    words = rng.bits(streams, 0, candidates.most)
    number = step.expand(-1, len(start))
    if spare is not None:
        number = rng.below(words, candidates.count + spare)
    slots = candidates.column(number)
    proposed = scores.gather(0, slots)
    # the same words give the uniform number: the draw of a slot uses the high bits, the uniform number the low bits
    keys = rng.uniform(words, scores.dtype).log_().neg_().add_(proposed)
    counts = step >= burn_in
    if not candidates.equal_counts:  # anchors with fewer negatives have fewer proposals
        keys.masked_fill_(step >= candidates.count, -torch.inf)
        counts = counts & (step < candidates.count)
    where, accepted = move(keys, proposed, slots, scores.gather(0, start[None])[0], start)
    counts = counts.to(scores.dtype).expand(-1, len(start))
    visits = torch.zeros_like(scores).scatter_add_(0, where, counts)
    return Walk(visits[:-1], where[-1], accepted)


def move(keys: Tensor, scores: Tensor, slots: Tensor, score: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slot of every chain after each proposal, ``(R, b)``, and the number of accepted ones, ``(b,)``.

    ``keys``, ``scores`` and ``slots`` belong to the proposals, ``(R, b)``; a chain begins in slot ``start`` with
    ``score``.
    """
    accepted = torch.empty_like(keys, dtype=torch.bool)
    if keys.device.type == "cpu":
        # four calls of numpy per proposal take half the time of torch, and less than :func:`places`
        where = torch.empty_like(slots)
        at, place = score.numpy().copy(), start.numpy()
        arrays = (x.numpy() for x in (keys, scores, slots, accepted, where))
        for key, proposed, slot, hit, there in zip(*arrays, strict=True):
            np.greater(key, at, out=hit)
            np.putmask(at, hit, proposed)
            np.copyto(there, place)
            np.putmask(there, hit, slot)
            place = there
        return where, accepted.sum(0)
    current = score.clone()
    for one, candidate, taken in zip(keys.unbind(), scores.unbind(), accepted.unbind(), strict=True):
        torch.gt(one, current, out=taken)
        torch.where(taken, candidate, current, out=current)
    return places(accepted, slots, start), accepted.sum(0)


def places(accepted: Tensor, slots: Tensor, start: Tensor) -> Tensor:
    """Return the slots of the chains after each proposal, ``(R, b)``, from the accepted proposals."""
    step = torch.arange(len(slots), device=slots.device)[:, None]
    taken = torch.where(accepted, step, -1).cummax(0).values
    return torch.where(taken < 0, start, slots.gather(0, taken.clamp(min=0)))


def burn_in_count(value: Scalar, count: int | Tensor) -> int | Tensor:
    """Convert a count or fraction to a count that leaves at least one proposal; on the host if both are numbers."""
    # fractions of several groups are float32; the factor 1 + 1e-6 makes 0.9 of 10 equal to 9 there too
    if isinstance(value, Tensor):
        value = value.to(accelerator.widest(value.device))
    elif isinstance(count, Tensor):
        value = count.new_full((), value, dtype=accelerator.widest(count.device))
    else:
        return min(int(value * count * (1 + 1e-6) if value < 1 else value), count - 1)
    proposals = torch.where(value < 1, (value * count * (1 + 1e-6)).floor(), value)
    return proposals.to(torch.int64).clamp(max=count - 1)
