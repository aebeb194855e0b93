r"""Pairs of one direction together with similarities of other kinds, whose sums the same anchors share.

.. math::
    \log \hat g_i = \log \tfrac{1}{|N_i|} \sum_k \sum_{j \in N_i^k} e^{(s^k_{ij} - s_{ii}) / \tau_i}, \qquad
    |N_i| = \sum_k |N_i^k|

Each kind ``k`` is a matrix of similarities with sums, masks and gradients of its own; only ``s_ii`` is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compopt.functional import Scalar, log
from compopt.kernel.blocks import positives
from compopt.kernel.pairs import PairOptions, PairStatistics, pull_positives
from compopt.kernel.source import Source
from compopt.pairs import Also

# Which modality is along the rows and which along the columns; of the second, the sample's own is the positive again.
SIDES: dict[Also, tuple[int, int]] = {
    "query_to_query": (0, 0),
    "document_to_query": (1, 0),
    "document_to_document": (1, 1),
    "document_to_every_document": (1, 1),
}


class JoinedPairs(PairStatistics):
    """Statistics of all kinds of similarities of the anchors of one direction; ``sides`` are those of the first kind.

    Args:
        source: the features ``z1, z2``.
        options: of the first kind, ``z1`` against ``z2``; their policy names the others.
    """

    def __init__(self, source: Source, options: PairOptions) -> None:
        first, selection = source.pairs(options), options.selection
        super().__init__(first.keys, options, 2)
        assert selection is not None  # which names the kinds
        self._source, self.positive, self.sides = source, first.positive, first.sides
        also = selection.policy.also
        selection = replace(selection, threshold=selection.thresholds(source.everyone, 1))
        options = options._replace(positive=positives(torch.stack([*source.everyone]), 1))
        self._parts: list[tuple[tuple[int, int], PairStatistics]] = [((0, 1), first)]
        for kind, side in ((kind, SIDES[kind]) for kind in also):
            extra = None
            if kind == "document_to_every_document" and self.extra is not None:
                extra = replace(self.extra, apart=True)
            chosen = replace(selection.of_sides(side), extra=extra)
            self._parts.append((side, source.pairs(options._replace(extra=extra, selection=chosen), views=side)))
        self._again = float("document_to_query" in also)  # how often the positive is a candidate
        self._join([part for _, part in self._parts])

    def _join(self, parts: Sequence[PairStatistics]) -> None:
        self.negatives = sum(part.negatives for part in parts)
        self.count = sum((part.count for part in parts[1:]), parts[0].count + self._again)
        self.log_count = log(self.divisor)
        # an anchor without candidates of some kind has a log_sum of 0 there
        sums = [part.log_sum.where(torch.as_tensor(part.count > 0), -torch.inf) for part in parts]
        terms = torch.stack([*sums, *[torch.zeros_like(sums[0])] * int(self._again)])
        self.log_sum = self.real(terms.logsumexp(0))
        self.mean_h = None
        if self.moments:
            shares = (terms[: len(parts)] - self.log_sum).exp_()  # of each kind in the sum
            means = [part.mean_h for part in parts if part.mean_h is not None]
            self.mean_h = self.real((shares * torch.stack(means)).sum(0))

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        total, outside = torch.zeros_like(self._source.own), None
        for side, part in self._parts:
            gradient, of_extra = part.gradients(alpha + self.log_count - part.log_count, coefficient, 0.0)
            for view, of_view in zip(side, gradient, strict=True):
                total[view] += of_view
            if of_extra is not None:
                outside = of_extra if outside is None else outside + of_extra
        # the positive as a candidate has the weight of h = 0
        weight = positive_weight - self._again * (-alpha - self.log_count).exp_()
        pull = self.factor(coefficient) * weight
        pull_positives(total, self._source.own, pull[self._source.place], self.directions)
        return total, outside

    def release(self) -> None:
        for _, part in self._parts:
            part.release()
