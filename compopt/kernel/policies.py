r"""Statistics of pairs under a policy: one or several sweeps, and corrections of their sums.

A positive may be an expectation, over several samples of one label or over candidates with a teacher's weights:

.. math::
    \bar s_i = \sum_j T_{ij} s_{ij}, \qquad \sum_j T_{ij} = 1, \qquad h_{ij} = s_{ij} - \bar s_i

All other features are candidates, including the positives. Since ``s_ij`` is linear in both features, only the mean
positive ``sum_j T_ij z_j`` of each anchor is kept; blocks of ``T`` are computed twice and freed after their product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from compopt.functional import Scalar, log
from compopt.kernel.blocks import Axis
from compopt.kernel.joined import Source, with_momentum, with_policy
from compopt.kernel.pairs import PairOptions, PairStatistics, scale_of
from compopt.pairs import PairPolicy

BLOCK_ROWS = 1024  # rows of a block of T if chunk_size is None

# Maps corrected statistics, log-normalizers and weights of positives to those of the pairs without the correction.
Through = Callable[[PairStatistics, Tensor, Scalar], tuple[Tensor, Scalar]]


def swept(source: Source, options: PairOptions, policy: PairPolicy | None) -> PairStatistics:
    """Return the statistics of the pairs of a call under its policy."""
    if options.held:
        return with_momentum(source, options)
    if policy is None:
        return source.pairs(options)
    if policy.expects:
        return TargetPairs(source, options, policy)
    pairs: PairStatistics = with_policy(source, options, policy.also) if policy.also else source.pairs(options)
    if policy.importance != "plain":  # the mean of exp(beta s_ij) is a sum at the temperature 1 / beta
        beta, _ = policy.strengths
        weights = source.pairs(options.without_hardness()._replace(moments=False), tau=1 / beta)
        pairs = NormalizedPairs(pairs, weights, beta, source.tau, policy.importance == "differentiated")
    scale = scale_of(source.tau, pairs.positive, *pairs.positive.shape)
    if policy.prior is not None:
        given = source.batch.values.get("prior1")
        pairs = debiased(pairs, cast(Scalar, policy.prior) if given is None else given[:, None], scale)
    return pairs if policy.mises_fisher is None else with_weighted_positives(pairs, policy.mises_fisher, scale)


class CorrectedPairs(PairStatistics):
    """Statistics of pairs with a correction of their sums.

    Args:
        pairs: statistics without the correction.
        log_ghat: corrected ``log ghat_i``; ``None``: that of ``pairs``.
        mean_h: corrected mean of ``h_ij``; ``None``: that of ``pairs``.
        through: maps the log-normalizers and weights of positives of a gradient to those that ``pairs`` needs.
    """

    def __init__(
        self,
        pairs: PairStatistics,
        log_ghat: Tensor | None = None,
        mean_h: Tensor | None = None,
        through: Through | None = None,
    ) -> None:
        super().__init__(pairs.keys, pairs.options, pairs.views)
        self._pairs, self._through = pairs, through
        self.negatives, self.positive, self.sides = pairs.negatives, pairs.positive, pairs.sides
        self.count, self.log_count = pairs.count, pairs.log_count
        self.log_sum = pairs.log_sum if log_ghat is None else self.real(log_ghat + self.log_count)
        self.mean_h = pairs.mean_h if mean_h is None else self.real(mean_h)

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        if self._through is not None:
            alpha, positive_weight = self._through(self, alpha, positive_weight)
        return self._pairs.gradients(alpha, coefficient, positive_weight)

    def release(self) -> None:
        self._pairs.release()


def debiased(pairs: PairStatistics, prior: Scalar, scale: Scalar) -> CorrectedPairs:
    r"""Correct the sums for a share ``pi`` of negatives that are in fact positives (debiased contrastive loss, eq. 8).

    .. math::
        \hat g_i \leftarrow \max\Bigl(\frac{\hat g_i - \pi}{1 - \pi},\; e^{(-1 - s_{ii}) / \tau_i}\Bigr)

    where ``pi = pi exp(h_ii / tau)`` is the term of the anchor's own positive, since ``h_ii = 0``; the lower bound is
    the term of a negative with ``s = -1``. At the bound the weights of the negatives are zero.

    Args:
        pairs: statistics without the correction.
        prior: ``pi``, in (0, 1), a number or a value per sample, ``(B, 1)``.
        scale: ``1 / tau``, broadcastable to ``(B, A)``.
    """
    log_rest = torch.log1p(-prior) if isinstance(prior, Tensor) else math.log1p(-prior)
    # NaN where the corrected value is negative; the bound replaces it
    corrected = pairs.log_ghat + torch.log1p(-prior * (-pairs.log_ghat).exp()) - log_rest
    lowest = (-1 - pairs.positive) * scale
    bound = (pairs.log_ghat < log(prior)) | (corrected < lowest)
    log_ghat, mean_h = torch.where(bound, lowest, corrected), None
    if pairs.mean_h is not None:
        ratio = (pairs.log_ghat - log_rest - log_ghat).exp()
        mean_h = torch.where(bound, -1 - pairs.positive, pairs.mean_h * ratio)

    def through(_: PairStatistics, alpha: Tensor, positive_weight: Scalar) -> tuple[Tensor, Scalar]:
        own = pairs.real(prior / (1 - prior) * (-alpha).exp())  # weight of the positive's term, which has h = 0
        return torch.where(bound, torch.inf, alpha + log_rest), positive_weight + torch.where(bound, 0, own)

    return CorrectedPairs(pairs, log_ghat, mean_h, through)


def with_weighted_positives(pairs: PairStatistics, sigma: float, scale: Scalar) -> CorrectedPairs:
    r"""Weight positives by the negative von Mises-Fisher density (weighted DCL, eq. 6).

    .. math::
        \hat g_i \leftarrow \hat g_i\, e^{(1 - v_i)\, s_{ii} / \tau_i}, \qquad
        v_i = 2 - \frac{e^{s_{ii} / \sigma}}{\tfrac{1}{B} \sum_k e^{s_{kk} / \sigma}}

    Args:
        pairs: statistics without the weights.
        sigma: > 0.
        scale: ``1 / tau``, broadcastable to ``(B, A)``.
    """
    less = (pairs.positive / sigma).softmax(0) * len(pairs.positive) - 1  # 1 - v_i
    shift = less * pairs.positive * scale
    mean_h = None if pairs.mean_h is None else pairs.mean_h + less * pairs.positive

    def through(corrected: PairStatistics, alpha: Tensor, positive_weight: Scalar) -> tuple[Tensor, Scalar]:
        return alpha - shift, positive_weight - less * corrected.sum_weights(alpha)

    return CorrectedPairs(pairs, pairs.log_ghat + shift, mean_h, through)


class NormalizedPairs(CorrectedPairs):
    r"""Importance weights whose mean over an anchor's negatives is one (HCL).

    .. math::
        b_{ij} = \beta s_{ij} - c_i, \qquad c_i = \log \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{\beta s_{ij}}

    Args:
        pairs: statistics with the log-weights ``beta s_ij``.
        importance: statistics of the same pairs without log-weights at the temperature ``1 / beta``.
        beta: strength.
        tau: temperatures, a number or broadcastable to ``(B, A)``.
        differentiated: differentiate through the weights, as the authors' code does.
    """

    def __init__(
        self, pairs: PairStatistics, importance: PairStatistics, beta: float, tau: Scalar, differentiated: bool
    ) -> None:
        self._importance, self._shift = importance, importance.log_ghat + beta * pairs.positive
        self._part = beta * tau if differentiated else 0.0  # share of the gradient that passes through the weights
        self._differentiated = differentiated
        super().__init__(pairs, pairs.log_ghat - self._shift)

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        share = self._part + 1
        found, outside = self._pairs.gradients(alpha + self._shift, coefficient * share, positive_weight / share)
        if not self._differentiated:
            self._importance.release()
            return found, outside
        # tau grad log ghat_i = (1 + beta tau) sum_j p_ij grad s_ij - beta tau sum_j q_ij grad s_ij
        of_weights = self._importance.log_ghat - (self.log_ghat - alpha)
        less, outside_less = self._importance.gradients(of_weights, coefficient * self._part, 0.0)
        if outside is not None and outside_less is not None:
            outside -= outside_less
        return found.sub_(less), outside

    def release(self) -> None:
        super().release()
        self._importance.release()


class TargetPairs(CorrectedPairs):
    """Statistics of all pairs if positives are expectations.

    The weights ``T`` of candidates in an anchor's positive are equal for all candidates with its label, or a softmax of
    a teacher's similarities, or proportional to these similarities. With ``inside=True`` the positive is the
    log-mean-exp of similarities, and the weights are their softmax. Candidates with another key ``within=`` have
    weight 0.

    Args:
        source: features of two modalities or views; its batch contains the teacher's features, labels and keys.
        options: options of the pairs.
        policy: selects the kind of weights.

    Communicates: one all-gather of ``2 a`` floats per sample, in addition to that of the pairs.
    """

    def __init__(self, source: Source, options: PairOptions, policy: PairPolicy) -> None:
        if policy.inside and options.moments:
            raise ValueError("inside=True takes temperatures that do not learn; leave it out, or fix tau")
        self._source, self._everyone, self._inside = source, source.everyone, policy.inside
        self._tau = None if isinstance(policy.targets, str) else policy.targets  # of the teacher's softmax
        self._teacher = [value for name, value in source.batch.values.items() if name.startswith("teacher")]
        if policy.targets == "classes":  # all modalities or views share the soft labels
            self._teacher *= len(self._everyone)
        self._rows = options.chunk_size or BLOCK_ROWS
        scale = scale_of(source.tau, source.own, len(self._everyone[0]), options.directions)
        scale = scale if isinstance(scale, Tensor) else source.own.new_full((), scale)
        self._scale = scale.expand(len(self._everyone[0]), options.directions)
        anchors, views = range(options.directions), range(len(self._everyone))
        self._candidates = [views if options.unimodal else (1 - view,) for view in anchors]
        expected, self._means, norms = zip(*map(self._expect, anchors), strict=True)
        shared = source.gather(torch.stack([*expected, *norms], dim=1))
        positive, self._log_norm = shared.split(options.directions, dim=1)
        positive = positive.repeat(1, len(views) - 1)  # equal for all ordered pairs of an anchor
        super().__init__(source.pairs(options._replace(positive=positive, whole=True)))

    def _axis(self, view: int, part: slice) -> Axis:
        """Return the teacher's features, keys and labels of the samples ``part`` of a view."""
        values, keys = self._source.batch.values, self._source.batch.keys
        key, label = values.get("within1"), None if self._teacher else keys["labels"]
        guide = self._teacher[view] if self._teacher else None
        return Axis(guide, key, label, len(self._everyone[0])).part(part.start, part.stop)

    def _logits(self, rows: Axis, columns: Axis) -> Tensor:
        """Return ``log T_ij`` up to a constant per row, ``(P, Q)``."""
        if rows.guide is not None and columns.guide is not None:
            result = rows.guide @ columns.guide.T
            result = result.log() if self._tau is None else result / self._tau
        else:
            assert rows.name is not None and columns.name is not None
            result = rows.name.new_zeros(len(rows.name), len(columns.name), dtype=self._everyone[0].dtype)
            result.masked_fill_(rows.name[:, None] != columns.name, -torch.inf)
        if rows.key is not None and columns.key is not None:
            result.masked_fill_(rows.key[:, None] != columns.key, -torch.inf)
        return result

    def _blocks(self, view: int, rows: slice, others: int, columns: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of ``rows``, anchors of a view, with ``log T`` up to a constant per row for candidates."""
        for start in range(rows.start, rows.stop, self._rows):
            part = slice(start, min(start + self._rows, rows.stop))
            logits = self._logits(self._axis(view, part), self._axis(others, columns))
            if self._inside:
                s = self._everyone[view][part] @ self._everyone[others][columns].T
                logits = logits + s * self._scale[part, view, None]
            offset = start - columns.start
            if view == others and -len(logits) < offset < logits.shape[1]:
                logits.diagonal(offset).fill_(-torch.inf)  # no feature is a candidate of itself
            yield part, logits

    def _expect(self, view: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the positives of this rank's anchors of a view.

        Returns:
            The similarity that replaces ``s_ii``, ``(b,)``; the mean ``sum_j T_ij z_j``, ``(b, d)``; the logarithm of
            the normalizer of the weights, ``(b,)``.
        """
        everyone, place = slice(0, len(self._everyone[0])), self._source.batch.own
        candidates = self._candidates[view]
        y = torch.cat([self._everyone[other] for other in candidates])
        by_view = [self._blocks(view, place, other, everyone) for other in candidates]
        means, norms, numbers = [y[:0]], [y[:0, 0]], [y[:0, 0]]
        for blocks in zip(*by_view, strict=True):
            logits = torch.cat([block for _, block in blocks], dim=1)
            norms.append(logits.logsumexp(1))
            means.append(logits.softmax(1) @ y)
            numbers.append((logits != -torch.inf).sum(1, dtype=y.dtype))
        mean, norm = torch.cat(means), torch.cat(norms)
        if self._inside:
            return (norm - torch.cat(numbers).log()) / self._scale[place, view], mean, norm
        return torch.linalg.vecdot(self._source.own[view], mean), mean, norm

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        gradient, outside = self._pairs.gradients(alpha, coefficient, 0.0)
        pull = self.factor(coefficient) * positive_weight * torch.ones_like(self.positive)
        pull = self.sum_over_positives(pull).unsqueeze(2)
        for view, mean in enumerate(self._means):
            gradient[view] -= pull[self._source.batch.own, view] * mean
            pulled = pull[:, view] * self._everyone[view]
            for other in self._candidates[view]:  # this rank's features as candidates of the anchors of all ranks
                for rows, logits in self._blocks(view, slice(0, len(pulled)), other, self._source.batch.own):
                    t = (logits - self._log_norm[rows, view, None]).exp()
                    gradient[other] -= t.T @ pulled[rows]
        return gradient, outside
