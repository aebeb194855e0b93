r"""Exact normalizers, losses and gradients over the features of a whole data set, as references for estimators.

All functions accept features ``z1, z2`` of shape ``(n, d)``; row ``i`` of both is sample ``i``. The negatives of ``i``
are all other samples, and ``g_i = 1/|N_i| sum_{j in N_i} exp(h_ij / tau_i)``. In unimodal mode ``views="averaged"`` is
objective V2 of SogCLR (one normalizer per sample, the mean of ``g`` over both views), and ``views="separate"`` is
objective V1. Similarities are computed in chunks: the work is ``O(n^2 d)`` and the memory ``O(chunk_size n)``, in
float32, or in float64 for float64 features. Logarithms are in nats. Nothing is stored. Functions that communicate
document it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from compopt import checks
from compopt.batch import Batch
from compopt.checks import Directions, Mode
from compopt.checks.inputs import check_features, check_tau
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.collectives import doing
from compopt.functional import mean_of_views
from compopt.kernel.features import full_precision, with_gradients, working_dtype
from compopt.kernel.pairs import PairOptions, Pairs

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
    """Compute the exact log-normalizers of all samples (NeuCLIP, eq. 9).

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> compopt.diagnostics.log_normalizers(z1, z2, tau=0.1).shape
        torch.Size([50, 2])

    Args:
        z1, z2: features, ``(n, d)`` each.
        tau: temperature, a number or a tensor: 0-d, ``(n,)``, ``(n, 1)``, or ``(n, 2)`` for both directions.
        mode, views: see the module.
        normalize: L2-normalise the features first.
        chunk_size: number of rows of the similarity matrix to process at a time.
        directions: as for :class:`~compopt.ContrastiveEstimator`.

    Returns:
        ``(n, 2)``, one column per direction, in nats, without a graph; ``(n, 1)`` for unimodal averaged views and for
        one direction.

    Raises:
        ValueError: wrong shapes or devices, fewer than two samples, tau <= 0, or an unknown option.
        TypeError: ``z1`` and ``z2`` are not floating-point tensors of one dtype, or another argument has the wrong
            type.
    """
    tau = _check(z1, z2, tau, mode, views, chunk_size, directions)
    with torch.no_grad(), full_precision(z1.device):
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
    """Compute the exact objective over a complete data set.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> compopt.diagnostics.global_loss(z1, z2, tau=0.1).shape
        torch.Size([])

    Args:
        z1, z2, tau, mode, views, normalize, chunk_size, directions: as for :func:`log_normalizers`, which raises the
            same errors.

    Returns:
        A 0-d tensor in nats times ``tau``, without gradients for the features; see :func:`global_gradient`.
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
    """Compute the exact gradient of :func:`global_loss` with respect to ``z1`` and ``z2``.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> g1, g2 = compopt.diagnostics.global_gradient(z1, z2, tau=0.1)
        >>> g1.shape, g2.shape
        (torch.Size([50, 8]), torch.Size([50, 8]))

    Args:
        z1, z2, tau, mode, views, normalize, chunk_size, directions: as for :func:`log_normalizers`, which raises the
            same errors.
        multiply_tau: ``False``: return the gradient of the mean of ``log g_i``, without the factors ``tau_i``.

    Returns:
        ``(g1, g2)``, ``(n, d)`` each, in the features' dtype. With ``normalize`` the gradient is that of the features
        before the normalization.
    """
    tau = _check(z1, z2, tau, mode, views, chunk_size, directions)
    with torch.enable_grad(), full_precision(z1.device):
        z1, z2 = z1.detach().requires_grad_(), z2.detach().requires_grad_()
        z = [_prepare(z, normalize) for z in (z1, z2)]
        with torch.no_grad():
            pairs = _pairs(z, tau, mode, normalize, chunk_size, directions)
            alpha = _of_views(pairs.log_ghat, mode, views).expand_as(pairs.positive)
            factor: float | Tensor = 1.0  # of multiply_tau, which cancels 1 / tau
            if isinstance(tau, Tensor) and tau.dim() == 2 and mode == "unimodal" and views == "averaged":
                factor = tau.mean(1, keepdim=True) / tau  # both views have one alpha
            weight = factor if multiply_tau else 1 / tau
            gradients, _ = pairs.gradients(alpha, weight / alpha.numel(), pairs.sum_weights(alpha))
        loss = with_gradients(z[0].new_zeros(()), list(zip(z, gradients.unbind(), strict=True)))
        g1, g2 = torch.autograd.grad(loss, (z1, z2))
    return g1, g2


