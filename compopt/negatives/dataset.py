"""Chains whose proposals are drawn from the whole data set: Algorithm 1 of EMC2 as printed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compopt import rng
from compopt.distributed.ranks import Ranks
from compopt.estimator.call import Call
from compopt.functional import Scalar
from compopt.negatives.chains import Chains, by_direction, flat
from compopt.negatives.walk import Pool, burn_in_count, walk


class DatasetChains(Chains):
    """Weights ``w_ij = visits of chain i to j / (R - P)``, with proposals uniform over the data set without ``i``.

    The candidates of a chain are the ``R`` samples drawn for it and the one where it was stored (in view 2: where view
    1 has left it). They are encoded in one go before the chains move, so that every similarity is one of now.

    Attributes: as of :class:`~compopt.negatives.chains.Chains`; a visit is ``away`` where the batch lacks the sample.
    """

    def __init__(self, call: Call, ranks: Ranks, burn_in: Scalar, seed: int, n: int, draws: int) -> None:
        self._n, self._draws = n, draws
        super().__init__(call, ranks, burn_in, seed, sweep=True, rescore=True)

    def _run(self) -> None:
        samples, at_view_2 = self._drawn(), (-1, slice(None), slice(1, None))
        self._place = self.outside.places(samples, self._samples[-1].names[:1])
        similarity = torch.stack([self.outside.similarities(place) for place in self._place])
        self._visits = torch.zeros_like(similarity)
        slot = torch.where(self._seen, self._draws, self._draws + 1)
        for at in self._together:
            if at.start:  # view 2 goes on where view 1 has ended
                last = slot[:, :1].clamp(max=self._draws)[None]
                for table in (samples, self._place):
                    table[at_view_2] = table[..., :1].gather(0, last)[0]
                similarity[-1] = self.outside.similarities(self._place[-1])
                slot[:, 1:] = slot[:, :1].clamp(min=self._draws)
            self._walk(similarity[..., at], slot[:, at], at)
        last = slot.clamp(max=self._draws)[None]
        self.sample = samples.gather(0, last)[0]
        # a chain that has met NaN alone is still nowhere, and its row is not written
        self.score = torch.where(slot > self._draws, -torch.inf, similarity.gather(0, last)[0])
        self._count(samples, similarity)

    def _drawn(self) -> Tensor:
        """Return the positions drawn for each chain, and in the last place its stored one, ``(R + 1, b, A)``."""
        streams = rng.streams(self._counters, self._positions, range(self._directions))
        # the high bits of the words; the walk takes the low ones
        number = rng.below(rng.bits(streams, 0, self._draws), self._positions.new_tensor(self._n - 1))
        drawn = by_direction(number, self._directions)
        drawn = drawn + (drawn >= self._call.batch.keys["index"][self._call.batch.own, None])
        return torch.cat([drawn, torch.where(self._seen, self.outside.sample, drawn[0])[None]])

    def _walk(self, similarity: Tensor, slot: Tensor, at: slice) -> None:
        """Move the chains of some directions, whose slots ``(b, D)`` change in place."""
        streams = rng.streams(self._counters, self._positions, range(at.start, at.stop))
        scores = torch.cat([similarity * self._scale[:, at], torch.full_like(similarity[:1], -torch.inf)])
        given = flat(self._burn_in[:, at]) if isinstance(self._burn_in, Tensor) else self._burn_in
        burn_in = burn_in_count(given, self._draws)
        # the draws of a chain are candidates of its own, of which each is proposed once
        done = walk(Pool(self._draws, scores), scores.mT.flatten(1), flat(slot), burn_in, streams, None)
        self._visits[..., at] = by_direction(done.visits, slot.shape[1])
        self.accepted[:, at] = by_direction(done.accepted, slot.shape[1]).to(scores.dtype)
        slot.copy_(by_direction(done.last, slot.shape[1]))

    def _count(self, samples: Tensor, similarity: Tensor) -> None:
        known = torch.isin(samples, self._call.batch.keys["index"])
        self.inside, self.away = (torch.where(mask, self._visits, 0).sum(0) for mask in (known, ~known))
        self._dot, self.squares = (self._visits * similarity).sum(0), self._visits.square().sum(0)
        self.proposed = torch.full_like(self._dot, self._draws)

    def _finish(self) -> None:
        self.visits = self.inside + self.away
        self._close(self._dot)

    def _of_candidates(self, factor: Tensor, of_anchors: Sequence[Tensor]) -> Tensor:
        self.outside.add_gradients(of_anchors, zip(self._visits * factor, self._place, strict=True))
        return torch.zeros_like(torch.stack(self._features))
