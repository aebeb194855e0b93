"""Losses that compare positives with the rest of the batch: average precision and partial AUC."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt import functional as F
from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs
from compopt.checks.inputs import check_vector
from compopt.estimator.base import Estimator
from compopt.estimator.groups import GroupSpec, Hyper
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.losses.base import CHECKS, TOTAL, CompositionalLoss, check_same_shape, check_scores, log_mean_exp
from compopt.losses.compositional import Domain
from compopt.stores.rows import Column


class PairLoss(CompositionalLoss):
    r"""Base class of losses that compare each positive sample with the other samples of the batch.

    Example:
        >>> import torch, compopt
        >>> class Logistic(compopt.losses.AveragePrecisionLoss):
        ...     surrogate = staticmethod(torch.nn.functional.softplus)

    ``l_ij = max(0, margin - (s_i - s_j))^2`` is the surrogate of "j is ranked above the positive i"; a subclass with
    another :meth:`surrogate` replaces it. Only the rows of positives are used; those of negatives stay empty.
    """

    @outside_of_graphs
    def __call__(self, scores: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """Return the loss.

        Args:
            scores: predictions of any scale, with their graph, ``(B,)``; with several ranks, of this rank's samples.
            labels: labels, positive if > 0, not NaN, ``(B,)``, preferably on the CPU, since the host reads them.
            index: data-set positions, ``(B,)`` integers.

        Raises:
            TypeError: scores that are not a floating-point tensor, an index without integers.
            ValueError: wrong shapes, a label that is NaN; a batch without positives, or without negatives if the loss
                needs them.
            IndexError: the index of a positive is outside ``0 .. n - 1``.
        """
        with self._guard():
            check_scores("scores", scores, 1)
            labels = check_same_shape("labels", labels, scores).cpu()
            if bool(labels.isnan().any()):
                sample = int(labels.isnan().nonzero()[0])
                raise ValueError(f"labels must be numbers, got nan for sample {sample}; leave such samples out")
            index = check_vector("index", index, len(scores))
            own, others = (torch.nonzero(x)[:, 0] for x in (labels > 0, labels <= 0))
        given = [scores[at.to(scores.device)] for at in (own, others)]
        return self._compose(index[own.to(index.device)], given, {})

    def surrogate(self, x: Tensor) -> Tensor:
        """Return ``max(0, x)^2`` of ``margin - (s_i - s_j)``."""
        return x.relu().square()

    def pairs(self, given: Sequence[Tensor], hyper: Hyper) -> Tensor:
        """Return ``l_ij`` of positives and negatives, ``(P, N)``."""
        if not len(given[1]):
            raise ValueError("the batch has no negatives on any rank: skip it, or draw batches with some in each")
        return self.surrogate(hyper("margin") - (given[0][:, None] - given[1]))


class AveragePrecisionLoss(PairLoss):
    r"""Average precision (area under the precision-recall curve) of a binary classifier, by SOAP.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.AveragePrecisionLoss(n=100)
        >>> scores = torch.tensor([0.3, 0.1, -0.4], requires_grad=True)
        >>> loss(scores, torch.tensor([1, 0, 0]), torch.tensor([7, 42, 3])).backward()
        >>> scores.grad.sign().tolist()  # the positive goes up, the negatives go down
        [-1.0, 1.0, 1.0]
        >>> loss.step()
        >>> loss.read(torch.tensor([7, 42]))["count"].tolist()
        [1, 0]

    .. math::
        F = -\frac{1}{n_+} \sum_{y_i = 1} \frac{g_{i1}}{g_{i2}}, \qquad
        g_{i1} = E_j\, [y_j = 1]\, \ell_{ij}, \qquad g_{i2} = E_j\, \ell_{ij}, \qquad
        \ell_{ij} = \max(0, \text{margin} - (s_i - s_j))^2

    Args:
        n: number of samples of the data set, or a list of sample groups.
        gamma: in (0, 1]; weight of the newest value of both averages.
        margin: > 0.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per positive: both averages (``u``, two values) and the number of visits. The first visit stores the values
    themselves.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Qi et al., Stochastic Optimization of Areas Under Precision-Recall Curves with Provable Convergence, NeurIPS
        2021 (SOAP).
    """

    domain: Domain = "linear"
    width = 2
    checked_by = CHECKS | {"margin": checks.positive}  # a positive's own pair keeps the denominator above 0

    @takes_options(Estimator, PlacementOptions)
    def __init__(
        self, n: GroupSpec, gamma: float = 0.9, margin: float = 1.0, **placement: Unpack[PlacementOptions]
    ) -> None:
        super().__init__(n, {"gamma": gamma, "margin": margin}, **placement)

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        each = self.surrogate(hyper("margin") - (given[0][:, None] - torch.cat([*given])))
        return torch.stack([each[:, : len(given[0])].sum(1) / each.shape[1], each.mean(1)], dim=1)

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return -u[:, 0] / u[:, 1]


class PartialAUCLoss(PairLoss):
    r"""One-way partial AUC (low false positive rates) with KL-regularised weights of negatives, by SOPA-s.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.PartialAUCLoss(n=100, tau=0.1)
        >>> scores = torch.tensor([0.3, 0.1, -0.4], requires_grad=True)
        >>> loss(scores, torch.tensor([1, 0, 0]), torch.tensor([7, 42, 3])).backward()
        >>> bool(scores.grad[1] > 10 * scores.grad[2])  # nearly all weight on the hardest negative
        True

    .. math::
        F = \frac{1}{n_+} \sum_{y_i = 1} \tau \log E_{y_j = 0}\, e^{\ell_{ij} / \tau}, \qquad
        \ell_{ij} = \max(0, \text{margin} - (s_i - s_j))^2

    Args:
        n: number of samples of the data set, or a list of sample groups.
        gamma: in (0, 1]; weight of the newest value.
        tau: weight of the KL term; a small value emphasises the hardest negatives (low false positive rates).
        margin: margin of the surrogate.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per positive: ``log_u`` in nats, and the number of visits.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Zhu et al., When AUC meets DRO, ICML 2022 (SOPA-s).
    """

    @takes_options(Estimator, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        tau: float = 1.0,
        margin: float = 1.0,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        super().__init__(n, {"gamma": gamma, "tau": tau, "margin": margin}, **placement)

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        return log_mean_exp(self.pairs(given, hyper) / hyper("tau"), 1)

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return (hyper("tau") * u)[:, 0]


class TwoWayPartialAUCLoss(PartialAUCLoss):
    r"""Two-way partial AUC (low false, high true positive rates), KL-regularised on both sides, by SOTA-s.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.TwoWayPartialAUCLoss(n=100, tau=0.5, tau_positive=0.1)
        >>> scores = torch.tensor([0.3, -0.9, -0.4], requires_grad=True)
        >>> loss(scores, torch.tensor([1, 1, 0]), torch.tensor([7, 42, 3])).backward()
        >>> bool(scores.grad[1] < 10 * scores.grad[0] < 0)  # nearly all weight on the hardest positive
        True

    .. math::
        F = \tau_+ \log E_{y_i = 1} \left( E_{y_j = 0}\, e^{\ell_{ij} / \tau} \right)^{\tau / \tau_+}, \qquad
        \ell_{ij} = \max(0, \text{margin} - (s_i - s_j))^2

    Args:
        n, gamma, tau, margin: as in :class:`PartialAUCLoss`; ``gamma`` is also used for the average of the outer
            expectation.
        tau_positive: weight of the KL term of positives; a small value emphasises the hardest positives. The value of
            the first sample group is used.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State: ``log_u`` per positive, in nats, and the number of visits; the average of the outer expectation, ``log_v``.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Zhu et al., When AUC meets DRO, ICML 2022 (SOTA-s).
    """

    numbers = TOTAL

    @takes_options(Estimator, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        tau: float = 1.0,
        tau_positive: float = 1.0,
        margin: float = 1.0,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        hyper = {"gamma": gamma, "tau": tau, "tau_positive": tau_positive, "margin": margin}
        CompositionalLoss.__init__(self, n, hyper, **placement)

    def weights(self, u: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor]:
        tau, tau_positive = hyper("tau"), hyper.of_first_group()("tau_positive")
        powers = u * (tau / tau_positive)
        log_v = self._total(log_mean_exp(powers, 0), batch, hyper)
        return tau_positive * log_v, tau * (powers - log_v).exp() / len(u)


class CVaRPartialAUCLoss(PairLoss):
    r"""One-way partial AUC up to a bound of the false positive rate, without KL smoothing, by SOPA.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.CVaRPartialAUCLoss(n=100, max_fpr=0.5, lr=1.0)
        >>> scores = torch.tensor([0.0, 0.1, -0.4], requires_grad=True)
        >>> for _ in range(2):
        ...     value = loss(scores, torch.tensor([1, 0, 0]), torch.tensor([7, 42, 3]))
        ...     loss.step()
        >>> value.backward()
        >>> [round(x, 4) for x in scores.grad.tolist()]  # only the hardest half of the negatives counts
        [-2.2, 2.2, 0.0]

    .. math::
        F = \frac{1}{n_+} \sum_{y_i = 1} \min_{c_i} \; c_i + \frac{1}{\beta}\, E_{y_j = 0} \max(0, \ell_{ij} - c_i),
        \qquad \ell_{ij} = \max(0, \text{margin} - (s_i - s_j))^2

    This is the mean over the share ``beta`` (``max_fpr``) of the hardest negatives of each positive. The threshold
    ``c_i`` is 0 initially and takes one step of subgradient descent at each visit.

    Args:
        n: number of samples of the data set, or a list of sample groups.
        max_fpr: in (0, 1]; bound ``beta`` of the false positive rate.
        lr: step size of the thresholds, in units of ``l``.
        margin: margin of the surrogate.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per positive: ``threshold``, and the number of visits.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Zhu et al., When AUC meets DRO, ICML 2022 (SOPA), whose ``eta / n_+`` is ``lr`` here.
    """

    @takes_options(Estimator, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec,
        max_fpr: float = 0.2,
        lr: float = 0.1,
        margin: float = 1.0,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        super().__init__(n, {"max_fpr": max_fpr, "lr": lr, "margin": margin}, **placement)

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return [Column("threshold", 1, dtype)]

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        # the excess of each pair: estimate() needs both its mean and the share that is above 0
        return (self.pairs(given, hyper) - batch.of().columns["threshold"]).relu()

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        threshold, weight = batch.of().columns["threshold"], 1 / (hyper("max_fpr") * inner.shape[1])
        share = (inner > 0).sum(1, keepdim=True) + 0 * inner.sum(1, keepdim=True)  # NaN if a loss is NaN
        value = (threshold + weight * inner.sum(1, keepdim=True)).mean()
        slope = torch.zeros_like(inner) + weight / len(inner)
        return value, slope, {"threshold": threshold - hyper("lr") * (1 - weight * share)}


class TwoWayCVaRPartialAUCLoss(CVaRPartialAUCLoss):
    r"""Two-way partial AUC with bounds of the false and the true positive rate, by SOTA.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.TwoWayCVaRPartialAUCLoss(n=100, max_fpr=0.5, min_tpr=0.5, lr=1.0)
        >>> scores = torch.tensor([0.9, 0.0, 0.1, -0.4], requires_grad=True)
        >>> for _ in range(2):
        ...     value = loss(scores, torch.tensor([1, 1, 0, 0]), torch.tensor([7, 8, 42, 3]))
        ...     loss.step()
        >>> value.backward()
        >>> [round(x, 4) for x in scores.grad.tolist()]  # the hardest half of each side
        [0.0, -2.2, 2.2, 0.0]

    .. math::
        F = \min_{c'} \; c' + \frac{1}{\alpha}\, E_{y_i = 1} \max(0, g_i - c'), \qquad
        g_i = \min_{c_i} \; c_i + \frac{1}{\beta}\, E_{y_j = 0} \max(0, \ell_{ij} - c_i)

    This is the mean over the share ``alpha = 1 - min_tpr`` of the hardest positives, and for each of them over the
    share ``beta`` (``max_fpr``) of its hardest negatives. A moving average of ``g_i`` identifies the hardest positives.

    Args:
        n, max_fpr, lr, margin: as in :class:`CVaRPartialAUCLoss`; ``lr`` is also the step size of ``c'``.
        min_tpr: in [0, 1); lower bound of the true positive rate. The values of the first sample group are used for
            ``min_tpr``, and for ``lr`` in the steps of ``c'``.
        gamma: in (0, 1]; weight of the newest ``g_i``.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State: ``threshold`` (``c_i``) and ``u`` per positive, and the number of visits; one ``threshold`` ``c'``.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Zhu et al., When AUC meets DRO, ICML 2022 (SOTA).
    """

    numbers = ("threshold",)

    @takes_options(Estimator, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec,
        max_fpr: float = 0.2,
        min_tpr: float = 0.5,
        gamma: float = 0.9,
        lr: float = 0.1,
        margin: float = 1.0,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        hyper = {"max_fpr": max_fpr, "min_tpr": min_tpr, "gamma": gamma, "lr": lr, "margin": margin}
        CompositionalLoss.__init__(self, n, hyper, **placement)

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return [*super().columns(directions, dtype), Column("u", 1, dtype)]

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        _, slope, proposals = super().estimate(inner, batch, hyper)
        old, outermost = batch.of().columns["threshold"], hyper.of_first_group()
        g = old + inner.mean(1, keepdim=True) / hyper("max_fpr")
        u = F.linear_average(batch.of().columns["u"], g, hyper("gamma"), batch.of().unseen)
        state, share = self.working_state(batch.depositing)["threshold"], 1 - outermost("min_tpr")
        hard = (u > state).to(u.dtype)  # other positives change neither the model nor their thresholds
        if batch.depositing:
            new = state - outermost("lr") * (1 - (hard + 0 * u).mean() / share)
            self.deposit_state(threshold=batch.nan_if_bad(new).to(state))
        value = state + (u - state).relu().mean() / share
        moved = old + hard * (proposals["threshold"] - old)
        return value.to(u.dtype), slope * hard / share, {"threshold": moved, "u": u}
