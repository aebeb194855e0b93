"""Intermediate results of a call, from which metrics are computed on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from compopt.functional import Scalar
from compopt.objective import Objective


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
            "effective_negatives": torch.cat(self.effective()).nanmean(),
            "tau_q10": spread.quantile(0.1),
            "tau_median": spread.quantile(0.5),
            "tau_q90": spread.quantile(0.9),
            "new_rows": self._new_rows(),
        }

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
