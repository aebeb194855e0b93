"""Value and gradients of the estimated objective, once pairs, log-normalizers and temperatures are known."""

from __future__ import annotations

from torch import Tensor

from compopt.estimator.component import Estimate
from compopt.functional import Scalar, temperature_gradient
from compopt.kernel.statistics import AnchorStatistics


def value(pairs: AnchorStatistics, alpha: Tensor, rho: Scalar, tau: Scalar, multiply_tau: bool) -> Tensor:
    """Mean of ``tau_i (alpha_i + rho_i)``, or of ``alpha_i``, over samples and directions, 0-d."""
    terms = tau * (alpha + rho) if multiply_tau else alpha
    return pairs.real(terms).mean()


def alpha_slope(pairs: AnchorStatistics, tau: Scalar, multiply_tau: bool) -> Tensor:
    """Derivative of :func:`value` with respect to ``alpha``, ``(B, 2)``."""
    like = pairs.positive
    factor = tau if multiply_tau else 1.0
    slope = factor.to(like.dtype) if isinstance(factor, Tensor) else like.new_full((), factor)
    return pairs.real(slope.expand(like.shape)) / like.numel()


def tau_gradient(pairs: AnchorStatistics, estimate: Estimate, rho: Scalar, tau: Scalar, multiply_tau: bool) -> Tensor:
    """``G(tau_i)`` of every anchor, ``(B, 2)``; needs pairs with moments.

    ``estimate.slack``: ``exp(-alpha)(eps + ghat) - 1``, where the objective is NeuCLIP's
    ``exp(-alpha)(eps + g) + alpha - 1`` and ``alpha`` no exact minimiser of it.
    With ``estimate.positive_weight`` ``p_i``, what stands in the place of ``sum_j w_ij h_ij`` is
    ``sum_j w_ij s_ij - p_i s_ii``.
    """
    assert pairs.mean_h is not None
    alpha = estimate.alpha.expand(-1, 2)
    sum_wh = pairs.sum_weights(alpha) * pairs.mean_h if estimate.weights is None else estimate.weights.sum_wh
    if estimate.positive_weight is not None:
        sum_wh = sum_wh - (estimate.positive_weight - pairs.sum_weights(alpha)) * pairs.positive
    if estimate.slack is not None and multiply_tau:
        alpha = alpha + estimate.slack
    return pairs.real(temperature_gradient(alpha, rho, sum_wh, tau, multiply_tau))


def feature_gradients(pairs: AnchorStatistics, estimate: Estimate, tau: Scalar, multiply_tau: bool) -> list[Tensor]:
    """Gradients of the value with respect to both feature matrices, weights held as estimated; uses up the pairs."""
    alpha = estimate.alpha.expand(-1, 2).to(pairs.positive.dtype)
    share = 1.0 / alpha.numel()
    coefficient = share if multiply_tau else share / tau
    if not isinstance(coefficient, Tensor):
        coefficient = alpha.new_full((), coefficient)
    coefficient = coefficient.to(alpha.dtype)
    if estimate.weights is not None:
        return list(estimate.weights.gradients(coefficient))
    weight = estimate.positive_weight
    return list(pairs.gradients(alpha, coefficient, None if weight is None else weight.to(alpha.dtype)))


def reduce_like(gradient: Tensor, tau: Tensor) -> Tensor:
    """Mean of ``G`` over the anchors, summed to the shape that ``tau`` was broadcast from."""
    gradient = gradient / gradient.numel()
    return (gradient.sum_to_size(tau.shape) if tau.dim() else gradient.sum()).to(tau.dtype)
