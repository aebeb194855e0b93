r"""Sweeps of a call's features, and statistics of anchors whose sums run over several matrices of similarities.

.. math::
    \log \hat g_i = \log \tfrac{1}{|N_i|} \sum_k \sum_{j \in N_i^k} e^{(s^k_{ij} - s_{ii}) / \tau_i}, \qquad
    |N_i| = \sum_k |N_i^k|

Each kind ``k`` is a matrix of similarities with its own sums, masks and gradients; only ``s_ii`` is shared. Candidates
are the features of a momentum copy of the encoders, which get no gradient:

.. math::
    h_{ij} = \langle z_i, k_j \rangle - \langle z_i, k_i \rangle

Each direction needs a separate sweep, since ``z1 K2^T`` and ``z2 K1^T`` are two matrices; in unimodal
mode it needs two sweeps, whose sums are joined. With several ranks each sweep communicates as
:class:`~compopt.kernel.distributed.GatheredPairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compopt.batch import Batch
from compopt.distributed.ranks import Ranks
from compopt.functional import Scalar, log, minus_product
from compopt.kernel.distributed import GatheredPairs
from compopt.kernel.local import Pairs
from compopt.kernel.pairs import PairOptions, PairStatistics, Sums, at_least_one
from compopt.kernel.triton.choice import Backend, precision_of, reason_for_torch
from compopt.kernel.triton.pairs import FusedGatheredPairs, FusedPairs, unsupported

# Positions of the features along the rows and along the columns, and the statistics of their matrix.
Kind = tuple[tuple[int, int], PairStatistics]


@dataclass
class Source:
    """Features of one call, with the arguments of a sweep over their pairs.

    Attributes:
        own: this process's features, ``(2, b, d)``, or ``(4, b, d)`` with those of a momentum copy last.
        tau: temperatures, a number or broadcastable to ``(B, D)``.
        batch: the samples of all ranks.
        ranks: the ranks.
        backend: selects the kernels in Triton or plain torch.
    """

    own: Tensor
    tau: float | Tensor
    batch: Batch
    ranks: Ranks
    backend: Backend

    @property
    def everyone(self) -> tuple[Tensor, ...]:
        """Features of all ranks, ``(B, d)`` each."""
        return (*self.batch.features, *self.batch.momentum)

    def pairs(self, options: PairOptions, views: Sequence[int] | None = None) -> PairStatistics:
        """Return statistics of the pairs of both views, or of two of the four with a momentum copy."""
        own = self.own if views is None else torch.stack([self.own[view] for view in views])
        tau, keys = self.tau, list(self.batch.keys.values())
        fused = reason_for_torch(self.backend, own, unsupported(options)) is None
        if fused:
            options = options._replace(precision=precision_of(tau))
        if self.ranks.size == 1:
            return (FusedPairs if fused else Pairs)(own, tau, keys, options)
        gathered, everyone = FusedGatheredPairs if fused else GatheredPairs, self.everyone
        everyone = everyone if views is None else tuple(everyone[view] for view in views)
        return gathered(own, everyone, tau, keys, options, self.ranks, self.batch.sizes)


class JoinedPairs(PairStatistics):
    """Statistics of the anchors of each direction, with sums over several kinds of similarities.

    Args:
        source: the features.
        by_anchor: the kinds of each direction of anchors. All kinds use the positive of the first.
        options: options of the pairs.
    """

    def __init__(self, source: Source, by_anchor: Sequence[Sequence[Kind]], options: PairOptions) -> None:
        firsts = [kinds[0][1] for kinds in by_anchor]
        super().__init__(firsts[0].keys, options)
        self._source, self._by_anchor = source, by_anchor
        self.positive = torch.cat([first.positive for first in firsts], dim=1)
        parts = [[part for _, part in kinds] for kinds in by_anchor]
        self.negatives = min(sum(part.negatives for part in each) for each in parts)
        counts, sums, means = zip(*map(self._join, parts), strict=True)
        self.count = counts[0]
        if any(isinstance(count, Tensor) or count != counts[0] for count in counts):
            self.count = torch.cat([torch.ones_like(x) * count for x, count in zip(sums, counts, strict=True)], dim=1)
        self._log_counts = [log(at_least_one(count)) for count in counts]
        self.log_count, self.log_sum = log(self.divisor), torch.cat(sums, dim=1)
        self.mean_h = torch.cat(means, dim=1) if self.moments else None
        self.sides = list(map(self._all_kinds, parts, sums))

    def _join(self, parts: Sequence[PairStatistics]) -> tuple[Scalar, Tensor, Tensor | None]:
        """Return ``|N_i|``, ``log_sum`` and ``mean_h`` of the anchors of one direction, ``(B, 1)``, over all kinds."""
        count: Scalar = sum((part.count for part in parts[1:]), parts[0].count)
        # log_sum is 0 for an anchor without candidates of a kind; its sum is 0, so that -inf replaces it
        sums = [_where(part.count, part.log_sum, -torch.inf) for part in parts]
        terms = torch.stack(sums)
        log_sum = _where(count, terms.logsumexp(0), 0.0)
        if not self.moments:
            return count, log_sum, None
        shares = (terms - log_sum).exp_()  # of each kind in the sum
        means = torch.stack([part.mean_h for part in parts if part.mean_h is not None])
        return count, log_sum, _where(count, (shares * means).sum(0), 0.0)

    def _all_kinds(self, parts: Sequence[PairStatistics], log_sum: Tensor) -> Sums:
        """Return sums of the normalised weights over all kinds, for this rank's first anchors; for a metric."""
        if len(parts) == 1:
            return parts[0].sides[0]
        effective = torch.stack([part.sides[0].effective() for part in parts])
        logs = torch.stack([part.log_sum - log_sum for part in parts])
        shares = logs[:, self._source.batch.own, 0][:, : effective.shape[1]].exp()
        shares = shares.where(effective > 0, 0)  # NaN for a kind without candidates
        return Sums(shares.sum(0), (shares.square() / effective.nan_to_num(1.0)).sum(0), True, None, None)

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        total, outside = torch.zeros_like(self._source.own), None
        pull = self.factor(coefficient) * (positive_weight * torch.ones_like(self.positive))
        for direction, kinds in enumerate(self._by_anchor):
            at = (slice(None), slice(direction, direction + 1))
            each = coefficient.expand_as(self.positive)[at] if isinstance(coefficient, Tensor) else coefficient
            for side, part in kinds:
                alpha_of_kind = alpha[at] + self._log_counts[direction] - part.log_count
                gradient, of_extra = part.gradients(alpha_of_kind, each, 0.0)
                for view, of_view in zip(side, gradient, strict=True):
                    total[view] += of_view
                if of_extra is not None:
                    outside = of_extra if outside is None else outside + of_extra
            (row, column), own_pull = kinds[0][0], pull[at][self._source.batch.own]
            for view, other in ((row, column), (column, row)):
                minus_product(total[view], self._source.own[other], own_pull, out=total[view])
        return total[:2], outside  # without the momentum copy

    def release(self) -> None:
        for _, part in (kind for kinds in self._by_anchor for kind in kinds):
            part.release()


