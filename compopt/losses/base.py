"""Base class of non-contrastive compositional losses, and the robust risk."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt import functional as F
from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs, refuse_derivatives, warn
from compopt.checks.inputs import check_values
from compopt.estimator.base import Estimator, Form
from compopt.estimator.groups import GroupSpec, Hyper, as_groups
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.kernel.features import reaches_others, with_gradients, working_dtype
from compopt.losses.compositional import DOMAINS, Domain, outer, through
from compopt.stores.rows import Column

TOTAL = ("log_v", "updates")  # state: moving average over all samples, and the number of its updates
# Check of each hyper-parameter.
CHECKS: dict[str, Callable[[str, Any], object]] = {
    "gamma": checks.unit_interval,
    "tau": checks.positive,
    "tau_positive": checks.positive,
    "margin": checks.number,
    "lr": checks.positive,
    "max_fpr": checks.unit_interval,
    "min_tpr": checks.decay,
}


class CompositionalLoss(Estimator, ABC):
    r"""Base class of losses that are functions of a moving average per sample.

    Example:
        >>> import compopt
        >>> issubclass(compopt.losses.RobustLoss, compopt.losses.CompositionalLoss)
        True

    The loss is ``1/n sum_i f(u_i)`` with averages ``u_i`` of inner functions ``g_i``. Each is an
    :class:`~compopt.Estimator`: a call deposits new averages, ``step()`` or ``attach(optimizer)``
    commits them, ``state_dict()`` and :func:`compopt.save` save them. A subclass defines :meth:`inner` and
    :meth:`outer`. The gradient is ``1/B sum_i f'(u_i) grad g_i``, as in :func:`compopt.compositional_loss`. Parameters
    inside these methods receive the derivative of the loss with ``u_i`` held constant, the whole one on every rank.

    Args:
        n: number of samples with rows, or a list of sample groups; ``None``: no rows.
        hyper: hyper-parameters that groups may override, ``gamma`` among them.
        process_group, offload, offload_dir, shard, dtype: placement, see :class:`~compopt.Estimator`.

    State, per sample: ``log_u`` (in nats), or ``u`` (``width`` values) with ``domain = "linear"``; number of visits.

    Communicates, with several ranks: as :class:`~compopt.ContrastiveEstimator`, with a few floats per sample; losses
    that compare samples also gather the scores of the other samples. With K ranks the values, the state and the mean
    gradient are those of one rank with the whole batch. The backward pass communicates nothing.

    Warns:
        UserWarning: scores that are NaN, infinite or too large to compare; the loss is NaN, and nothing of the batch is
            committed.
    """

    domain: Domain = "log"
    width = 1
    checked_by = CHECKS
    numbers: tuple[str, ...] = ()  # names of state entries that are one number for all samples

    @takes_options(Estimator, PlacementOptions)
    def __init__(self, n: GroupSpec | None, hyper: Mapping[str, Any], **placement: Unpack[PlacementOptions]) -> None:
        super().__init__(None if n is None else as_groups(n), hyper, **placement)

    def setup(self, form: Form) -> None:
        # float64, since each number is averaged at every step
        self.state = {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in self.numbers}

    def check(self, group: Mapping[str, Any]) -> None:
        for name in group.keys() & self.checked_by.keys():  # a subclass checks its own
            self.checked_by[name](name, group[name])

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        name, reduce = DOMAINS[self.domain]
        return [Column(name, self.width, dtype, reduce)]

    @abstractmethod
    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        """Return inner values of the batch, or their logarithms, ``(B, k)``, differentiable in ``given``."""

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        """Return the objective of each sample, ``(B,)``, from the stored averages (or logarithms), ``(B, k)``."""
        raise NotImplementedError(f"{type(self).__name__} must define outer() or estimate()")

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss, its derivative with respect to inner values, and proposals for the rows."""
        name, _ = DOMAINS[self.domain]
        average = F.moving_average if self.domain == "log" else F.linear_average
        read = batch.of()
        u = average(read.columns[name], inner, hyper("gamma"), read.unseen)
        value, slope = self.weights(u, batch, hyper)
        return value, slope * (inner - u).exp() if self.domain == "log" else slope, {name: u}

    def weights(self, u: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor]:
        """Return the loss, and its derivative with respect to the stored averages (or logarithms)."""
        value, (slope,) = outer(lambda x: self.outer(x, batch, hyper), u)
        return value, slope

    def _total(self, log_g: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        """Update ``log v``, the average over all samples, with ``log_g``, one number in any shape; return it, 0-d."""
        state = self.working_state(batch.depositing)
        gamma, first = hyper.of_first_group()("gamma"), state["updates"] == 0
        log_v = F.moving_average(state["log_v"], log_g.to(state["log_v"]).squeeze(), gamma, first)
        if batch.depositing:
            self.deposit_state(log_v=batch.nan_if_bad(log_v), updates=state["updates"] + 1)
        return log_v.to(log_g)

    def _compose(self, index: Tensor, given: Sequence[Tensor], values: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of ``given``: a tensor with an entry per sample, and optionally one for other samples."""
        ranks, ready = self._ranks, [x.detach().to(working_dtype(x.dtype)) for x in given]
        batch = self._read({"index": index}, {"given": ready[0], **values}, more=sum(map(len, ready[1:])))
        if not len(batch.rows):
            raise ValueError(
                f"the batch has no sample that {type(self).__name__} is a mean over, on any rank (no positive, or no "
                f"relevant item): skip it, or draw batches with some in each"
            )
        hyper = self._hyper(batch)
        everyone = [batch.values["given"], *(ranks.gather(ready[1:], batch.more) if ready[1:] else ())]
        leaves = [x.detach().to(batch.dtype).requires_grad_(torch.is_grad_enabled()) for x in everyone]
        with self._rollback_on_error():
            numbers = [*everyone, *(value for name, value in batch.values.items() if name != "given")]
            bad = torch.cat([number.flatten() for number in numbers]).isfinite().logical_not_().sum()
            self._async_checks.watch(bad, _warn_scores)
            batch.bad = bad > 0 if batch.bad is None else batch.bad | (bad > 0)
            inner = self.inner(leaves, batch, hyper)
            value, slope, proposals = self.estimate(inner.detach(), batch, hyper)
            batch.bad = batch.bad | ~value.detach().isfinite()
            if batch.depositing:
                self._deposit(batch, proposals)
            return self._with_gradients(batch, value, inner, batch.nan_if_bad(slope), leaves, given)

    def _with_gradients(
        self, batch: Batch, value: Tensor, inner: Tensor, slope: Tensor, leaves: list[Tensor], given: Sequence[Tensor]
    ) -> Tensor:
        """Return the value as a node of the graph of ``given``, and of parameters inside ``inner`` and ``outer``."""
        pairs, ranks = through(value), self._ranks
        if reaches_others(inner, *leaves):
            pairs.append((inner, slope))
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            found = torch.autograd.grad(inner, leaves, slope, retain_graph=bool(pairs))
            first = sum(batch.more[: ranks.rank])
            own = [batch.own, *(slice(first, first + len(x)) for x in given[1:])]
            # multiplied by the number of ranks, since frameworks average gradients over ranks
            pairs += [(x, g[at] * ranks.size) for x, g, at in zip(given, found, own, strict=True)]
        return with_gradients(batch.nan_if_bad(value.detach()), pairs)


def _warn_scores(bad: int) -> None:
    if bad:
        warn(
            f"{bad} scores, or values of samples, of a batch are NaN, infinite or too large to compare: its loss is "
            f"NaN and nothing of it is committed"
        )


def check_scores(name: str, value: Tensor, axes: int) -> None:
    """Refuse values that are not scores with ``axes`` axes, and transforms that would lose derivatives."""
    refuse_derivatives((name, value))
    check_values(name, value, ("(B,)", "(Q, L)")[axes - 1], axes)


def check_same_shape(name: str, value: Any, like: Tensor) -> Tensor:
    """Return ``value`` after a check that it is a tensor with the shape of ``like``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {tuple(like.shape)}, got {type(value).__name__}")
    if value.shape != like.shape:
        raise ValueError(f"{name} must have the shape {tuple(like.shape)}, as scores, got {tuple(value.shape)}")
    return value


def log_mean_exp(x: Tensor, dim: int) -> Tensor:
    """Return ``log mean exp`` over one axis, which is kept."""
    return torch.logsumexp(x, dim, keepdim=True) - math.log(x.shape[dim])


class RobustLoss(CompositionalLoss):
    r"""Distributionally robust risk: a soft maximum of losses, per task or over all samples.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.RobustLoss(tau=0.5)
        >>> each = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> loss(each).backward()
        >>> each.grad.tolist() == torch.tensor([0.0, 2.0]).softmax(0).tolist()
        True

    .. math::
        F = \frac{1}{n} \sum_{i=1}^n \tau \log E_{z \sim P_i}\, e^{\ell(w; z) / \tau}
        \qquad \text{or, without } n, \qquad F = \tau \log E_z\, e^{\ell(w; z) / \tau}

    ``F = max_q E_q[l] - tau KL(q, p)``: for a small ``tau`` close to the largest loss, for a large ``tau`` to the mean.

    Args:
        n: number of tasks, each with its own average; ``None``: one risk over all samples.
        gamma: in (0, 1]; weight of the newest value.
        tau: weight of the KL term, in units of the losses.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State: ``log_u`` per task, in nats; without ``n`` one number, ``log_v``.

    Communicates, errors: as :class:`CompositionalLoss` and its call.

    References:
        Qi et al., An Online Method for A Class of Distributionally Robust Optimization with Non-Convex Objectives,
        NeurIPS 2021 (all samples); Wang and Yang, SOX, ICML 2022 (per task).
    """

    numbers = TOTAL

    @takes_options(Estimator, PlacementOptions)
    def __init__(
        self, n: GroupSpec | None = None, gamma: float = 0.9, tau: float = 1.0, **placement: Unpack[PlacementOptions]
    ) -> None:
        super().__init__(n, {"gamma": gamma, "tau": tau}, **placement)

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return super().columns(directions, dtype) if self.n else []

    @outside_of_graphs
    def __call__(self, losses: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the risk.

        Args:
            losses: losses of the samples, with their graph, ``(B,)``.
            index: task of each sample, ``(B,)`` integers; omitted without ``n``.

        Raises:
            TypeError, ValueError, IndexError: wrong types or shapes, or a task outside ``0 .. n - 1``.
        """
        with self._guard():
            check_scores("losses", losses, 1)
            index = self._index(index, len(losses))
        return self._compose(index, [losses], {})

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        return given[0][:, None] / hyper("tau")

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return (hyper("tau") * u)[:, 0]

    def estimate(self, inner: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.n:
            return super().estimate(inner, batch, hyper)
        tau, log_v = hyper("tau"), self._total(log_mean_exp(inner, 0), batch, hyper)
        return tau * log_v, tau * (inner - log_v).exp() / len(inner), {}
