r"""Exact quantities of a whole data set's features, to compare estimators with. Chunked: never ``n x n``.

All take features ``z1, z2`` of shape ``(n, d)``, row ``i`` of both being sample ``i``, and one batch worth of
definitions: negatives of ``i`` are all other samples, ``g_i = 1/|N_i| sum_{j in N_i} exp(h_ij / tau_i)``. In unimodal
mode ``views="averaged"`` is objective V2 of SogCLR (one normalizer per sample, the mean of both views' ``g``) and
``views="separate"`` objective V1. Work is ``O(n^2 d)``, memory ``O(chunk_size n)``, in float32, or in float64 for
float64 features; logarithms are in nats. Nothing is stored or, unless a function says so, communicated.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from compopt import checks
from compopt.arguments import DIRECTIONS, check_options
from compopt.batch import Batch
from compopt.checks import Directions, Mode
from compopt.checks.inputs import check_features, check_tau
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.collectives import doing
from compopt.functional import mean_of_views
from compopt.kernel.features import with_gradients, working_dtype
from compopt.kernel.local import Pairs
from compopt.kernel.pairs import PairOptions

Views = Literal["averaged", "separate"]
CHUNK_SIZE = 512


def log_normalizers(
    z1: Tensor,
    z2: Tensor,
    tau: float | Tensor,
    mode: Mode = "bimodal",
    views: Views = "averaged",
    normalize: bool = True,
    chunk_size: int = CHUNK_SIZE,
    directions: Directions = "both",
) -> Tensor:
    """Exact ``log g_i`` (NeuCLIP, eq. 9).

    Args:
        z1, z2: ``(n, d)``.
        tau: a number, or a tensor: 0-d, ``(n,)``, ``(n, 1)``, or ``(n, 2)`` for both directions.
        mode, views: see the module.
        normalize: L2-normalise the features first.
        chunk_size: rows of the similarity matrix at a time.
        directions: as of :class:`~compopt.ContrastiveEstimator`.

    Returns:
        ``(n, 2)``, a column per direction, in nats, without a graph; ``(n, 1)`` for unimodal averaged views and for one
        direction.

    Raises:
        ValueError: wrong shapes or devices, fewer than two samples, tau <= 0, an unknown option.
        TypeError: ``z1`` and ``z2`` are no floating-point tensors of one dtype; another argument of the wrong type.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> compopt.diagnostics.log_normalizers(z1, z2, tau=0.1).shape
        torch.Size([50, 2])
    """
    tau = _check(z1, z2, tau, mode, views, chunk_size, directions)
    with torch.no_grad():
        z = [_prepare(z, normalize) for z in (z1, z2)]
        return _of_views(_pairs(z, tau, mode, normalize, chunk_size, directions).log_ghat, mode, views)


def global_loss(
    z1: Tensor,
    z2: Tensor,
    tau: float | Tensor,
    mode: Mode = "bimodal",
    views: Views = "averaged",
    normalize: bool = True,
    chunk_size: int = CHUNK_SIZE,
    directions: Directions = "both",
) -> Tensor:
    """Exact objective ``mean of tau_i log g_i`` over samples and directions.

    Args:
        z1, z2, tau, mode, views, normalize, chunk_size, directions: as of :func:`log_normalizers`, which raises the
            same errors.

    Returns:
        0-d, in nats times ``tau``; no gradient reaches the features, see :func:`global_gradient`.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> compopt.diagnostics.global_loss(z1, z2, tau=0.1).shape
        torch.Size([])
    """
    tau = _check(z1, z2, tau, mode, views, chunk_size, directions)
    return (log_normalizers(z1, z2, tau, mode, views, normalize, chunk_size, directions) * tau).mean()


def global_gradient(
    z1: Tensor,
    z2: Tensor,
    tau: float | Tensor,
    mode: Mode = "bimodal",
    views: Views = "averaged",
    normalize: bool = True,
    chunk_size: int = CHUNK_SIZE,
    directions: Directions = "both",
    multiply_tau: bool = True,
) -> tuple[Tensor, Tensor]:
    """Exact gradient of :func:`global_loss` with respect to ``z1`` and ``z2``.

    Args:
        z1, z2, tau, mode, views, normalize, chunk_size, directions: as of :func:`log_normalizers`, which raises the
            same errors.
        multiply_tau: without it the gradient of the mean of ``log g_i``, whose terms do not weigh ``tau_i``.

    Returns:
        ``(g1, g2)``, ``(n, d)`` each, in the features' dtype; through the normalization, if there is one.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> g1, g2 = compopt.diagnostics.global_gradient(z1, z2, tau=0.1)
        >>> g1.shape, g2.shape
        (torch.Size([50, 8]), torch.Size([50, 8]))
    """
    tau = _check(z1, z2, tau, mode, views, chunk_size, directions)
    with torch.enable_grad():
        z1, z2 = z1.detach().requires_grad_(), z2.detach().requires_grad_()
        z = [_prepare(z, normalize) for z in (z1, z2)]
        with torch.no_grad():
            pairs = _pairs(z, tau, mode, normalize, chunk_size, directions)
            alpha = _of_views(pairs.log_ghat, mode, views).expand_as(pairs.positive)
            weight = 1.0 if multiply_tau else 1 / tau
            gradients, _ = pairs.gradients(alpha, weight / alpha.numel(), pairs.sum_weights(alpha))
        loss = with_gradients(z[0].new_zeros(()), list(zip(z, gradients.unbind(), strict=True)))
        g1, g2 = torch.autograd.grad(loss, (z1, z2))
    return g1, g2


def view_differences(z1: Tensor, z2: Tensor, normalize: bool = True) -> Tensor:
    r"""Difference of what both views of each sample see: ``epsilon_i^2`` of SogCLR's Theorem 2 and Figure 2.

    .. math::
        \epsilon_i^2 = \frac1{|N_i|} \sum_{z \in N_i} \langle z^1_i - z^2_i, z \rangle^2

    over both views ``z`` of all other samples, in time linear in ``n``. With one normalizer per sample (objective V2,
    what SogCLR keeps) the gradient of V1 has an error of the order of the largest of them that training does not take
    away.

    Args:
        z1, z2: features of both views of a data set, ``(n, d)`` each, n >= 2.
        normalize: L2-normalise them first.

    Returns:
        ``(n,)``, squared similarities.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> compopt.diagnostics.view_differences(z1, z1).max().item()  # views that are alike
        0.0
        >>> compopt.diagnostics.view_differences(z1, z2).shape
        torch.Size([50])
    """
    check_features(z1, z2)
    with torch.no_grad():
        a, b = (_prepare(z, normalize) for z in (z1, z2))
        gap = a - b
        every = torch.linalg.vecdot(gap @ (a.T @ a + b.T @ b), gap)
        own = torch.linalg.vecdot(gap, a).square() + torch.linalg.vecdot(gap, b).square()
        return (every - own).clamp(min=0) / (2 * len(a) - 2)


@doing("a diagnostic")
def normalizer_error(
    est: ContrastiveEstimator,
    z1: Tensor,
    z2: Tensor,
    batch_size: int | None = None,
    seed: int = 0,
    chunk_size: int = CHUNK_SIZE,
    anchors: int | None = None,
) -> Tensor:
    """Mean squared error of the estimator's log-normalizers against the exact ones (NeuCLIP, appendix B.6).

    A stateful normalizer is judged by what it has stored, over the rows it has seen, each at its own temperature; a
    stateless one by its estimates on random batches.

    Args:
        est: any estimator.
        z1, z2: current features of the whole data set it was built for, ``(n, d)``.
        batch_size: for stateless normalizers, required there.
        seed: of the random batches and of the anchors.
        chunk_size: rows of the similarity matrix at a time.
        anchors: judge a random sample of so many, against all candidates (the paper takes 10,000); ``None``: all.

    Returns:
        0-d, in squared nats; NaN if no row has been seen.

    Raises:
        ValueError: a stateless normalizer without ``batch_size``; a normalizer whose ``averages_views`` does not fit
            what it stores; ``anchors`` or ``batch_size`` < 1.
        IndexError: more samples than the estimator has rows for.

    Communicates: collective on shards and with a network that ranks split.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> est = compopt.DCLEstimator(tau=0.1)
        >>> compopt.diagnostics.normalizer_error(est, z1, z2, batch_size=50).item() < 1e-8  # the batch is the data set
        True
    """
    checks.count("chunk_size", chunk_size)
    seen, tau, views = _about(est, z1, z2)
    n = len(z1)
    with torch.no_grad():
        a, b = (_prepare(z, est.normalize) for z in (z1, z2))
        generator = torch.Generator().manual_seed(seed)
        count = n if anchors is None else checks.count("anchors", anchors)
        order = torch.randperm(n, generator=generator, device="cpu")[:count].to(a.device)
        exact = _exact_of_anchors(order, a, b, tau, est.mode, chunk_size, est._anchors)
        exact = _of_views(exact, est.mode, views)
        stored = est.normalizer.stored(seen.columns, (a, b), tau, est._hyper("normalizer", seen))
        if stored is not None:
            if stored.shape[1] != exact.shape[1]:
                raise ValueError(
                    f"{type(est.normalizer).__name__} stores {stored.shape[1]} values per sample, and averages_views="
                    f"{est.normalizer.averages_views} says that there are {exact.shape[1]}; override that property"
                )
            visited = seen.count > 0 if seen.block is not None else torch.ones_like(stored, dtype=torch.bool)
            return (stored[order] - exact)[visited.expand_as(stored)[order]].square().mean()
        if batch_size is None:
            raise ValueError(f"batch_size is None; {type(est.normalizer).__name__} is stateless and needs one")
        if checks.count("batch_size", batch_size) < 2:
            raise ValueError("batch_size must be at least 2: a sample alone has no negatives")
        errors = []
        for at in torch.arange(len(order), device="cpu").split(batch_size):
            if len(at) > 1:
                alpha = _estimate(est, a[order[at]], b[order[at]], order[at], tau)
                errors.append((alpha - exact[at]).square().flatten())
        return torch.cat(errors).mean()


@doing("a diagnostic")
def gradient_error(
    est: ContrastiveEstimator,
    z1: Tensor,
    z2: Tensor,
    batch_size: int,
    repeats: int = 1,
    seed: int = 0,
    chunk_size: int = CHUNK_SIZE,
) -> dict[str, Tensor]:
    """Distance of the estimator's batch gradients, on average, from the exact global gradient.

    The data set is cut into random batches ``repeats`` times; the batch gradients, each placed at its samples, are
    averaged. With exact normalizers that average is unbiased, so what remains as ``repeats`` grows is the bias of
    the estimates, given the state as it is. Nothing is deposited: a memory of features
    (:class:`~compopt.MemoryNormalizer`) holds the same few samples in all batches, and that counts as bias here.

    Args:
        est: any estimator; in training mode again afterwards, if it was before.
        z1, z2: current features of the whole data set it was built for, ``(n, d)``.
        batch_size: samples per batch; a last, shorter batch is left out.
        repeats: number of cuts of the data set.
        seed: of the random batches.
        chunk_size: rows of the exact similarity matrix at a time.

    Returns:
        ``cosine`` of the angle between the two (1: the direction is right, whatever the length), and ``relative`` error
        ``|mean - exact| / |exact|``, 0-d.

    Raises:
        ValueError, TypeError, IndexError: as a call and :func:`log_normalizers`; ``batch_size`` or ``repeats`` < 1.

    Communicates: as ``est.feature_gradients``, once per batch.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> est = compopt.DCLEstimator(tau=0.1)
        >>> error = compopt.diagnostics.gradient_error(est, z1, z2, batch_size=50)
        >>> sorted(error), error["relative"].item() < 1e-4
        (['cosine', 'relative'], True)
    """
    checks.count("batch_size", batch_size)
    checks.count("repeats", repeats)
    _, tau, views = _about(est, z1, z2)
    options: dict[str, Any] = {name: getattr(est, name) for name in ("mode", "normalize", "directions", "multiply_tau")}
    exact = torch.stack(global_gradient(z1, z2, tau, views=views, chunk_size=chunk_size, **options))
    total, batches = torch.zeros_like(exact), 0
    training, seen = est.training, (est._last, est._shown)
    learned = [(parameter, parameter.grad) for parameter in est.parameters()]
    est.eval()
    for parameter, _ in learned:
        parameter.grad = None  # which feature_gradients adds to
    try:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(repeats):
            for rows in torch.randperm(len(z1), generator=generator, device="cpu").split(batch_size):
                if len(rows) < batch_size and batches:
                    continue  # a short last batch would weigh as much as a full one
                there = rows.to(z1.device)
                _, g1, g2 = est.feature_gradients(z1[there], z2[there], rows)
                total[0].index_add_(0, there, g1)
                total[1].index_add_(0, there, g2)
                batches += 1
    finally:
        est.train(training)
        est._last, est._shown = seen  # metrics are those of the caller's last call
        for parameter, grad in learned:
            parameter.grad = grad
    mean = total / batches
    return {
        "cosine": F.cosine_similarity(mean.flatten(), exact.flatten(), dim=0),
        "relative": (mean - exact).norm() / exact.norm(),
    }


def _about(est: ContrastiveEstimator, z1: Tensor, z2: Tensor) -> tuple[Batch, float | Tensor, Views]:
    """Return rows and temperatures of all samples, and the ``views`` of the normalizer."""
    if not isinstance(est, ContrastiveEstimator):
        raise TypeError(f"est must be a ContrastiveEstimator, got {type(est).__name__}")
    if est.pairs is not None:
        raise ValueError(
            f"est has pairs={est.pairs}, and what is exact here is the mean over all pairs; ask an estimator without"
        )
    check_features(z1, z2)
    with torch.no_grad():
        seen = est._look(torch.arange(len(z1), device="cpu"), z1)
        tau = est._temperature(seen, None, est._hyper("temperature", seen))
    return seen, tau, "averaged" if est.normalizer.averages_views else "separate"


def _check(
    z1: Tensor, z2: Tensor, tau: float | Tensor, mode: str, views: str, chunk_size: int, directions: str
) -> float | Tensor:
    check_options(mode, directions, normalize=True, multiply_tau=True)
    checks.one_of("views", views, get_args(Views))
    checks.count("chunk_size", chunk_size)
    check_features(z1, z2)
    return check_tau(tau, len(z1), len(DIRECTIONS[directions]))


def _prepare(z: Tensor, normalize: bool) -> Tensor:
    z = z.to(working_dtype(z.dtype))
    return F.normalize(z, dim=1) if normalize else z


def _pairs(z: list[Tensor], tau: float | Tensor, mode: str, bounded: bool, chunk_size: int, directions: str) -> Pairs:
    count, unimodal = len(DIRECTIONS[directions]), mode == "unimodal"
    options = PairOptions(True, count, unimodal=unimodal, bounded=bounded, chunk_size=chunk_size)
    index = torch.arange(len(z[0]), device=z[0].device)
    return Pairs(torch.stack([side.detach() for side in z]), tau, [index], options)


def _of_views(log_g: Tensor, mode: str, views: str) -> Tensor:
    return mean_of_views(log_g) if mode == "unimodal" and views == "averaged" else log_g


def _exact_of_anchors(
    rows: Tensor, a: Tensor, b: Tensor, tau: float | Tensor, mode: str, chunk_size: int, directions: int
) -> Tensor:
    """Return exact ``log g_i`` per direction or view of some anchors against all candidates, ``(len(rows), A)``."""
    n, bimodal = len(a), mode == "bimodal"
    tau = torch.as_tensor(tau, dtype=a.dtype, device=a.device).expand(n, directions)
    columns = []
    for direction, (own, other) in enumerate(((a, b), (b, a))[:directions]):
        candidates = other if bimodal else torch.cat([own, other])
        negatives = n - 1 if bimodal else 2 * n - 2
        parts = []
        for at in rows.split(chunk_size):
            s = own[at] @ candidates.T
            line = torch.arange(len(at), device=s.device)
            positive = s[line, at if bimodal else at + n].clone()
            for column in (at,) if bimodal else (at, at + n):
                s[line, column] = -torch.inf
            top = s.amax(1, keepdim=True)
            scale = tau[at, direction]
            total = s.sub_(top).div_(scale[:, None]).exp_().sum(1)
            parts.append(total.log() + (top[:, 0] - positive) / scale - math.log(negatives))
        columns.append(torch.cat(parts))
    return torch.stack(columns, dim=1)


def _estimate(est: ContrastiveEstimator, a: Tensor, b: Tensor, rows: Tensor, tau: float | Tensor) -> Tensor:
    """Return the estimates of a (stateless) normalizer for one batch, ``(B, A)``."""
    own = tau[rows] if isinstance(tau, Tensor) and tau.dim() else tau
    batch = est._look(rows, a, {"z1": a, "z2": b})
    options = PairOptions(True, est._anchors, unimodal=est.mode == "unimodal", bounded=est.normalize)
    pairs = Pairs(torch.stack([a, b]), own, [rows], options)
    return est.normalizer.estimate(est._call(batch, pairs, own, None)).alpha.expand_as(pairs.positive)
