"""The estimated objective of a batch: its value, and its gradients in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt import functional as F
from compopt.batch import Batch
from compopt.estimator.call import Estimate
from compopt.functional import Scalar
from compopt.kernel.features import Features
from compopt.kernel.log_sum_exp import OnlineLogSumExp
from compopt.kernel.statistics import PairStatistics


@dataclass
class Objective:
    r"""``mean of tau_i (alpha_i + rho_i)`` over samples and directions, or the mean of ``alpha_i``.

    Gradients of what every rank has a part of are multiplied by the number of ranks, for wrappers that average them;
    those of what is the same on all ranks survive an average as they are.

    Attributes:
        batch: the samples of all ranks.
        pairs: the statistics of all their pairs.
        estimate: what the normalizer made of them.
        tau: temperatures of the global batch, without a graph: a number, 0-d, ``(B, 1)`` or ``(B, A)``.
        rho: radius of the KL constraint, per anchor or the same for all.
        multiply_tau: ``False``: the mean of ``alpha_i``, whose weights are ``w / tau``.
        ranks: how many there are.
    """

    batch: Batch
    pairs: PairStatistics
    estimate: Estimate
    tau: Scalar
    rho: Scalar
    multiply_tau: bool
    ranks: int

    @property
    def alpha(self) -> Tensor:
        """Log-normalizers, ``(B, A)``."""
        return self.estimate.alpha.expand_as(self.pairs.positive)

    def value(self) -> Tensor:
        """The objective, 0-d."""
        terms = self.tau * (self.alpha + self.rho) if self.multiply_tau else self.alpha
        return self.pairs.real(terms).mean()

    def tau_gradients(self) -> Tensor:
        """``G(tau_i)`` of every anchor, ``(B, A)``; needs pairs with moments.

        ``estimate.slack``: ``exp(-alpha)(eps + ghat) - 1``, where the objective is NeuCLIP's
        ``exp(-alpha)(eps + g) + alpha - 1`` and ``alpha`` no exact minimiser of it.
        With ``estimate.positive_weight`` ``p_i``, what stands in the place of ``sum_j w_ij h_ij`` is
        ``sum_j w_ij s_ij - p_i s_ii``.
        """
        pairs, estimate, alpha = self.pairs, self.estimate, self.alpha
        assert pairs.mean_h is not None
        sum_wh = pairs.sum_weights(alpha) * pairs.mean_h if estimate.weights is None else estimate.weights.sum_wh
        if estimate.positive_weight is not None:
            sum_wh = sum_wh - (estimate.positive_weight - pairs.sum_weights(alpha)) * pairs.positive
        if estimate.slack is not None and self.multiply_tau:
            alpha = alpha + estimate.slack
        return pairs.real(F.temperature_gradient(alpha, self.rho, sum_wh, self.tau, self.multiply_tau))

    def temperature_gradient(self, tau: Tensor) -> tuple[Tensor, Tensor]:
        """A temperature with a graph, and its gradient: the mean of ``G``, summed to its shape.

        A scalar gets the whole gradient, a tensor per sample this rank's part.
        """
        g = self.tau_gradients()
        if tau.dim() == 0:
            return tau, (g / g.numel()).sum().to(tau.dtype)
        g = g[self.batch.own]
        return tau, (g / g.numel()).sum_to_size(tau.shape).to(tau.dtype) * (
            len(tau) * self.ranks / len(self.batch.rows) if self.ranks > 1 else 1
        )

    def feature_gradients(self, own: Sequence[Features], wanted: bool, elsewhere: bool) -> list[tuple[Tensor, Tensor]]:
        """This rank's features with their gradients, weights held as estimated; uses up the pairs.

        Args:
            own: this rank's features, and its further candidates if there are any.
            wanted: whether they get any; without, what other ranks or other features wait for is computed nevertheless.
            elsewhere: whether weights of the normalizer's have gradients for others.
        """
        gradients: tuple[Tensor, ...] = ()
        if wanted or (self.estimate.weights is not None and elsewhere):
            gradients = self._weighted()
        by_alpha: tuple[Tensor, ...] = ()
        if self.estimate.through_alpha is not None and (wanted or self.ranks > 1):
            by_alpha = self.estimate.through_alpha(self._alpha_slope())
        if not wanted:
            return []
        for gradient, rest in zip(gradients, by_alpha, strict=False):
            gradient.add_(rest[self.batch.own])
        if self.ranks > 1:
            gradients = tuple(gradient * self.ranks for gradient in gradients)
        return [z.pull_back(gradient) for z, gradient in zip(own, gradients, strict=True)]

    def _alpha_slope(self) -> Tensor:
        """Derivative of the value with respect to ``alpha``, ``(B, A)``."""
        like = self.pairs.positive
        factor = self.tau if self.multiply_tau else 1.0
        slope = factor.to(like.dtype) if isinstance(factor, Tensor) else like.new_full((), factor)
        return self.pairs.real(slope.expand(like.shape)) / like.numel()

    def _weighted(self) -> tuple[Tensor, ...]:
        """``sum_i (tau_i w_ij / A B) grad h_ij`` of this rank's features."""
        alpha = self.alpha.to(self.pairs.positive.dtype)
        share = 1.0 / alpha.numel()
        coefficient = share if self.multiply_tau else share / self.tau
        if not isinstance(coefficient, Tensor):
            coefficient = alpha.new_full((), coefficient)
        coefficient = coefficient.to(alpha.dtype)
        if self.estimate.weights is not None:
            return self.estimate.weights.gradients(coefficient)
        weight = self.estimate.positive_weight
        return self.pairs.gradients(alpha, coefficient, None if weight is None else weight.to(alpha.dtype))


@dataclass
class Summary:
    """What :attr:`ContrastiveEstimator.metrics` are computed from, when somebody asks.

    Attributes:
        alpha: log-normalizers, ``(B, A)``.
        tau: temperatures.
        sides: sums over the weights, by direction.
        count: visits so far, ``(B, .)``.
    """

    alpha: Tensor
    tau: float | Tensor
    sides: list[OnlineLogSumExp]
    count: Tensor

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors; nothing waits for the device."""
        tau = self.tau if isinstance(self.tau, Tensor) else self.alpha.new_full((1,), self.tau)  # no copy, no wait
        spread = tau.to(self.alpha.dtype).flatten()
        return {
            "log_normalizer": self.alpha.mean(),
            "effective_negatives": torch.cat([side.effective() for side in self.sides]).nanmean(),
            "tau_q10": spread.quantile(0.1),
            "tau_median": spread.quantile(0.5),
            "tau_q90": spread.quantile(0.9),
            "new_rows": (self.count == 0).any(dim=1).sum(),
        }
