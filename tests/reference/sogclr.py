"""SogCLR as printed in its paper: equations 9 and 10 by autograd, u in the linear domain, without code of compopt.

Yuan et al., ICML 2022. The only difference: eq. 10 divides by the previous u, its authors' code and compopt by the
updated one, which is used here.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LiteralSogCLR:
    """A table ``u`` and the two equations.

    Args:
        n: samples.
        gamma, tau: of the paper.
        two_way: images against texts (section 4: a table per modality); otherwise two views (eq. 9: one table).
    """

    def __init__(self, n: int, gamma: float, tau: float, two_way: bool) -> None:
        self.gamma, self.tau, self.two_way = gamma, tau, two_way
        self.u = torch.full((2 if two_way else 1, n), torch.nan, dtype=torch.float64)

    def inner(self, own: Tensor, other: Tensor) -> Tensor:
        """``g(w; x_i, B_i) / |B_i|`` of every anchor: the mean of ``exp(s_ij / tau)`` over the other samples."""
        off = 1 - torch.eye(len(own), dtype=own.dtype)
        to_other = (torch.exp(own @ other.T / self.tau) * off).sum(1)
        if self.two_way:
            return to_other / off.sum(1)
        return (to_other + (torch.exp(own @ own.T / self.tau) * off).sum(1)) / (2 * off.sum(1))

    def gradients(self, z1: Tensor, z2: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """``m_t`` with respect to the features, averaged over directions; updates ``u`` (eq. 9)."""
        z1, z2 = (z.detach().double().requires_grad_() for z in (z1, z2))
        a, b = (z / z.norm(dim=1, keepdim=True) for z in (z1, z2))
        g = [self.inner(a, b), self.inner(b, a)]
        inner = g if self.two_way else [(g[0] + g[1]) / 2]
        positive = (a * b).sum(1)
        objective = torch.zeros((), dtype=torch.float64)
        for u, g_i in zip(self.u, inner, strict=True):
            previous = torch.where(u[index].isnan(), g_i.detach(), u[index])
            u[index] = (1 - self.gamma) * previous + self.gamma * g_i.detach()  # eq. 9
            objective = objective + (self.tau / u[index] * g_i - positive).mean()  # its gradient is eq. 10
        return torch.autograd.grad(objective / len(inner), (z1, z2))
