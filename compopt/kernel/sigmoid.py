"""Weights of a sigmoid per pair, block by block: every pair is a binary classification of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from compopt.functional import Scalar
from compopt.kernel.pairs import PairStatistics, SampledPairs, pull_positives, same_sample, scale_of

BLOCK_ROWS = 1024  # where the caller has set no chunk_size


class SigmoidPairs(SampledPairs):
    r"""Weights ``w_ij`` of negatives and ``p_i`` of positives under the pairwise sigmoid loss.

    .. math::
        \alpha_i = \sum_{j \in N_i} \log(1 + e^{s_{ij} / \tau_i + b}) + \log(1 + e^{-s_{ii} / \tau_i - b}), \qquad
        w_{ij} = \sigma(s_{ij} / \tau_i + b), \quad p_i = \sigma(-s_{ii} / \tau_i - b)

    No weight depends on another pair, so that blocks are computed once for the sums and once for the gradients, and
    none is kept.

    Args:
        pairs: of the batch: which pairs there are, and ``s_ii``.
        features: of all ranks, ``(B, d)`` each.
        own: where this process's samples are.
        tau: temperatures, a number or broadcastable to ``(B, a)``.
        bias: ``b``, the same.
        chunk_size: rows per block.
        gather: from values of the own samples to those of all.

    Attributes:
        alpha: ``(B, A)``.
        slope: derivative of ``alpha`` with respect to ``b``, ``(B, A)``.
        total, squares: sums of ``w_ij`` and of ``w_ij^2`` of this process's anchors, ``(b, a)``; for a metric.

    Communicates: one all-gather of ``3 a`` floats per sample, at construction.
    """

    serves = False

    def __init__(
        self,
        pairs: PairStatistics,
        features: Sequence[Tensor],
        own: slice,
        tau: Scalar,
        bias: Scalar,
        chunk_size: int | None,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        self._pairs, self._z, self._own = pairs, torch.stack([*features]), own
        self._rows = chunk_size or BLOCK_ROWS
        self._scale = self._of_anchors(scale_of(tau, self._z, len(features[0]), pairs.directions))
        self._bias = self._of_anchors(bias)
        sums = torch.stack([self._sums(view) for view in range(pairs.directions)], dim=1)
        self.total, self.squares = sums[:, :, 1], sums[:, :, 3]
        per_anchor = gather(sums[:, :, :3]).unbind(2)
        losses, weights, weighted = (pairs.per_pair(value) for value in per_anchor)
        logits = pairs.positive * pairs.per_pair(self._scale) + pairs.per_pair(self._bias)
        self._pull = torch.sigmoid(-logits)
        self.alpha = losses - logsigmoid(logits)
        self.slope = weights - self._pull
        self.sum_wh = weighted - self._pull * pairs.positive

    def _of_anchors(self, value: Scalar) -> Tensor:
        """A number, or a tensor, as ``(B, a)``."""
        shape = self._z.shape[1], self._pairs.directions
        return value.to(self._z).expand(shape) if isinstance(value, Tensor) else self._z.new_full(shape, value)

    def _others(self, view: int) -> Sequence[int]:
        """Views whose features are candidates of one view's."""
        return range(len(self._z)) if self._pairs.unimodal else (1 - view,)

    def _blocks(self, view: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield rows of own anchors of a view, candidates, their similarities, and where there is no pair."""
        y = self._z.flatten(0, 1) if self._pairs.unimodal else self._z[1 - view]
        mine, theirs = self._pairs.names((view,)), self._pairs.names(self._others(view))
        for start in range(self._own.start, self._own.stop, self._rows):
            rows = slice(start, min(start + self._rows, self._own.stop))
            yield rows, y, self._z[view, rows] @ y.T, same_sample([key[rows] for key in mine], theirs)

    def _sums(self, view: int) -> Tensor:
        """Sums of losses, ``w_ij``, ``w_ij s_ij`` and ``w_ij^2`` over the negatives of the own anchors, ``(b, 4)``."""
        found = [self._z.new_empty(0, 4)]
        for rows, _, s, same in self._blocks(view):
            logits = s * self._scale[rows, view, None] + self._bias[rows, view, None]
            weights = torch.sigmoid(logits).masked_fill_(same, 0)
            losses = softplus(logits).masked_fill_(same, 0)
            sums = losses.sum(1), weights.sum(1), (weights * s).sum(1), weights.square().sum(1)
            found.append(torch.stack(sums, dim=1))
        return torch.cat(found)

    def gradients(self, coefficient: Scalar) -> Tensor:
        coefficient = self._pairs.factor(coefficient) * torch.ones_like(self._pull)
        of_anchor = self._pairs.sum_over_positives(coefficient)
        gradient = torch.zeros_like(self._z[:, self._own])
        for view in range(len(gradient)):
            for rows, y, s, same in self._blocks(view):
                a = self._weighted(s, view, rows, of_anchor).masked_fill_(same, 0)
                gradient[view, rows.start - self._own.start : rows.stop - self._own.start] = a @ y
        pull_positives(gradient, self._z[:, self._own], (coefficient * self._pull)[self._own], self._pairs.directions)
        return gradient

    def _weighted(self, s: Tensor, view: int, rows: slice, coefficient: Tensor) -> Tensor:
        """Return ``c_i w_ij + c_j w_ji`` of a block, as far as its rows and its columns are anchors."""
        values, directions = torch.stack([self._scale, self._bias, coefficient]), self._pairs.directions
        total = torch.zeros_like(s)
        if view < directions:
            scale, bias, c = values[:, rows, view, None]
            total += c * torch.sigmoid(s * scale + bias)
        of_others = zip(self._others(view), s.split(len(coefficient), 1), total.split(len(coefficient), 1), strict=True)
        for other, theirs, part in of_others:
            if other < directions:
                scale, bias, c = values[:, :, other]
                part += c * torch.sigmoid(theirs * scale + bias)
        return total
