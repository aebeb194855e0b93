"""The objectives over a whole data set, dense and in float64: differentiable, hence their own gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_log_normalizers(z1: Tensor, z2: Tensor, tau, mode="bimodal", views="averaged") -> Tensor:
    """log ghat of every sample over all others: (n, 2), or (n, 1) for the averaged views."""
    z1 = z1.double() / z1.double().norm(dim=1, keepdim=True)
    z2 = z2.double() / z2.double().norm(dim=1, keepdim=True)
    n = len(z1)
    off = ~torch.eye(n, dtype=torch.bool)
    columns = []
    for own, other in ((z1, z2), (z2, z1)):
        rows = []
        for i in range(n):
            scores = (other[off[i]] @ own[i],)
            if mode == "unimodal":
                scores += (own[off[i]] @ own[i],)
            h = torch.cat(scores) - own[i] @ other[i]
            rows.append(torch.log(torch.exp(h / tau).mean()))
        columns.append(torch.stack(rows))
    result = torch.stack(columns, dim=1)
    if mode == "unimodal" and views == "averaged":
        result = torch.log(torch.exp(result).mean(dim=1, keepdim=True))
    return result


def dense_global_loss(z1, z2, tau, mode="bimodal", views="averaged") -> Tensor:
    """tau times the mean log-normalizer."""
    return tau * dense_log_normalizers(z1, z2, tau, mode, views).mean()


def dense_global_gradient(z1, z2, tau, mode="bimodal", views="averaged") -> tuple[Tensor, Tensor]:
    """Plain autograd of the global objective."""
    z1, z2 = z1.detach().double().requires_grad_(), z2.detach().double().requires_grad_()
    return torch.autograd.grad(dense_global_loss(z1, z2, tau, mode, views), (z1, z2))
