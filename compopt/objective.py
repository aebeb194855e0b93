"""The estimated objective of a batch: its value, and its gradients in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import softplus

from compopt import functional as F
from compopt.batch import Batch
from compopt.estimator.call import Estimate
from compopt.functional import Scalar
from compopt.kernel.features import Features
from compopt.kernel.log_sum_exp import Sums
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

    @cached_property
    def _level(self) -> Tensor:
        """``alpha_i + rho_i``."""
        return self.alpha if isinstance(self.rho, float) and self.rho == 0 else self.alpha + self.rho

    @property
    def _weight_alpha(self) -> Tensor:
        """Log-normalizers of the pairs' weights, ``(B, A)``."""
        given = self.estimate.weight_alpha
        return self.alpha if given is None else given.expand_as(self.pairs.positive)

    @cached_property
    def _sum_weights(self) -> Tensor:
        """``sum_j w_ij``."""
        return self.pairs.sum_weights(self._weight_alpha)

    def value(self) -> Tensor:
        """The objective, 0-d."""
        terms = self.tau * self._level if self.multiply_tau else self.alpha
        return self.pairs.real(terms).mean()

    def tau_gradients(self) -> Tensor:
        """``G(tau_i)`` of every anchor, ``(B, A)``; needs pairs with moments.

        ``estimate.target``: where the objective is NeuCLIP's ``exp(-alpha)(eps + g) + alpha - 1`` and ``alpha`` no
        exact minimiser of it, its derivative has ``exp(-alpha)(eps + ghat) - 1`` on top.
        With ``estimate.positive_weight`` ``p_i``, what stands in the place of ``sum_j w_ij h_ij`` is
        ``sum_j w_ij s_ij - p_i s_ii``.
        """
        pairs, estimate, level = self.pairs, self.estimate, self._level
        assert pairs.mean_h is not None
        sum_wh = self._sum_weights * pairs.mean_h if estimate.weights is None else estimate.weights.sum_wh
        if estimate.outside_wh is not None:
            sum_wh = sum_wh + estimate.outside_wh
        if estimate.positive_weight is not None:
            sum_wh = sum_wh - (estimate.positive_weight - self._sum_weights) * pairs.positive
        if estimate.target is not None and self.multiply_tau:
            level = level + (estimate.target - estimate.alpha).expm1_()
        return pairs.real(F.temperature_gradient(level, 0.0, sum_wh, self.tau, self.multiply_tau))

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

    def feature_gradients(
        self, own: Features, extra: Features | None, graph: bool, elsewhere: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """This rank's features (their nodes) with their gradients, weights held as estimated; uses up the pairs.

        Args:
            own: this rank's features.
            extra: its further candidates, if there are any.
            graph: gradients may be wanted at all; if no features want any, what other ranks or other features wait for
                is computed nevertheless.
            elsewhere: whether weights of the normalizer's have gradients for others.
        """
        wanted = graph and (own.want_gradients or (extra is not None and extra.want_gradients))
        gradient: Tensor | None = None
        of_extra: Tensor | None = None
        if wanted or (self.estimate.weights is not None and elsewhere):
            gradient, of_extra = self._weighted()
        if self.estimate.through_alpha is not None and (wanted or self.ranks > 1):
            by_alpha = self.estimate.through_alpha(self._alpha_slope())
            if gradient is not None:
                by_alpha = by_alpha if isinstance(by_alpha, Tensor) else torch.stack(by_alpha)
                gradient += by_alpha[:, self.batch.own]
        if not wanted or gradient is None:
            return []
        found = [own.pull_back(gradient if self.ranks == 1 else gradient * self.ranks)]
        if extra is not None and of_extra is not None:
            found.append(extra.pull_back(of_extra[None] if self.ranks == 1 else of_extra[None] * self.ranks))
        return found

    def _alpha_slope(self) -> Tensor:
        """Derivative of the value with respect to ``alpha``, ``(B, A)``."""
        like = self.pairs.positive
        slope = (self.tau if self.multiply_tau else 1.0) / like.numel()
        slope = slope.to(like.dtype) if isinstance(slope, Tensor) else like.new_full((), slope)
        return self.pairs.real(slope.expand_as(like))

    def _weighted(self) -> tuple[Tensor, Tensor | None]:
        """``sum_i (tau_i w_ij / A B) grad h_ij`` of this rank's features, and of its further candidates."""
        alpha = self._weight_alpha.to(self.pairs.positive.dtype)
        share = 1.0 / alpha.numel()
        coefficient = share if self.multiply_tau else share / self.tau
        if isinstance(coefficient, Tensor):
            coefficient = coefficient.to(alpha.dtype)
        if self.estimate.weights is not None:
            return self.estimate.weights.gradients(coefficient), None
        weight = self._sum_weights if self.estimate.positive_weight is None else self.estimate.positive_weight
        weight = weight.to(alpha.dtype) if isinstance(weight, Tensor) else weight
        return self.pairs.gradients(alpha, coefficient, weight)


@dataclass
class Summary:
    """What :attr:`ContrastiveEstimator.metrics` are computed from, when somebody asks.

    Attributes:
        alpha: log-normalizers, ``(B, A)``.
        tau: temperatures.
        sides: sums over the weights, by direction.
        log_sum, negatives: of the pairs: ``log sum_j exp(h_ij / tau_i)``, ``(B, A)``, and ``|N_i|``.
        index: data-set positions, ``(B,)``.
        count: visits so far, ``(B, D)``; ``None`` where none are counted.
    """

    alpha: Tensor
    tau: float | Tensor
    sides: list[Sums]
    log_sum: Tensor
    negatives: Scalar
    index: Tensor
    count: Tensor | None

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors; nothing waits for the device."""
        tau = self.tau if isinstance(self.tau, Tensor) else self.alpha.new_full((1,), self.tau)  # no copy, no wait
        spread = tau.to(self.alpha.dtype).flatten()
        return {
            "log_normalizer": self.alpha.mean(),
            "info_nce": self._cross_entropy().mean(),
            "effective_negatives": torch.cat([side.effective() for side in self.sides]).nanmean(),
            "tau_q10": spread.quantile(0.1),
            "tau_median": spread.quantile(0.5),
            "tau_q90": spread.quantile(0.9),
            "new_rows": self._new_rows(),
        }

    def _cross_entropy(self) -> Tensor:
        """``-log softmax`` of each anchor's positive among its candidates, ``(B, A)``; 0 without negatives."""
        loss = softplus(self.log_sum, threshold=60.0)
        return torch.where(self.negatives > 0, loss, 0) if isinstance(self.negatives, Tensor) else loss

    def _new_rows(self) -> Tensor:
        """How many samples have not been visited before, each counted once."""
        if self.count is None:
            return self.index.new_zeros(())
        new = (self.count == 0).any(dim=1)
        names = self.index.masked_fill(~new, -1).sort().values
        return (torch.diff(names, prepend=names.new_full((1,), -1)) != 0).sum()
