"""The chains of EMC2 (DESIGN 3.6, EMC2 Algorithm 1), one proposal at a time, with exponentials and Python integers."""

from __future__ import annotations

import math

import torch

from tests.reference.normalizers import BatchReference
from tests.reference.pairs import may_be_negative

WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def scramble(x):
    """SplitMix64's output function."""
    x &= WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def word(seed, step, window, direction, position, number):
    """Return the 64 random bits of one proposal."""
    state = 0
    for counter in (seed, step, window, direction):
        state = scramble(state + counter + GOLDEN)
    return scramble(scramble(state + position * GOLDEN) + (number + 1) * GOLDEN)


def split(bits, pool):
    """Return (a number below pool, a uniform number)."""
    return ((bits >> 32) * pool) >> 32, ((bits & 0xFFFFFFFF) + 0.5) / 2**32


def choose(row, visits, proposals):
    """Return one of several (sample, score), independent of their order."""

    bits = scramble(scramble(row * GOLDEN) + visits)
    return sorted(proposals)[((bits >> 32) * len(proposals)) >> 32]


def kernel(similarity, tau):
    """Return transition probabilities of a Metropolis-Hastings proposal among negatives, ``(K, K)`` float64 (eq. 9)."""
    accept = ((similarity - similarity[:, None]) / tau).clamp(max=0).exp()  # from a row's state to a column's
    moves = accept / len(similarity)
    return moves + torch.diag(1 - moves.sum(1))


class MCMCReference(BatchReference):
    """Chains in ref.rows["chain"]: (sample, score) per row and column. Reports log ghat for alpha."""

    has_rows = True

    def __init__(self, burn_in=0.5, proposals="pool", seed=0):
        super().__init__()
        self.burn_in, self.proposals, self.seed = burn_in, proposals, seed

    def read(self, ref, row):
        """Return the current sample of each chain, and its score."""
        pairs = [ref.rows["chain"][row][c] for c in range(ref.columns)]
        return {"chain": [sample for sample, _ in pairs], "score": [score for _, score in pairs]}

    def alphas(self, ref, anchors, taus, rows):
        """Run all chains; alpha is log ghat."""
        index, index2, group = ref.keys
        names = [index if index2 is None else index2, *[index] * (len(ref.features) - 1)]
        batch, views = len(index), len(ref.features) if ref.mode == "unimodal" else 1
        self.visits, self.outside, proposals, state = [], [], [], {}
        last_view, walked = max(a.view for a in anchors), {}
        for a, tau in zip(anchors, taus, strict=True):
            i, d = a.position, a.view
            if (d, i) in walked:  # with another positive, on which the chain does not depend
                visits, out = walked[(d, i)]
                self.visits.append(visits), self.outside.append(out)
                continue
            column = d if ref.columns == 2 else 0
            row = rows[column][i]
            slots = self.slots(a, index, index2, group, views)  # (position of the sample, number in a.negatives)
            draw = lambda number, pool, i=i, d=d: split(  # noqa: E731
                word(self.seed, ref.steps, ref.window, d, i, number), pool
            )
            if ref.columns == 2 or d == 0:
                stored = ref.rows["chain"][row].get(column)
                place, score = self.start(a, stored, slots, names[d], tau, draw, views * (batch - 1), views)
                spare = views if place == "outside" and self.proposals == "pool" else 0
            else:
                stored, place, was, spare = state[i]
                score = was if place in ("outside", None) else a.s[slots[place][1]]
            visits, out = [0] * len(a.negatives), 0
            count = len(slots)
            burn = min(int(self.burn_in * count * (1 + 1e-6)) if self.burn_in < 1 else self.burn_in, count - 1)
            for r in range(count):
                number, u = draw(r, count + spare)
                if self.proposals == "sweep":
                    number = r
                new = "outside" if number >= count else number
                new_score = stored[1] if new == "outside" else a.s[slots[new][1]]
                if place is None or u < math.exp(min(0.0, (new_score - score) / tau)):
                    place, score = new, new_score
                if r >= burn:
                    if place == "outside":
                        out += 1
                    else:
                        visits[slots[place][1]] += 1
            self.visits.append(visits)
            self.outside.append((out, stored[0] if out else None))
            walked[(d, i)] = visits, self.outside[-1]
            if place == "outside" and ref.encode is not None:
                state[i] = (stored, place, score, spare)
                score = ref.encoded_score(a, stored[0])
            else:
                state[i] = (stored, place, score, spare)
            if count and (ref.mode != "unimodal" or d == last_view):
                sample = stored[0] if place == "outside" else names[d][slots[place][0]]
                proposals.append((row, column, "chain", (sample, score)))
        return super().alphas(ref, anchors, taus, rows)[0], proposals

    def slots(self, a, index, index2, group, views):
        """Return the columns that may be proposed, in the library's order: all of view 1, then all of view 2, ..."""
        others = [j for j in range(len(index)) if may_be_negative(a.position, j, index, index2, group)]
        return [(j, views * k + view) for view in range(views) for k, j in enumerate(others)]

    def start(self, a, stored, slots, names, tau, draw, last, views):
        """Return (number among the slots, "outside" or None, score) before the first proposal."""
        if stored is None:
            return None, None
        if stored[0] not in names:
            return "outside", stored[1]
        position = names.index(stored[0])
        found = [number for number, (j, _) in enumerate(slots) if j == position]
        if not found:
            return None, None
        scores = [a.s[slots[number][1]] for number in found]
        which = 0
        for view in range(1, views):  # this one or a later one
            gap = math.log(sum(math.exp(s / tau) for s in scores[:view]))
            gap -= math.log(sum(math.exp(s / tau) for s in scores[view:]))
            which = view if draw(last, 1)[1] < 1 / (1 + math.exp(gap)) else which
        return found[which], scores[which]

    def weights(self, ref, anchors):
        """Return, per anchor, the weights of the negatives, and a (weight, sample) for each visit outside."""
        result = []
        for visits, (out, sample) in zip(self.visits, self.outside, strict=True):
            known = out if ref.encode is not None else 0
            total = max(1, sum(visits) + known)
            result.append(([v / total for v in visits], [(known / total, sample)] if known else []))
        return result


