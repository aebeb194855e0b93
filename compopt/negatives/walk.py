r"""Metropolis-Hastings with uniform proposals, for all anchors at once.

Proposal ``r`` is accepted if ``U_r < exp((s_r - s) / tau)``, that is if its *key* ``s_r / tau - log U_r`` exceeds the
score ``s / tau`` of where the chain is. Keys do not depend on the chain, so everything but one comparison per proposal
is done for all proposals at once, and nothing is exponentiated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compopt import rng
from compopt.negatives.candidates import Candidates, Pool


@dataclass
class Walk:
    """What one pass of the chains of some anchors found.

    A *slot* is where a chain can be: a column (a candidate of the batch, ``0`` to ``Q - 1``), ``Q``, *outside*: at its
    stored sample, which the batch lacks; ``Q + 1``, *nowhere*: before a first proposal was accepted.

    Attributes:
        visits: proposals after burn-in during which each chain was in each slot, ``(Q + 1, b)``, nowhere left out.
        last: slot at the end, ``(b,)``.
        accepted: accepted proposals, ``(b,)``.
    """

    visits: Tensor
    last: Tensor
    accepted: Tensor


def move(keys: Tensor, scores: Tensor, slots: Tensor, score: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Where every chain is after each proposal, and how many it accepted: ``(R, b)`` and ``(b,)``.

    Args:
        keys: ``s_r / tau - log U_r``, ``(R, b)``.
        scores: ``s_r / tau``, ``(R, b)``.
        slots: what is proposed, ``(R, b)``.
        score: of where each chain is, ``(b,)``.
        start: where that is, ``(b,)``.
    """
    accepted = torch.empty_like(keys, dtype=torch.bool)
    if keys.device.type == "cpu":
        return _move_on_host(keys, scores, slots, score, start, accepted), accepted.sum(0)
    current = score.clone()
    for key, proposed, hit in zip(keys.unbind(), scores.unbind(), accepted.unbind(), strict=True):
        torch.gt(key, current, out=hit)
        torch.where(hit, proposed, current, out=current)
    return places(accepted, slots, start), accepted.sum(0)


def _move_on_host(
    keys: Tensor, scores: Tensor, slots: Tensor, score: Tensor, start: Tensor, accepted: Tensor
) -> Tensor:
    """Four of numpy's calls per proposal, which cost half of torch's, and less than :func:`places` does."""
    where = torch.empty_like(slots)
    current, place = score.numpy().copy(), start.numpy()
    arrays = (x.numpy() for x in (keys, scores, slots, accepted, where))
    for key, proposed, slot, hit, there in zip(*arrays, strict=True):
        np.greater(key, current, out=hit)
        np.putmask(current, hit, proposed)
        np.copyto(there, place)
        np.putmask(there, hit, slot)
        place = there
    return where


def places(accepted: Tensor, slots: Tensor, start: Tensor) -> Tensor:
    """Where chains that accepted these proposals are after each, ``(R, b)``."""
    step = torch.arange(len(slots), device=slots.device)[:, None]
    taken = torch.where(accepted, step, -1).cummax(0).values
    return torch.where(taken < 0, start, slots.gather(0, taken.clamp(min=0)))


def walk(
    candidates: Candidates | Pool,
    scores: Tensor,
    start: Tensor,
    burn_in: int | Tensor,
    streams: Tensor,
    spare: Tensor | None,
) -> Walk:
    """``|N_i|`` proposals to every chain.

    Args:
        candidates: the anchors' candidates, ``Q`` columns.
        scores: ``s / tau`` by slot, ``(Q + 2, b)``: of every column, of the stored sample outside the batch, and
            ``-inf`` for nowhere.
        start: slot of each chain, ``(b,)``.
        burn_in: proposals whose visits do not count, a number or ``(b,)`` int64.
        streams: of random numbers, ``(b,)`` int64.
        spare: how often the stored sample outside the batch is in the pool beside the negatives, ``(b,)``; ``None``:
            no draws, every negative once in the order of the batch.
    """
    step = torch.arange(candidates.most, device=start.device)[:, None]
    words = rng.bits(streams, 0, candidates.most)
    number = step.expand(-1, len(start))
    if spare is not None:
        number = rng.below(words, candidates.count + spare)
    slots = candidates.column(number)
    proposed = scores.gather(0, slots)
    keys = rng.uniform(words, scores.dtype).log_().neg_().add_(proposed)
    if not candidates.alike:  # anchors with fewer negatives make fewer proposals
        keys.masked_fill_(step >= candidates.count, -torch.inf)
    where, accepted = move(keys, proposed, slots, scores.gather(0, start[None])[0], start)
    counts = step >= burn_in if candidates.alike else (step >= burn_in) & (step < candidates.count)
    counts = counts.to(scores.dtype).expand(-1, len(start))
    visits = torch.zeros_like(scores).scatter_add_(0, where, counts)
    return Walk(visits[:-1], where[-1], accepted)
