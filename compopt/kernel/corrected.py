"""Sums of all pairs with a correction per anchor: importance weights, the prior of a class, the positive's weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compopt.functional import Scalar, log
from compopt.kernel.pairs import PairStatistics

COPIED = (
    *("keys", "views", "distinct", "directions", "extra", "unimodal", "moments", "selection", "whole"),
    *("negatives", "positive", "count", "log_count", "sides", "mean_h"),
)


class CorrectedPairs(PairStatistics):
    """Base of corrections: all facts are those of other statistics, until a subclass sets ``log_sum``.

    Args:
        pairs: those statistics.
    """

    def __init__(self, pairs: PairStatistics) -> None:
        self._pairs = pairs
        for name in COPIED:
            setattr(self, name, getattr(pairs, name))

    def _set_log_ghat(self, log_ghat: Tensor) -> None:
        self.log_sum = self.real(log_ghat + self.log_count)

    def release(self) -> None:
        self._pairs.release()


class NormalizedPairs(CorrectedPairs):
    r"""Importance weights whose mean over an anchor's negatives is one (HCL).

    .. math::
        b_{ij} = \beta s_{ij} - c_i, \qquad c_i = \log \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{\beta s_{ij}}

    Args:
        pairs: with the log-weights ``beta s_ij``.
        importance: the same pairs without log-weights at the temperature ``1 / beta``.
        beta: strength.
        tau: temperatures, a number or broadcastable to ``(B, A)``.
        differentiated: let the gradient through the weights, as the authors' code does.
    """

    def __init__(
        self, pairs: PairStatistics, importance: PairStatistics, beta: float, tau: Scalar, differentiated: bool
    ) -> None:
        super().__init__(pairs)
        self._importance, self._shift = importance, importance.log_ghat + beta * pairs.positive
        self._part = beta * tau if differentiated else 0.0  # of the gradient that goes through the weights
        self._differentiated = differentiated
        self._set_log_ghat(pairs.log_ghat - self._shift)

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


class DebiasedPairs(CorrectedPairs):
    r"""A share ``pi`` of the negatives is taken to be positives in disguise (debiased contrastive loss, eq. 8).

    .. math::
        \hat g_i \leftarrow \max\Bigl(\frac{\hat g_i - \pi}{1 - \pi},\; e^{(-1 - s_{ii}) / \tau_i}\Bigr)

    where ``pi = pi exp(h_ii / tau)`` is the term of the anchor's own positive; the bound is a negative at ``s = -1``.

    Args:
        pairs: without the correction.
        prior: ``pi``, in (0, 1), a number or of the samples, ``(B, 1)``.
        scale: ``1 / tau``, broadcastable to ``(B, A)``.
    """

    def __init__(self, pairs: PairStatistics, prior: Scalar, scale: Scalar) -> None:
        super().__init__(pairs)
        self._prior = prior
        self._log_rest = torch.log1p(-prior) if isinstance(prior, Tensor) else math.log1p(-prior)
        # the logarithm of what is below 0 is NaN, which the bound replaces too
        corrected = pairs.log_ghat + torch.log1p(-prior * (-pairs.log_ghat).exp()) - self._log_rest
        lowest = (-1 - pairs.positive) * scale
        self._bound = (pairs.log_ghat < log(prior)) | (corrected < lowest)
        log_ghat = torch.where(self._bound, lowest, corrected)
        self._set_log_ghat(log_ghat)
        if pairs.mean_h is not None:
            ratio = (pairs.log_ghat - self._log_rest - log_ghat).exp()
            self.mean_h = self.real(torch.where(self._bound, -1 - pairs.positive, pairs.mean_h * ratio))

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        own = self._prior / (1 - self._prior) * (-alpha).exp()  # weight of the positive's term, which has h = 0
        weight = positive_weight + torch.where(self._bound, 0, own)
        return self._pairs.gradients(torch.where(self._bound, torch.inf, alpha + self._log_rest), coefficient, weight)


class WeightedPositives(CorrectedPairs):
    r"""Positives that are pulled with the weight of the negative von Mises-Fisher density (weighted DCL, eq. 6).

    .. math::
        \hat g_i \leftarrow \hat g_i\, e^{(1 - v_i)\, s_{ii} / \tau_i}, \qquad
        v_i = 2 - \frac{e^{s_{ii} / \sigma}}{\tfrac{1}{B} \sum_k e^{s_{kk} / \sigma}}

    Args:
        pairs: without the weights.
        sigma: > 0.
        scale: ``1 / tau``, broadcastable to ``(B, A)``.
    """

    def __init__(self, pairs: PairStatistics, sigma: float, scale: Scalar) -> None:
        super().__init__(pairs)
        self._less = (pairs.positive / sigma).softmax(0) * len(pairs.positive) - 1  # 1 - v_i
        self._shift = self._less * pairs.positive * scale
        self._set_log_ghat(pairs.log_ghat + self._shift)
        if pairs.mean_h is not None:
            self.mean_h = self.real(pairs.mean_h + self._less * pairs.positive)

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        weight = positive_weight - self._less * self.sum_weights(alpha)
        return self._pairs.gradients(alpha - self._shift, coefficient, weight)
