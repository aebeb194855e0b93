"""A pair policy (false negatives, hard negatives, data sets), one anchor and one candidate at a time."""

from __future__ import annotations

from dataclasses import dataclass

from tests.reference.pairs import unit_rows


@dataclass
class PolicyReference:
    """The options of compopt.PairPolicy."""

    false_negatives: object = None
    guided: bool = False
    spare_negatives: bool = False
    hardness: float | None = None
    within: bool = False

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
        for a in anchors:
            kept, own = [], a.positive.item()
            if guides:
                own = (guides[a.view][a.position] * guides[a.partner][a.position]).sum().item()
            for s, who in zip(a.negatives, a.who, strict=True):
                outside, place = who[0] == "extra", who[-1]
                if within is not None and int(within[0][a.position]) != int(within[outside][place]):
                    continue
                spared, seen = outside and self.spare_negatives, s.item()
                if guides and not spared:
                    seen = (guides[a.view][a.position] * guides[2 if outside else who[0]][place]).sum().item()
                if not spared and self.too_similar(seen, own):
                    continue
                kept.append((s, who, (self.hardness or 0.0) * s.item()))
            a.negatives, a.who, a.log_weights = ([entry[k] for entry in kept] for k in range(3))
