"""The chains of one batch: their walks, the weights that their visits are, and the gradients of those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt import accelerator, rng
from compopt.distributed.ranks import Ranks
from compopt.estimator.call import Call
from compopt.functional import Scalar
from compopt.kernel.pairs import SampledPairs, scale_of
from compopt.negatives.candidates import Candidates, Samples
from compopt.negatives.outside import Outside
from compopt.negatives.walk import Walk, walk

# Proposals of the anchors that walk at a time, at some 80 bytes each. On the CPU what fits its caches; elsewhere as
# many as memory bears, since a walk launches two kernels per proposal however many anchors it has.
CPU_PROPOSALS, DEVICE_PROPOSALS = 1 << 18, 1 << 24


@dataclass(frozen=True)
class Rules:
    """How chains move.

    Attributes:
        burn_in: proposals that do not count, a number or ``(b, A)``: below 1 a fraction of ``|N_i|``.
        sweep: every negative once, in order, rather than independent draws.
        rescore: the stored samples outside the batch are encoded before the chains move.
        counters: seed, step and call within the step, which with direction and position name every draw.
        recompute: anchors at a time whose walks are not kept but repeated; ``None`` keeps all.
    """

    burn_in: Scalar
    sweep: bool
    rescore: bool
    counters: tuple[int, ...]
    recompute: int | None


class Totals:
    """Sums over the walks of the own anchors, ``(b, A)`` each.

    Attributes:
        inside, outside: visits to samples of the batch, and to the stored sample outside it.
        dot: ``sum of visits times s_ij`` inside.
        squares: sum of squared visits inside.
        accepted, proposed: proposals.
    """

    def __init__(self, like: Tensor) -> None:
        self._all = like.new_zeros(6, *like.shape)
        self.inside, self.outside, self.dot, self.squares, self.accepted, self.proposed = self._all.unbind()

    def add(self, at: tuple[slice, slice], done: Walk, similarity: Tensor, proposed: Tensor) -> None:
        """One walk of some anchors of some directions."""
        inside, into = done.visits[:-1], self._all[:, at[0], at[1]]
        dot, squares = torch.linalg.vecdot(inside, similarity[:-2], dim=0), inside.square().sum(0)
        found = [inside.sum(0), done.visits[-1], dot, squares, done.accepted, proposed.expand_as(dot)]
        into.copy_(_by_direction(torch.stack([x.to(inside.dtype) for x in found]), into.shape[2]))


class Chains(SampledPairs):
    """Weights ``w_ij = visits of chain i to j / all its visits``, the anchors' own part of a batch.

    Args:
        call: the batch.
        rules: how chains move.
        ranks: who shares the batch.

    Attributes:
        sample, score: where each own chain is now and its similarity, ``(b, D)``; not finite where it is nowhere.
        totals: of the own anchors.
        outside: the stored samples.
    """

    def __init__(self, call: Call, rules: Rules, ranks: Ranks) -> None:
        self._call, self._rules, self._ranks, self._pairs = call, rules, ranks, call.pairs
        own, (z1, z2) = call.batch.own, call.batch.features
        self._batch, self._views = len(z1), 2 if call.unimodal else 1
        self._directions = call.pairs.directions
        self._features = [z1[own], z2[own]]
        self._anchors = self._features[: self._directions]
        self._candidates = ([torch.cat([z1, z2])] * 2 if call.unimodal else [z2, z1])[: self._directions]
        index = call.batch.keys["index"]
        names = (call.batch.keys.get("index2", index), index)[: self._directions]
        # without index2 samples of both modalities have the same positions
        self._samples = [Samples(positions) for positions in names[: 1 if names[0] is names[-1] else 2]]
        scale = scale_of(call.tau, z1, self._batch, self._directions)
        scale = scale if isinstance(scale, Tensor) else z1.new_full((1, 1), scale)
        self._scale = scale.expand(self._batch, self._directions)[own]
        self._positions = torch.arange(own.start, own.stop, device=z1.device)
        stored, score = (call.rows[name][own] for name in ("chain", "score"))
        self.outside = Outside(stored, score.to(z1.dtype), self._anchors, call.encoder, ranks)
        # directions that walk side by side; in unimodal mode one chain goes through view 1, then view 2
        together = [slice(0, self._directions)] if self._views == 1 else [slice(0, 1), slice(1, 2)]
        self._together = together
        self._seen = call.batch.seen("chain")[own].expand(-1, self._directions)
        self._kept: list[tuple[slice, list[Walk]]] = []
        self.totals = Totals(self._scale)
        self._run()
        self._finish()

    # -- walks -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Move the chains, and encode what the batch lacks."""
        outside, rules, spare = self.outside, self._rules, self._samples[-1].names[:1]
        if outside.encoded and rules.rescore:
            outside.encode(self._absent(), spare)
            outside.score = outside.fresh
        sample, score = outside.sample.clone(), torch.zeros_like(self._scale)
        self._stayed = torch.zeros_like(self._seen)
        for own in self._blocks():
            walks = []
            for at, candidates, similarity, done in self._walks(own):
                count, last = at[1].stop - at[1].start, done.last
                self.totals.add(at, done, similarity, candidates.count)
                score[at] = _by_direction(similarity.gather(0, last[None])[0], count)
                self._stayed[at] = _by_direction(last == candidates.width, count)
                moved = torch.where(last < candidates.width, self._names(at, last), _flat(sample[at]))
                sample[at] = _by_direction(moved, count)
                walks.append(done)
            if rules.recompute is None:
                self._kept.append((own, walks))
        self.sample, self.score = sample, score
        if outside.encoded and not rules.rescore:
            outside.encode(self.totals.outside > 0, spare)

    def _blocks(self) -> Iterator[slice]:
        """Own anchors that walk at a time."""
        most = CPU_PROPOSALS if self._scale.device.type == "cpu" else DEVICE_PROPOSALS
        side_by_side = self._together[0].stop
        rows = max(1, min(self._rules.recompute or self._batch, most // (self._views * side_by_side * self._batch)))
        for start in range(0, len(self._positions), rows):
            yield slice(start, min(start + rows, len(self._positions)))

    def _walks(self, own: slice) -> Iterator[tuple[tuple[slice, slice], Candidates, Tensor, Walk]]:
        """All directions of some anchors: which they are, ``P`` chains each time, and what they found."""
        rules, count = self._rules, self._together[0].stop
        positions = self._positions[own]
        candidates = Candidates(self._pairs.keys, positions.repeat(count), self._pairs.distinct, self._views)
        slot: Tensor | None = None
        for directions in self._together:
            at = (own, directions)
            similarity = self._similarity(own, directions)
            streams = rng.streams(rules.counters, positions, range(directions.start, directions.stop))
            scores = similarity * _flat(self._scale[at])
            given = _flat(rules.burn_in[at]) if isinstance(rules.burn_in, Tensor) else rules.burn_in
            burn_in = burn_in_count(given, candidates.most if candidates.alike else candidates.count)
            if slot is None:
                slot = self._start(at, candidates, scores, streams)
                # the pool is that of the whole call: a chain that view 1 took into the batch may return in view 2
                spare = self._views * (slot == candidates.width)
            done = walk(candidates, scores, slot, burn_in, streams, None if rules.sweep else spare)
            slot = done.last
            yield at, candidates, similarity, done

    def _similarity(self, own: slice, directions: slice) -> Tensor:
        """``s`` by slot, ``(Q + 2, P)``."""
        products = [y @ x[own].T for x, y in zip(self._anchors[directions], self._candidates[directions], strict=True)]
        outside = _flat(self.outside.score[own, directions])
        width = outside.new_full((1, len(outside)), -torch.inf)
        return torch.cat([torch.cat(products, dim=1), outside[None], width])

    def _names(self, at: tuple[slice, slice], column: Tensor) -> Tensor:
        """Data-set positions of the samples in some columns, ``(P,)``."""
        if len(self._samples) == 1:
            return self._samples[0].name(column)
        parts = column.chunk(at[1].stop - at[1].start)
        return torch.cat([s.name(part) for s, part in zip(self._samples[at[1]], parts, strict=True)])

    def _find(self, at: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        """Columns of the stored samples, and whether the batch has them, ``(P,)``."""
        sample = self.outside.sample[at]
        if len(self._samples) == 1:
            return self._samples[0].find(_flat(sample))
        pairs = [s.find(part) for s, part in zip(self._samples[at[1]], sample.unbind(1), strict=True)]
        column, found = zip(*pairs, strict=True)
        return torch.cat(column), torch.cat(found)

    def _start(self, at: tuple[slice, slice], candidates: Candidates, scores: Tensor, streams: Tensor) -> Tensor:
        """Slot of every chain before its first proposal."""
        column, found = self._find(at)
        allowed = candidates.allows(column)
        if self._views == 2:  # the row does not say which view: drawn as the softmax would
            both = torch.stack([column, column + self._batch])
            gap = scores.gather(0, both).diff(dim=0)[0]
            random = rng.uniform(rng.bits(streams, candidates.most, 1)[0], scores.dtype)
            column = torch.where(random < gap.sigmoid(), both[1], both[0])
        outside, nowhere = candidates.width, candidates.width + 1
        slot = torch.where(found, torch.where(allowed, column, nowhere), outside)
        return torch.where(_flat(self._seen[at]), slot, nowhere)

    def _absent(self) -> Tensor:
        """Chains whose stored sample is not in the batch, ``(b, A)``."""
        stored = self.outside.sample.unbind(1)
        samples = self._samples * (len(stored) // len(self._samples))
        absent = [~batch.find(sample)[1] for sample, batch in zip(stored, samples, strict=True)]
        return torch.stack(absent, dim=1) & self._seen

    def _finish(self) -> None:
        """What counts of the visits, and where the chains are."""
        totals, fresh = self.totals, self.outside.fresh
        self.visits, dot = totals.inside, totals.dot
        if self.outside.encoded:
            self.visits = self.visits + totals.outside
            dot = dot + torch.where(totals.outside > 0, totals.outside * fresh, 0)
        mean_h = dot / self.visits - self._pairs.positive[self._call.batch.own]
        # a temperature whose anchor has no usable visit learns from the batch
        batch = torch.zeros_like(mean_h) if self._pairs.mean_h is None else self._pairs.mean_h[self._call.batch.own]
        self.sum_wh = torch.where(self.visits > 0, mean_h, batch)
        self.score = torch.where(self._stayed, fresh, self.score)
        if self._call.unimodal:
            self.sample, self.score = self.sample[:, 1:], self.score[:, 1:]

    # -- gradients ---------------------------------------------------------------------------------------------

    def gradients(self, coefficient: Scalar) -> Tensor:
        coefficient = self._pairs.factor(coefficient)
        if not isinstance(coefficient, Tensor):
            coefficient = self._scale.new_full((), coefficient)
        coefficient = coefficient.expand(self._batch, self._directions)[self._call.batch.own]
        factor = torch.where(self.visits > 0, coefficient / self.visits, 0)
        of_anchors = [torch.zeros_like(x) for x in self._anchors]
        of_candidates = [torch.zeros_like(y) for y in self._candidates]
        for own, walks in self._again():
            visits = [part for done in walks for part in done.visits[:-1].split(own.stop - own.start, dim=1)]
            for direction, visited in enumerate(visits):
                weights = visited * factor[own, direction]
                torch.mm(weights.T, self._candidates[direction], out=of_anchors[direction][own])
                of_candidates[direction].addmm_(weights, self._anchors[direction][own])
        if self.outside.encoded:
            self.outside.add_gradients(of_anchors, factor * self.totals.outside)
        if self._call.unimodal:
            of_both = torch.stack((of_candidates[0] + of_candidates[1]).chunk(2))
        elif self._directions == 2:
            of_both = torch.stack(of_candidates[::-1])
        else:
            of_both = torch.stack([torch.zeros_like(of_candidates[0]), of_candidates[0]])
        of_both = self._ranks.sum(of_both)[:, self._call.batch.own].clone()
        for gradient, of_anchor in zip(of_both, of_anchors, strict=False):
            gradient.add_(of_anchor)
        pull = coefficient.sum(1, keepdim=True)
        return of_both.addcmul_(pull, torch.stack(self._features[::-1]), value=-1)

    def _again(self) -> Iterator[tuple[slice, list[Walk]]]:
        """All walks; repeated where they were not kept."""
        if self._rules.recompute is None:
            yield from self._kept
            return
        for own in self._blocks():
            yield own, [done for *_, done in self._walks(own)]


def _flat(per_anchor: Tensor) -> Tensor:
    """``(b, D)`` -> ``(D b,)``, direction by direction."""
    return per_anchor.T.contiguous().view(-1)


def _by_direction(flat: Tensor, directions: int) -> Tensor:
    """The inverse, of the last axis: ``(..., D b)`` -> ``(..., b, D)``."""
    return flat.unflatten(-1, (directions, -1)).mT


def burn_in_count(value: Scalar, count: int | Tensor) -> int | Tensor:
    """A count or a fraction of the proposals -> a count that leaves at least one; on the host if that knows both."""
    # fractions of several groups come in float32: 0.9 of 10 is 9 there too
    if isinstance(value, Tensor):
        value = value.to(accelerator.widest(value.device))
    elif isinstance(count, Tensor):
        value = count.new_full((), value, dtype=accelerator.widest(count.device))
    else:
        return min(int(value * count * (1 + 1e-6) if value < 1 else value), count - 1)
    proposals = torch.where(value < 1, (value * count * (1 + 1e-6)).floor(), value)
    return proposals.to(torch.int64).clamp(max=count - 1)
