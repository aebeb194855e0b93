"""Estimated objective of a batch: value and gradients in closed form, and a summary of its intermediate results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from compopt import functional as F
from compopt.estimator.parts import Call, Estimate
from compopt.functional import Scalar
from compopt.kernel.features import Features, TensorGradient, full_precision


@dataclass
class Objective:
    r"""Mean of ``tau_i (alpha_i + rho_i)``, or of ``alpha_i``, over samples and directions.

    Wrappers average gradients over ranks. Gradients of tensors of which every rank has a part (features, temperatures
    per sample) are therefore multiplied by the number of ranks; those of tensors that are equal on all ranks are not.

    Attributes:
        call: the samples of all ranks, the statistics of their pairs, and the temperatures.
        estimate: the output of the normalizer for this call.
        rho: radius of the KL constraint, per anchor or the same for all.
        multiply_tau: ``False``: the objective is the mean of ``alpha_i``, with weights ``w / tau``.
    """

    call: Call
    estimate: Estimate
    rho: Scalar
    multiply_tau: bool

    def __post_init__(self) -> None:
        self.batch, self.pairs, self.tau = self.call.batch, self.call.pairs, self.call.tau
        self.ranks = len(self.batch.sizes)
        self.alpha = self._per_anchor(self.estimate.alpha)  # log-normalizers, (B, A)
        self._level = self.alpha if isinstance(self.rho, float) and self.rho == 0 else self.alpha + self.rho

    @cached_property
    def _sum_weights(self) -> Tensor:
        """``sum_j w_ij``."""
        return self.pairs.sum_weights(self._weight_alpha)

    @cached_property
    def _weight_alpha(self) -> Tensor:
        """Log-normalizers of the pairs' weights, ``(B, A)``."""
        given = self.estimate.weight_alpha
        return self.alpha if given is None else self._per_anchor(given)

    def _per_anchor(self, value: Tensor) -> Tensor:
        """Expand a column that both directions share to ``(B, A)``."""
        return value if value.shape == self.pairs.shape else value.expand(self.pairs.shape)

    def value(self) -> Tensor:
        """Return the objective, 0-d."""
        return self._real(self.tau * self._level if self.multiply_tau else self.alpha).mean()

    def _real(self, per_anchor: Tensor) -> Tensor:
        """Set values of anchors without negatives, in the batch or outside of it, to zero."""
        return self.pairs.real(per_anchor, self.estimate.outside_count)

    # -- gradients of temperatures -----------------------------------------------------------------------------

    def tau_gradients(self) -> Tensor:
        """Return ``G(tau_i)`` of every anchor, ``(B, A)``; needs pairs with moments.

        With ``estimate.target`` the objective is NeuCLIP's ``exp(-alpha)(eps + g) + alpha - 1``. Since ``alpha`` is not
        its exact minimiser, the derivative has the additional term ``exp(-alpha)(eps + ghat) - 1``.
        With ``estimate.positive_weight`` ``p_i``, ``sum_j w_ij s_ij - p_i s_ii`` replaces ``sum_j w_ij h_ij``.
        """
        pairs, estimate, level = self.pairs, self.estimate, self._level
        sum_wh = pairs.sum_wh(self._weight_alpha) if estimate.weights is None else estimate.weights.sum_wh
        if estimate.outside_wh is not None:
            sum_wh = sum_wh + estimate.outside_wh
        if estimate.positive_weight is not None:
            sum_wh = sum_wh - (estimate.positive_weight - self._sum_weights) * pairs.positive
        if estimate.target is not None and self.multiply_tau:
            level = level + (estimate.target - estimate.alpha).expm1_()
        return self._real(F.temperature_gradient(level, 0.0, sum_wh, self.tau, self.multiply_tau))

    def temperature_gradient(self, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return a temperature with a graph, and its gradient: the mean of ``G``, summed to the temperature's shape.

        A scalar receives the whole gradient, a tensor per sample receives the part of this rank.
        """
        g = self.tau_gradients()
        if tau.dim() == 0:
            return tau, (g / g.numel()).sum().to(tau.dtype)
        g, share = g[self.batch.own], len(tau) * self.ranks / len(self.batch.rows) if self.ranks > 1 else 1
        return tau, (g / g.numel()).sum_to_size(tau.shape).to(tau.dtype) * share

    def learned_gradients(self) -> list[TensorGradient]:
        """Return pairs of a parameter of the normalizer and its whole gradient."""
        shape = self.pairs.shape
        return [(p, (self._alpha_slope() * d.expand(shape)).sum().to(p.dtype)) for p, d in self.estimate.learned]

    # -- gradients of features, with constant pair weights -----------------------------------------------------

    def feature_gradients(self, own: Features, negatives: Features | None) -> list[TensorGradient]:
        """Return the features and ``negatives`` of this rank with their gradients; consumes the pairs."""
        gradient, of_negatives = self._weighted()
        if self.estimate.through_alpha is not None:
            self.estimate.through_alpha(self._alpha_slope(), gradient)
        found = [own.pull_back(gradient if self.ranks == 1 else gradient.mul_(self.ranks))]
        if negatives is not None and of_negatives is not None:
            found.append(negatives.pull_back(of_negatives[None].mul_(self.ranks)))
        return found

    def serve_others(self) -> None:
        """Take part in the gradients of other ranks, or of features outside the batch, if this rank's need none."""
        if self.estimate.weights is not None and self.estimate.weights.serves:
            self._weighted()
        if self.estimate.through_alpha is not None:
            self.estimate.through_alpha(self._alpha_slope(), None)

    def _alpha_slope(self) -> Scalar:
        """Return the derivative of the value with respect to ``alpha``, a number or ``(B, A)``."""
        pairs, slope = self.pairs, (self.tau if self.multiply_tau else 1.0) / self.alpha.numel()
        if not isinstance(slope, Tensor):
            if isinstance(pairs.count, float):
                return slope
            slope = self.alpha.new_full((), slope)
        return self._real(slope.to(pairs.dtype).expand(pairs.shape))

    def _weighted(self) -> tuple[Tensor, Tensor | None]:
        """Return ``sum_i (tau_i w_ij / A B) grad h_ij`` for this rank's features and further candidates."""
        alpha, dtype = self._weight_alpha, self.pairs.dtype
        alpha = alpha if alpha.dtype == dtype else alpha.to(dtype)
        share = 1.0 / alpha.numel()
        # grad (h / tau) contributes a factor 1 / tau, which multiply_tau cancels
        coefficient = share if self.multiply_tau else share / self.tau
        if isinstance(coefficient, Tensor):
            coefficient = coefficient.to(dtype)
        if self.estimate.weights is not None:
            return self.estimate.weights.gradients(coefficient), None
        weight = self.estimate.positive_weight  # None: that of the negatives
        return self.pairs.gradients(alpha, coefficient, weight.to(dtype) if isinstance(weight, Tensor) else weight)


@dataclass
class Summary:
    """Results of the last call, from which :attr:`ContrastiveEstimator.metrics` are computed on request.

    Attributes:
        alpha: log-normalizers, ``(B, A)``.
        tau: temperatures.
        effective: function that returns the effective numbers of negatives of the first anchors, by direction.
        log_sum: function that returns ``log sum_j exp(h_ij / tau_i)``, ``(B, A)``.
        negatives: the number of negatives, ``|N_i|``.
        rows: data-set positions, ``(B, R)``.
        count: visits so far, ``(B, D)``; ``None`` if visits are not counted.
    """

    alpha: Tensor
    tau: float | Tensor
    effective: Callable[[], list[Tensor]]
    log_sum: Callable[[], Tensor]
    negatives: Scalar
    rows: Tensor
    count: Tensor | None

    @classmethod
    def of(cls, objective: Objective) -> Summary:
        """Return the summary of a call from its objective."""
        batch, pairs, alpha = objective.batch, objective.pairs, objective.alpha
        sums = pairs.effective, partial(getattr, pairs, "log_sum"), pairs.count
        return cls(alpha, objective.tau, *sums, batch.rows, batch.visits)

    def evaluated(self) -> Summary:
        """Return the summary with results in place of functions that hold the features, and without views."""
        count, sums = self.count, (partial(list[Tensor], self.effective()), partial(torch.clone, self.log_sum()))
        return replace(self, effective=sums[0], log_sum=sums[1], count=None if count is None else count.clone())

    def metrics(self) -> dict[str, Tensor]:
        """Return the metrics as 0-d tensors, without waiting for the device."""
        tau = self.tau if isinstance(self.tau, Tensor) else self.alpha.new_full((1,), self.tau)  # no copy, no wait
        spread = tau.to(self.alpha.dtype).flatten()
        return {
            "log_normalizer": self.alpha.mean(),
            "info_nce": self.cross_entropy().mean(),
            "effective_negatives": self._effective_negatives(),
            "tau_q10": spread.quantile(0.1),
            "tau_median": spread.quantile(0.5),
            "tau_q90": spread.quantile(0.9),
            "new_rows": self._new_rows(),
        }

    def _effective_negatives(self) -> Tensor:
        with full_precision(self.alpha.device):
            return torch.cat(self.effective()).nanmean()

    def cross_entropy(self) -> Tensor:
        """Return ``-log softmax`` of each anchor's positive among its candidates, ``(B, A)``; 0 without negatives."""
        loss = softplus(self.log_sum(), threshold=60.0)
        return torch.where(self.negatives > 0, loss, 0) if isinstance(self.negatives, Tensor) else loss

    def _new_rows(self) -> Tensor:
        """Return the number of samples that have not been visited before, each counted once."""
        index = self.rows[:, 0]
        if self.count is None:
            return index.new_zeros(())
        new = (self.count == 0).any(dim=1)
        names = index.masked_fill(~new, -1).sort().values
        return (torch.diff(names, prepend=names.new_full((1,), -1)) != 0).sum()
