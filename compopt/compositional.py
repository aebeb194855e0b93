"""Outer functions of moving averages: finite-sum compositional objectives that are not contrastive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compopt.checks.context import refuse_derivatives
from compopt.kernel.features import reaches_others, with_gradients
from compopt.normalizers import MovingAverageEstimator


def compositional_loss(
    g: Tensor,
    index: Tensor,
    estimator: MovingAverageEstimator,
    f: Callable[..., Tensor],
    *,
    args: Sequence[Tensor] = (),
    previous: Tensor | None = None,
    beta: float | None = None,
) -> Tensor:
    r"""Return ``1/B sum_i f(u_i)`` with gradient ``1/B sum_i f'(u_i) grad g_i``; ``u_i`` are averages of ``g_i``.

    Parameters inside ``f``, and ``args`` with a graph, receive the derivative of the returned value, with ``u_i`` held
    constant.

    The objective is ``F(w) = 1/n sum_i f(g_i(w))``, where each inner ``g_i`` is an expectation and a batch provides one
    sample of it. The gradient of a nonlinear ``f`` at the sample is biased; at the moving average ``u_i`` the bias
    vanishes as the average converges. With an optimizer that has momentum, such as ``SGD(momentum=0.9)`` or Adam,
    the steps are those of SOX: the momentum is its moving average of the gradient.

    Args:
        g: unbiased samples of the inner functions with their graph, ``(B,)``, or ``(B, k)`` with an estimator of
            ``width=k``, floating point; > 0 unless the estimator has ``domain="linear"``. With several ranks each rank
            passes its own samples; the loss is that of all ranks, and gradients are multiplied by the number of ranks.
        index: the numbers ``i``, ``(B,)`` integers.
        estimator: stores ``log u`` or ``u``; commit with its ``step()`` or ``attach``. In training mode with gradients
            enabled the new rows are deposited.
        f: differentiable outer function, called as ``f(u, *args)`` on the averages of the samples of all ranks, in the
            shape of ``g``; returns one value per sample, ``(B,)``. Every rank returns the whole gradient of parameters
            inside ``f``.
        args: further arguments of ``f``, ``(B, ...)`` each, optionally with a graph, for example
            ``args=(weight[index],)``.
        previous, beta: correction of the averages, see :meth:`~compopt.MovingAverageEstimator.update`.

    Returns:
        0-d loss; float64 if ``g`` or the rows are float64, else float32.

    Raises:
        ValueError: ``g`` has another shape, is empty, or (on the CPU) has an entry <= 0 while averages are kept as
            logarithms; ``f`` returns another shape than ``(B,)``; ``previous`` or ``beta``, see ``update``.
        TypeError: ``estimator`` is not a :class:`~compopt.MovingAverageEstimator`; ``g`` is not floating point;
            ``index`` is not an integer tensor; ``f`` returns no tensor, or one that does not depend on ``u``.
        IndexError: an index is outside ``0 .. n - 1``.
        RuntimeError: the estimator is part of another one; a transform or a tangent is active, as in a call of
            :class:`~compopt.ContrastiveEstimator`.

    Communicates: see :meth:`~compopt.MovingAverageEstimator.update`; the backward pass communicates nothing.

    References:
        Wang and Yang, Finite-Sum Coupled Compositional Stochastic Optimization, ICML 2022 (SOX); Jiang et al., NeurIPS
        2022 (MSVR, with ``previous``).

    Example, a robust (KL-regularised) risk per task, ``F = 1/n sum_i lam log E exp(loss_i / lam)``:
        >>> import torch, compopt
        >>> _ = torch.manual_seed(0)
        >>> n, lam = 5, 0.5
        >>> theta = torch.zeros(n, requires_grad=True)          # one location per task
        >>> centre = torch.arange(n, dtype=torch.float32)       # its data: centre + noise
        >>> u = compopt.MovingAverageEstimator(n, gamma=0.3)
        >>> optimizer = torch.optim.SGD([theta], lr=0.5)
        >>> _ = u.attach(optimizer)
        >>> for _ in range(300):
        ...     task = torch.randperm(n)[:3]
        ...     x = centre[task] + 0.1 * torch.randn(3)
        ...     g = torch.exp((theta[task] - x).square() / lam)  # one sample of each inner expectation
        ...     loss = compopt.compositional_loss(g, task, u, lambda v: lam * v.log())
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
        >>> bool((theta - centre).abs().max() < 0.2)
        True
    """
    if not isinstance(estimator, MovingAverageEstimator):
        raise TypeError(f"estimator must be a MovingAverageEstimator, got {type(estimator).__name__}")
    logs = estimator.domain == "log"
    with estimator._engine.handshake.guard():
        refuse_derivatives(("g", g))
        inner = estimator._inner("g", g)
        if logs and inner.device.type == "cpu" and bool((inner <= 0).any()):
            raise ValueError(
                f"g must be > 0, since its average is kept as a logarithm; got {inner.min().item()!r}: build the "
                f'estimator with domain="linear"'
            )
    inner = (inner.log() if logs else inner).view(g.shape)
    average, batch = estimator._average(inner, index, previous, beta, args)
    with estimator._engine.undone_on_error():
        u = batch.nan_if_bad(average.exp() if logs else average).view(-1, *g.shape[1:])
        given = [batch.values[str(k)].detach().requires_grad_(x.requires_grad) for k, x in enumerate(args)]
        value, slopes = outer(f, u, *given)
        estimator._deposit_average(average, batch)
        if not torch.is_grad_enabled():
            return value
        # multiplied by the number of ranks, since frameworks average gradients over ranks
        slopes = [slope[batch.own] * len(batch.sizes) for slope in slopes]
        inputs = [g, *(x for x in args if x.requires_grad)]
        return with_gradients(value.detach(), [*zip(inputs, slopes, strict=True), *through(value)])


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
