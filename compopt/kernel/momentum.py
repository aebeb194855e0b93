r"""Pairs of anchors with the features of a momentum copy of the encoders, which take no gradient.

.. math::
    h_{ij} = \langle z_i, k_j \rangle - \langle z_i, k_i \rangle

Each direction is a sweep of its own, since ``z1 K2^T`` and ``z2 K1^T`` are two matrices; in unimodal mode two, whose
sums are joined. With several ranks each sweep communicates as :class:`~compopt.kernel.distributed.GatheredPairs`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from compopt.functional import Scalar, log
from compopt.kernel.joined import JoinedPairs, Kind
from compopt.kernel.pairs import PairOptions, PairStatistics
from compopt.kernel.source import Source


class MomentumPairs(PairStatistics):
    """Statistics of the anchors ``z1, z2``; candidates are ``k2, k1``, in unimodal mode both views of the copy.

    Args:
        source: the features ``z1, z2, k1, k2``.
        options: of the pairs; further candidates are those of direction 1.
    """

    def __init__(self, source: Source, options: PairOptions) -> None:
        self._source = source
        self._by_anchor = [self._of_anchors(view, options) for view in range(options.directions)]
        super().__init__(self._by_anchor[0].keys, options, 2)
        self.negatives = min(pairs.negatives for pairs in self._by_anchor)
        self.positive = torch.cat([pairs.positive for pairs in self._by_anchor], dim=1)
        self.count = self._joined_count()
        self.log_count = log(self.divisor)
        self.log_sum = torch.cat([pairs.log_sum for pairs in self._by_anchor], dim=1)
        means = [pairs.mean_h for pairs in self._by_anchor if pairs.mean_h is not None]
        self.mean_h = torch.cat(means, dim=1) if self.moments else None
        self.sides = [pairs.all_kinds() for pairs in self._by_anchor]

    def _of_anchors(self, view: int, options: PairOptions) -> JoinedPairs:
        """Sweep the pairs of the anchors of one modality or view."""
        source, first = self._source, (view, 3 - view)
        if isinstance(source.tau, Tensor) and source.tau.dim() == 2:
            source = replace(source, tau=source.tau.expand(-1, options.directions)[:, view, None])
        extra, selection = options.extra if view == 0 else None, options.selection
        if selection is not None:
            threshold = selection.thresholds([source.everyone[side] for side in first], 1)
            selection = replace(selection, extra=extra, threshold=threshold)
        one = options._replace(directions=1, unimodal=False, extra=extra, selection=selection, held=True)
        kinds: list[Kind] = [(first, source.pairs(one, views=first))]
        if options.unimodal:
            selection = None if selection is None else replace(selection, extra=None)
            shared = one._replace(extra=None, selection=selection, positive=kinds[0][1].positive)
            kinds.append(((view, 2 + view), source.pairs(shared, views=(view, 2 + view))))
        return JoinedPairs(source, kinds, one)

    def _joined_count(self) -> Scalar:
        """Return ``|N_i|`` of all anchors: one number, or ``(B, a)``."""
        counts = [pairs.count for pairs in self._by_anchor]
        if all(isinstance(count, float) and count == counts[0] for count in counts):
            return counts[0]
        return torch.cat([torch.ones_like(pairs.positive) * pairs.count for pairs in self._by_anchor], dim=1)

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        total, outside = torch.zeros_like(self._source.own[:2]), None
        for view, pairs in enumerate(self._by_anchor):
            values = (self._of_view(value, view) for value in (coefficient, positive_weight))
            found, of_extra = pairs.gradients(alpha[:, view, None], *values)
            total[view] = found[view]
            outside = of_extra if outside is None else outside
        return total, outside

    def _of_view(self, value: Scalar, view: int) -> Scalar:
        """``(B, a)``, or what can be expanded to it, -> ``(B, 1)``."""
        return value.expand_as(self.positive)[:, view, None] if isinstance(value, Tensor) else value

    def release(self) -> None:
        for pairs in self._by_anchor:
            pairs.release()
