"""User-defined compositional objectives: averages of inner values, and outer functions of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt import functional as F
from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs, refuse_derivatives
from compopt.checks.inputs import check_values, check_vector
from compopt.distributed.handshake import fingerprint
from compopt.estimator.base import Estimator
from compopt.estimator.groups import GroupSpec, as_groups
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.functional import Scalar
from compopt.kernel.features import reaches_others, with_gradients
from compopt.normalizers import MovingAverageEstimator
from compopt.stores.rows import Column

Domain = Literal["log", "linear"]
# Column of each domain, and the reduction of several proposals for one row.
DOMAINS = {"log": ("log_u", "log_mean_exp"), "linear": ("u", "mean")}


class InnerAverage(Estimator):
    r"""Moving averages of inner values of any sign, one or several per sample.

    Example:
        >>> import torch, compopt
        >>> average = compopt.losses.InnerAverage(n=100, gamma=0.5)
        >>> index = torch.tensor([3, 7])
        >>> for g in (torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 1.0])):
        ...     u = average.update(g, index)
        ...     average.step()
        >>> u.tolist()
        [0.0, 0.5]

    .. math::
        u_i \leftarrow (1 - \gamma)\, u_i + \gamma\, g_i

    :func:`compopt.compositional_loss` takes them to an objective ``1/n sum_i f(g_i(w))``; :meth:`update` returns them
    for a loss of your own.

    Args:
        n: number of samples, or a list of sample groups.
        gamma: in (0, 1]; weight of the newest value. 1 keeps no history.
        width: number of values per sample, ``k``, for inner functions with values in ``R^k``.
        domain: ``"linear"`` stores ``u_i``; ``"log"`` stores ``log u_i``, for positive values outside the range of
            the rows' dtype.
        process_group, offload, offload_dir, shard, dtype: see :class:`~compopt.Estimator`.

    State, per sample: ``u``, or ``log_u`` in nats with ``domain="log"``, ``width`` values; number of visits. The first
    visit sets the value itself.

    Communicates, with several ranks: see :meth:`update`.

    Raises:
        ValueError: gamma outside (0, 1], width < 1, an unknown domain.
        TypeError: an argument that is not a number.
    """

    @takes_options(Estimator, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        width: int = 1,
        domain: Domain = "linear",
        **placement: Unpack[PlacementOptions],
    ) -> None:
        checks.one_of("domain", domain, DOMAINS)
        self.width, self.domain = checks.positive_int("width", width), domain
        super().__init__(as_groups(n), {"gamma": gamma}, **placement)

    def check(self, group: Mapping[str, Any]) -> None:
        checks.unit_interval("gamma", group["gamma"], "; it is the weight of the newest value, and 1 keeps no history")

    def structure(self) -> dict[str, Any]:
        return {"width": self.width, "domain": self.domain}

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        name, reduce = DOMAINS[self.domain]
        return [Column(name, self.width, dtype, reduce)]

    @outside_of_graphs
    def update(self, value: Tensor, index: Tensor, previous: Tensor | None = None, beta: float | None = None) -> Tensor:
        r"""Update the averages with a batch of inner values, and return them.

        In training mode with gradients enabled the new rows are deposited until :meth:`step`; otherwise nothing is
        deposited.

        With ``previous`` the average is corrected by the change of the same samples' values (MSVR), so that it follows
        weights that change faster than the average:

        .. math::
            u_i \leftarrow (1 - \gamma)\, u_i + \gamma\, g_i(w_t) + \beta\, (g_i(w_t) - g_i(w_{t-1}))

        Args:
            value: ``g_i`` of the batch, or ``log g_i`` with ``domain="log"`` (with several ranks, of this rank's part
                of it), ``(B,)``, or ``(B, k)`` with ``width=k``, floating point; no gradient is propagated.
            index: data-set positions, ``(B,)`` integers, preferably on the CPU.
            previous: ``g_i`` of the same samples at the weights of the previous step, of the same shape as ``value``;
                only with ``domain="linear"``, since a corrected average may be negative.
            beta: factor of the correction; ``None``: ``1 - gamma`` (STORM), the paper's value if every sample is in
                the batch. With ``B`` of ``n`` samples per batch the paper uses ``(n - B) / (B (1 - gamma)) + 1 -
                gamma`` (its ``gamma_t`` and ``beta_t`` are ``beta`` and ``gamma`` here).

        Returns:
            ``u_i``, or ``log u_i``, after the update, in the shape of ``value``, without a graph; float64 if ``value``
            or the rows are, else float32.

        Raises:
            RuntimeError: a transform of ``torch.func``, or a checkpointed function.
            TypeError: ``value`` or ``previous`` is not a floating-point tensor, ``index`` does not contain integers.
            ValueError: shapes other than ``(B,)`` or ``(B, k)``, or another B; ``previous`` with logarithms; ``beta``
                without ``previous``.
            IndexError: an index outside ``0 .. n - 1``.

        Communicates, with several ranks: as :class:`~compopt.ContrastiveEstimator`, with ``k`` floats per sample, or
        ``2 k`` with ``previous``.

        References:
            Jiang et al., Multi-block-Single-probe Variance Reduced Estimator for Coupled Compositional Optimization,
            NeurIPS 2022 (MSVR); the journal version, Solving Finite-sum Coupled Compositional Optimization via
            Multi-block-Single-probe Estimator, eq. 4 and section 3.2.
        """
        with self._guard():
            refuse_derivatives(("value", value))
            inner = _inner("value", value, self.width)
        batch = _read(self, inner, index, previous, beta)
        average = self._average(batch.values["inner"], batch, beta)
        with self._rollback_on_error():
            if batch.depositing:
                self._deposit(batch, {DOMAINS[self.domain][0]: average})
            return batch.nan_if_bad(average)[batch.own].view(value.shape)

    def _average(self, inner: Tensor, batch: Batch, beta: float | None = None) -> Tensor:
        """Return updated averages of the batch over all ranks, ``(B, k)``, without depositing them."""
        name, inner = DOMAINS[self.domain][0], inner.to(batch.dtype)
        gamma, read = self._hyper(batch)("gamma"), batch.of()
        if self.domain == "log":
            return F.moving_average(read.columns[name], inner, gamma, read.unseen)
        change: Scalar = 0.0
        if "previous" in batch.values:
            change = (1 - gamma if beta is None else beta) * (inner - batch.values["previous"].to(batch.dtype))
        return F.linear_average(read.columns[name], inner, gamma, read.unseen, change)


def compositional_loss(
    g: Tensor,
    index: Tensor,
    estimator: InnerAverage | MovingAverageEstimator,
    f: Callable[..., Tensor],
    *,
    args: Sequence[Tensor] = (),
    previous: Tensor | None = None,
    beta: float | None = None,
) -> Tensor:
    r"""Return a loss whose function is applied to moving averages of inner values, one per sample.

    Example:
        >>> import torch, compopt
        >>> _ = torch.manual_seed(0)
        >>> n, lam = 5, 0.5  # F = 1/n sum_i lam log E exp(loss_i / lam), a robust risk per task
        >>> theta = torch.zeros(n, requires_grad=True)          # one location per task
        >>> centre = torch.arange(n, dtype=torch.float32)       # its data: centre + noise
        >>> u = compopt.MovingAverageEstimator(n, gamma=0.3)
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> _ = u.attach(optimizer)
        >>> for _ in range(300):
        ...     task = torch.randperm(n)[:3]
        ...     x = centre[task] + 0.1 * torch.randn(3)
        ...     g = torch.exp((theta[task] - x).square() / lam)  # a sample of each
        ...     loss = compopt.compositional_loss(g, task, u, lambda v: lam * v.log())
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
        >>> bool((theta - centre).abs().max() < 0.2)
        True

    Parameters inside ``f``, and ``args`` with a graph, receive the derivative of the returned value, with ``u_i`` held
    constant.

    The objective is ``F(w) = 1/n sum_i f(g_i(w))``, where each inner ``g_i`` is an expectation and a batch provides one
    sample of it. The gradient of a nonlinear ``f`` at the sample is biased; at the moving average ``u_i`` the bias
    vanishes as the average converges. With an optimizer that has momentum, such as ``SGD(momentum=0.9)`` or Adam,
    the steps are those of SOX: the momentum is its moving average of the gradient.

    Args:
        g: unbiased samples of the inner functions with their graph, ``(B,)``, or ``(B, k)`` with an ``InnerAverage``
            of ``width=k``, floating point; > 0 if the estimator stores logarithms. With several ranks each rank passes
            its own samples; the loss is that of all ranks, and gradients are multiplied by the number of ranks.
        index: the numbers ``i``, ``(B,)`` integers.
        estimator: a :class:`~compopt.losses.InnerAverage`, which stores ``u``, or a
            :class:`~compopt.MovingAverageEstimator`, which stores ``log u``; commit with its ``step()`` or ``attach``.
            In training mode with gradients enabled the new rows are deposited.
        f: differentiable outer function, called as ``f(u, *args)`` on the averages of the samples of all ranks, in the
            shape of ``g``; returns one value per sample, ``(B,)``. Every rank returns the whole gradient of parameters
            inside ``f``.
        args: further arguments of ``f``, ``(B, ...)`` each, optionally with a graph, for example
            ``args=(weight[index],)``.
        previous, beta: correction of the averages, see :meth:`compopt.losses.InnerAverage.update`.

    Returns:
        0-d loss; float64 if ``g`` or the rows are float64, else float32.

    Raises:
        ValueError: ``g`` has another shape, is empty, or (on the CPU) has an entry <= 0 while averages are kept as
            logarithms; ``f`` returns another shape than ``(B,)``; ``previous`` or ``beta``, see ``update``.
        TypeError: ``estimator`` is of another class; ``g`` is not floating point; ``index`` is not an integer tensor;
            ``f`` returns no tensor, or one that does not depend on ``u``.
        IndexError: an index is outside ``0 .. n - 1``.
        RuntimeError: a transform or a tangent is active, as in a call of :class:`~compopt.ContrastiveEstimator`.

    Communicates: see :meth:`compopt.losses.InnerAverage.update`; the backward pass communicates nothing.

    References:
        Wang and Yang, Finite-Sum Coupled Compositional Stochastic Optimization, ICML 2022 (SOX); Jiang et al., NeurIPS
        2022 (MSVR, with ``previous``).
    """
    if not isinstance(estimator, InnerAverage | MovingAverageEstimator):
        raise TypeError(
            f"estimator must be an InnerAverage or a MovingAverageEstimator, got {type(estimator).__name__}"
        )
    domain, width = _form(estimator)
    logs = domain == "log"
    with estimator._guard():
        if isinstance(estimator, MovingAverageEstimator):
            estimator._check_one_value()
        refuse_derivatives(("g", g))
        inner = _inner("g", g, width)
        if logs and inner.device.type == "cpu" and bool((inner <= 0).any()):
            raise ValueError(
                f"g must be > 0, since its average is kept as a logarithm; got {inner.min().item()!r}: use "
                f"compopt.losses.InnerAverage"
            )
    batch = _read(estimator, inner.log() if logs else inner, index, previous, beta, args)
    if not len(batch.rows):
        raise ValueError("g is empty on every rank; skip such a batch")
    inner = batch.values["inner"]
    average = (
        estimator._average(inner, batch, beta)
        if isinstance(estimator, InnerAverage)
        else estimator._average(inner, batch)
    )
    with estimator._rollback_on_error():
        u = batch.nan_if_bad(average.exp() if logs else average).view(-1, *g.shape[1:])
        given = [batch.values[str(k)].detach().requires_grad_(x.requires_grad) for k, x in enumerate(args)]
        value, slopes = outer(f, u, *given)
        if batch.depositing:
            estimator._deposit(batch, {DOMAINS[domain][0]: average})
        if not torch.is_grad_enabled():
            return value
        # multiplied by the number of ranks, since frameworks average gradients over ranks
        slopes = [slope[batch.own] * len(batch.sizes) for slope in slopes]
        inputs = [g, *(x for x in args if x.requires_grad)]
        return with_gradients(value.detach(), [*zip(inputs, slopes, strict=True), *through(value)])


def _form(estimator: InnerAverage | MovingAverageEstimator) -> tuple[str, int]:
    """Return the domain of the averages, and their number per sample."""
    return (estimator.domain, estimator.width) if isinstance(estimator, InnerAverage) else ("log", 1)


def _inner(name: str, value: Any, width: int) -> Tensor:
    """Return checked inner values of the batch, ``(B, k)``."""
    if width == 1:
        return check_values(name, value, "(B,)", 1)[:, None]
    value = check_values(name, value, f"(B, {width})", 2)
    if value.shape[1] != width:
        raise ValueError(f"{name} must have shape (B, {width}) with width={width}, got {(*value.shape,)}")
    return value


def _read(
    estimator: InnerAverage | MovingAverageEstimator,
    inner: Tensor,
    index: Tensor,
    previous: Tensor | None,
    beta: float | None,
    args: Sequence[Tensor] = (),
) -> Batch:
    """Return the batch over all ranks: ``inner``, ``previous`` if given, and ``args`` as ``0``, ``1``, ..."""
    with estimator._guard():
        values, keys = {"inner": inner}, {"index": check_vector("index", index, len(inner))}
        if beta is not None:
            checks.non_negative("beta", beta)
            if previous is None:
                raise ValueError(f"beta={beta} is the factor of a correction by previous=, which is not given")
        if previous is not None:
            domain, width = _form(estimator)
            if domain == "log":
                raise ValueError(
                    'previous= may make an average negative, which has no logarithm: use InnerAverage(domain="linear")'
                )
            values["previous"] = _as_many("previous", _inner("previous", previous, width), len(inner))
        values |= {str(k): _of_samples(f"args[{k}]", value, len(inner)) for k, value in enumerate(args)}
    facts = {"width": sum(prod(x.shape[1:]) for x in values.values()), "beta": fingerprint(beta)}
    return estimator._read(keys, values, facts)


def _of_samples(name: str, value: Any, count: int) -> Tensor:
    """Return a detached tensor with one or more values per sample."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        raise TypeError(f"{name} must be a tensor (B, ...) with a value per sample, got {value!r}")
    return _as_many(name, value.detach(), count)


