"""Statistics of all pairs of a call, a few numbers per anchor on all ranks, and their gradients in closed form.

One rank has one matrix for the anchors of both directions: its rows are the anchors of direction 1 and its columns
those of direction 2, or, in unimodal mode, both axes are all features. Several ranks have one matrix per direction,
with this rank's features along the rows and all candidates along the columns; the weights of the anchors along the
columns need three numbers each, which one all-gather has exchanged, so that no collective runs in the backward pass.
Features of a momentum copy are candidates without a gradient, of one matrix per direction. Further candidates are
columns that are not anchors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from compopt.distributed.ranks import Ranks
from compopt.functional import Scalar
from compopt.kernel.block import CPU_BLOCK_ROWS, Block, BlockOptions, ColumnWeights, Diagonal, Exclusions, same_sample
from compopt.pairs import Axis, PairPolicy, Selection

# Above this 1/tau, exp(s/tau) of a unit-norm pair approaches the range of float32, and a maximum must be subtracted.
MAX_UNSHIFTED_SCALE = 40.0
# Anchors per direction for which the effective number of negatives is computed.
SPREAD_ANCHORS = 128


@dataclass(frozen=True)
class Negatives:
    """Further candidates of the anchors of direction 1, in addition to the features of the batch.

    Attributes:
        features: features of this process, ``(M, d)``, no graph.
        everyone: features of all ranks, in the order of the ranks; with one process the same.
        positive: positions of the anchors' own positives, ``(B,)``, of all ranks.
        positions: positions of ``everyone`` in the second modality, ``(M,)`` int64; ``None``: none is a positive.
        own: slice of this process's candidates among all.
        guide, key: guide features and keys of ``everyone`` for a policy of pairs, ``(M, g)`` and ``(M,)``, or ``None``.
    """

    features: Tensor
    everyone: Tensor
    positive: Tensor
    positions: Tensor | None
    own: slice
    guide: Tensor | None = None
    key: Tensor | None = None

    def same(self, anchors: slice, candidates: slice = slice(None)) -> Tensor:
        """Return a mask of the candidates that are an anchor's positive, ``(anchors, candidates)``."""
        positive = self.positive[anchors, None]
        if self.positions is None:
            return positive.new_zeros(len(positive), len(self.everyone[candidates]), dtype=torch.bool)
        return positive == self.positions[None, candidates]


class PairOptions(NamedTuple):
    """Options of a call: selection of the pairs, and how their statistics are computed.

    Attributes:
        distinct: the first key has no repeats and is the only one, as known on the host.
        directions: ``D``, number of modalities or views that are anchors, the first ones.
        negatives: further candidates of the anchors of direction 1.
        unimodal: both views of the other samples are candidates (otherwise the features of the other modality).
        bounded: features have norm at most one.
        chunk_size: rows per block, with blocks recomputed in the gradients; ``None`` stores all blocks.
        moments: also compute ``mean_h``, which the gradients of temperatures need.
        policy: policy that leaves pairs out or weights them; ``None``: only the keys exclude pairs.
        guide: features from which the policy finds false negatives, by modality or view, ``(B, g)`` each; empty: those
            of the estimator.
        key: keys ``within=`` of the policy, of all ranks, ``(B,)``, or ``None``.
        sums: compute sums of exponentials; otherwise positives and counts only.
    """

    distinct: bool
    directions: int = 2
    negatives: Negatives | None = None
    unimodal: bool = False
    bounded: bool = True
    chunk_size: int | None = None
    moments: bool = False
    policy: PairPolicy | None = None
    guide: Sequence[Tensor] = ()
    key: Tensor | None = None
    sums: bool = True

    @property
    def guides(self) -> list[Tensor]:
        """All features of the guide."""
        return [
            *self.guide,
            *([] if self.negatives is None or self.negatives.guide is None else [self.negatives.guide]),
        ]

    def axis(self, views: Sequence[int], own: slice, outside: slice | None = None) -> Axis:
        """Return the axis of some views of the samples ``own``, followed by the further candidates ``outside``."""
        negatives, count = self.negatives, len(views)
        guides = [self.guide[view][own] for view in views] if self.guide else []
        keys = [] if self.key is None else [self.key[own]] * count
        if negatives is not None and outside is not None:
            guides += [] if negatives.guide is None else [negatives.guide[outside]]
            keys += [] if negatives.key is None else [negatives.key[outside]]
        guide, key = (torch.cat(parts) if parts else None for parts in (guides, keys))
        return Axis(guide, key, count * (own.stop - own.start))