class DatasetMCMCReference(MCMCReference):
    """Algorithm 1 as printed: proposals uniform over all n samples but the anchor's own, each encoded."""

    def __init__(self, n, burn_in=0.5, seed=0, draws=None):
        super().__init__(burn_in, "dataset", seed)
        self.n, self.draws = n, draws

    def alphas(self, ref, anchors, taus, rows):
        """Run all chains; alpha is log ghat."""
        index = ref.keys[0]
        count = self.draws or (2 if ref.mode == "unimodal" else 1) * (len(index) - 1)
        burn = min(int(self.burn_in * count * (1 + 1e-6)) if self.burn_in < 1 else self.burn_in, count - 1)
        self.visited, proposals, state = [], [], {}
        for a, tau in zip(anchors, taus, strict=True):
            column = a.direction if ref.columns == 2 else 0
            row = rows[column][a.position]
            chain = (a.position, column)
            if chain not in state:
                state[chain] = ref.rows["chain"][row].get(column, (None, None))[0]
            self.visited.append(self.walk(ref, a, tau, state[chain], count, burn))
            state[chain] = self.visited[-1][-1]
            if ref.mode != "unimodal" or a.direction == 1:
                proposals.append((row, column, "chain", (state[chain], ref.encoded_score(a, state[chain]))))
        return BatchReference.alphas(self, ref, anchors, taus, rows)[0], proposals

    def walk(self, ref, a, tau, current, count, burn):
        """Return the chain's sample after each proposal that counts."""
        own, visited = ref.keys[0][a.position], []
        for r in range(count):
            bits = word(self.seed, ref.steps, ref.window, a.direction, a.position, r)
            number, u = split(bits, self.n - 1)
            new = number + (number >= own)
            if current is None or u < math.exp(
                min(0.0, (ref.encoded_score(a, new) - ref.encoded_score(a, current)) / tau)
            ):
                current = new
            if r >= burn:
                visited.append(current)
        return visited

    def weights(self, ref, anchors):
        """Return equal weights for all visits, and 0 for the batch's own features."""
        return [
            ([0.0] * len(a.negatives), [(1 / len(visited), sample) for sample in visited])
            for a, visited in zip(anchors, self.visited, strict=True)
        ]