def view_differences(z1: Tensor, z2: Tensor, normalize: bool = True) -> Tensor:
    r"""Compute the difference between both views of each sample (SogCLR, Theorem 2, Figure 2).

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> compopt.diagnostics.view_differences(z1, z1).max().item()  # views that are alike
        0.0
        >>> compopt.diagnostics.view_differences(z1, z2).shape
        torch.Size([50])

    .. math::
        \epsilon_i^2 = \frac1{|N_i|} \sum_{z \in N_i} \langle z^1_i - z^2_i, z \rangle^2

    The sum runs over both views ``z`` of all other samples; the time is linear in ``n``. With one normalizer per sample
    (objective V2, as in SogCLR), the error of the gradient of objective V1 is of the order of the largest
    ``epsilon_i^2``. Training does not reduce this error.

    Args:
        z1, z2: features of both views of a data set, ``(n, d)`` each, n >= 2.
        normalize: L2-normalise the features first.

    Returns:
        ``(n,)``, mean squared differences of similarities.
    """
    check_features(z1, z2)
    with torch.no_grad(), full_precision(z1.device):
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
    """Compute the mean squared error of the estimator's log-normalizers (NeuCLIP, appendix B.6).

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> est = compopt.DCLEstimator(tau=0.1)
        >>> compopt.diagnostics.normalizer_error(est, z1, z2, batch_size=50).item() < 1e-8
        True

    For a stateful normalizer, the error is that of the stored values, over all visited rows, each at its own
    temperature. For a stateless normalizer, it is that of the estimates on random batches.

    Args:
        est: a :class:`~compopt.ContrastiveEstimator` without ``pairs=``.
        z1, z2: current features of the whole data set of the estimator, ``(n, d)`` each.
        batch_size: batch size for a stateless normalizer, at least 2; required there.
        seed: seed of the random batches and of the selection of anchors.
        chunk_size: number of rows of the similarity matrix to process at a time.
        anchors: number of randomly selected anchors, compared with all candidates (10,000 in the paper); ``None``: all.

    Returns:
        A 0-d tensor in squared nats; NaN if no row has been visited.

    Raises:
        ValueError: a stateless normalizer without ``batch_size``; a normalizer with an ``averages_views`` that does not
            match its stored values; ``anchors`` < 1 or ``batch_size`` < 2; the number of samples is not that of the
            rows.

    Communicates: collective on shards and with a network that is split across ranks.
    """
    checks.positive_int("chunk_size", chunk_size)
    seen, tau, views = _about(est, z1, z2)
    n = len(z1)
    with torch.no_grad(), full_precision(z1.device):
        a, b = (_prepare(z, est.normalize) for z in (z1, z2))
        generator = torch.Generator().manual_seed(seed)
        count = n if anchors is None else checks.positive_int("anchors", anchors)
        order = torch.randperm(n, generator=generator, device="cpu")[:count].to(a.device)
        exact = _exact_of_anchors(order, a, b, tau, est.mode, chunk_size, est._anchors)
        exact = _of_views(exact, est.mode, views)
        read = seen.of("normalizer")
        stored = est.normalizer.stored(read.columns, (a, b), tau, est.normalizer._hyper(seen))
        if stored is not None:
            if stored.shape[1] != exact.shape[1]:
                raise ValueError(
                    f"{type(est.normalizer).__name__} stores {stored.shape[1]} values per sample, and averages_views="
                    f"{est.normalizer.averages_views} says that there are {exact.shape[1]}; override that property"
                )
            visited = torch.ones_like(stored, dtype=torch.bool)
            if read.columns:
                visited = read.count > 0
            return (stored[order] - exact)[visited.expand_as(stored)[order]].square().mean()
        if batch_size is None:
            raise ValueError(f"batch_size is None; {type(est.normalizer).__name__} is stateless and needs one")
        if checks.positive_int("batch_size", batch_size) < 2:
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
    """Compare the mean of the estimator's batch gradients with the exact global gradient.

    Example:
        >>> import torch, compopt
        >>> z1, z2 = torch.randn(2, 50, 8)
        >>> est = compopt.DCLEstimator(tau=0.1)
        >>> error = compopt.diagnostics.gradient_error(est, z1, z2, batch_size=50)
        >>> sorted(error), error["relative"].item() < 1e-4
        (['cosine', 'relative'], True)

    The data set is divided into random batches ``repeats`` times. The batch gradients are added to the gradients of
    their samples and divided by the number of batches. With exact normalizers this mean is unbiased. The error that
    remains for large ``repeats`` is therefore the bias of the estimates in the current state. Nothing is deposited: a
    memory of features (:class:`~compopt.MemoryNormalizer`) contains the same few samples in all batches, and the
    resulting error counts as bias here.

    Args:
        est: a :class:`~compopt.ContrastiveEstimator` without ``pairs=``; its mode is restored afterwards.
        z1, z2: current features of the whole data set of the estimator, ``(n, d)`` each.
        batch_size: number of samples per batch; a shorter last batch is skipped, unless it is the first one.
        repeats: number of random divisions of the data set.
        seed: seed of the random batches.
        chunk_size: number of rows of the exact similarity matrix to process at a time.

    Returns:
        A dict of 0-d tensors: ``cosine`` of the angle between mean and exact gradient (1: same direction), and
        ``relative``, the error ``|mean - exact| / |exact|``.

    Raises:
        ValueError, TypeError, IndexError: as a call and :func:`log_normalizers`; ``batch_size`` or ``repeats`` < 1; the
            number of samples is not that of the rows.

    Communicates: as ``est.feature_gradients``, once per batch.
    """
    checks.positive_int("batch_size", batch_size)
    checks.positive_int("repeats", repeats)
    _, tau, views = _about(est, z1, z2)
    options: dict[str, Any] = {name: getattr(est, name) for name in ("mode", "normalize", "directions", "multiply_tau")}
    exact = torch.stack(global_gradient(z1, z2, tau, views=views, chunk_size=chunk_size, **options))
    total, batches = torch.zeros_like(exact), 0
    training, seen = [(each, each.training) for each in est._tree()], (est._last, est._shown)
    learned = [(parameter, parameter.grad) for parameter in est._differentiated()]
    est.eval()
    for parameter, _ in learned:
        parameter.grad = None  # feature_gradients accumulates into .grad, which is restored below
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
        for each, mode in training:
            each.training = mode
        est._last, est._shown = seen  # restore the metrics of the caller's last call
        for parameter, grad in learned:
            parameter.grad = grad
    mean = total / batches
    return {
        "cosine": F.cosine_similarity(mean.flatten(), exact.flatten(), dim=0),
        "relative": (mean - exact).norm() / exact.norm(),
    }