class Pairs:
    """All pairs of one call: statistics at construction, gradients once the log-normalizers are known.

    Args:
        own: this rank's features of both modalities or views, ``(2, b, d)``, float32 or float64, no graph.
        tau: one number for all anchors, or a tensor: 0-d, ``(B, 1)`` or ``(B, D)``.
        keys: int64 tensors ``(B,)``; two samples with equal values in any of them are not each other's negatives. The
            first is the data-set index.
        options: options of the call; some also become attributes.
        everyone: features of all ranks, ``(B, d)`` each; ``None``: those of this rank.
        momentum: features of a momentum copy of all ranks, ``(B, d)`` each, which replace the candidates.
        ranks, sizes: the ranks, and ``b`` of each; ``None``: this rank alone.
        block: class of the matrices.

    Attributes:
        shape, dtype: those of the statistics, ``(B, D)``.
        may_lack_negatives: an anchor may be without negatives, and a sample without pairs.
        distinct: only the anchor's own sample is excluded from its candidates, as known on the host.
        least: smallest ``|N_i|`` if only the anchor's own sample is excluded; keys may exclude more.
        positive: ``s_ii``, with a column per direction.
        count: ``|N_i|`` as float; 0 for an anchor without negatives. A number if it is equal for all anchors and known
            on the host.
        divisor: divisor of a mean over negatives: ``|N_i|``, or 1 without negatives.
        log_count: its logarithm.

    Communicates, with several ranks: one all-gather of ``1 + D`` to ``1 + 3 D`` floats per sample (with momentum
    ``2 D`` to ``4 D``).
    """

    count: Scalar
    divisor: Scalar
    log_count: Scalar
    _dot: Tensor | None = None
    _kept: tuple[Tensor, Tensor, Tensor] | None = None

    def __init__(
        self,
        own: Tensor,
        tau: float | Tensor,
        keys: Sequence[Tensor],
        options: PairOptions,
        everyone: Sequence[Tensor] | None = None,
        momentum: Sequence[Tensor] = (),
        ranks: Ranks | None = None,
        sizes: Sequence[int] = (),
        block: Callable[..., Block] = Block,
    ) -> None:
        self.block, self.options, self.keys, self.negatives = block, options, keys, options.negatives
        self.directions, self.unimodal, self.moments = options.directions, options.unimodal, options.moments
        # in unimodal mode further candidates are excluded for the anchors of view 2
        all_rows = self.negatives is None or (self.negatives.positions is None and not self.unimodal)
        self.distinct = all_rows and options.distinct
        self.may_lack_negatives = len(keys) > 1 or options.policy is not None
        self._z, self._everyone = own, own.unbind() if everyone is None else everyone
        self._momentum, self._sizes, self._tau = momentum, sizes, tau
        self._batch, first = len(self._everyone[0]), 0 if ranks is None else sum(sizes[: ranks.rank])
        self.shape, self.dtype = (self._batch, self.directions), own.dtype
        self._own = slice(first, first + own.shape[1])
        self._scale = scale_of(tau, own, self._batch, self.directions)
        uniform = tau if isinstance(tau, float) and is_uniform(tau, options) else None
        self._form = BlockOptions(uniform, self.moments, options.chunk_size)
        self._ranks = ranks if ranks is not None and ranks.size > 1 else Ranks.alone() if momentum else None
        # no maximum was subtracted, so that the offset of the sums is -s_ii / tau_i
        self._relative = self._ranks is None and uniform is not None
        self._limits = None if options.policy is None else self._thresholds(options.policy)
        self._blocks: list[Block] = []
        if not options.sums:
            self._count_pairs()
        elif self._ranks is None:
            rows, columns = ((0, 1), (0, 1)) if self.unimodal else ((0,), (1,))
            self._blocks = [self._matrix(rows, columns, slice(0, self._batch), shared=True)]
            self._read_shared(self._blocks[0])
        else:
            self._blocks = [self._of_direction(d, self._own) for d in range(self.directions if momentum else 2)]
            self._exchange(self._ranks)

    # -- matrices ----------------------------------------------------------------------------------------------

    def names(self, views: Sequence[int], part: slice = slice(None)) -> Sequence[Tensor]:
        """Return keys of the features of some views, one after the other; features with an equal key are not a pair."""
        keys = [key[part] for key in self.keys]
        return keys if len(views) == 1 else [key.repeat(len(views)) for key in keys]

    @cached_property
    def _all(self) -> Tensor:
        """Both views of all samples, or of their copies."""
        return torch.cat(tuple(self._momentum or self._everyone))

    def _thresholds(self, policy: PairPolicy) -> Tensor | None:
        """Return the similarity above which a candidate is a false negative, ``(B, D)``, or ``None``."""
        if policy.false_negatives is None:
            return None
        momentum: list[Sequence[Tensor]] = [*zip(self._everyone, self._momentum[::-1], strict=False)]
        pairs = momentum or [self.options.guide or self._everyone]
        positive = torch.stack([torch.linalg.vecdot(*pair) for pair in pairs], dim=1)
        return policy.threshold(positive[:, : self.directions].expand(self.shape))

    def _of_direction(self, direction: int, part: slice, form: BlockOptions | None = None) -> Block:
        """Return the matrix of some samples of a modality or view, which are anchors if it has a direction."""
        return self._matrix((direction,), (0, 1) if self.unimodal else (1 - direction,), part, False, form)

    def _matrix(
        self, rows: Sequence[int], columns: Sequence[int], part: slice, shared: bool, form: BlockOptions | None = None
    ) -> Block:
        """Return the matrix of the views ``rows`` of some samples with the views ``columns`` of all samples.

        Further candidates follow the columns. ``shared``: it is the only matrix of the call. With another ``form`` than
        that of the call, plain torch computes it.
        """
        B, count, scale = self._batch, part.stop - part.start, self._scale
        x = self._z[rows[0]] if len(rows) == 1 else self._z.view(-1, self._z.shape[2])
        if len(rows) * count < len(x):
            x = x[part.start - self._own.start : part.stop - self._own.start]
        y = x if columns == rows else self._all if len(columns) > 1 else (self._momentum or self._everyone)[columns[0]]
        own, positives = [], []
        for at, row in enumerate(rows):
            for to, column in enumerate(columns):
                own.append(Diagonal(at * count, (at + 1) * count, to * B + part.start))
                positives += [own[-1]] if row != column else []
        both = shared and not self.unimodal and self.directions == 2  # the columns are anchors, too
        block, weighted = self.block if form is None else Block, not (shared or self._momentum)
        exclusions, selected = Exclusions(own, lambda: (self.names(rows, part), self.names(columns))), None
        if self.negatives is not None or not self.distinct:
            y, exclusions = self._with_further(y, exclusions, rows, part)
        if self.options.policy is not None:
            selected = self._selection(self.options.policy, rows, columns, part, both or weighted)
        of_rows = self._by_row(scale, rows, part) if rows[0] < self.directions else None
        of_columns = None if not both else scale[:, 1] if isinstance(scale, Tensor) else scale
        return block(x, y, form or self._form, exclusions, of_rows, of_columns, weighted, positives, selected)

    def _with_further(
        self, y: Tensor, exclusions: Exclusions, rows: Sequence[int], part: slice
    ) -> tuple[Tensor, Exclusions]:
        """Add further candidates to the columns of a matrix, and compare keys if samples may repeat."""
        negatives, own = self.negatives if rows[0] == 0 else None, exclusions.own if self.distinct else None
        if negatives is None:
            return y, exclusions._replace(own=own)

        def same(some: slice) -> Tensor:
            """Return the mask of the further candidates for some rows; none is a candidate of view 2."""
            found = negatives.same(slice(part.start + some.start, min(part.start + some.stop, part.stop)))
            missing = some.stop - some.start - len(found)
            # cat() instead of pad(), which raises for a tensor without entries in torch 2.4
            return torch.cat([found, found.new_ones(missing, found.shape[1])]) if missing else found

        return torch.cat([y, negatives.everyone]), Exclusions(own, exclusions.keys, None if self.distinct else same)

    def _of_negatives(self, negatives: Negatives) -> Block:
        """Return the matrix of this rank's further candidates, whose columns are the anchors of direction 1."""

        def further(part: slice) -> Tensor:
            first = negatives.own.start
            return negatives.same(slice(None), slice(first + part.start, first + part.stop)).T

        policy, limits, selected = self.options.policy, self._limits, None
        if policy is not None:
            axis, sides = self.options.axis, (None, None if limits is None else limits[:, 0])
            rows, columns = axis((), slice(0, 0), negatives.own), axis((0,), slice(0, self._batch))
            selected = Selection(policy, rows, columns, sides)
        exclusions = Exclusions([]) if negatives.positions is None else Exclusions(None, None, further)
        x, y = negatives.features, self._everyone[0]
        return Block(x, y, self._form, exclusions, weighted=True, selected=selected)

    def _selection(
        self, policy: PairPolicy, rows: Sequence[int], columns: Sequence[int], part: slice, both: bool
    ) -> Selection:
        """Return the policy of a matrix; ``both``: its columns may be anchors, too."""
        limits, by_row, by_column = self._limits, None, None
        if limits is not None:
            by_row = self._by_row(limits, rows, part)[:, None] if rows[0] < self.directions else None
            by_column = self._by_column(rows[0], "threshold", limits) if both and self._meets(rows[0]) else None
        outside = slice(None) if self.negatives is not None and rows[0] == 0 else None
        sides = self.options.axis(rows, part), self.options.axis(columns, slice(0, self._batch), outside)
        return Selection(policy, *sides, (by_row, by_column))

    def _by_row(self, per_anchor: Any, rows: Sequence[int], part: slice = slice(None)) -> Any:
        """Rearrange ``(B, D)`` into one value per row of a matrix; a number stays a number."""
        if not isinstance(per_anchor, Tensor):
            return per_anchor
        return per_anchor[part, rows[0]] if len(rows) == 1 else per_anchor.T.reshape(-1)

    def _meets(self, direction: int) -> bool:
        """Return whether the candidates of a direction are anchors, too."""
        return self.unimodal or 1 - direction < self.directions

    def _by_column(self, direction: int, name: str, value: Tensor) -> Tensor:
        """Return values ``(B, D)`` of the anchors along the columns of a matrix; other candidates have weight 0."""
        column = value.T.reshape(-1) if self.unimodal else value[:, 1 - direction]
        if direction == 1 or self.negatives is None:
            return column
        return pad(column, (0, len(self.negatives.everyone)), value=OUTSIDE[name])

    # -- statistics --------------------------------------------------------------------------------------------

    def _read_shared(self, block: Block) -> None:
        """Set the statistics from the sums of the matrix of both directions."""
        B, sums, columns = self._batch, block.sums, block.column_sums
        if columns is None:
            found = iter([x.view(-1, B).T for x in sums if x is not None])
        else:  # one copy for all quantities, since every copy is a kernel launch on an accelerator
            sides = [x[:B] for both in zip(sums, columns, strict=True) for x in both if x is not None]
            found = iter(torch.stack(sides).view(-1, 2, B).mT.unbind())
        self._total, self._minus = next(found), block.minus_positive[:B, None]
        self._offset = self._minus if sums.shift is None else (next(found) + self._minus) * self._scale
        self._dot = None if sums.dot is None else next(found)
        candidates = len(block.y)
        self._count([candidates, candidates if self.unimodal else B], None if sums.excluded is None else next(found))

    def _exchange(self, ranks: Ranks) -> None:
        """Gather the statistics of each rank's anchors on all ranks."""
        blocks, sizes = self._blocks[: self.directions], self._sizes or [self._z.shape[1]]
        self._scale = scale = _spread_out(self._scale, self._z.new_empty(self.shape))
        mine, zero = scale[self._own], self._z.new_zeros(())
        positives = [block.positive for block in (blocks if self._momentum else blocks[:1])]
        logs = [block.sums.log_total(mine[:, direction]) for direction, block in enumerate(blocks)]
        more = [[block.sums.dot / block.sums.total for block in blocks if block.sums.dot is not None]]
        more += [[block.sums.excluded for block in blocks if block.sums.excluded is not None]]
        own = [torch.stack(values, dim=1) for values in (positives, logs, *more) if values]
        positive, log_total, *rest = ranks.gather(own, sizes)
        self.positive = positive = positive.expand(self.shape)
        self._count([len(block.y) for block in blocks], rest[-1] if more[1] else None)
        shifts = [
            zero.expand_as(block.sums.total) if block.sums.shift is None else block.sums.shift for block in blocks
        ]
        self._offset = (torch.stack(shifts, dim=1) - positive[self._own]) * mine
        self._total = torch.stack([block.sums.total for block in blocks], dim=1)
        self.log_sum = self.real(log_total - positive * scale)
        self.mean_h = self.real(rest[0] - positive) if self.moments else None

    def _count_pairs(self) -> None:
        """Set the positives and the counts without sums of exponentials."""
        self.positive = torch.linalg.vecdot(*self._everyone).unsqueeze(1).expand(self.shape)
        views, excluded = 2 if self.unimodal else 1, None
        if not self.distinct:
            parts = zip(*(key.split(self.options.chunk_size or CPU_BLOCK_ROWS) for key in self.keys), strict=True)
            excluded = torch.cat([same_sample(part, self.keys).sum(1) for part in parts]).mul_(views)
            excluded = excluded.unsqueeze(1).expand(self.shape)
        self._count([views * self._batch] * 2, excluded)

    def _count(self, candidates: Sequence[int], excluded: Tensor | None) -> None:
        """Set the counts, from the candidates by direction and the numbers of those excluded, ``(B, D)``."""
        own, candidates = 2 if self.unimodal else 1, candidates[: self.directions]
        self.least = low = min(candidates) - own
        if excluded is not None or max(candidates) - own > low:
            self._count_each([number - (own if excluded is None else 0) for number in candidates], excluded)
        else:
            self.count, self.divisor = float(low), max(1.0, float(low))
            self.log_count = math.log(self.divisor)

    def _count_each(self, numbers: Sequence[int], excluded: Tensor | None) -> None:
        """Set counts that differ between the anchors: ``numbers`` by direction minus ``excluded``."""
        # filled on the device, without a copy from the host that synchronises
        count = torch.stack([self._z.new_full((), float(number)) for number in numbers]).expand(self.shape)
        self.count = count if excluded is None else count - excluded.to(self.dtype)
        self.divisor = self.count.clamp(min=1)
        self.log_count = self.divisor.log()

    @cached_property
    def positive(self) -> Tensor:
        """``s_ii``, ``(B, D)``."""
        return self._blocks[0].positive[: self._batch, None].expand(self.shape)

    @cached_property
    def minus_logit(self) -> Tensor:
        """``-s_ii / tau_i``, ``(B, 1)`` or ``(B, D)``."""
        return self._offset if self._relative else self.positive * -self._scale

    @cached_property
    def log_sum(self) -> Tensor:
        """``log sum_{j in N_i} exp(h_ij / tau_i)``, ``(B, D)``; 0 for anchors without negatives."""
        if not self.options.sums:  # for a metric
            options, z = self.options._replace(sums=True, moments=False), torch.stack(tuple(self._everyone))
            return Pairs(z, self._tau, self.keys, options).log_sum
        return self.real(self._total.log() + self._offset)

    @cached_property
    def mean_h(self) -> Tensor | None:
        """Mean of ``h_ij`` under the batch softmax, ``(B, D)``, or ``None``."""
        return None if self._dot is None else self.real(self._dot / self._total + self._minus)

    @cached_property
    def log_ghat(self) -> Tensor:
        """``log ghat_i``, the batch estimate of the inner function, ``(B, D)``."""
        return self.log_sum - self.log_count

    def log_inner(self, inside: Scalar) -> Tensor:
        """Return ``log`` of the mean of ``exp((s_ij - s_ii) / tau_i)``, times ``exp(inside s_ii / tau_i)``, ``(B, D)``.

        ``inside`` is 0 or 1, a number or a tensor.
        """
        if isinstance(inside, float):
            if inside == 0.0:
                return self.log_ghat
            if inside == 1.0 and self._relative:  # without -s_ii / tau_i, which would be added and subtracted
                return self.real(self._total.log() - self.log_count)
        return self.log_ghat - inside * self.minus_logit

    def sum_weights(self, alpha: Tensor) -> Tensor:
        """Return ``sum_j w_ij``, ``(B, D)``."""
        if self._ranks is None:
            return self.real(self._scaled(alpha)[1] / self.divisor)
        return self.real((self.log_ghat - alpha).exp_())

    def sum_wh(self, alpha: Tensor) -> Tensor:
        """Return ``sum_j w_ij h_ij``, ``(B, D)``; needs moments."""
        if self._dot is None:
            assert self.mean_h is not None
            return self.sum_weights(alpha) * self.mean_h
        moment = torch.addcmul(self._dot, self._total, self._minus)
        return self.real(self._scaled(alpha)[0] * moment / self.divisor)

    def _scaled(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor from the terms of a sum to ``|N_i| w_ij``, and ``|N_i| sum_j w_ij``, ``(B, D)`` each.

        They are kept, since gradients of temperatures and of features need both.
        """
        if self._kept is None or self._kept[0] is not alpha:
            factor = (self._offset - alpha).exp_()
            self._kept = alpha, factor, self._total * factor
        return self._kept[1:]

    def real(self, per_anchor: Tensor, outside: Scalar = 0.0) -> Tensor:
        """Set values of anchors without negatives, which labels and index2 can cause, to zero.

        ``outside`` is the number of negatives from outside the batch, a number or ``(B, D)``.
        """
        return per_anchor if isinstance(self.count, float) else torch.where(self.count + outside > 0, per_anchor, 0)

    def lacking(self, outside: Scalar = 0.0) -> Tensor | None:
        """Return a 0-d flag: no anchor has a negative; ``None`` if the keys and the policy rule that out."""
        if isinstance(self.count, float) or not self.may_lack_negatives:
            return None
        return (self.count + outside <= 0).all()

    def factor(self, value: Scalar) -> Scalar:
        """Return a factor per anchor, zero without negatives; a number if ``count`` is a number."""
        if isinstance(self.count, float):
            return value
        value = value if isinstance(value, Tensor) else self._z.new_full((), value)
        return torch.where(self.count > 0, value, 0)

    def of_other_view(self, per_anchor: Tensor) -> Tensor:
        """Copy values of the other view to a view without negatives, in unimodal mode.

        The other view may have negatives, since only the first view has further candidates.
        """
        if isinstance(self.count, float):
            return per_anchor
        return torch.where(self.count > 0, per_anchor, per_anchor.flip(1))

    def effective(self) -> list[Tensor]:
        """Return ``(sum w)^2 / sum w^2`` of this rank's first anchors of each direction; NaN without candidates."""
        part = slice(self._own.start, min(self._own.stop, self._own.start + SPREAD_ANCHORS))
        form = self._form._replace(moments=False, chunk_size=None)
        return [self._of_direction(direction, part, form).effective() for direction in range(self.directions)]

    # -- gradients ---------------------------------------------------------------------------------------------

    def gradients(
        self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar | None
    ) -> tuple[Tensor, Tensor | None]:
        r"""Return ``sum over directions, anchors i of coefficient_i (sum_j w_ij grad s_ij - p_i grad s_ii)``.

        The weights are held constant. The method frees the matrices and can be called only once.

        Args:
            alpha: log-normalizers, ``(B, D)``.
            coefficient: factor of each anchor, a number or broadcastable to ``(B, D)``.
            positive_weight: ``p_i``, the weight of each anchor's positive, of the same form; ``None``: ``sum_j w_ij``.

        Returns:
            Gradients with respect to this process's features, ``(2, b, d)``, and to its further candidates,
            ``(M, d)``, if there are any.
        """
        if isinstance(self.count, Tensor):
            coefficient = self.factor(coefficient)
        if self._ranks is None:
            found = self._shared_gradients(alpha, coefficient, positive_weight)
        else:
            found = self._own_gradients(alpha, coefficient, positive_weight)
        self.release()  # so that the next steps of the gradient can reuse the memory
        return found

    def _shared_gradients(
        self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar | None
    ) -> tuple[Tensor, Tensor | None]:
        block, ratio, scale = self._blocks[0], coefficient / self.divisor, 1.0
        pull: Scalar
        if positive_weight is None:
            factor, pull = self._scaled(alpha)
        else:
            factor, pull = (self._offset - alpha).exp_(), positive_weight * self.divisor
        if isinstance(ratio, Tensor):
            factor, pull = factor * ratio, pull * ratio
        else:
            scale = ratio  # of all weights: a factor of the products
        gradient = torch.zeros_like(self._z) if block.recompute else torch.empty_like(self._z)
        outside = None if self.negatives is None else torch.zeros_like(self.negatives.features)
        if self.unimodal:
            self._of_views(block, factor, pull, gradient.view(-1, gradient.shape[2]), outside, scale)
        else:
            pull = pull.expand(self.shape).sum(1) if isinstance(pull, Tensor) else pull * self.directions
            columns = self._by_column(0, "factor", factor) if self.directions == 2 else None
            block.products(factor[:, 0], columns, pull, gradient[0], gradient[1], outside, scale)
        return gradient, outside

    def _of_views(
        self, block: Block, factor: Tensor, pull: Scalar, gradient: Tensor, outside: Tensor | None, scale: float
    ) -> None:
        """Write the gradient of both views in unimodal mode, ``(2 B, d)``."""
        views, pulls = (0, 1), pull.expand(self.shape) if isinstance(pull, Tensor) else pull
        rows = self._by_row(factor, views)
        if self._form.tau is not None and outside is None:  # exp(S) is its own transpose: A + A^T in one product
            both = pulls.sum(1).repeat(2) if isinstance(pulls, Tensor) else 2 * pulls
            block.products(rows, rows, both, gradient, scale=scale)
        else:
            block.products(rows, None, self._by_row(pulls, views), gradient, gradient, outside, scale)

    def _own_gradients(
        self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of this rank's features as anchors, and as candidates of the anchors of all ranks."""
        own, scale, like = self._own, self._scale, self.positive
        assert isinstance(scale, Tensor)  # since _exchange()
        alpha, log_count = alpha.expand_as(like), _spread_out(self.log_count, like)
        factor = _spread_out(coefficient, like)
        mine = (self._offset - alpha[own] - log_count[own]).exp_().mul_(factor[own])
        weight = self._total * mine if positive_weight is None else (factor * positive_weight)[own]
        level = self.positive * scale + alpha + log_count
        gradient = torch.zeros_like(self._z)
        for direction, block in enumerate(self._blocks):
            rows = mine[:, direction] if direction < self.directions else None
            weights = None
            if not self._momentum and self._meets(direction):
                values = {"scale": scale, "level": level, "factor": factor}
                weights = ColumnWeights(*[self._by_column(direction, name, value) for name, value in values.items()])
            # both features of a positive pair are on this rank, so that its gradient needs no other rank
            pull = weight[:, direction] if self._momentum else weight.sum(1)
            block.products(rows, weights, pull, gradient[direction])
            block.release()
        if self.negatives is None:
            return gradient, None
        outside = torch.zeros_like(self.negatives.features)
        anchors = ColumnWeights(scale[:, 0], level[:, 0], factor[:, 0])
        self._of_negatives(self.negatives).products(None, anchors, None, outside)
        return gradient, outside

    def release(self) -> None:
        """Free the memory that only :meth:`gradients` needs; for calls that do not use that method."""
        self._kept = None
        for block in self._blocks:
            block.release()


# Values of columns that are no anchors, whose weights are 0.
OUTSIDE = {"scale": 1.0, "level": torch.inf, "factor": 0.0, "threshold": torch.inf}


def _spread_out(value: Scalar, like: Tensor) -> Tensor:
    """Expand a number or a tensor to the shape of ``like``."""
    return (value if isinstance(value, Tensor) else like.new_full((), value)).expand_as(like)


class SampledPairs(ABC):
    """Weights ``w_ij`` that replace ``exp(h_ij / tau_i - alpha_i) / |N_i|``, for example from a sampler.

    Attributes:
        sum_wh: ``sum_j w_ij h_ij`` of every anchor of the (global) batch, ``(B, D)``, for gradients of temperatures.
        serves: :meth:`gradients` also computes gradients for other ranks or for encoded features, and must be called
            even if this rank's features need none.
    """

    sum_wh: Tensor
    serves = True

    @abstractmethod
    def gradients(self, coefficient: Scalar) -> Tensor:
        r"""Return ``sum over directions and anchors i of coefficient_i (sum_j w_ij grad s_ij - grad s_ii)``.

        Collective with several ranks, if ``serves``. Gradients of features outside the batch are passed to the encoder
        that computed the features.

        Args:
            coefficient: factor of each anchor, a number or broadcastable to ``(B, D)``.

        Returns:
            Gradients with respect to this process's features, ``(2, b, d)``.
        """


def effective_number(total: Tensor, squares: Tensor) -> Tensor:
    """Return the mean of ``(sum w)^2 / sum w^2`` over the anchors with nonzero weights."""
    return (total.square() / squares).nanmean()


def pull_positives(gradient: Tensor, z: Tensor | Sequence[Tensor], weight: Scalar, directions: int) -> None:
    """Subtract the gradient of ``sum weight s_ii`` over all anchors, in place.

    Args:
        gradient: gradient of the features of both modalities or views, ``(2, b, d)``.
        z: the features.
        weight: weight of each anchor's positive, a number or ``(b, D)``.
        directions: number of modalities or views that are anchors.
    """
    shared = weight.sum(1, keepdim=True) if isinstance(weight, Tensor) else weight * directions
    for own, partner in zip(gradient.unbind(), (z[1], z[0]), strict=True):
        if isinstance(shared, Tensor):
            own.addcmul_(shared, partner, value=-1)
        else:
            own.sub_(partner, alpha=shared)


def is_uniform(tau: float | Tensor, options: PairOptions) -> bool:
    """Return whether the anchors of both directions can share one exponential without a shift."""
    plain = options.bounded and not options.moments and options.policy is None
    return plain and isinstance(tau, float) and 1 / tau <= MAX_UNSHIFTED_SCALE


def scale_of(tau: float | Tensor, like: Tensor, batch: int, directions: int = 2) -> float | Tensor:
    """Return ``1 / tau`` of every anchor: a number, or ``(B, D)``."""
    if isinstance(tau, float):
        return 1 / tau
    return tau.to(like.dtype).reciprocal().expand(batch, directions)
