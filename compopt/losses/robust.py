"""Robust risk: losses that an adversary reweights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs
from compopt.estimator.component import Component
from compopt.estimator.groups import GroupSpec, Hyper
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.losses.base import TOTAL, CompositionalLoss, check_scores, log_mean_exp
from compopt.stores.layout import Column


class RobustLoss(CompositionalLoss):
    r"""Risk that a KL-regularised adversary reweights: a soft maximum of losses, of each task or of all samples.

    .. math::
        F = \frac{1}{n} \sum_{i=1}^n \tau \log E_{z \sim P_i}\, e^{\ell(w; z) / \tau}
        \qquad \text{or, without } n, \qquad F = \tau \log E_z\, e^{\ell(w; z) / \tau}

    It is ``max_q E_q[l] - tau KL(q, p)``: a small ``tau`` looks at the largest losses only, a large one at the mean.

    Args:
        n: number of tasks, each with an average of its own; ``None``: one risk over all samples.
        gamma: in (0, 1]; the weight of the newest value.
        tau: weight of the KL term, in units of the losses.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State: ``log_u`` per task, in nats; without ``n`` one number, ``log_v``.

    Communicates, errors: as :class:`CompositionalLoss` and its call.

    References:
        Qi et al., An Online Method for A Class of Distributionally Robust Optimization with Non-Convex Objectives,
        NeurIPS 2021 (all samples); Wang and Yang, SOX, ICML 2022 (per task).

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.RobustLoss(tau=0.5)
        >>> each = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> loss(each).backward()
        >>> each.grad.tolist() == torch.tensor([0.0, 2.0]).softmax(0).tolist()
        True
    """

    numbers = TOTAL

    @takes_options(Component, PlacementOptions)
    def __init__(
        self, n: GroupSpec | None = None, gamma: float = 0.9, tau: float = 1.0, **placement: Unpack[PlacementOptions]
    ) -> None:
        super().__init__(n, {"gamma": gamma, "tau": tau}, **placement)

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return super().columns(directions, dtype) if self.own_groups else []

    @outside_of_graphs
    def __call__(self, losses: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the risk.

        Args:
            losses: of the samples, with their graph, ``(B,)``.
            index: the task of each, ``(B,)`` integers; nothing without ``n``.

        Raises:
            TypeError, ValueError, IndexError: wrong types, shapes, or a task outside ``0 .. n - 1``.
        """
        with self._engine.handshake.guard():
            check_scores("losses", losses, 1)
            index = self._index(index, len(losses))
        return self._compose(index, [losses], {})

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        return given[0][:, None] / hyper("tau")

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return (hyper("tau") * u)[:, 0]

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.own_groups:
            return super().estimate(inner, batch, hyper)
        tau, log_v = hyper("tau"), self._total(log_mean_exp(inner, 0), batch, hyper)
        return tau * log_v, tau * (inner - log_v).exp() / len(inner), {}
