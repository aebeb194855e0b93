"""Errors of an estimator's normalizers and gradients at the final weights of its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import compopt
from compopt.diagnostics import global_gradient, normalizer_error

REPEATS = 32  # times that the data set is cut into batches


def measures(est: Any, z1: Tensor, z2: Tensor, batch: int) -> dict[str, float]:
    """Return errors of an estimator against the exact values of the whole data set.

    Returns:
        ``normalizer_error``: mean squared error of the log-normalizers; ``bias``, ``spread``: bias and spread of a
        sample's gradient over random batches, relative to the exact global gradient (root of the mean square).
    """
    est.eval()
    error = normalizer_error(est, z1, z2, batch_size=batch, anchors=min(len(z1), 4096))
    bias, spread = gradient_errors(est, z1, z2, batch)
    return {"normalizer_error": float(error), "bias": bias, "spread": spread}


def gradient_errors(
    est: Any, z1: Tensor, z2: Tensor, batch: int, repeats: int = REPEATS, among: Tensor | None = None
) -> tuple[float, float]:
    """Return relative bias and spread of a sample's gradient over random batches of all samples or of ``among``.

    Rows are not changed. A memory of features is updated with each batch, as in training, so that its samples are as
    random as the batch. The variance of the mean over finitely many batches is subtracted from the squared bias.
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
    """Return the exact gradient, ``(2, n, d)``, at the estimator's own temperatures."""
    individual = isinstance(est.temperature, compopt.TemperatureDual)
    tau = est.read(torch.arange(len(z1)))["tau"] if individual else est.sample_groups[0]["tau"]
    views = "averaged" if est.normalizer.averages_views else "separate"
    return torch.stack(global_gradient(z1, z2, tau, est.mode, views)).double()
