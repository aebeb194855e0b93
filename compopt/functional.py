r"""Equations of the library, one per function: tensors in, tensors out, no state.

Letters (shapes): ``B`` samples, ``D`` directions (2: image -> text and text -> image, or view 1 and view 2).

===========  ==========================================================================================
``s_ij``     similarity of anchor ``i`` and candidate ``j``; ``h_ij = s_ij - s_ii``
``N_i``      negatives of anchor ``i``: the candidates whose data-set index differs from its own
``tau_i``    temperature
``ghat_i``   batch estimate of the inner function, ``1/|N_i| sum_{j in N_i} exp(h_ij / tau_i)``
``u_i``      moving average of ``ghat_i`` (or of ``mean_j exp(s_ij / tau_i)``), stored as ``log u``
``alpha_i``  estimated log-normalizer of anchor ``i``
``w_ij``     pair weight ``exp(h_ij / tau_i - alpha_i) / |N_i|``
===========  ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from compopt.kernel.triton.choice import BACKENDS, PRECISIONS, Backend, Precision, precision_of, reason_for_torch
from compopt.kernel.triton.sweep import Anchors, Operands, products, ranked, sums

Scalar = float | Tensor


def log(x: Any) -> Any:
    """Return the natural logarithm of ``x``, a number or a tensor of any shape.

    Example:
        >>> from compopt import functional as F
        >>> F.log(1.0), F.log(0.0)
        (0.0, -inf)

    The result is ``-inf`` for a number <= 0, and NaN for a negative entry of a tensor.
    """
    if isinstance(x, Tensor):
        return x.log()
    return math.log(x) if x > 0 else -math.inf


def add_positive(log_sum: Tensor, log_count: Scalar, candidates: float) -> Tensor:
    r"""Add the positive to a log-normalizer, as one of ``candidates`` candidates.

    Example:
        >>> import torch, compopt.functional as F
        >>> F.add_positive(torch.zeros(2), 0.0, 4).exp().tolist()  # 1 + 1 / 4
        [1.25, 1.25]

    The result is ``log(c + sum_j exp(h_ij / tau))``. The ``|N|`` negatives of an anchor are taken as a sample of ``K``
    ones. Weights of the sum of all ``K`` with the positive, whose own exponential is 1, are those of the sum over the
    sample with ``c = |N| / K`` for the positive. With ``K <= |N|`` it is 1, the usual softmax.

    Args:
        log_sum: log-sum-exp over the negatives of each anchor.
        log_count: ``log |N|``, a number or a tensor broadcastable to ``log_sum``.
        candidates: ``K``.

    References:
        Jean et al., On Using Very Large Target Vocabulary for Neural Machine Translation, ACL 2015: sampled softmax.
    """
    log_c = log_count - math.log(candidates)
    log_c = log_c.clamp(max=0.0) if isinstance(log_c, Tensor) else torch.full_like(log_sum, min(0.0, log_c))
    return torch.logaddexp(log_sum, log_c.to(log_sum.dtype))


def add_eps(log_g: Tensor, eps: Scalar) -> Tensor:
    """Add a constant to a value that is given as a logarithm.

    Example:
        >>> import torch, compopt.functional as F
        >>> F.add_eps(torch.zeros(2), 1.0).exp().tolist()  # 1 + exp(0)
        [2.0, 2.0]

    Args:
        log_g: logarithms in nats, any shape.
        eps: >= 0; a number, or a tensor broadcastable to ``log_g``.

    Returns:
        ``log(eps + g)``, a tensor like ``log_g``; ``log_g`` itself if ``eps`` is the number 0.
    """
    if isinstance(eps, Tensor):
        return torch.logaddexp(log_g, eps.log())
    return log_g if eps == 0 else torch.logaddexp(log_g, log_g.new_full((), math.log(eps)))


def clip(x: Tensor, low: Scalar, high: Scalar) -> Tensor:
    """Limit values to bounds, numbers or tensors: ``min(max(x, low), high)``.

    Example:
        >>> import torch, compopt.functional as F
        >>> F.clip(torch.tensor([0.0, 0.5, 2.0]), 0.1, torch.tensor(1.0)).tolist()
        [0.10000000149011612, 0.5, 1.0]

    Args:
        x: any shape.
        low, high: numbers, or broadcastable to ``x``.
    """
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return x.clamp(min=low).clamp(max=high)
    return x.clamp(low, high)


def minus_product(x: Tensor, y: Tensor, factor: Scalar, out: Tensor | None = None) -> Tensor:
    """Subtract a product, ``x - factor y``; the factor is a number or a tensor.

    Example:
        >>> import torch, compopt.functional as F
        >>> F.minus_product(torch.tensor([3.0]), torch.tensor([2.0]), 0.5).item()
        2.0

    Args:
        x, y, factor: broadcastable to one shape.
        out: tensor to which the result is written, optional.
    """
    if isinstance(factor, Tensor):
        return torch.addcmul(x, factor, y, value=-1, out=out)
    return torch.sub(x, y, alpha=factor, out=out)


def minus_quotient(x: Tensor, y: Tensor, z: Tensor, factor: Scalar) -> Tensor:
    """Subtract a quotient, ``x - factor y / z``; the factor is a number or a tensor.

    Example:
        >>> import torch, compopt.functional as F
        >>> F.minus_quotient(torch.ones(2), torch.ones(2), torch.tensor([2.0, 4.0]), 1.0).tolist()
        [0.5, 0.75]
    """
    if isinstance(factor, Tensor):
        return minus_product(x, y / z, factor)
    return torch.addcdiv(x, y, z, value=-factor)


def all_finite(x: Tensor, dim: int | None = None) -> Tensor:
    """Return whether all values, or all values along an axis, are finite.

    Example:
        >>> import torch, compopt.functional as F
        >>> F.all_finite(torch.tensor([[1.0, 2.0], [float('nan'), 0.0]]), dim=1).tolist()
        [True, False]

    Args:
        x: floating point, any shape.
        dim: the axis; ``None``: all axes.

    Returns:
        A bool tensor with the shape of ``x`` without ``dim``, or 0-d, on the same device.
    """
    return torch.linalg.vector_norm(x, math.inf, dim=dim) < math.inf


def mean_of_views(log_g: Tensor) -> Tensor:
    """Average the normalizers of views, which are given as logarithms (SogCLR, eq. 9).

    Example:
        >>> import torch, compopt.functional as F
        >>> round(F.mean_of_views(torch.tensor([[1.0, 3.0]]).log()).exp().item(), 4)
        2.0

    Args:
        log_g: logarithms in nats, ``(..., V)``, for ``V`` views (usually 2); the result is ``(..., 1)``.
    """
    return torch.logsumexp(log_g, dim=-1, keepdim=True) - math.log(log_g.shape[-1])


def moving_average(log_u: Tensor, log_g: Tensor, gamma: Scalar, first: Tensor | None) -> Tensor:
    r"""Update moving averages that are stored as logarithms (SogCLR, eq. 9; NeuCLIP, eq. 3).

    Example:
        >>> import torch, compopt.functional as F
        >>> log_u, log_g = torch.tensor([1.0, 1.0]).log(), torch.tensor([3.0, 3.0]).log()
        >>> F.moving_average(log_u, log_g, 0.5, torch.tensor([False, True])).exp().round(decimals=4).tolist()
        [2.0, 3.0]

    Args:
        log_u: stored values in nats, any shape.
        log_g: ``log(eps + g)`` of this batch, broadcastable to ``log_u``.
        gamma: in (0, 1]; a number, or one per row.
        first: True where the row was never visited; the result is then ``log g`` itself. ``None``: no such row.

    Returns:
        The logarithm of ``(1 - gamma) u + gamma (eps + g)``, in the common shape.
    """
    if isinstance(gamma, Tensor):
        log_keep, log_take = torch.log1p(-gamma), gamma.log()
    else:
        log_keep, log_take = log(1.0 - gamma), log(gamma)
    average = torch.logaddexp(log_u + log_keep, log_g + log_take)
    return average if first is None else torch.where(first, log_g, average)


def linear_average(u: Tensor, g: Tensor, gamma: Scalar, first: Tensor, change: Scalar = 0.0) -> Tensor:
    r"""Update moving averages of values of any sign.

    Example:
        >>> import torch, compopt.functional as F
        >>> F.linear_average(torch.ones(2), torch.full((2,), -3.0), 0.5, torch.tensor([False, True])).tolist()
        [-1.0, -3.0]

    Args:
        u: stored values, any shape.
        g: values of this batch, of the same shape.
        gamma: in (0, 1]; a number, or broadcastable to ``u``.
        first: True where the row was never visited, broadcastable to ``u``; the result is then ``g`` itself.
        change: correction, added to ``(1 - gamma) u + gamma g``; ``beta (g_i(w_t) - g_i(w_{t-1}))`` in MSVR (Jiang et
            al., NeurIPS 2022).
    """
    average = torch.lerp(u, g, gamma)
    if isinstance(change, Tensor):
        average = average + change
    return torch.where(first, g, average)


def temperature_gradient(alpha: Tensor, rho: Scalar, sum_wh: Tensor, tau: Scalar, multiply_tau: bool = True) -> Tensor:
    r"""Return the derivative of each anchor's term of the objective by its temperature.

    Example:
        >>> import torch, compopt.functional as F
        >>> F.temperature_gradient(torch.tensor(0.5), 1.0, torch.tensor(-0.2), 0.1).item()  # 0.5 + 1 + 0.2 / 0.1
        3.5

    With ``multiply_tau`` the term is ``tau (alpha + rho)`` and ``G = alpha + rho - sum_j w_ij h_ij / tau`` (iSogCLR,
    eq. 13, without its factor 1/n). Otherwise the term is ``alpha`` and ``G = -sum_j w_ij h_ij / tau^2``.

    Args:
        alpha: log-normalizers, ``(B, D)``.
        rho: radius of the KL constraint.
        sum_wh: ``sum_j w_ij h_ij``, ``(B, D)``; ``sum_j w_ij s_ij - s_ii`` where the positive's weight is 1.
        tau: temperatures, broadcastable to ``(B, D)``.
        multiply_tau: see above.

    Returns:
        ``G``, ``(B, D)``, not clipped; in nats with ``multiply_tau``.
    """
    if multiply_tau:
        value = alpha if isinstance(rho, float) and rho == 0 else alpha + rho
        if isinstance(tau, Tensor):
            return torch.addcdiv(value, sum_wh, tau, value=-1)
        return value - sum_wh / tau
    return -sum_wh / (tau * tau)


def momentum(m: Tensor, grad: Tensor, beta: Scalar) -> Tensor:
    """Update the momentum of a gradient (iSogCLR, Algorithm 1, step 8).

    Example:
        >>> import torch, compopt.functional as F
        >>> F.momentum(torch.tensor(0.0), torch.tensor(2.0), 0.5).item()
        1.0

    Args:
        m: the average so far, any shape; the new one is ``(1 - beta) m + beta G``.
        grad: ``G``, of the same shape.
        beta: in (0, 1], a number or one per row; weight of the newest gradient.
    """
    return torch.lerp(m, grad, beta)


def adam(
    x: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    visits: Tensor,
    lr: Scalar,
    betas: tuple[Scalar, Scalar],
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Take one step of Adam, with the bias corrected by each row's own number of visits.

    Example:
        >>> import torch, compopt.functional as F
        >>> zero, grad = torch.zeros(1), torch.full((1,), 2.0)
        >>> x, m, v = F.adam(zero, zero, zero, grad, torch.ones(1), 0.1, (0.9, 0.999))
        >>> round(x.item(), 4)  # a first step has length lr
        -0.1

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) G, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) G^2 \\
        x &\leftarrow x - \text{lr}\; \frac{m / (1 - \beta_1^k)}{\sqrt{v / (1 - \beta_2^k)} + \epsilon}

    Args:
        x, m, v, grad: value, moments and gradient ``G``, of one shape.
        visits: ``k``, with this visit, broadcastable to that shape, floating point, >= 1.
        lr: step size, a number or one per row.
        betas: ``beta_1`` and ``beta_2``, numbers or one per row.
        eps: added to the root.

    Returns:
        New value, new first moment, new second moment.

    References:
        Kingma and Ba, Adam, ICLR 2015, Algorithm 1, with a separate ``k`` per row.
    """
    beta1, beta2 = betas
    m, v = torch.lerp(m, grad, 1.0 - beta1), torch.lerp(v, grad.square(), 1.0 - beta2)
    m_hat = m / (1.0 - beta1**visits)
    v_hat = v / (1.0 - beta2**visits)
    return minus_quotient(x, m_hat, v_hat.sqrt() + eps, lr), m, v


