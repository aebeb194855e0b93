"""Value and gradients of the estimated objective, once pairs, log-normalizers and temperatures are known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compopt.anchors import MASKED, AnchorStatistics
from compopt.component import Estimate
from compopt.functional import Scalar, temperature_gradient

NORM_MIN = 1e-12  # as F.normalize
# Similarities of rows below this norm stay above what stands for "not a pair".
NORM_MAX = math.sqrt(-MASKED)


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


def through_normalization(gradient: Tensor, unit: Tensor, norm: Tensor) -> Tensor:
    """Gradient with respect to ``z`` from the one with respect to ``unit = z / |z|``; overwrites the latter."""
    radial = torch.linalg.vecdot(gradient, unit).unsqueeze(1)
    return gradient.addcmul_(radial, unit, value=-1).div_(norm)


def reduce_like(gradient: Tensor, tau: Tensor) -> Tensor:
    """Mean of ``G`` over the anchors, summed to the shape that ``tau`` was broadcast from."""
    gradient = gradient / gradient.numel()
    return (gradient.sum_to_size(tau.shape) if tau.dim() else gradient.sum()).to(tau.dtype)


def prepare(z: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Features in working precision without their graph, normalised if asked for, and the norms they had.

    A bad row is NaN throughout: one with a NaN or an infinity, one whose norm overflows (it would be normalised to
    zero), or, not normalised, one whose norm reaches 1e15. A row too short to be normalised is a zero row.
    """
    z = z.detach().to(torch.promote_types(z.dtype, torch.float32))
    norm = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    if not normalize:
        return torch.where(norm < NORM_MAX, z, torch.nan), None
    norm = norm.masked_fill_(norm.isinf(), torch.nan).clamp_(min=NORM_MIN)
    return z / norm, norm