def _where(count: Scalar, value: Tensor, otherwise: float) -> Tensor:
    """Replace ``value`` of anchors without candidates; a ``count`` that is a number is compared on the host."""
    if isinstance(count, Tensor):
        return value.where(count > 0, otherwise)
    return value if count > 0 else torch.full_like(value, otherwise)


def swept(source: Source, options: PairOptions) -> PairStatistics:
    """Return the statistics of the pairs of a call."""
    return with_momentum(source, options) if options.held else source.pairs(options)


def with_momentum(source: Source, options: PairOptions) -> JoinedPairs:
    """Return statistics of ``z1, z2`` against ``k2, k1``, in unimodal mode against both views of the copy.

    Further candidates are candidates of direction 1 only.
    """
    by_anchor = []
    for view in range(options.directions):
        first, own = (view, 3 - view), source
        if isinstance(source.tau, Tensor) and source.tau.dim() == 2:
            own = replace(source, tau=source.tau.expand(-1, options.directions)[:, view, None])
        one = options._replace(directions=1, unimodal=False, extra=options.extra if view == 0 else None)
        one = one._replace(threshold=one.thresholds([source.everyone[side] for side in first]))
        kinds: list[Kind] = [(first, own.pairs(one, views=first))]
        if options.unimodal:
            same = one._replace(extra=None, positive=kinds[0][1].positive)
            kinds.append(((view, 2 + view), own.pairs(same, views=(view, 2 + view))))
        by_anchor.append(kinds)
    return JoinedPairs(source, by_anchor, options)
