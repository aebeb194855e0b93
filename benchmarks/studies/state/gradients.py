"""Why: what an estimator knows at the weights that it has trained, and what its gradients are worth there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import compopt
from compopt.diagnostics import global_gradient, normalizer_error

REPEATS = 32  # times that the data set is cut into batches


def measures(est: Any, z1: Tensor, z2: Tensor, batch: int) -> dict[str, float]:
    """Errors of an estimator against the exact values of its whole data set.

    Returns:
        ``normalizer_error``: mean squared error of the log-normalizers; ``bias``, ``spread``: of a sample's gradient
        over the batches that it may be in, relative to the exact global one (root of the mean square).
    """
    est.eval()
    error = normalizer_error(est, z1, z2, batch_size=batch, anchors=min(len(z1), 4096))
    bias, spread = gradient_errors(est, z1, z2, batch)
    return {"normalizer_error": float(error), "bias": bias, "spread": spread}


def gradient_errors(
    est: Any, z1: Tensor, z2: Tensor, batch: int, repeats: int = REPEATS, among: Tensor | None = None
) -> tuple[float, float]:
    """Relative bias and spread of a sample's feature gradient, over random batches, of all samples or of ``among``.

    Rows stay as they are. A memory of features goes on taking those of each batch, as in training: which samples it has
    is as random as the batch. What finitely many batches leave of the spread in the mean is taken off the bias.
    """
    est.train(isinstance(est.normalizer, compopt.MemoryNormalizer))
    among = torch.arange(len(z1)) if among is None else among
    n = len(among) - len(among) % batch
    total = torch.zeros(2, *z1.shape, dtype=torch.float64)
    square = torch.zeros(2, len(z1), dtype=torch.float64)
    visits = torch.zeros(len(z1), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(repeats):
        for rows in among[torch.randperm(len(among), generator=generator)[:n]].split(batch):
            gradients = torch.stack(est.feature_gradients(z1[rows], z2[rows], rows)[1:]).double() * len(rows)
            est.step()
            total.index_add_(1, rows, gradients)
            square.index_add_(1, rows, gradients.square().sum(2))
            visits.index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64))
    exact = exact_gradient(est, z1, z2) * len(z1)
    known = visits > 1
    total, square, exact, visits = total[:, known], square[:, known], exact[:, known], visits[known]
    mean = total / visits[:, None]
    variance = (square / visits - mean.square().sum(2)).mul(visits / (visits - 1)).clamp(min=0)
    bias = (mean - exact).square().sum(2) - variance / visits
    size = exact.square().sum()
    return float((bias.sum().clamp(min=0) / size).sqrt()), float((variance.sum() / size).sqrt())


def exact_gradient(est: Any, z1: Tensor, z2: Tensor) -> Tensor:
    """``(2, n, d)``, at the estimator's own temperatures."""
    individual = isinstance(est.temperature, compopt.TemperatureDual)
    tau = est.read(torch.arange(len(z1)))["tau"] if individual else est.sample_groups[0]["tau"]
    views = "averaged" if est.normalizer.averages_views else "separate"
    return torch.stack(global_gradient(z1, z2, tau, est.mode, views)).double()
