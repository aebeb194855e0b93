"""A pair policy (false negatives, hard negatives, data sets), one anchor and one candidate at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from tests.reference.pairs import unit_rows


@dataclass
class PolicyReference:
    """The options of compopt.PairPolicy."""

    false_negatives: object = None
    guided: bool = False
    spare_extra: bool = False
    hardness: object = None
    mises_fisher: float | None = None
    also: tuple = ()
    within: bool = False

    def strength(self, outside, owned) -> float:
        """Return beta of one candidate; outside: a further candidate; owned: mined for the anchor."""
        if not isinstance(self.hardness, tuple):
            return self.hardness or 0.0
        first, second = self.hardness
        if first in ("mined", "others"):
            return second if (outside and owned) == (first == "mined") else 0.0
        return second if outside else first

    def too_similar(self, s, positive) -> bool:
        """A margin m: s > s_ii + m; ("relative", r): s > s_ii - (1 - r) |s_ii|."""
        if self.false_negatives is None:
            return False
        if isinstance(self.false_negatives, tuple):
            return s > positive - (1.0 - self.false_negatives[1]) * abs(positive)
        return s > positive + self.false_negatives

    def apply(self, anchors, guide, within, normalize):
        """Drop candidates of each anchor, and store the log-weights of the remaining ones."""
        rows = unit_rows if normalize else lambda z: list(z.unbind(0))
        guides = [rows(z.double()) for z in guide or ()]
        positives = defaultdict(list)
        for a in anchors:
            own, partner = a.positive.item(), None
            if guides:
                partner = (guides[a.view][a.position] * guides[a.partner][a.position]).sum().item()
            positives[(a.view, a.position)].append((own, partner))
        batch = 1 + max(a.position for a in anchors)
        for a in anchors:
            kept, own = [], positives[(a.view, a.position)]
            for s, who in zip(a.negatives, a.who, strict=True):
                outside = who[0] == "extra" or who[2:3] == (-1,)
                if within is not None and int(within[0][a.position]) != int(within[outside][who[-1]]):
                    continue
                seen, positive = s.item(), sum(p for p, _ in own) / len(own)
                if guides and not (outside and self.spare_extra):
                    view, other = (who[1], who[2]) if who[0] == "also" else (a.view, -1 if outside else who[0])
                    seen = (guides[view][a.position] * guides[other][who[-1]]).sum().item()
                    positive = sum(p for _, p in own) / len(own)
                again = who == ("also", 1, 0, a.position)  # the positive itself
                if not (outside and self.spare_extra) and not again and self.too_similar(seen, positive):
                    continue
                beta = self.strength(outside, who[-1] % batch == a.position)
                kept.append((s, who, 0.0 if who[0] == "also" else beta * s.item()))
            a.negatives, a.who, a.log_weights = ([entry[k] for entry in kept] for k in range(3))
        if self.mises_fisher is not None:
            self.weigh_positives(anchors)

    def weigh_positives(self, anchors):
        """Weight the positive by v = 2 - exp(s_ii / sigma) / mean: s_ij - v s_ii replaces h_ij."""
        terms = {(a.direction, a.position): math.exp(a.positive.item() / self.mises_fisher) for a in anchors}
        for a in anchors:
            column = [term for (direction, _), term in terms.items() if direction == a.direction]
            v = 2.0 - terms[a.direction, a.position] / (sum(column) / len(column))
            a.negatives = [s + (1.0 - v) * a.positive for s in a.negatives]
