"""The memory of past features (MemoryNormalizer): one anchor and one slot at a time, gradients by autograd."""

from __future__ import annotations

import math

import torch

from tests.reference.neural import unit


class MemoryReference:
    """A list of slots, oldest first: keys of the sample, and both features less the means of their batch."""

    has_rows = False

    def __init__(self, length):
        self.length = length
        self.slots, self.pending = [], None

    def alphas(self, ref, found, taus, rows):
        """log of the mean over the batch's negatives and the slots; what is outside the batch is noted per anchor."""
        z = [unit(side) if ref.normalize else side for side in ref.features]
        means = [side.detach().mean(0) for side in z]
        if ref.mode == "unimodal":  # of many views the first two are kept
            means = [(means[0] + means[1]) / 2] * 2
        slots = self.pending if ref.train and self.pending is not None else self.slots
        self.outside, alphas = [], []
        for a, tau in zip(found, taus, strict=True):
            mine = [None if key is None else key[a.position] for key in ref.keys]
            own, partner = z[a.view][a.position], z[a.partner][a.position].detach()
            terms = []
            for keys, features in slots:
                if any(k is not None and k == other for k, other in zip(mine, keys, strict=True)):
                    continue
                for side in (0, 1) if ref.mode == "unimodal" else (1 - a.direction,):
                    terms.append(torch.dot(own, features[side] + means[side] - partner))
            every = [h / tau for h in a.h] + [t.item() / tau for t in terms]
            log_total = torch.tensor(every, dtype=torch.float64).logsumexp(0).item() if every else 0.0
            weights = [math.exp(t.item() / tau - log_total) for t in terms]
            alphas.append(log_total - math.log(max(1, len(every))))
            self.outside.append((log_total - math.log(max(1, len(a.h))), weights, terms))
        if ref.train:
            at = range(len(z[0]))
            new = [
                (
                    tuple(None if key is None else key[i] for key in ref.keys),
                    [s[i].detach() - m for s, m in zip(z[:2], means, strict=True)],
                )
                for i in at
            ]
            self.pending = [*slots, *new][-self.length :]
        return alphas, []

    def weight_alpha(self, number):
        """Return what the weights of an anchor's pairs have for alpha."""
        return self.outside[number][0]

    def outside_wh(self, number):
        """sum w h over the slots."""
        return sum(w * t.item() for w, t in zip(*self.outside[number][1:], strict=True))

    def surrogate(self, ref, found, taus, scale):
        """The slots push the anchor; its own positive pulls it with the same weight, and is not moved."""
        total = 0.0
        for tau, (_, weights, terms) in zip(taus, self.outside, strict=True):
            for weight, term in zip(weights, terms, strict=True):
                total = total + scale(tau) / tau * weight * term
        return total

    def step(self):
        """The copy becomes the memory."""
        if self.pending is not None:
            self.slots, self.pending = self.pending, None

    def discard(self):
        """The copy is dropped."""
        self.pending = None
