"""What a normalizer and a temperature make of one batch: weights, proposals, the value and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compopt import objective
from compopt.estimator.batch import Visit
from compopt.estimator.component import Call, Estimate
from compopt.kernel.distributed import GatheredPairs
from compopt.kernel.features import Encoder
from compopt.kernel.local import Pairs
from compopt.kernel.statistics import AnchorStatistics
from compopt.kernel.sums import RunningSums

if TYPE_CHECKING:
    from compopt.contrastive import ContrastiveEstimator


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
    sides: list[RunningSums]
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


def statistics(
    est: ContrastiveEstimator, visit: Visit, a: Tensor, b: Tensor, tau: float | Tensor, moments: bool
) -> AnchorStatistics:
    """The kernel: all pairs of the batch, or those of this rank's anchors.

    Args:
        est: the estimator.
        visit: the samples of all ranks.
        a, b: this rank's features.
        tau: temperatures of the whole batch.
        moments: a temperature's derivative will be asked for.
    """
    keys = list(visit.keys.values())
    options: dict[str, Any] = {
        "distinct": visit.distinct,
        "unimodal": est.mode == "unimodal",
        "bounded": est.normalize,
        "chunk_size": est.chunk_size,
        "moments": moments,
    }
    if est._ranks.size == 1:
        return Pairs(a, b, tau, keys, **options)
    return GatheredPairs((a, b), features_of_all(est, visit, a, b), tau, keys, est._ranks, visit.sizes, **options)


def features_of_all(est: ContrastiveEstimator, visit: Visit, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Features of the whole batch."""
    return (a, b) if est._ranks.size == 1 else (visit.payload[0], visit.payload[1])


def tau_of_all(visit: Visit, tau: float | Tensor) -> float | Tensor:
    """Temperatures of the whole batch, without their graph."""
    if isinstance(tau, Tensor) and tau.dim() and len(visit.payload) > 2:
        return visit.payload[2]
    return tau.detach() if isinstance(tau, Tensor) else tau


class Evaluation:
    """One batch of one estimator.

    Args:
        est: whose parts decide.
        visit: the samples of all ranks and their rows.
        pairs: the kernel's statistics.
        tau: temperatures of the whole batch, without a graph.
        features: of the whole batch.
        encoder: for samples outside the batch.

    Attributes:
        call: what the parts are shown.
        estimate, alpha: the normalizer's, after :meth:`decide`.
    """

    estimate: Estimate
    alpha: Tensor

    def __init__(
        self,
        est: ContrastiveEstimator,
        visit: Visit,
        pairs: AnchorStatistics,
        tau: float | Tensor,
        features: tuple[Tensor, Tensor],
        encoder: Encoder | None = None,
    ) -> None:
        self._est, self._visit, self._encoder, self._ranks = est, visit, encoder, est._ranks
        self.pairs, self.tau = pairs, tau
        self.call = Call(
            rows=visit.columns,
            count=visit.columns["count"],
            hyper=visit.hypers("normalizer"),
            tau=tau,
            pairs=pairs,
            features=features,
            keys=visit.keys,
            own=visit.own,
            sizes=visit.sizes,
            chunk_size=est.chunk_size,
            encoder=encoder,
            t=est.t,
            window=est.pending,
            training=visit.depositing,
            unimodal=est.mode == "unimodal",
        )

    # -- the two parts -----------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Ask the normalizer; a network learns here."""
        self.estimate = self._est.normalizer.estimate(self.call)
        self.alpha = self.estimate.alpha.expand(-1, 2)
        self.call.hyper = self._visit.hypers("temperature")
        self._rho = self._est.temperature.rho(self.call.hyper)

    def proposals(self) -> dict[str, Tensor]:
        """New values of the rows, by column."""
        proposals = dict(self.estimate.proposals)
        if self._est.temperature.learns:
            g = objective.tau_gradient(self.pairs, self.estimate, self._rho, self.tau, self._est.multiply_tau)
            proposals.update(self._est.temperature.update(self.call, g))
        return proposals

    def valid(self) -> Tensor | None:
        """Anchors without any negative (possible with index2 and group) propose nothing."""
        if len(self.pairs.keys) == 1:
            return None
        valid = self.pairs.count > 0
        return valid.all(dim=1, keepdim=True) if self._est.mode == "unimodal" else valid

    # -- the objective -----------------------------------------------------------------------------------------

    def value(self) -> Tensor:
        """The estimated objective, 0-d."""
        return objective.value(self.pairs, self.alpha, self._rho, self.tau, self._est.multiply_tau)

    def feature_gradients(self, wanted: bool) -> list[Tensor]:
        """For the own features, if ``wanted``. What follows may be collective: no rank may skip it."""
        pairs, estimate, multiply_tau, ranks = self.pairs, self.estimate, self._est.multiply_tau, self._ranks.size
        elsewhere = ranks > 1 or (self._encoder is not None and self._encoder.wants_gradients)
        computed: list[Tensor] = []
        if wanted or (estimate.weights is not None and elsewhere):
            computed = objective.feature_gradients(pairs, estimate, self.tau, multiply_tau)
        gradients = computed if wanted else []
        if estimate.through_alpha is not None and (wanted or ranks > 1):
            more = estimate.through_alpha(objective.alpha_slope(pairs, self.tau, multiply_tau))
            for gradient, rest in zip(gradients, more, strict=False):
                gradient.add_(rest[self._visit.own])
        return [gradient * ranks for gradient in gradients] if ranks > 1 else gradients

    def tau_gradient(self, tau: Tensor) -> Tensor:
        """For a temperature with a graph: a scalar gets the whole gradient, a tensor per sample this rank's part.

        A part is multiplied by the number of ranks, as feature gradients are; the whole is the same on all ranks
        and survives an average as it is.
        """
        g = objective.tau_gradient(self.pairs, self.estimate, 0.0, self.tau, self._est.multiply_tau)
        if tau.dim() == 0 or self._ranks.size == 1:
            return objective.reduce_like(g, tau)
        return objective.reduce_like(g[self._visit.own], tau) * (len(tau) * self._ranks.size / len(g))

    def summary(self) -> Summary:
        """For the metrics; keeps nothing of the batch's size squared."""
        first = self._visit.old is None
        count = self.alpha.new_ones((1, 1)) if first else self._visit.columns["count"]
        return Summary(self.alpha, self.tau, self.pairs.sides, count)