def _as_many(name: str, value: Tensor, count: int) -> Tensor:
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for a batch of {count} samples; pass one for each")
    return value


def outer(f: Callable[..., Tensor], u: Tensor, *args: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the mean of ``f(u, *args)`` over the samples, and its derivatives by ``u`` and ``args`` that require one.

    The value has a graph if ``f`` uses other tensors that require a gradient, see :func:`through`.
    """
    if torch.is_inference_mode_enabled():  # without derivatives
        return _per_sample(f(u, *args), len(u)).mean(), [torch.zeros_like(u)]
    found: Sequence[Tensor | None] = ()
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [u.detach().requires_grad_(), *(x for x in args if x.requires_grad)]
        value = _per_sample(f(leaves[0], *args), len(u)).mean()
        graph = graph and reaches_others(value, *leaves)
        if value.requires_grad:
            found = torch.autograd.grad(value, leaves, retain_graph=graph, allow_unused=True)
        if not found or found[0] is None:
            raise TypeError("f must be differentiable: what it returned has no graph, or none that leads to u")
    slopes = [torch.zeros_like(x) if slope is None else slope for x, slope in zip(leaves, found, strict=True)]
    return value if graph else value.detach(), slopes


def through(value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the value of :func:`outer` and its gradient for ``with_gradients``, if it has a graph."""
    return [(value, torch.ones_like(value.detach()))] if value.requires_grad else []


def _per_sample(values: Any, count: int) -> Tensor:
    """Return the values of an outer function; raise unless there is one per sample."""
    if not isinstance(values, Tensor):
        raise TypeError(f"f must return a tensor, one value per sample, got {values!r}")
    if values.shape != (count,):
        raise ValueError(f"f must return one value per sample, ({count},), got shape {(*values.shape,)}")
    return values
