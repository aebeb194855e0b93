"""Losses beyond contrast: robust risks, average precision, partial AUC and rankings, with averages per sample."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compopt import checks
from compopt import functional as F
from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs, refuse_tangents, refuse_transforms
from compopt.checks.inputs import check_values, check_vector
from compopt.compositional import outer
from compopt.estimator.call import Setting
from compopt.estimator.component import Component
from compopt.estimator.groups import GroupSpec, Hyper, SampleGroups, as_groups
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.kernel.features import with_gradients, working_dtype
from compopt.normalizers.moving_average import DOMAINS, Domain
from compopt.stores.layout import Column

if TYPE_CHECKING:
    from typing_extensions import Unpack

# How each hyper-parameter is checked.
CHECKS = {
    "gamma": checks.unit_interval,
    "tau": checks.positive,
    "tau_positive": checks.positive,
    "margin": checks.number,
    "lr": checks.positive,
    "max_fpr": checks.unit_interval,
    "min_tpr": checks.decay,
}


class CompositionalLoss(Component):
    r"""Base class of losses ``1/n sum_i f(u_i)``, ``u_i`` the moving average of an inner function ``g_i``.

    Each is an :class:`~compopt.Estimator`: a call deposits new averages, ``step()`` or ``attach(optimizer)`` commits
    them, ``state_dict()`` and :func:`compopt.save` keep them. A subclass defines :meth:`inner` and :meth:`outer`. The
    gradient is ``1/B sum_i f'(u_i) grad g_i``, as of :func:`compopt.compositional_loss`.

    Args:
        n: number of samples that rows are kept for, or a list of sample groups; ``None``: no rows.
        hyper: hyper-parameters that groups may override, ``gamma`` among them.
        process_group, offload, offload_dir, shard, dtype: placement, see :class:`~compopt.estimator.Component`.

    State, per sample: ``log_u`` (in nats), or ``u`` (``width`` values) with ``domain = "linear"``; the visits.

    Communicates, with several ranks: as :class:`~compopt.ContrastiveEstimator`, with a few floats per sample; those
    losses that compare samples gather the scores of the others too. K ranks have the values, the state and the mean
    gradient of one rank with the whole batch. Backward communicates nothing.
    """

    role = "loss"
    domain: Domain = "log"
    width = 1

    @takes_options(Component, PlacementOptions)
    def __init__(self, n: GroupSpec | None, hyper: Mapping[str, Any], **placement: Unpack[PlacementOptions]) -> None:
        super().__init__(None if n is None else as_groups(n), hyper, **placement)

    def check(self, group: Mapping[str, Any]) -> None:
        for name in self.own_defaults.keys() & CHECKS.keys():  # a subclass checks its own
            CHECKS[name](name, group[name])

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        name, reduce = DOMAINS[self.domain]
        return [Column(name, self.width, dtype, reduce)]

    @abstractmethod
    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        """Return inner values of the batch, or their logarithms, ``(B, k)``, differentiable in what was ``given``."""

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        """Return the objective of each sample, ``(B,)``, from averages as they are stored, ``(B, k)``."""
        raise NotImplementedError(f"{type(self).__name__} must define outer() or estimate()")

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss, its derivative with respect to inner values, and proposals for the rows."""
        name, _ = DOMAINS[self.domain]
        average = F.moving_average if self.domain == "log" else F.linear_average
        u = average(batch.columns[name], inner, hyper("gamma"), batch.unseen(name))
        value, slope = self.weights(u, batch, hyper)
        return value, slope * (inner - u).exp() if self.domain == "log" else slope, {name: u}

    def weights(self, u: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor]:
        """Return the loss, and its derivative with respect to averages as they are stored."""
        return outer(lambda x: self.outer(x, batch, hyper), u)

    def _compose(self, index: Tensor, given: Sequence[Tensor], values: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of ``given``: a tensor with an entry per sample, perhaps another one of other samples."""
        ranks, ready = self._engine.ranks, [x.detach().to(working_dtype(x.dtype)) for x in given]
        batch = self._read({"index": index}, {"given": ready[0], **values}, more=sum(map(len, ready[1:])))
        if not len(batch.rows):
            raise ValueError(
                f"the batch has no sample that {type(self).__name__} is a mean over, on any rank (no positive, or no "
                f"relevant item): skip it, or draw batches with some in each"
            )
        hyper = self._engine.groups.hyper(self.role, batch.rows, batch.dtype)
        everyone = (
            [batch.values["given"], *ranks.gather(ready[1:], batch.more)] if ready[1:] else [batch.values["given"]]
        )
        leaves = [x.detach().to(batch.dtype).requires_grad_(torch.is_grad_enabled()) for x in everyone]
        inner = self.inner(leaves, batch, hyper)
        value, slope, proposals = self.estimate(inner.detach(), batch, hyper)
        if batch.depositing:
            self._deposit(batch, proposals)
        value = batch.nan_if_bad(value)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
            return value
        first = sum(batch.more[: ranks.rank])
        own = [batch.own, slice(first, first + sum(map(len, ready[1:])))]
        # frameworks average gradients over ranks; this rank's share of the global mean must survive that
        gradients = [g[at] * ranks.size for g, at in zip(torch.autograd.grad(inner, leaves, slope), own, strict=False)]
        return with_gradients(value, list(zip(given, gradients, strict=True)))


def _checked(name: str, value: Tensor, axes: int) -> None:
    """Refuse values that are no scores of ``axes`` axes, and callers that would lose their derivatives."""
    refuse_transforms()
    refuse_tangents((name, value))
    check_values(name, value, ("(B,)", "(Q, L)")[axes - 1], axes)


def _alike(name: str, value: Any, like: Tensor) -> Tensor:
    """Return a tensor in the shape of ``like``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {tuple(like.shape)}, got {type(value).__name__}")
    if value.shape != like.shape:
        raise ValueError(f"{name} must have the shape {tuple(like.shape)}, as scores, got {tuple(value.shape)}")
    return value


def _grades(relevance: Tensor) -> Tensor:
    """Return the relevance of items on the host, which selects by it."""
    grades = relevance.cpu()
    bad = ~(grades >= 0) | (grades == torch.inf)
    if bool(bad.any()):
        raise ValueError(f"relevance must be finite and at least 0 (not relevant), got {grades[bad][0].item()!r}")
    return grades


# -- robust risk -------------------------------------------------------------------------------------------------------


def _log_mean_exp(x: Tensor) -> Tensor:
    return torch.logsumexp(x.flatten(), 0) - math.log(x.numel())


class _WithTotal(CompositionalLoss):
    """Loss with one more moving average, ``v``, for all samples together, kept as ``log_v``."""

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        super().joined(groups, setting)
        # float64: one number, which is averaged at every step
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        self.state = {"log_v": zero, "updates": zero.clone()}

    def _total(self, log_g: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        """Fold ``log_g``, 0-d, into ``log v`` and return that."""
        state = self.working_state(batch.depositing)
        gamma, first = hyper.of_first_group()("gamma"), state["updates"] == 0
        log_v = F.moving_average(state["log_v"], log_g.to(state["log_v"]), gamma, first)
        if batch.depositing:
            self.deposit_state(log_v=log_v, updates=state["updates"] + 1)
        return log_v.to(log_g)


class RobustLoss(_WithTotal):
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
            _checked("losses", losses, 1)
            index = self._index(index, len(losses))
        return self._compose(index, [losses], {})

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        return given[0][:, None] / hyper("tau")

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return (hyper("tau") * u)[:, 0]

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.own_groups:
            return super().estimate(inner, batch, hyper)
        tau, log_v = hyper("tau"), self._total(_log_mean_exp(inner), batch, hyper)
        return tau * log_v, tau * (inner - log_v).exp() / len(inner), {}


# -- positives against negatives ---------------------------------------------------------------------------------------


class PairLoss(CompositionalLoss):
    r"""Base class of losses that compare each positive sample with the other samples of the batch.

    ``l_ij = max(0, margin - (s_i - s_j))^2`` is the surrogate of "j is ranked above the positive i"; another one is a
    subclass with its own :meth:`surrogate`. Rows are kept for positives; those of negatives stay empty.
    """

    needs_negatives = True

    @outside_of_graphs
    def __call__(self, scores: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """Return the loss.

        Args:
            scores: predictions of any scale, with their graph, ``(B,)``; with several ranks, of this rank's samples.
            labels: positive where > 0, ``(B,)``, best on the CPU, since the host selects by them.
            index: data-set positions, ``(B,)`` integers.

        Raises:
            TypeError: scores that are no floating-point tensor, an index without integers.
            ValueError: wrong shapes; a batch without positives, or without the negatives that are needed.
            IndexError: the index of a positive is outside ``0 .. n - 1``.
        """
        with self._engine.handshake.guard():
            _checked("scores", scores, 1)
            positive = _alike("labels", labels, scores) > 0
            index = check_vector("index", index, len(scores))
            own, others = (torch.nonzero(x.cpu())[:, 0] for x in (positive, ~positive))
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

    .. math::
        F = -\frac{1}{n_+} \sum_{y_i = 1} \frac{g_{i1}}{g_{i2}}, \qquad
        g_{i1} = E_j\, [y_j = 1]\, \ell_{ij}, \qquad g_{i2} = E_j\, \ell_{ij}, \qquad
        \ell_{ij} = \max(0, \text{margin} - (s_i - s_j))^2

    Args:
        n: number of samples of the data set, or a list of sample groups.
        gamma: in (0, 1]; the weight of the newest value of both averages.
        margin: > 0.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per positive: both averages (``u``, two values) and the visits. The first visit takes the values themselves.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Qi et al., Stochastic Optimization of Areas Under Precision-Recall Curves with Provable Convergence, NeurIPS
        2021 (SOAP).

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
    """

    domain: Domain = "linear"
    width = 2

    @takes_options(Component, PlacementOptions)
    def __init__(
        self, n: GroupSpec, gamma: float = 0.9, margin: float = 1.0, **placement: Unpack[PlacementOptions]
    ) -> None:
        super().__init__(n, {"gamma": gamma, "margin": margin}, **placement)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        checks.positive("margin", group["margin"])  # a positive's own pair keeps the denominator above 0

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        each = self.surrogate(hyper("margin") - (given[0][:, None] - torch.cat([*given])))
        return torch.stack([each[:, : len(given[0])].sum(1) / each.shape[1], each.mean(1)], dim=1)

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return -u[:, 0] / u[:, 1]


class PartialAUCLoss(PairLoss):
    r"""One-way partial AUC (low false positive rates) with KL-regularised weights of negatives, by SOPA-s.

    .. math::
        F = \frac{1}{n_+} \sum_{y_i = 1} \tau \log E_{y_j = 0}\, e^{\ell_{ij} / \tau}, \qquad
        \ell_{ij} = \max(0, \text{margin} - (s_i - s_j))^2

    Args:
        n: number of samples of the data set, or a list of sample groups.
        gamma: in (0, 1]; the weight of the newest value.
        tau: weight of the KL term; a small one looks at the hardest negatives (a low false positive rate) only.
        margin: of the surrogate.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per positive: ``log_u`` in nats, and the visits.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Zhu et al., When AUC meets DRO, ICML 2022 (SOPA-s).

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.PartialAUCLoss(n=100, tau=0.1)
        >>> scores = torch.tensor([0.3, 0.1, -0.4], requires_grad=True)
        >>> loss(scores, torch.tensor([1, 0, 0]), torch.tensor([7, 42, 3])).backward()
        >>> bool(scores.grad[1] > 10 * scores.grad[2])  # nearly all weight on the hardest negative
        True
    """

    @takes_options(Component, PlacementOptions)
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
        scaled = self.pairs(given, hyper) / hyper("tau")
        return torch.logsumexp(scaled, dim=1, keepdim=True) - math.log(scaled.shape[1])

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return (hyper("tau") * u)[:, 0]


class TwoWayPartialAUCLoss(PartialAUCLoss, _WithTotal):
    r"""Two-way partial AUC (low false, high true positive rates), KL-regularised on both sides, by SOTA-s.

    .. math::
        F = \tau_+ \log E_{y_i = 1} \left( E_{y_j = 0}\, e^{\ell_{ij} / \tau} \right)^{\tau / \tau_+}, \qquad
        \ell_{ij} = \max(0, \text{margin} - (s_i - s_j))^2

    Args:
        n, gamma, tau, margin: as of :class:`PartialAUCLoss`; ``gamma`` also averages the outer expectation.
        tau_positive: weight of the KL term of positives; a small one looks at the hardest positives only. The first
            sample group's counts.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State: ``log_u`` per positive, in nats, and the visits; the average of the outer expectation, ``log_v``.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Zhu et al., When AUC meets DRO, ICML 2022 (SOTA-s).

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.TwoWayPartialAUCLoss(n=100, tau=0.5, tau_positive=0.1)
        >>> scores = torch.tensor([0.3, -0.9, -0.4], requires_grad=True)
        >>> loss(scores, torch.tensor([1, 1, 0]), torch.tensor([7, 42, 3])).backward()
        >>> bool(scores.grad[1] < 10 * scores.grad[0] < 0)  # nearly all weight on the hardest positive
        True
    """

    @takes_options(Component, PlacementOptions)
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
        log_v = self._total(_log_mean_exp(powers), batch, hyper)
        return tau_positive * log_v, tau * (powers - log_v).exp() / len(u)


class CVaRPartialAUCLoss(PairLoss):
    r"""One-way partial AUC at false positive rates up to a bound, exactly, by SOPA.

    .. math::
        F = \frac{1}{n_+} \sum_{y_i = 1} \min_{c_i} \; c_i + \frac{1}{\beta}\, E_{y_j = 0} \max(0, \ell_{ij} - c_i),
        \qquad \ell_{ij} = \max(0, \text{margin} - (s_i - s_j))^2

    The mean over the share ``beta`` (``max_fpr``) of the hardest negatives of each positive. The threshold ``c_i``
    takes a step of subgradient descent at each visit and starts at 0.

    Args:
        n: number of samples of the data set, or a list of sample groups.
        max_fpr: in (0, 1]; the bound ``beta`` of the false positive rate.
        lr: step size of the thresholds, in units of ``l``.
        margin: of the surrogate.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per positive: ``threshold``, and the visits.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Zhu et al., When AUC meets DRO, ICML 2022 (SOPA), whose ``eta / n_+`` is ``lr`` here.

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
    """

    @takes_options(Component, PlacementOptions)
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
        return (self.pairs(given, hyper) - batch.columns["threshold"]).relu()

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        threshold, weight = batch.columns["threshold"], 1 / (hyper("max_fpr") * inner.shape[1])
        share = (inner > 0).sum(1, keepdim=True) + 0 * inner.sum(1, keepdim=True)  # NaN where a loss is
        value = (threshold + weight * inner.sum(1, keepdim=True)).mean()
        slope = torch.zeros_like(inner) + weight / len(inner)
        return value, slope, {"threshold": threshold - hyper("lr") * (1 - weight * share)}


class TwoWayCVaRPartialAUCLoss(CVaRPartialAUCLoss):
    r"""Two-way partial AUC at false positive rates up to, and true positive rates from, a bound, by SOTA.

    .. math::
        F = \min_{c'} \; c' + \frac{1}{\alpha}\, E_{y_i = 1} \max(0, g_i - c'), \qquad
        g_i = \min_{c_i} \; c_i + \frac{1}{\beta}\, E_{y_j = 0} \max(0, \ell_{ij} - c_i)

    The mean over the share ``alpha = 1 - min_tpr`` of the hardest positives, and for each over the share ``beta``
    (``max_fpr``) of its hardest negatives. A moving average of each ``g_i`` tells which positives these are.

    Args:
        n, max_fpr, lr, margin: as of :class:`CVaRPartialAUCLoss`; ``lr`` is the step size of ``c'`` too.
        min_tpr: in [0, 1); the bound of the true positive rate. The first sample group's counts, as for ``c'``.
        gamma: in (0, 1]; the weight of the newest ``g_i``.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State: ``threshold`` (``c_i``) and ``u`` per positive, and the visits; ``c'``.

    Communicates, errors: as :class:`CompositionalLoss` and the call of :class:`PairLoss`.

    References:
        Zhu et al., When AUC meets DRO, ICML 2022 (SOTA).

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.TwoWayCVaRPartialAUCLoss(n=100, max_fpr=0.5, min_tpr=0.5, lr=1.0)
        >>> scores = torch.tensor([0.9, 0.0, 0.1, -0.4], requires_grad=True)
        >>> for _ in range(2):
        ...     value = loss(scores, torch.tensor([1, 1, 0, 0]), torch.tensor([7, 8, 42, 3]))
        ...     loss.step()
        >>> value.backward()
        >>> [round(x, 4) for x in scores.grad.tolist()]  # the hardest half of the positives, of the negatives
        [0.0, -2.2, 2.2, 0.0]
    """

    @takes_options(Component, PlacementOptions)
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

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        super().joined(groups, setting)
        self.state = {"threshold": torch.zeros((), dtype=torch.float64, device="cpu")}

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return [*super().columns(directions, dtype), Column("u", 1, dtype)]

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        _, slope, proposals = super().estimate(inner, batch, hyper)
        old, outermost = batch.columns["threshold"], hyper.of_first_group()
        g = old + inner.mean(1, keepdim=True) / hyper("max_fpr")
        u = F.linear_average(batch.columns["u"], g, hyper("gamma"), batch.unseen("u"))
        state, share = self.working_state(batch.depositing)["threshold"], 1 - outermost("min_tpr")
        hard = (u > state).to(u.dtype)  # a positive that is not hard enough moves neither the model nor its threshold
        if batch.depositing:
            new = state - outermost("lr") * (1 - (hard + 0 * u).mean() / share)
            self.deposit_state(threshold=new.to(state))
        value = state + (u - state).relu().mean() / share
        moved = old + hard * (proposals["threshold"] - old)
        return value.to(u.dtype), slope * hard / share, {"threshold": moved, "u": u}


# -- rankings ----------------------------------------------------------------------------------------------------------


class _ListLoss(CompositionalLoss):
    """Loss of rankings: each relevant item of a query is compared with the items of the same query."""

    def _call(self, scores: Tensor, relevance: Tensor, index: Tensor, items: Tensor | None) -> Tensor:
        with self._engine.handshake.guard():
            _checked("scores", scores, 2)
            relevance, index = (_alike(k, v, scores) for k, v in (("relevance", relevance), ("index", index)))
            query, item = torch.nonzero(_grades(relevance) > 0, as_tuple=True)
            pair = check_vector("index", index[query.to(index.device), item.to(index.device)], len(query))
            dtype = working_dtype(scores.dtype, self.dtype)
            every = (
                torch.full((len(scores),), scores.shape[1]) if items is None else _alike("items", items, scores[:, 0])
            )
            if every.device.type == "cpu" and not bool((every >= 1).all()):
                raise ValueError(f"items must be at least 1, the number that each query ranks, got {every.tolist()!r}")
            relevance = relevance.to(scores.device, dtype)
            at = query.to(scores.device), item.to(scores.device)
            values = {"items": every.to(scores.device, dtype)[at[0]], **self.gains(relevance, at)}
            hyper = self._engine.groups.hyper(self.role, pair.to(scores.device)[:, None], dtype)
            scores = scores.to(dtype)  # differences of half precision would have few digits, or overflow
            own = self.compare(scores[at[0]] - scores[at][:, None], hyper)
        return self._compose(pair, [own], values)

    def compare(self, excess: Tensor, hyper: Hyper) -> Tensor:
        """Return the inner value, or its logarithm, ``(P, 1)``, from ``s_j - s_i``, ``(P, L)``."""
        raise NotImplementedError

    def gains(self, relevance: Tensor, at: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return what the outer function needs of each relevant item, ``(P,)`` each, from ``relevance`` ``(Q, L)``."""
        return {"gain": relevance[at]}

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        return given[0].clone()


class NDCGLoss(_ListLoss):
    r"""Normalised discounted cumulative gain of rankings, by SONG.

    .. math::
        F = \frac{1}{|S|} \sum_{(q, i) \in S} \frac{1}{Z_q} \frac{1 - 2^{y_{qi}}}{\log_2 (1 + N_q\, g_{qi})}, \qquad
        g_{qi} = E_{j \in S_q} \max(0, \text{margin} - (s_{qi} - s_{qj}))^2

    ``S`` are the pairs of a query and a relevant item, ``N_q g_qi`` is a surrogate of the rank of the item, ``Z_q`` the
    ideal DCG of the items in the batch.

    Args:
        n: number of pairs of a query and a relevant item, or a list of sample groups.
        gamma: in (0, 1]; the weight of the newest value.
        margin: > 0.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per pair: ``u``, and the visits.

    Communicates, errors: as :class:`CompositionalLoss` and its call.

    References:
        Qiu et al., Large-scale Stochastic Optimization of NDCG Surrogates for Deep Learning with Provable Convergence,
        ICML 2022 (SONG).

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.NDCGLoss(n=10)
        >>> scores = torch.tensor([[0.1, 0.4, 0.2]], requires_grad=True)  # one query, three items
        >>> loss(scores, torch.tensor([[2, 0, 1]]), torch.tensor([[0, -1, 1]])).backward()
        >>> scores.grad[0].argmin().item()  # the most relevant item rises most
        0
    """

    domain: Domain = "linear"

    @takes_options(Component, PlacementOptions)
    def __init__(
        self, n: GroupSpec, gamma: float = 0.9, margin: float = 1.0, **placement: Unpack[PlacementOptions]
    ) -> None:
        super().__init__(n, {"gamma": gamma, "margin": margin}, **placement)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        checks.positive("margin", group["margin"])  # an item's own pair keeps the logarithm above 0

    @outside_of_graphs
    def __call__(self, scores: Tensor, relevance: Tensor, index: Tensor, items: Tensor | None = None) -> Tensor:
        """Return the loss, minus a surrogate of NDCG.

        Args:
            scores: of the items of each query, with their graph, ``(Q, L)``.
            relevance: ``y``, ``(Q, L)``; 0: not relevant.
            index: number of each relevant pair, ``(Q, L)`` integers; anything where the item is not relevant.
            items: ``N_q``, the items that each query ranks in all, ``(Q,)``; ``None``: those of the batch, ``L``.

        Raises:
            TypeError, ValueError, IndexError: wrong types, shapes, or a number outside ``0 .. n - 1``.
        """
        return self._call(scores, relevance, index, items)

    def compare(self, excess: Tensor, hyper: Hyper) -> Tensor:
        return (hyper("margin") + excess).relu().square().mean(1, keepdim=True)

    def gains(self, relevance: Tensor, at: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        gain = torch.exp2(relevance) - 1
        discount = torch.arange(2, relevance.shape[1] + 2, dtype=gain.dtype, device=gain.device).log2()
        ideal = (gain.sort(1, descending=True).values / discount).sum(1)
        return {"gain": gain[at] / ideal[at[0]]}

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return -batch.values["gain"] / (1 + batch.values["items"] * u[:, 0]).log2()


class ListwiseLoss(_ListLoss):
    r"""Listwise cross-entropy of rankings: each relevant item against a softmax over all items of the query.

    .. math::
        F = \frac{1}{|S|} \sum_{(q, i) \in S} y_{qi} \log \left( N_q\, g_{qi} \right), \qquad
        g_{qi} = E_{j \in S_q}\, e^{s_{qj} - s_{qi}}

    Args:
        n: number of pairs of a query and a relevant item, or a list of sample groups.
        gamma: in (0, 1]; the weight of the newest value.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per pair: ``log_u`` in nats, and the visits.

    Communicates, errors: as :class:`CompositionalLoss` and its call.

    References:
        Cao et al., Learning to Rank, ICML 2007 (ListNet); Qiu et al., ICML 2022, whose estimator this is.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.ListwiseLoss(n=10)
        >>> scores = torch.tensor([[0.1, 0.4, 0.2]], requires_grad=True)
        >>> value = loss(scores, torch.tensor([[0, 1, 0]]), torch.tensor([[-1, 0, -1]]))
        >>> round(value.item(), 4) == round(-scores.log_softmax(1)[0, 1].item(), 4)
        True
    """

    @takes_options(Component, PlacementOptions)
    def __init__(self, n: GroupSpec, gamma: float = 0.9, **placement: Unpack[PlacementOptions]) -> None:
        super().__init__(n, {"gamma": gamma}, **placement)

    @outside_of_graphs
    def __call__(self, scores: Tensor, relevance: Tensor, index: Tensor, items: Tensor | None = None) -> Tensor:
        """Return the loss; arguments and errors as of :class:`NDCGLoss`."""
        return self._call(scores, relevance, index, items)

    def compare(self, excess: Tensor, hyper: Hyper) -> Tensor:
        return torch.logsumexp(excess, dim=1, keepdim=True) - math.log(excess.shape[1])

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return batch.values["gain"] * (batch.values["items"].log() + u[:, 0])
