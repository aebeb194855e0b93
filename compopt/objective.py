"""The estimated objective of a batch: its value and its gradients in closed form, DESIGN.md section 2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.estimator.component import Estimate
from compopt.functional import Scalar, temperature_gradient
from compopt.kernel.log_sum_exp import OnlineLogSumExp
from compopt.kernel.statistics import PairStatistics


@dataclass
class Objective:
    r"""``mean of tau_i (alpha_i + rho_i)`` over samples and directions, or the mean of ``alpha_i``.

    Attributes:
        pairs: the statistics of all pairs of the global batch.
        estimate: what the normalizer made of them.
        tau: temperatures of the global batch, without a graph: a number, 0-d, ``(B, 1)`` or ``(B, 2)``.
        rho: radius of the KL constraint, per anchor or the same for all.
        multiply_tau: ``False``: the mean of ``alpha_i``, whose weights are ``w / tau``.
    """

    pairs: PairStatistics
    estimate: Estimate
    tau: Scalar
    rho: Scalar
    multiply_tau: bool

    @property
    def alpha(self) -> Tensor:
        """Log-normalizers, ``(B, 2)``."""
        return self.estimate.alpha.expand(-1, 2)

    def value(self) -> Tensor:
        """The objective, 0-d."""
        terms = self.tau * (self.alpha + self.rho) if self.multiply_tau else self.alpha
        return self.pairs.real(terms).mean()

    def tau_gradient(self) -> Tensor:
        """``G(tau_i)`` of every anchor, ``(B, 2)``; needs pairs with moments.

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
        return pairs.real(temperature_gradient(alpha, self.rho, sum_wh, self.tau, self.multiply_tau))

    def alpha_slope(self) -> Tensor:
        """Derivative of the value with respect to ``alpha``, ``(B, 2)``."""
        like = self.pairs.positive
        factor = self.tau if self.multiply_tau else 1.0
        slope = factor.to(like.dtype) if isinstance(factor, Tensor) else like.new_full((), factor)
        return self.pairs.real(slope.expand(like.shape)) / like.numel()

    def feature_gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients with respect to this rank's features, weights held as estimated; uses up the pairs.

        Collective where the normalizer gives the weights.
        """
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

    def alpha_gradients(self) -> tuple[Tensor, Tensor] | None:
        """What the features of the whole batch get by way of ``alpha``; ``None``: it is held constant. Collective."""
        through = self.estimate.through_alpha
        return None if through is None else through(self.alpha_slope())


def reduce_like(gradient: Tensor, tau: Tensor) -> Tensor:
    """Mean of ``G`` over the anchors, summed to the shape that ``tau`` was broadcast from."""
    gradient = gradient / gradient.numel()
    return (gradient.sum_to_size(tau.shape) if tau.dim() else gradient.sum()).to(tau.dtype)


@dataclass
class Summary:
    """What :attr:`ContrastiveEstimator.metrics` are computed from, when somebody asks.

    Attributes:
        alpha: log-normalizers, ``(B, 2)``.
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
        spread = torch.as_tensor(self.tau, dtype=self.alpha.dtype, device=self.alpha.device).flatten()
        return {
            "log_normalizer": self.alpha.mean(),
            "effective_negatives": torch.cat([side.effective() for side in self.sides]).nanmean(),
            "tau_q10": spread.quantile(0.1),
            "tau_median": spread.quantile(0.5),
            "tau_q90": spread.quantile(0.9),
            "new_rows": (self.count == 0).any(dim=1).sum(),
        }
