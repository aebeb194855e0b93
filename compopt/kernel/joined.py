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

from compopt.functional import Scalar, log, minus_product
from compopt.kernel.blocks import positives
from compopt.kernel.pairs import PairOptions, PairStatistics, Sums
from compopt.kernel.source import Source
from compopt.pairs import Also

# What is along the rows and along the columns, and its statistics.
Kind = tuple[tuple[int, int], PairStatistics]
# Which modality is along the rows and which along the columns; of the second, the sample's own is the positive again.
SIDES: dict[Also, tuple[int, int]] = {
    "query_to_query": (0, 0),
    "document_to_query": (1, 0),
    "document_to_document": (1, 1),
    "document_to_every_document": (1, 1),
}


class JoinedPairs(PairStatistics):
    """Statistics of several kinds of similarities of the anchors of one direction; ``sides`` are those of the first.

    Args:
        source: the features.
        kinds: what is along the rows and along the columns, positions among the features of the source, with its
            statistics. The positive of all kinds is that of the first.
        options: of the first kind.
        again: how often the positive is a candidate.
    """

    def __init__(self, source: Source, kinds: Sequence[Kind], options: PairOptions, again: float = 0.0) -> None:
        first = kinds[0][1]
        super().__init__(first.keys, options, 2)
        self._source, self._parts, self._again = source, kinds, again
        self.positive, self.sides = first.positive, first.sides
        self._join([part for _, part in kinds])

    @classmethod
    def of_policy(cls, source: Source, options: PairOptions) -> JoinedPairs:
        """Return ``z1`` against ``z2`` with the kinds that the policy of ``options.selection`` names."""
        first, selection = source.pairs(options), options.selection
        assert selection is not None  # which names the kinds
        also = selection.policy.also
        selection = replace(selection, threshold=selection.thresholds(source.everyone, 1))
        shared = options._replace(positive=positives(torch.stack([*source.everyone]), 1))
        kinds: list[Kind] = [((0, 1), first)]
        for kind, side in ((kind, SIDES[kind]) for kind in also):
            extra = None
            if kind == "document_to_every_document" and options.extra is not None:
                extra = replace(options.extra, apart=True)
            chosen = replace(selection.of_sides(side), extra=extra)
            kinds.append((side, source.pairs(shared._replace(extra=extra, selection=chosen), views=side)))
        return cls(source, kinds, options, float("document_to_query" in also))

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

    def all_kinds(self) -> Sums:
        """Return sums over all kinds, for the metric: weights of the first own anchors, which sum to one."""
        if len(self._parts) == 1:
            return self.sides[0]
        effective = torch.stack([part.sides[0].effective() for _, part in self._parts])
        logs = torch.stack([part.log_sum - self.log_sum for _, part in self._parts])
        shares = logs[:, self._source.place, 0][:, : effective.shape[1]].exp()
        shares = shares.where(effective > 0, 0)  # NaN where there are no candidates of a kind
        return Sums(shares.sum(0), (shares.square() / effective.nan_to_num(1.0)).sum(0), True, None, None)

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        total, outside = torch.zeros_like(self._source.own), None
        for side, part in self._parts:
            gradient, of_extra = part.gradients(alpha + self.log_count - part.log_count, coefficient, 0.0)
            for view, of_view in zip(side, gradient, strict=True):
                total[view] += of_view
            if of_extra is not None:
                outside = of_extra if outside is None else outside + of_extra
        weight = positive_weight * torch.ones_like(self.positive)
        if self._again:  # the positive as a candidate has the weight of h = 0; where it is none, this may overflow
            weight -= (-alpha - self.log_count).exp_()
        pull = (self.factor(coefficient) * weight)[self._source.place]
        (row, column), own = self._parts[0][0], self._source.own
        minus_product(total[row], own[column], pull, out=total[row])
        minus_product(total[column], own[row], pull, out=total[column])
        return total, outside

    def release(self) -> None:
        for _, part in self._parts:
            part.release()
