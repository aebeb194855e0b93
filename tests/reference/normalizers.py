"""Normalizers of DESIGN sections 3.1 and 3.2, with u itself (float64 holds exp(+-400)), not log u."""

from __future__ import annotations

import math


class BatchReference:
    """alpha from the batch alone; with the positive, the usual softmax denominator."""

    has_rows = False

    def __init__(self, include_positive=False, candidates=None):
        self.include_positive, self.candidates = include_positive, candidates

    def alphas(self, ref, anchors, taus, rows):
        """Return alpha per anchor and no proposals."""
        result = []
        for a, tau in zip(anchors, taus, strict=True):
            total = sum(a.terms(tau))
            if self.include_positive:
                total += 1.0 if self.candidates is None else min(1.0, len(a.negatives) / self.candidates)
            result.append(math.log(total / len(a.negatives)))
        return result, []


def softplus(x):
    """log(1 + exp x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


class SigmoidReference:
    """Binary classification per pair: alpha is the loss of an anchor's pairs; a weight depends on its own pair only."""

    has_rows = False

    def __init__(self, bias):
        self.bias = bias

    def logit(self, similarity, tau):
        """Return the value for one pair."""
        return similarity.item() / tau + self.bias

    def alphas(self, ref, anchors, taus, rows):
        """Return alpha per anchor and no proposals."""
        self.taus = taus
        result = []
        for a, tau in zip(anchors, taus, strict=True):
            others = [softplus(self.logit(s, tau)) for s in a.negatives]
            result.append(softplus(-self.logit(a.positive, tau)) + sum(others))
        return result, []

    def weights(self, ref, anchors):
        """Return the weights of the negatives, all of the batch: softplus' derivative."""
        pairs = zip(anchors, self.taus, strict=True)
        return [([1 / (1 + math.exp(-self.logit(s, tau))) for s in a.negatives], []) for a, tau in pairs]

    def pull(self, a, tau):
        """Weight of the positive."""
        return 1 / (1 + math.exp(self.logit(a.positive, tau)))


class MovingAverageReference:
    """u <- (1 - gamma) u + gamma (eps + g); alpha uses the updated u."""

    has_rows = True

    def __init__(self, reference="none", eps=0.0):
        self.reference = reference
        self.outer_positive = reference == "none"
        self.eps = eps

    def read(self, ref, row):
        """Return the logarithm, which the library stores."""
        return {"log_u": [math.log(ref.rows["u"][row][c]) for c in range(ref.columns)]}

    def inner(self, anchor, tau):
        """g_i of this batch."""
        factor = math.exp(anchor.positive.item() / tau) if self.reference == "none" else 1.0
        return factor * sum(anchor.terms(tau)) / len(anchor.h)

    def updated(self, ref, row, column, g):
        """Return the new u of one column of one row."""
        gamma = ref.hyper(row, "gamma")
        if ref.visits(row, column) == 0:
            return self.eps + g
        return (1.0 - gamma) * ref.rows["u"][row][column] + gamma * (self.eps + g)

    def alphas(self, ref, anchors, taus, rows):
        """Return alpha per anchor and the proposals (row, column, "u", value)."""
        g = {(a.direction, a.position): self.inner(a, t) for a, t in zip(anchors, taus, strict=True)}
        batch = len(rows[0])
        new_u = {}
        proposals = []
        for i in range(batch):
            for column in range(ref.columns):
                mean_g = g[(column, i)]
                if ref.mode == "unimodal":
                    of_views = [value for (_, position), value in g.items() if position == i]
                    mean_g = sum(of_views) / len(of_views)
                row = rows[column][i]
                new_u[(column, i)] = self.updated(ref, row, column, mean_g)
                proposals.append((row, column, "u", new_u[(column, i)]))
        result = []
        for a, tau in zip(anchors, taus, strict=True):
            column = a.direction if ref.columns == 2 else 0
            alpha = math.log(new_u[(column, a.position)])
            if self.reference == "none":
                alpha -= a.positive.item() / tau
            result.append(alpha)
        return result, proposals
