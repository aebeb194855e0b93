"""Statistics of all pairs of a batch: a few numbers per anchor, on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from compopt.functional import Scalar, log
from compopt.kernel.blocks import MASKED, Axis, Exponentials, Extra, Matrix, positives
from compopt.kernel.triton.choice import Precision
from compopt.pairs import PairPolicy

# Above this 1/tau, exp(s/tau) of a unit-norm pair approaches the range of float32, and a maximum must be subtracted.
MAX_UNSHIFTED_SCALE = 40.0
# Views, a slice of their samples, and a slice of the further candidates (or None) along an axis of a matrix.
Axes = tuple[Sequence[int], slice, slice | None]
# Anchors per side for which the effective number of negatives is computed.
SPREAD_ANCHORS = 128


class Sums(NamedTuple):
    """Sums of ``exp((s_ij - shift_i) / tau_i)`` over the candidates of some anchors.

    Attributes:
        total: the sum, ``(P,)``.
        norms: ``sqrt(sum exp^2)`` of the first anchors only, for a metric.
        squared: ``norms`` contains the squares; the metric takes the roots.
        shift, dot: as in :class:`Exponentials`.
    """

    total: Tensor
    norms: Tensor
    squared: bool
    shift: Tensor | None
    dot: Tensor | None

    @classmethod
    def over(cls, side: Exponentials, dim: int, start: int = 0) -> Sums:
        """Sum over one axis of a block; ``start`` is the number of its first anchor."""
        few, anchors = side.exp, side.exp.shape[1 - dim]
        spread = max(0, SPREAD_ANCHORS - start)
        if spread < anchors:
            few = few.narrow(1 - dim, 0, spread)
        # a norm along the columns of a row-major matrix is five times as slow as a sum of squares
        norms = few.square().sum(0) if dim == 0 else torch.linalg.vector_norm(few, dim=1)
        return cls(side.exp.sum(dim), norms, dim == 0, side.shift, side.dot)

    def merged(self, more: Sums, scale: Tensor | float) -> Sums:
        """Add sums of column anchors over further rows, relative to a maximum that may have grown."""
        total, squares, dot = self.total, self.norms, self.dot
        if self.shift is not None and more.shift is not None:
            shrink = (self.shift - more.shift).mul_(scale).exp_()
            total, squares = total * shrink, squares * shrink[:SPREAD_ANCHORS].square()
            dot = None if dot is None else dot * shrink
        dot = None if dot is None or more.dot is None else dot + more.dot
        return Sums(total + more.total, squares + more.norms, True, more.shift, dot)

    def log_total(self, scale: Tensor | float) -> Tensor:
        """Return ``log sum_j exp(s_ij / tau_i)``."""
        log_total = self.total.log()
        return log_total if self.shift is None else log_total + self.shift * scale

    def effective(self) -> Tensor:
        """Return ``(sum w)^2 / sum w^2`` of the first anchors; NaN for those without candidates."""
        first = slice(len(self.norms))
        norms = self.norms.sqrt() if self.squared else self.norms
        number = (self.total[first] / norms).square()
        return number if self.shift is None else number.masked_fill(self.shift[first] <= MASKED, torch.nan)


def joined(parts: Sequence[Sums]) -> Sums:
    """Concatenate sums of different row anchors."""
    if len(parts) == 1:
        return parts[0]
    total, norms, _, shift, dot = zip(*parts, strict=True)
    return Sums(
        torch.cat(total),
        torch.cat(norms),
        False,
        None if shift[0] is None else torch.cat(shift),
        None if dot[0] is None else torch.cat(dot),
    )


class PairOptions(NamedTuple):
    """Options of a call: selection of the pairs, and how their statistics are computed.

    Attributes:
        distinct: the first key has no repeats and is the only one, as known on the host.
        directions: ``D``, number of modalities or views that are anchors, the first ones.
        extra: further candidates of the anchors of direction 1.
        unimodal: all views of the other samples are candidates (otherwise the features of the other modality).
        bounded: features have norm at most one.
        chunk_size: rows per block, with blocks recomputed in the gradients; ``None`` stores all blocks.
        moments: also compute ``mean_h``, which the gradients of temperatures need.
        policy: policy that leaves pairs out or weights them; ``None``: only the keys exclude pairs.
        guide: features from which the policy finds false negatives, by modality or view, ``(B, g)`` each; empty: those
            of the estimator.
        key: keys ``within=`` of the policy, of all ranks, ``(B,)``, or ``None``.
        threshold: thresholds of the anchors, ``(B, D)``; ``None``: computed from the positives of these features.
        positive: ``s_ii`` of all ranks, ``(B, D)``; ``None``: computed from these features.
        held: candidates of the batch that are not anchors get no gradient; zeros are returned for them.
        precision: precision of the products of the kernels in Triton; ``None``: plain torch computes the pairs.
    """

    distinct: bool
    directions: int = 2
    extra: Extra | None = None
    unimodal: bool = False
    bounded: bool = True
    chunk_size: int | None = None
    moments: bool = False
    policy: PairPolicy | None = None
    guide: Sequence[Tensor] = ()
    key: Tensor | None = None
    threshold: Tensor | None = None
    positive: Tensor | None = None
    held: bool = False
    precision: Precision | None = None

    def thresholds(self, z: Sequence[Tensor]) -> Tensor | None:
        """Return the similarity above which a candidate is a false negative, ``(B, D)``; ``z``: ``(B, d)`` each."""
        if self.threshold is not None or self.policy is None or self.policy.false_negatives is None:
            return self.threshold
        return self.policy.threshold(positives(torch.stack([*(self.guide or z)]), self.directions))

    @property
    def guides(self) -> list[Tensor]:
        """All features of the guide."""
        return [*self.guide, *([] if self.extra is None or self.extra.guide is None else [self.extra.guide])]

    def axis(self, views: Sequence[int], own: slice, outside: slice | None = None) -> Axis:
        """Return the axis of some views of the samples ``own``, followed by the further candidates ``outside``."""
        extra, count = self.extra, len(views)
        guides = [self.guide[view][own] for view in views] if self.guide else []
        keys = [] if self.key is None else [self.key[own]] * count
        if extra is not None and outside is not None:
            guides += [] if extra.guide is None else [extra.guide[outside]]
            keys += [] if extra.key is None else [extra.key[outside]]
        guide, key = (torch.cat(parts) if parts else None for parts in (guides, keys))
        return Axis(guide, key, count * (own.stop - own.start))

    def matrix(self, rows: Axes, columns: Axes, thresholds: tuple[Tensor | None, Tensor | None]) -> Matrix | None:
        """Return the policy for one matrix of similarities; ``rows``, ``columns``: arguments of :meth:`axis`."""
        if self.policy is None:
            return None
        return Matrix(self.policy, self.axis(*rows), self.axis(*columns), thresholds)


class PairStatistics(ABC):
    """Statistics of all anchors of the (global) batch, ``(B, D)`` each, with a column per direction.

    Args:
        keys: int64 tensors ``(B,)``; two samples with equal values in any of them are not each other's negatives. The
            first is the data-set index.
        options: options of the call; some also become attributes.

    Attributes:
        distinct: only the anchor's own sample is excluded from its candidates, as known on the host.
        negatives: smallest ``|N_i|`` if only the anchor's own sample is excluded; keys may exclude more.
        positive: ``s_ii``.
        count: ``|N_i|`` as float; 0 for an anchor without negatives. A number if it is equal for all anchors and known
            on the host.
        log_count: ``log |N_i|``; 0 for anchors without negatives.
        log_sum: ``log sum_{j in N_i} exp(h_ij / tau_i)``; 0 for anchors without negatives.
        mean_h: mean of ``h_ij`` under the batch softmax, or ``None``.
        sides: sums of the anchors of this process.
    """

    negatives: int
    positive: Tensor
    count: Scalar
    log_count: Scalar
    log_sum: Tensor
    mean_h: Tensor | None
    sides: list[Sums]

    def __init__(self, keys: Sequence[Tensor], options: PairOptions) -> None:
        self.options = options
        self.directions, self.extra, self.unimodal = options.directions, options.extra, options.unimodal
        self.moments, self.held, self.keys = options.moments, options.held, keys
        # in unimodal mode further candidates are excluded for the anchors of view 2
        told = self.extra is None or (self.extra.positions is None and not self.unimodal)
        self.distinct = told and options.distinct

    def names(self, views: Sequence[int]) -> Sequence[Tensor]:
        """Return keys of the features of some views, one after the other; features with an equal key are not a pair."""
        return self.keys if len(views) == 1 else [key.repeat(len(views)) for key in self.keys]

    def mask(
        self, s: Tensor, views: Sequence[int], rows: slice, others: Sequence[int], shifts: Sequence[int], further: bool
    ) -> Tensor | None:
        """Overwrite the entries of a block that are not pairs, and return their mask, or ``None`` if ``distinct``.

        Args:
            s: similarities.
            views: views along the rows, one after the other.
            rows: slice of their features.
            others: views along the columns.
            shifts: offsets, in numbers of views, of the diagonals with the anchor's own sample; used if ``distinct``.
            further: the last columns are further candidates, if there are any.
        """
        if self.distinct:
            for offset in (shift * len(self.keys[0]) + rows.start for shift in shifts):
                if -s.shape[0] < offset < s.shape[1]:
                    s.diagonal(offset).fill_(MASKED)
            return None
        same = same_sample([key[rows] for key in self.names(views)], self.names(others))
        if self.extra is not None and further:
            outside = self.extra.same(rows)
            missing = len(same) - len(outside)  # rows of view 2
            # cat() instead of pad(), which raises for a tensor without entries in torch 2.4
            outside = torch.cat([outside, outside.new_ones(missing, outside.shape[1])]) if missing else outside
            same = torch.cat([same, outside], dim=1)
        s.masked_fill_(same, MASKED)
        return same

    @property
    def may_lack_negatives(self) -> bool:
        """Return whether an anchor may be without negatives, and a sample without pairs."""
        return len(self.keys) > 1 or self.options.policy is not None

    @abstractmethod
    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        r"""Return ``sum over directions, anchors i of coefficient_i (sum_j w_ij grad s_ij - p_i grad s_ii)``.

        The weights are held constant. The method frees the blocks of the sweep and can be called only once.

        Args:
            alpha: log-normalizers, ``(B, D)``.
            coefficient: factor of each anchor, a number or broadcastable to ``(B, D)``.
            positive_weight: ``p_i``, the weight of each anchor's positive, of the same form.

        Returns:
            Gradients with respect to this process's features, ``(2, b, d)``, and to its further candidates,
            ``(M, d)``, if there are any.
        """

    @abstractmethod
    def release(self) -> None:
        """Free the memory that only :meth:`gradients` needs; for calls that do not use that method."""

    @cached_property  # used by normalizers and by the gradients
    def log_ghat(self) -> Tensor:
        """``log ghat_i``, the batch estimate of the inner function, ``(B, D)``."""
        return self.log_sum - self.log_count

    def sum_weights(self, alpha: Tensor) -> Tensor:
        """Return ``sum_j w_ij``, ``(B, D)``."""
        return self.real((self.log_ghat - alpha).exp_())

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
        value = value if isinstance(value, Tensor) else self.positive.new_full((), value)
        return torch.where(self.count > 0, value, 0)

    def of_other_view(self, per_anchor: Tensor) -> Tensor:
        """Copy values of the other view to a view without negatives, in unimodal mode.

        The other view may have negatives, since only the first view has further candidates.
        """
        if isinstance(self.count, float):
            return per_anchor
        return torch.where(self.count > 0, per_anchor, per_anchor.flip(1))

    @property
    def divisor(self) -> Scalar:
        """Divisor of a mean over negatives: ``|N_i|``, or 1 without negatives."""
        return at_least_one(self.count)

    def _count_negatives(self, candidates: Sequence[int], excluded: Tensor | None, like: Tensor) -> None:
        """Set ``count`` and ``log_count`` from candidates by direction and numbers of those excluded, ``(B, D)``."""
        own = 2 if self.unimodal else 1
        self.negatives = min(candidates) - own
        numbers = [number - (own if excluded is None else 0) for number in candidates]
        count: Scalar = float(numbers[0])
        if len(set(numbers)) > 1:  # filled on the device, without a copy from the host that synchronises
            count = torch.stack([like.new_full((), float(number)) for number in numbers]).expand_as(like)
        self.count = count if excluded is None else count - excluded
        self.log_count = log(self.divisor)


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


def at_least_one(count: Scalar) -> Scalar:
    """Return the number of negatives, or 1 if there are none."""
    return max(1.0, count) if isinstance(count, float) else count.clamp(min=1)


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


def same_sample(rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """Return a mask that is True where any key of a row equals that of a column, which are then not a pair."""
    same = rows[0][:, None] == columns[0][None, :]
    for row, column in zip(rows[1:], columns[1:], strict=True):
        same.logical_or_(row[:, None] == column[None, :])
    return same