def pair_weights(
    s: Tensor, positive: Tensor, negative: Tensor, tau: Tensor, alpha: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return dense weights and log-normalizers of one direction, the reference for :mod:`compopt.kernel`.

    Example:
        >>> import torch, compopt.functional as F
        >>> s = torch.tensor([[0.9, 0.1, 0.1], [0.2, 0.8, 0.2]])
        >>> negative = torch.tensor([[False, True, True], [True, False, True]])
        >>> w, log_ghat = F.pair_weights(s, torch.tensor([0.9, 0.8]), negative, torch.tensor([0.1, 0.1]))
        >>> w.tolist()  # the batch's own normalizer: each row sums to one
        [[0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]

    ``log ghat_i = logsumexp_{j in N_i} h_ij / tau_i - log |N_i|`` and
    ``w_ij = exp(h_ij / tau_i - alpha_i) / |N_i|``. The methods of the library differ in ``alpha`` or ``w``.
    This function needs several ``(P, Q)`` matrices; the kernel computes the same numbers with at most two.

    Args:
        s: similarities of ``P`` anchors and ``Q`` candidates, ``(P, Q)``, floating point.
        positive: ``s_ii``, ``(P,)``.
        negative: True where candidate ``j`` is a negative of anchor ``i``, ``(P, Q)``.
        tau: temperatures of the anchors, ``(P,)``.
        alpha: log-normalizers, ``(P,)``; ``None``: ``log ghat``, the stateless estimate.

    Returns:
        ``w`` (P, Q), zero outside ``negative``, and ``log ghat`` (P,) in nats; NaN for an anchor without negatives.
    """
    count = negative.sum(1, dtype=s.dtype)
    logits = ((s - positive[:, None]) / tau[:, None]).masked_fill(~negative, -math.inf)
    log_ghat = torch.logsumexp(logits, dim=1) - count.log()
    alpha = log_ghat if alpha is None else alpha
    return torch.exp(logits - alpha[:, None]) / count[:, None], log_ghat


def contrastive_sums(
    z1: Tensor,
    z2: Tensor,
    tau: float | Tensor,
    keys: Tensor | Sequence[Tensor] | None = None,
    *,
    backend: Backend = "auto",
    precision: Precision | None = None,
    wave: int | None = None,
) -> Tensor:
    r"""Return the log-sums over all negatives for both directions, without a matrix of all pairs.

    Example:
        >>> import torch, compopt.functional as F
        >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=2).requires_grad_().unbind()
        >>> sums = F.contrastive_sums(z1, z2, tau=0.1)
        >>> positive = (z1 * z2).sum(1, keepdim=True) / 0.1
        >>> (torch.logaddexp(sums, positive) - positive).mean().backward()
        >>> tuple(sums.shape)
        (8, 2)

    .. math::
        L_i^1 = \log \sum_{j:\, k_j \ne k_i} e^{\langle z^1_i, z^2_j \rangle / \tau_i^1}, \qquad
        L_j^2 = \log \sum_{i:\, k_i \ne k_j} e^{\langle z^1_i, z^2_j \rangle / \tau_j^2}

    The sums contain negatives only. With the positives ``s = (z1 * z2).sum(1, keepdim=True) / tau`` CLIP's loss
    is ``(torch.logaddexp(L, s) - s).mean()``.

    Args:
        z1, z2: features, ``(B, d)``, of one floating dtype and device, normalised or not. Half precision is computed
            in float32.
        tau: temperatures > 0: a number, or a tensor, 0-d, ``(B,)``, ``(B, 1)`` or ``(B, 2)``, which may require grad.
        keys: ``(B,)`` integers, or several such tensors; two samples with equal values in any key are not a pair.
            ``None``: only a sample and itself are not a pair.
        backend: ``"torch"``, or ``"triton"`` for the fused kernel if it supports the call; ``"auto"``: ``"torch"``.
        precision: precision of the kernel's products: ``"tf32"``, ``"bf16"``, ``"tf32x3"`` or ``"ieee"`` (the last two
            are float32, as three TF32 products or without tensor cores). ``None``: TF32, or bfloat16 if
            ``torch.set_float32_matmul_precision("medium")`` is set and ``tau`` is a number of at least 0.02.
        wave: number of rows of the matrix in memory at a time; ``None``: so many that the part has 2^28 entries in the
            kernel, 2^25 in torch on an accelerator, which holds four to six such parts, and 2^21 in torch on a CPU.

    Returns:
        ``(B, 2)`` in nats, float64 for features in float64, else float32; ``-inf`` for an anchor without negatives.
        Autograd stores the features and a few numbers per sample. The backward pass recomputes the similarities in
        waves of rows: four matrix products in all. The result is differentiable once.

    Raises:
        TypeError: a key is not a tensor.
        ValueError: features that are not matrices of one shape, or have no rows; an unknown backend or precision; keys
            that are not integers or have another shape; temperatures of another shape; a number ``tau`` that is not
            greater than 0; ``wave`` below 1.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if z1.dim() != 2 or z1.shape != z2.shape or z1.dtype != z2.dtype:
        shapes = f"{tuple(z1.shape)} and {tuple(z2.shape)} of {z1.dtype} and {z2.dtype}"
        raise ValueError(f"z1 and z2 must be features (B, d) of one shape and dtype, got {shapes}")
    if not len(z1) or not z1.is_floating_point():
        raise ValueError(f"z1 and z2 must have rows, of a floating dtype, got {len(z1)} rows of {z1.dtype}")
    if wave is not None and (not isinstance(wave, int) or wave < 1):
        raise ValueError(f"wave must be a number of rows, at least 1, or None, got {wave!r}")
    for name, value, known in (("backend", backend, BACKENDS), ("precision", precision, (None, *PRECISIONS))):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    dtype = torch.float64 if z1.dtype == torch.float64 else torch.float32
    x, y, scale = z1.to(dtype).contiguous(), z2.to(dtype).contiguous(), _scale_by_direction(tau, z1, dtype)
    fused = reason_for_torch(backend, x) is None
    chosen, ranks = (precision or precision_of(tau)) if fused else None, _ranked_keys(keys, z1)
    facts = {"row_keys": ranks, "column_keys": ranks, "precision": chosen, "wave": wave}
    return _LogSums.apply(x, y, scale, facts)