def _about(est: ContrastiveEstimator, z1: Tensor, z2: Tensor) -> tuple[Batch, float | Tensor, Views]:
    """Return the rows and temperatures of all samples, and the ``views`` of the normalizer."""
    if not isinstance(est, ContrastiveEstimator):
        raise TypeError(f"est must be a ContrastiveEstimator, got {type(est).__name__}")
    if est.pairs is not None:
        raise ValueError(
            f"est has pairs={est.pairs}; diagnostics compute means over all pairs: pass an estimator without pairs="
        )
    check_features(z1, z2)
    if est.n not in (None, len(z1)):
        raise ValueError(
            f"z1 and z2 have {len(z1)} samples, the estimator has rows for n={est.n}: pass the features of the whole "
            f"data set, in the order of index"
        )
    with torch.no_grad():
        seen = est._reading().read_committed(torch.arange(len(z1), device="cpu"), z1)
        tau = est._temperature(seen, None, est.temperature._hyper(seen))
    return seen, tau, "averaged" if est.normalizer.averages_views else "separate"


def _check(
    z1: Tensor, z2: Tensor, tau: float | Tensor, mode: str, views: str, chunk_size: int, directions: str
) -> float | Tensor:
    checks.loss_options(mode, directions, normalize=True, multiply_tau=True)
    checks.one_of("views", views, get_args(Views))
    checks.positive_int("chunk_size", chunk_size)
    check_features(z1, z2)
    return check_tau(tau, len(z1), checks.DIRECTIONS[directions])


def _prepare(z: Tensor, normalize: bool) -> Tensor:
    z = z.to(working_dtype(z.dtype))
    return F.normalize(z, dim=1) if normalize else z


def _pairs(z: list[Tensor], tau: float | Tensor, mode: str, bounded: bool, chunk_size: int, directions: str) -> Pairs:
    count, unimodal = checks.DIRECTIONS[directions], mode == "unimodal"
    options = PairOptions(True, count, unimodal=unimodal, bounded=bounded, chunk_size=chunk_size)
    index = torch.arange(len(z[0]), device=z[0].device)
    return Pairs(torch.stack([side.detach() for side in z]), tau, [index], options)


def _of_views(log_g: Tensor, mode: str, views: str) -> Tensor:
    return mean_of_views(log_g) if mode == "unimodal" and views == "averaged" else log_g


def _exact_of_anchors(
    rows: Tensor, a: Tensor, b: Tensor, tau: float | Tensor, mode: str, chunk_size: int, directions: int
) -> Tensor:
    """Return the exact ``log g_i`` of the anchors ``rows`` per direction or view, ``(len(rows), A)``."""
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
    batch = est._reading().read_committed(rows, a, {"z1": a, "z2": b})
    options = PairOptions(True, est._anchors, unimodal=est.mode == "unimodal", bounded=est.normalize)
    pairs = Pairs(torch.stack([a, b]), own, [rows], options)
    return est.normalizer.estimate(est._call(batch, pairs, own, None)).alpha.expand_as(pairs.positive)
