"""Chains of one batch: walks, weights as shares of visits, and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from compopt import rng
from compopt.distributed.ranks import Ranks
from compopt.estimator.parts import Call
from compopt.functional import Scalar
from compopt.kernel.features import Encoder
from compopt.kernel.pairs import SampledPairs, pull_positives, scale_of
from compopt.negatives.walk import Candidates, Pool, Samples, Walk, burn_in_count, walk

# Proposals per block, about 80 bytes each. On the CPU a block fits the caches; elsewhere blocks are larger, since a
# walk launches two kernels per proposal, independently of the number of anchors.
CPU_PROPOSALS, DEVICE_PROPOSALS = 1 << 18, 1 << 24


class StoredSamples:
    """Stored samples of this rank's chains, their similarities and, with ``encode``, their features.

    With several ranks the encoder runs in every call, so that collectives inside it match. Its ``error`` is stored and
    raised after the next all-gather; otherwise the other ranks would hang.

    ``sample`` and ``score`` are the values of the rows, ``(b, D)``. ``fresh`` is the current similarity if the sample
    was encoded, else the stored one, and ``place`` the position of the sample among the features.
    """

    def __init__(
        self, sample: Tensor, score: Tensor, anchors: Sequence[Tensor], encoder: Encoder | None, ranks: Ranks
    ) -> None:
        self.error: Exception | None = None
        self._anchors, self._encoder, self._ranks = anchors, encoder, ranks
        self._features: tuple[Tensor, Tensor] | None = None
        self.sample, self.score = (rows.expand(-1, len(anchors)) for rows in (sample, score))
        self.fresh, self.place = self.score, self.sample  # until some are encoded

    @property
    def encoded(self) -> bool:
        """True with ``encode``: visits to these samples count."""
        return self._encoder is not None

    def places(self, samples: Tensor, spare: Tensor) -> Tensor:
        """Encode ``samples`` (of any shape), each once, and return their positions among the features.

        With several ranks, a rank with no samples encodes ``spare`` instead.
        """
        names, place = torch.unique(samples, return_inverse=True)
        if len(names) or self._ranks.size > 1:
            self._features = self._call((names if len(names) else spare).cpu())
        return place

    def _call(self, names: Tensor) -> tuple[Tensor, Tensor]:
        assert self._encoder is not None
        try:
            return self._encoder(names)
        except Exception as error:
            if self._ranks.size == 1:
                raise
            self.error = error  # raised after the all-gather in which the other ranks wait
            nothing = self._anchors[0].new_zeros(len(names), self._anchors[0].shape[1])
            return nothing, nothing

    def similarities(self, place: Tensor) -> Tensor:
        """Return the similarities of the anchors to one sample each per direction, given its place, ``(b, A)``."""
        return torch.stack([torch.linalg.vecdot(x, feature) for x, feature, _ in self._pairs(place)], dim=1)

    def _pairs(self, place: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return, by direction, the anchors, the features of one sample each, and the places of these samples."""
        assert self._features is not None
        features = self._features[: len(self._anchors)]
        by_direction = zip(self._anchors, features, place.unbind(1), strict=True)
        return [(x, feature[at], at) for x, feature, at in by_direction]

    def add_gradients(self, of_anchors: Sequence[Tensor], terms: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the gradients of ``sum weights_i s_i`` for both sides; ``terms``: weights and places, ``(b, A)``."""
        if self._features is None or self._encoder is None:
            return
        received = [torch.zeros_like(feature) for feature in self._features]
        for weights, place in terms:
            for direction, (x, feature, at) in enumerate(self._pairs(place)):
                weight = weights[:, direction, None]
                of_anchors[direction].addcmul_(weight, feature)
                received[direction].index_add_(0, at, weight * x)
        self._encoder.receive((received[0], received[1]))

    def encode(self, needed: Tensor, spare: Tensor) -> None:
        """Encode the samples in the mask ``needed``, ``(b, A)``, each once; a rank without any encodes ``spare``."""
        place = self.places(self.sample[needed], spare)
        if self._features is not None:
            self.place = torch.zeros_like(self.sample).masked_scatter_(needed, place)
            self.fresh = torch.where(needed, self.similarities(self.place), self.score)


class Chains(SampledPairs):
    """Weights ``w_ij = visits of chain i to j / all its visits``, for this rank's anchors.

    With ``chunk_size`` the walks are not stored but repeated for the gradients, in chunks of anchors.

    Attributes:
        sample, score: current sample of each of this rank's chains, and its similarity, ``(b, D)``; not finite for a
            chain without a sample.
        inside, away: visits to samples of the batch, and to the stored sample outside the batch, ``(b, a)``.
        squares, accepted, proposed: sum of squared visits inside, and numbers of proposals, ``(b, a)``.
        outside: the stored samples.
    """

    def __init__(self, call: Call, ranks: Ranks, burn_in: Scalar, seed: int, sweep: bool) -> None:
        self._call, self._ranks, self._pairs = call, ranks, call.pairs
        self._burn_in, self._sweep = burn_in, sweep
        self._counters = (seed, call.t, call.window)  # identify every draw, with direction and position
        own, z = call.batch.own, call.batch.features
        z1, z2 = z[:2]
        self._batch, self._views = len(z1), len(z) if call.unimodal else 1
        self._directions = call.pairs.directions
        self._features = [view[own] for view in z]
        self._anchors = self._features[: self._directions]
        self._candidates = [torch.cat(z)] * self._directions if call.unimodal else [z2, z1][: self._directions]
        index = call.batch.keys["index"]
        names = (call.batch.keys.get("index2", index), index)[: self._directions]
        # by direction; without index2 both directions share one look-up
        samples = {id(positions): positions for positions in names}
        self._samples = [Samples(positions) for positions in samples.values()]
        scale = scale_of(call.tau, z1, self._batch, self._directions)
        scale = scale if isinstance(scale, Tensor) else z1.new_full((1, 1), scale)
        self._scale = scale.expand(self._batch, self._directions)[own]
        self._positions = torch.arange(own.start, own.stop, device=z1.device)
        stored, score = (call.rows[name][own] for name in ("chain", "score"))
        self.outside = StoredSamples(stored, score.to(z1.dtype), self._anchors, call.encoder, ranks)
        # directions that walk together; in unimodal mode one chain walks through view 1, then view 2 ...
        side_by_side = 1 if call.unimodal else self._directions
        self._together = [slice(v, v + side_by_side) for v in range(0, self._directions, side_by_side)]
        self._seen = (call.count > 0)[own].expand(-1, self._directions)
        self._kept: list[tuple[slice, list[Walk]]] = []
        self._totals = self._scale.new_zeros(6, *self._scale.shape)
        self.inside, self.away, self._dot, self.squares, self.accepted, self.proposed = self._totals.unbind()
        self._run()
        self._finish()

    def _run(self) -> None:
        outside = self.outside
        sample, score = outside.sample.clone(), torch.zeros_like(self._scale)
        self._stayed = torch.zeros_like(self._seen)
        for own in self._blocks():
            walks = []
            for at, candidates, similarity, done in self._walks(own):
                count, last = at[1].stop - at[1].start, done.last
                inside = done.visits[:-1]  # the last slot is the stored sample outside the batch
                dot, squares = torch.linalg.vecdot(inside, similarity[:-2], dim=0), inside.square().sum(0)
                found = [inside.sum(0), done.visits[-1], dot, squares, done.accepted, candidates.count.expand_as(dot)]
                sums = torch.stack([x.to(inside.dtype) for x in found])
                self._totals[:, at[0], at[1]] = by_direction(sums, count)
                score[at] = by_direction(similarity.gather(0, last[None])[0], count)
                self._stayed[at] = by_direction(last == candidates.width, count)
                moved = torch.where(last < candidates.width, self._names(last), flat(sample[at]))
                sample[at] = by_direction(moved, count)
                walks.append(done)
            if self._call.chunk_size is None:
                self._kept.append((own, walks))
        self.sample, self.score = sample, score
        if outside.encoded:
            outside.encode(self.away > 0, self._samples[-1].names[:1])

    def _blocks(self) -> Iterator[slice]:
        most = CPU_PROPOSALS if self._scale.device.type == "cpu" else DEVICE_PROPOSALS
        side_by_side = self._together[0].stop
        rows = max(1, min(self._call.chunk_size or self._batch, most // (self._views * side_by_side * self._batch)))
        for start in range(0, len(self._positions), rows):
            yield slice(start, min(start + rows, len(self._positions)))

    def _walks(self, own: slice) -> Iterator[tuple[tuple[slice, slice], Candidates, Tensor, Walk]]:
        """Walk in all directions of some anchors; yield their slices, candidates, similarities and results."""
        count = self._together[0].stop
        positions = self._positions[own]
        candidates = Candidates(self._pairs.keys, positions.repeat(count), self._pairs.distinct, self._views)
        slot: Tensor | None = None
        for directions in self._together:
            at = (own, directions)
            similarity = self._similarity(own, directions)
            streams = rng.streams(self._counters, positions, range(directions.start, directions.stop))
            scores = similarity * flat(self._scale[at])
            given = flat(self._burn_in[at]) if isinstance(self._burn_in, Tensor) else self._burn_in
            burn_in = burn_in_count(given, candidates.most if candidates.equal_counts else candidates.count)
            if slot is None:
                slot = self._start(at, candidates, scores, streams)
                # one pool per call: a chain that moved into the batch in view 1 may return in view 2
                spare = self._views * (slot == candidates.width)
            done = walk(candidates, scores, slot, burn_in, streams, None if self._sweep else spare)
            slot = done.last
            yield at, candidates, similarity, done

    def _similarity(self, own: slice, directions: slice) -> Tensor:
        """Return similarities by slot, ``(Q + 2, P)``."""
        products = [y @ x[own].T for x, y in zip(self._anchors[directions], self._candidates[directions], strict=True)]
        outside = flat(self.outside.score[own, directions])
        width = outside.new_full((1, len(outside)), -torch.inf)
        return torch.cat([torch.cat(products, dim=1), outside[None], width])

    def _names(self, column: Tensor) -> Tensor:
        if len(self._samples) == 1:
            return self._samples[0].name(column)
        return torch.cat([s.name(part) for s, part in zip(self._samples, column.chunk(2), strict=True)])

    def _find(self, at: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        """Return the columns of the stored samples, and a mask of those in the batch, ``(P,)``."""
        sample = self.outside.sample[at]
        if len(self._samples) == 1:
            return self._samples[0].find(flat(sample))
        first, second = (s.find(part) for s, part in zip(self._samples, sample.unbind(1), strict=True))
        return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])

    def _start(self, at: tuple[slice, slice], candidates: Candidates, scores: Tensor, streams: Tensor) -> Tensor:
        column, found = self._find(at)
        allowed = candidates.allows(column)
        if self._views > 1:  # the row does not contain the view: draw it from the softmax
            random = rng.uniform(rng.bits(streams, candidates.most, 1)[0], scores.dtype)
            column = self._draw_view(column, scores, random)
        outside, nowhere = candidates.width, candidates.width + 1
        slot = torch.where(found, torch.where(allowed, column, nowhere), outside)
        return torch.where(flat(self._seen[at]), slot, nowhere)

    def _draw_view(self, column: Tensor, scores: Tensor, random: Tensor) -> Tensor:
        """Draw a view of each sample by the softmax; return its column, given the ``column`` of view 1."""
        columns = torch.stack([column + view * self._batch for view in range(self._views)])
        of_views = scores.gather(0, columns)
        for view in range(1, self._views):  # with the probability of this view or a later one
            gap = of_views[view:].logsumexp(0) - of_views[:view].logsumexp(0)
            column = torch.where(random < gap.sigmoid(), columns[view], column)
        return column

    def _finish(self) -> None:
        fresh = self.outside.fresh
        self.visits, dot = self.inside, self._dot
        if self.outside.encoded:
            self.visits = self.visits + self.away
            self.squares = self.squares + self.away.square()
            dot = dot + torch.where(self.away > 0, self.away * fresh, 0)
        self.score = torch.where(self._stayed, fresh, self.score)
        self._close(dot)

    def _close(self, dot: Tensor) -> None:
        """Compute the means over the visits from ``dot``, the sum of their similarities, ``(b, a)``."""
        own = self._call.batch.own
        mean_h = dot / self.visits - self._pairs.positive[own]
        # the temperature of an anchor without a usable visit learns from the batch
        batch = torch.zeros_like(mean_h) if self._pairs.mean_h is None else self._pairs.mean_h[own]
        self.sum_wh = torch.where(self.visits > 0, mean_h, batch)
        if self._call.unimodal:
            self.sample, self.score = self.sample[:, -1:], self.score[:, -1:]

    def gradients(self, coefficient: Scalar) -> Tensor:
        coefficient = self._pairs.factor(coefficient)
        if not isinstance(coefficient, Tensor):
            coefficient = self._scale.new_full((), coefficient)
        coefficient = coefficient.expand_as(self._pairs.positive)[self._call.batch.own]
        factor = torch.where(self.visits > 0, coefficient / self.visits, 0)
        of_anchors = [torch.zeros_like(x) for x in self._anchors]
        of_both = self._of_candidates(factor, of_anchors)
        for gradient, of_anchor in zip(of_both, of_anchors, strict=False):
            gradient.add_(of_anchor)
        pull_positives(of_both, self._features, coefficient, self._directions)
        return of_both

    def _of_candidates(self, factor: Tensor, of_anchors: Sequence[Tensor]) -> Tensor:
        """Add visited candidates times ``factor``, ``(b, A)``, to the anchors' gradients; return candidate gradients.

        These are the gradients of this rank's features as candidates of the anchors of all ranks, ``(2, b, d)``.
        """
        of_candidates = [torch.zeros_like(y) for y in self._candidates]
        walked: Iterable[tuple[slice, list[Walk]]] = self._kept
        if self._call.chunk_size is not None:  # visits, one number per pair, were not stored
            walked = ((own, [done for *_, done in self._walks(own)]) for own in self._blocks())
        for own, walks in walked:
            visits = [part for done in walks for part in done.visits[:-1].split(own.stop - own.start, dim=1)]
            for direction, visited in enumerate(visits):
                weights = visited * factor[own, direction]
                torch.mm(weights.T, self._candidates[direction], out=of_anchors[direction][own])
                of_candidates[direction].addmm_(weights, self._anchors[direction][own])
        if self.outside.encoded:
            self.outside.add_gradients(of_anchors, [(factor * self.away, self.outside.place)])
        if self._call.unimodal:
            of_both = torch.stack(reduce(torch.add, of_candidates).chunk(self._views))
        elif self._directions == 2:
            of_both = torch.stack(of_candidates[::-1])
        else:
            of_both = torch.stack([torch.zeros_like(of_candidates[0]), of_candidates[0]])
        return self._ranks.sum(of_both)[:, self._call.batch.own].clone()


class DatasetChains(Chains):
    """Weights ``w_ij = visits of chain i to j / (R - P)``, with proposals uniform over the data set without ``i``.

    The candidates of a chain are the ``R`` samples drawn for it and its stored sample (in view 2: its last sample of
    view 1). All are encoded in one call before the chains move, so that every similarity is current.

    Attributes: as for :class:`Chains`; a visit is ``away`` if the sample is not in the batch.
    """

    def __init__(self, call: Call, ranks: Ranks, burn_in: Scalar, seed: int, n: int, draws: int) -> None:
        self._n, self._draws = n, draws
        super().__init__(call, ranks, burn_in, seed, sweep=True)

    def _run(self) -> None:
        samples, at_view_2 = self._drawn(), (-1, slice(None), slice(1, None))
        self._place = self.outside.places(samples, self._samples[-1].names[:1])
        similarity = torch.stack([self.outside.similarities(place) for place in self._place])
        self._visits = torch.zeros_like(similarity)
        slot = torch.where(self._seen, self._draws, self._draws + 1)
        for at in self._together:
            if at.start:  # view 2 continues from the end of view 1
                last = slot[:, :1].clamp(max=self._draws)[None]
                for table in (samples, self._place):
                    table[at_view_2] = table[..., :1].gather(0, last)[0]
                similarity[-1] = self.outside.similarities(self._place[-1])
                slot[:, 1:] = slot[:, :1].clamp(min=self._draws)
            self._walk(similarity[..., at], slot[:, at], at)
        last = slot.clamp(max=self._draws)[None]
        self.sample = samples.gather(0, last)[0]
        # a chain for which all similarities are NaN is still nowhere, and its row is not written
        self.score = torch.where(slot > self._draws, -torch.inf, similarity.gather(0, last)[0])
        self._count(samples, similarity)

    def _drawn(self) -> Tensor:
        """Return the positions drawn for each chain, followed by its stored one, ``(R + 1, b, A)``."""
        streams = rng.streams(self._counters, self._positions, range(self._directions))
        # the high bits of the words; the walk uses the low bits
        number = rng.below(rng.bits(streams, 0, self._draws), self._positions.new_tensor(self._n - 1))
        drawn = by_direction(number, self._directions)
        drawn = drawn + (drawn >= self._call.batch.keys["index"][self._call.batch.own, None])
        return torch.cat([drawn, torch.where(self._seen, self.outside.sample, drawn[0])[None]])

    def _walk(self, similarity: Tensor, slot: Tensor, at: slice) -> None:
        """Move the chains of some directions; ``slot``, ``(b, D)``, is updated in place."""
        streams = rng.streams(self._counters, self._positions, range(at.start, at.stop))
        scores = torch.cat([similarity * self._scale[:, at], torch.full_like(similarity[:1], -torch.inf)])
        given = flat(self._burn_in[:, at]) if isinstance(self._burn_in, Tensor) else self._burn_in
        burn_in = burn_in_count(given, self._draws)
        # each chain has its own draws as candidates, and each draw is proposed once
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


def flat(per_anchor: Tensor) -> Tensor:
    """Flatten ``(b, D)`` -> ``(D b,)``, direction by direction."""
    return per_anchor.T.contiguous().view(-1)


def by_direction(flat: Tensor, directions: int) -> Tensor:
    """Undo :func:`flat` on the last axis: ``(..., D b)`` -> ``(..., b, D)``."""
    return flat.unflatten(-1, (directions, -1)).mT
