"""The memory of past features (MemoryNormalizer): one anchor and one slot at a time, gradients by autograd."""

from __future__ import annotations

import math

import torch

from tests.reference.neural import unit


class MemoryReference:
    """A list of slots, oldest first: keys of the sample, and both features minus the means of their batch.

    ``fresh`` are the slots since the last commit; those of a batch's own samples are replaced by the batch.
    """

    has_rows = False

    def __init__(self, length, candidates=None):
        self.length, self.candidates = length, candidates
        self.slots, self.fresh = [], []

    def alphas(self, ref, found, taus, rows):
        """Return the log of the mean over the batch's negatives and the slots, whose terms are recorded per anchor."""
        z = [unit(side) if ref.normalize else side for side in ref.features]
        means = [side.detach().mean(0) for side in z]
        if ref.mode == "unimodal":  # of many views the first two are kept
            means = [(means[0] + means[1]) / 2] * 2
        pairs = list(zip(*(key for key in ref.keys[:2] if key is not None), strict=True))
        given = [at for at, key in enumerate(ref.keys[:2]) if key is not None]
        others = [slot for slot in self.fresh if tuple(slot[0][at] for at in given) not in pairs]
        slots = [*self.slots, *others][-self.length :] if ref.train else self.slots
        self.outside, alphas = [], []
        for a, tau in zip(found, taus, strict=True):
            mine = [None if key is None else key[a.position] for key in ref.keys]
            own, partner = z[a.view][a.position], z[a.partner][a.position].detach()
            terms, biases = [], []
            for keys, features in slots:
                if any(k is not None and k == other for k, other in zip(mine, keys[: len(mine)], strict=True)):
                    continue
                if ref.within is not None and keys[-1] != int(ref.within[0][a.position]):
                    continue
                for side in (0, 1) if ref.mode == "unimodal" else (1 - a.direction,):
                    candidate = features[side] + means[side]
                    s = torch.dot(own, candidate).item()
                    if ref.policy is None or not ref.policy.too_similar(s, a.positive.item()):
                        terms.append(torch.dot(own, candidate - partner))
                        biases.append(0.0 if ref.policy is None else (ref.policy.hardness or 0.0) * s)
            every = [math.log(x) for x in a.terms(tau)]
            every += [t.item() / tau + b for t, b in zip(terms, biases, strict=True)]
            summed = list(every)
            if self.candidates is not None and every:  # the positive
                summed.append(min(0.0, math.log(len(every) / self.candidates)))
            log_total = torch.tensor(summed, dtype=torch.float64).logsumexp(0).item() if every else 0.0
            weights = [math.exp(t.item() / tau + b - log_total) for t, b in zip(terms, biases, strict=True)]
            alphas.append(log_total - math.log(max(1, len(every))))
            self.outside.append((log_total - math.log(max(1, len(a.h))), weights, terms))
        if ref.train:
            at = range(len(z[0]))
            new = [
                (
                    (*(None if key is None else key[i] for key in ref.keys), *within_of(ref, i)),
                    [s[i].detach() - m for s, m in zip(z[:2], means, strict=True)],
                )
                for i in at
            ]
            self.fresh = [*others, *new][-self.length :]
        return alphas, []

    def weight_alpha(self, number):
        """Return the log-normalizer that replaces alpha in the weights of an anchor's pairs."""
        return self.outside[number][0]

    def outside_wh(self, number):
        """Return sum w h over the slots."""
        return sum(w * t.item() for w, t in zip(*self.outside[number][1:], strict=True))

    def surrogate(self, ref, found, taus, slopes):
        """Return the term in which slots repel an anchor and its detached positive attracts it with the same weight."""
        total = 0.0
        for tau, slope, (_, weights, terms) in zip(taus, slopes, self.outside, strict=True):
            for weight, term in zip(weights, terms, strict=True):
                total = total + slope / tau * weight * term
        return total

    def step(self):
        """Make the pending copy the memory."""
        self.slots, self.fresh = [*self.slots, *self.fresh][-self.length :], []

    def discard(self):
        """Discard the pending copy."""
        self.fresh = []


def within_of(ref, i):
    """Return a tuple with the key of a sample's data set, empty without ``within``."""
    return () if ref.within is None else (int(ref.within[0][i]),)
