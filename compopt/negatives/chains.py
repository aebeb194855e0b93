"""The chains of one batch: their walks, the weights that their visits are, and the gradients of those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt import draws
from compopt.anchors import scale_of
from compopt.component import Call
from compopt.negatives.candidates import Candidates
from compopt.negatives.encoder import Encoder
from compopt.negatives.walk import Walk, walk
from compopt.ranks import Ranks
from compopt.weights import PairWeights

# Proposals held at a time: what a strip of anchors draws takes about 50 bytes each.
MAX_PROPOSALS = 1 << 22


@dataclass(frozen=True)
class Rules:
    """How chains move.

    Attributes:
        sweep: every negative once, in order, rather than independent draws.
        rescore: the stored samples outside the batch are encoded before the chains move.
        counters: seed, step and pass within the step, which with direction and position name every draw.
    """

    sweep: bool
    rescore: bool
    counters: tuple[int, ...]


@dataclass
class Totals:
    """Sums over the slots of every own anchor, ``(b, 2)`` each.

    Attributes:
        inside, outside: visits to candidates of the batch and to the stored sample outside it.
        dot: ``sum of visits times s_ij`` inside.
        squares: sum of squared visits.
        accepted, proposed: proposals.
    """

    inside: Tensor
    outside: Tensor
    dot: Tensor
    squares: Tensor
    accepted: Tensor
    proposed: Tensor


class Chains(PairWeights):
    """Weights ``w_ij = visits of chain i to j / all its visits``.

    Args:
        call: the batch; of its anchors this process moves its own.
        burn_in: proposals that do not count, ``(b, 2)``: below 1 a fraction of ``|N_i|``.
        rules: how chains move.
        ranks: who shares the batch.

    Attributes:
        sample, score: where each own chain is and its similarity, ``(b, D)``.
        totals: of the own anchors.
        error: what ``encode`` raised here, to be raised once the other ranks know.
    """

    error: Exception | None = None

    def __init__(self, call: Call, burn_in: Tensor, rules: Rules, ranks: Ranks) -> None:
        self._call, self._rules, self._ranks, self._burn_in = call, rules, ranks, burn_in
        self._own, self._pairs = call.own, call.pairs
        z1, z2 = call.features
        self._batch, self._views = len(z1), 2 if call.unimodal else 1
        self._anchors = [z[self._own] for z in (z1, z2)]
        both = torch.cat([z1, z2]) if call.unimodal else None
        self._candidates = [z2 if both is None else both, z1 if both is None else both]
        index = call.keys["index"]
        self._names = [call.keys.get("index2", index), index]
        self._scale = scale_of(call.tau, z1, self._batch)[self._own]
        self._positions = torch.arange(self._own.start, self._own.stop, device=z1.device)
        self._stored, self._seen = call.rows["chain"][self._own], call.count[self._own] > 0
        self._outside_score = call.rows["score"][self._own].to(z1.dtype).expand(-1, 2)
        self._outside_feature: list[Tensor] | None = None
        self._encoder: Encoder | None = None
        self._kept: list[tuple[int, int, list[Walk]]] = []

    # -- walks -------------------------------------------------------------------------------------------------

    def run(self, encoder: Encoder | None, recompute: int | None) -> None:
        """Move the chains, and encode what the batch lacks.

        Args:
            encoder: gives features of other samples.
            recompute: anchors at a time whose walks are not kept but repeated; ``None`` keeps all.
        """
        self._encoder, self._recompute = encoder, recompute
        if encoder is not None and self._rules.rescore:
            self._encode(self._missing())
            self._outside_score = self._fresh_score()
        self._last = torch.zeros_like(self._stored.expand(-1, 2))
        shape = (len(self._positions), 2)
        self.totals = Totals(*(self._scale.new_zeros(shape) for _ in range(6)))
        self.score = self._scale.new_zeros(shape)
        for start, stop in self._bounds():
            walks = self._strip(start, stop)
            for direction, (similarity, done, candidates) in enumerate(walks):
                self._record(slice(start, stop), direction, similarity, done, candidates)
            if recompute is None:
                self._kept.append((start, stop, [done for _, done, _ in walks]))
        if encoder is not None and not self._rules.rescore:
            self._encode(self.totals.outside > 0)
        self._finish()

    def _bounds(self) -> Iterator[tuple[int, int]]:
        most = self._views * self._batch
        rows = max(1, min(self._recompute or self._batch, MAX_PROPOSALS // most))
        for start in range(0, len(self._positions), rows):
            yield start, min(start + rows, len(self._positions))

    def _strip(self, start: int, stop: int) -> list[tuple[Tensor, Walk, Candidates]]:
        """Both directions of some anchors; in unimodal mode one chain goes through view 1, then view 2."""
        own, walks, rules = slice(start, stop), [], self._rules
        slot: Tensor | None = None
        for direction in (0, 1):
            positions = self._positions[own]
            candidates = Candidates(
                self._pairs.keys, self._names[direction], positions, self._pairs.distinct, self._views
            )
            similarity = self._similarity(own, direction)
            streams = draws.streams((*rules.counters, direction), positions)
            scores = similarity * self._scale[own, direction]
            if slot is None or not self._call.unimodal:
                slot = self._start(own, direction, candidates, scores, streams)
            burn_in = _burn_in(self._burn_in[own, direction], candidates.count)
            done = walk(candidates, scores, slot, burn_in, streams, rules.sweep, self._views)
            slot = done.last
            walks.append((similarity, done, candidates))
        return walks

    def _similarity(self, own: slice, direction: int) -> Tensor:
        """``s`` by slot, ``(Q + 2, b)``."""
        x, y = self._anchors[direction][own], self._candidates[direction]
        similarity = x.new_empty(len(y) + 2, len(x))
        torch.mm(y, x.T, out=similarity[:-2])
        similarity[-2] = self._outside_score[own, direction]
        similarity[-1] = -torch.inf
        return similarity

    def _start(self, own: slice, direction: int, candidates: Candidates, scores: Tensor, streams: Tensor) -> Tensor:
        """Slot of every chain before its first proposal."""
        which = min(direction, self._stored.shape[1] - 1)
        column, found, allowed = candidates.find(self._stored[own, which])
        if self._views == 2:  # the row does not say which view: drawn as the softmax would
            both = torch.stack([column, column + self._batch])
            gap = scores.gather(0, both).diff(dim=0)[0]
            random = draws.uniform(draws.bits(streams, candidates.most, 1)[0], scores.dtype)
            column = torch.where(random < gap.sigmoid(), both[1], both[0])
        outside, nowhere = candidates.width, candidates.width + 1
        slot = torch.where(found, torch.where(allowed, column, nowhere), outside)
        return torch.where(self._seen[own, which], slot, nowhere)

    def _record(self, own: slice, direction: int, similarity: Tensor, done: Walk, candidates: Candidates) -> None:
        visits, outside = done.visits, candidates.width
        at = (own, direction)
        self.totals.inside[at] = visits[:outside].sum(0)
        self.totals.outside[at] = visits[outside]
        self.totals.dot[at] = torch.linalg.vecdot(visits[:outside], similarity[:outside], dim=0)
        self.totals.squares[at] = visits.square().sum(0)
        self.totals.accepted[at] = done.accepted.to(visits.dtype)
        self.totals.proposed[at] = candidates.count.to(visits.dtype)
        self.score[at] = similarity.gather(0, done.last[None])[0]
        self._last[at] = torch.where(
            done.last < outside, candidates.name(done.last), torch.where(done.last == outside, -1, -2)
        )

    # -- samples outside the batch -----------------------------------------------------------------------------

    def _missing(self) -> Tensor:
        """Chains whose stored sample is not in the batch, ``(b, 2)``."""
        absent = [~torch.isin(self._stored[:, min(d, self._stored.shape[1] - 1)], self._names[d]) for d in (0, 1)]
        return torch.stack(absent, dim=1) & self._seen

    def _encode(self, needed: Tensor) -> None:
        """Features for the stored samples of some anchors: one call, each sample once."""
        assert self._encoder is not None
        stored = self._stored.expand(-1, 2)
        names, place = torch.unique(stored[needed], return_inverse=True)
        if not len(names):
            if self._ranks.size == 1:
                return
            names = self._names[1][:1]  # every rank runs the model as often as the others
        try:
            features = self._encoder(names.cpu())
        except Exception as error:
            if self._ranks.size == 1:
                raise
            self.error = error  # the others wait for this rank, which tells them
            features = (self._anchors[0].new_zeros(len(names), self._anchors[0].shape[1]),) * 2
        self._needed = needed
        self._place = torch.zeros_like(stored).masked_scatter_(needed, place)
        self._outside_feature = list(features)

    def _fresh_score(self) -> Tensor:
        """Similarities to the stored samples that were encoded, else as stored, ``(b, 2)``."""
        if self._outside_feature is None:
            return self._outside_score
        fresh = [
            torch.linalg.vecdot(x, feature[self._place[:, direction]])
            for direction, (x, feature) in enumerate(zip(self._anchors, self._outside_feature, strict=True))
        ]
        return torch.where(self._needed, torch.stack(fresh, dim=1), self._outside_score)

    def _finish(self) -> None:
        """Visits that have a feature count; where the chains are now."""
        totals, fresh = self.totals, self._fresh_score()
        self._known = totals.outside if self._encoder is not None else torch.zeros_like(totals.outside)
        self._visits = totals.inside + self._known
        mean = (totals.dot + self._known * fresh) / self._visits
        self.sum_wh = mean - self._pairs.positive[self._own]
        if self._pairs.mean_h is not None:  # without a usable visit, what the batch says
            self.sum_wh = torch.where(self._visits > 0, self.sum_wh, self._pairs.mean_h[self._own])
        self.sample = torch.where(self._last == -1, self._stored, self._last)
        self.score = torch.where(self._last == -1, fresh, self.score)
        if self._call.unimodal:
            self.sample, self.score = self.sample[:, 1:], self.score[:, 1:]

    # -- gradients ---------------------------------------------------------------------------------------------

    def gradients(self, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        coefficient = self._pairs.real(coefficient.expand(self._batch, 2))[self._own]
        factor = torch.where(self._visits > 0, coefficient / self._visits, 0)
        of_anchors = [torch.zeros_like(x) for x in self._anchors]
        of_candidates = [torch.zeros_like(y) for y in self._candidates]
        for start, stop, walks in self._again():
            own = slice(start, stop)
            for direction, done in enumerate(walks):
                weights = done.visits[:-1] * factor[own, direction]
                torch.mm(weights.T, self._candidates[direction], out=of_anchors[direction][own])
                of_candidates[direction].addmm_(weights, self._anchors[direction][own])
        self._add_outside(of_anchors, factor)
        if self._call.unimodal:
            of_both = torch.stack((of_candidates[0] + of_candidates[1]).chunk(2))
        else:
            of_both = torch.stack(of_candidates[::-1])
        of_both = self._ranks.sum(of_both)[:, self._own]
        pull = coefficient.sum(1, keepdim=True)
        z1, z2 = self._anchors
        return (
            of_both[0].add(of_anchors[0]).addcmul_(pull, z2, value=-1),
            of_both[1].add(of_anchors[1]).addcmul_(pull, z1, value=-1),
        )

    def _again(self) -> Iterator[tuple[int, int, list[Walk]]]:
        if self._recompute is None:
            yield from self._kept
            return
        for start, stop in self._bounds():
            yield start, stop, [done for _, done, _ in self._strip(start, stop)]

    def _add_outside(self, of_anchors: list[Tensor], factor: Tensor) -> None:
        """The pairs of anchors with encoded samples."""
        if self._outside_feature is None or self._encoder is None:
            return
        weights, received = factor * self._known, []
        for direction, feature in enumerate(self._outside_feature):
            weight, place = weights[:, direction, None], self._place[:, direction]
            of_anchors[direction].addcmul_(weight, feature[place])
            received.append(torch.zeros_like(feature).index_add_(0, place, weight * self._anchors[direction]))
        self._encoder.receive((received[0], received[1]))


def _burn_in(value: Tensor, count: Tensor) -> Tensor:
    """A count or a fraction of the proposals -> a count that leaves at least one."""
    proposals = torch.where(value < 1, (value.double() * count).floor(), value.double())
    return proposals.to(torch.int64).minimum(count - 1)