def info_nce_loss(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.1,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    r"""Compute the InfoNCE loss of queries, in one direction, without a stored matrix of all pairs.

    Example:
        >>> import torch
        >>> from compopt.functional import info_nce_loss
        >>> query, key = torch.randn(2, 8, 4, requires_grad=True).unbind()
        >>> info_nce_loss(query, key).backward()
        >>> info_nce_loss(query, key, torch.randn(5, 4), temperature=0.05, reduction="none").shape
        torch.Size([8])

    .. math::
        L_i = \log\left(e^{s_{ii} / \tau} + \sum_{j \in N_i} e^{s_{ij} / \tau}\right) - s_{ii} / \tau, \qquad
        s_{ij} = \frac{\langle q_i, k_j \rangle}{|q_i| |k_j|}

    ``N_i`` are the other positive keys of the batch; or, if they are given, the negative keys, and only these. The
    loss has no state and no options. :class:`~compopt.InfoNCEEstimator` averages both directions and adds equal
    samples, mined negatives, several ranks and a gradient in closed form; :func:`~compopt.recommended` is the next step
    from there.

    Args:
        query, positive_key: features, ``(B, d)``; row ``i`` of both belongs to one sample.
        negative_keys: features ``(M, d)``, negatives of every query, or ``(B, M, d)``, of each query.
        temperature: > 0, a number or a 0-d tensor, which may require grad.
        reduction: ``"mean"`` or ``"sum"`` over the queries, or ``"none"``.

    Returns:
        The loss in nats, 0-d, or ``(B,)`` for ``"none"``; float64 for features in float64, else float32.
        Differentiable once.

    Raises:
        ValueError: features of other shapes or of different dtypes; an unknown reduction; a number ``temperature`` that
            is not greater than 0.

    References: van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018, eq. 4.
    """
    features = [query, positive_key, *([] if negative_keys is None else [negative_keys])]
    _check_queries(*features)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, positive, *further = (torch.nn.functional.normalize(x.to(dtype), dim=-1) for x in features)
    scale = _scale_by_direction(temperature, q, dtype)[:, :1]
    own = (q * positive).sum(1) * scale[:, 0]
    keys = (further or [positive])[0]
    if keys.dim() == 3:
        with torch.autocast(q.device.type, enabled=False):
            log_sum = torch.logsumexp((keys @ q[:, :, None]).squeeze(2) * scale, dim=1)
    else:
        none = {f"{side}_keys": q.new_empty(0, len(x), dtype=torch.int32) for side, x in (("row", q), ("column", keys))}
        log_sum = _LogSums.apply(q, keys, scale, {**none, "precision": None, "wave": None})[:, 0]
    # the keys of the batch contain the positive itself
    loss = (torch.logaddexp(log_sum, own) if further else log_sum) - own
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _check_queries(query: Tensor, positive_key: Tensor, negative_keys: Tensor | None = None) -> None:
    count, dim = query.shape if query.dim() == 2 else (0, 0)
    if not count or positive_key.shape != query.shape:
        shapes = f"{tuple(query.shape)} and {tuple(positive_key.shape)}"
        raise ValueError(f"query and positive_key must have one shape (B, d) with rows, got {shapes}")
    if negative_keys is not None:
        axes, shape = negative_keys.dim(), negative_keys.shape
        if axes not in (2, 3) or shape[-1] != dim or not shape[-2] or (axes == 3 and shape[0] != count):
            raise ValueError(
                f"negative_keys must be (M, {dim}) or ({count}, M, {dim}) with M >= 1, got {tuple(negative_keys.shape)}"
            )
    dtypes = {x.dtype for x in (query, positive_key, negative_keys) if x is not None}
    if len(dtypes) > 1 or not query.is_floating_point():
        raise ValueError(f"query and keys must have one floating dtype, got {sorted(map(str, dtypes))}")


def _scale_by_direction(tau: float | Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``1 / tau``, ``(B, 2)``."""
    if not isinstance(tau, Tensor):
        if not tau > 0:
            raise ValueError(f"tau must be greater than 0, got {tau!r}")
        return z.new_full((len(z), 2), 1 / tau, dtype=dtype)
    if tau.dim() > 2 or (tau.dim() > 0 and len(tau) != len(z)) or (tau.dim() == 2 and tau.shape[1] > 2):
        raise ValueError(f"tau must be a number, 0-d, (B,), (B, 1) or (B, 2) for B = {len(z)}, got {tuple(tau.shape)}")
    column = tau.unsqueeze(1) if tau.dim() == 1 else tau
    return column.to(z.device, dtype).reciprocal().expand(len(z), 2)  # 1 / tau in half precision has three digits only


def _ranked_keys(keys: Tensor | Sequence[Tensor] | None, z: Tensor) -> Tensor:
    """Return the keys as int32 ranks, ``(k, B)``, which the sweep compares."""
    if keys is None:
        return torch.arange(len(z), device=z.device, dtype=torch.int32)[None]
    given = [keys] if isinstance(keys, Tensor) else list(keys)
    for key in given:
        if not isinstance(key, Tensor):
            raise TypeError(f"keys must be a tensor of integers, or a sequence of such tensors, got {key!r} in it")
        if key.shape != z.shape[:1] or key.is_floating_point():
            raise ValueError(f"keys must be integers of shape {tuple(z.shape[:1])}, got {key.dtype} {tuple(key.shape)}")
    if not given:
        raise ValueError("keys has no entry; leave it out, so that a sample is no negative of itself")
    return torch.stack([ranked(key.to(z.device)) for key in given])


class _LogSums(torch.autograd.Function):
    """Autograd function of :func:`contrastive_sums`, which stores the features and a few numbers per anchor.

    Its arguments are the features, ``1 / tau_i`` of the anchors along the rows and along the columns, ``(B, 2)``, or
    of those along the rows alone, ``(B, 1)``, and further fields of the operands.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, facts: dict[str, Any]) -> Tensor:
        low = torch.bfloat16 if facts["precision"] == "bf16" else x.dtype
        x, y, ctx.facts = x.to(low), y.to(low), facts
        rows, columns = (*map(Anchors, scale.unbind(1)), None)[:2]
        with torch.autocast(x.device.type, enabled=False):
            found = sums(Operands(x, y, rows=rows, columns=columns, moments=ctx.needs_input_grad[2], **facts))
        sides = [side for side in found if side is not None]
        log_sums = torch.stack([side.log_total() for side in sides], dim=1)
        means = [torch.where(side.total == 0, 0, side.dot / side.total) for side in sides if side.dot is not None]
        ctx.save_for_backward(x, y, scale, log_sums, *means)
        return log_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # in a backward pass: with create_graph=True, and only then
            raise RuntimeError("the sums are differentiable once; call backward() without create_graph=True")
        x, y, scale, log_sums, *means = ctx.saved_tensors
        of_scale = grad * torch.stack(means, dim=1) if means else None
        if not any(ctx.needs_input_grad[:2]):
            return None, None, of_scale, None
        sides = zip(scale.unbind(1), (grad * scale).unbind(1), log_sums.unbind(1), strict=True)
        rows, columns = (*(Anchors(*side) for side in sides), None)[:2]
        operands, transposed = Operands(x, y, rows=rows, columns=columns, **ctx.facts), ctx.needs_input_grad[1]
        with torch.autocast(x.device.type, enabled=False):  # autocast may be enabled around backward()
            of_x, of_y = products(operands, transposed)
        return of_x, of_y if transposed else None, of_scale, None
