"""Contenders of the kernel benchmark: losses and bare matrix products, each as one call on a batch of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from compopt.kernel.features import NORM_MIN, with_gradients

TAU = 0.07
LOW_TAU = 0.01  # exp(s / tau) underflows for many pairs of trained encoders
CHUNK = 512
SAMPLES_PER_BATCH = 4  # data-set size n = 4 B: rows are revisited, and a batch is only a part of the data set

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # (z1 (B, d), z2 (B, d), index (B,)) -> loss
Runner = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Contender:
    what: str
    build: Callable[[int, int], Runner]  # (B, d) -> one call


def loss_and_gradients(loss: LossFn) -> Runner:
    def run(z1: Tensor, z2: Tensor, index: Tensor) -> None:
        loss(z1, z2, index).backward()

    return run


def estimator(make: Callable[..., compopt.ContrastiveEstimator], commit: bool = False, with_dim: bool = False):
    """Return the builder of a contender; ``make`` builds its estimator from the number of samples, or from ``d``."""

    def build(B: int, d: int) -> Runner:
        est = make(d if with_dim else SAMPLES_PER_BATCH * B)

        def run(z1: Tensor, z2: Tensor, index: Tensor) -> None:
            est(z1, z2, index).backward()
            if commit:
                est.step()
            else:
                est.discard()

        return run

    return build


def products(preallocate: bool):
    """Return the builder of a bimodal method's three products; similarities replace the coefficient matrix."""

    def build(B: int, d: int) -> Runner:
        buffers = (torch.empty(B, B), torch.empty(B, d), torch.empty(B, d)) if preallocate else (None,) * 3

        def run(z1: Tensor, z2: Tensor, index: Tensor) -> None:
            s, g1, g2 = buffers
            with torch.no_grad():
                s = torch.mm(z1, z2.T, out=s)
                g1 = torch.mm(s, z2, out=g1)
                g2 = torch.mm(s.T, z1, out=g2)

        return run

    return build


def unimodal_products(B: int, d: int) -> Runner:
    """Build `Z Z^T` and `(A + A^T) Z` of the 2B stacked features, where every view is an anchor and a candidate."""

    def run(z1: Tensor, z2: Tensor, index: Tensor) -> None:
        with torch.no_grad():
            z = torch.cat([z1, z2])
            torch.mm(torch.mm(z, z.T), z)

    return run


def cross_entropy_both_ways(z1: Tensor, z2: Tensor, index: Tensor, tau: float = TAU) -> Tensor:
    logits = F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T / tau
    target = torch.arange(len(z1))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def operations_alone(z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    """Compute InfoNCE by the operations of the library's kernel, without checks, options or state."""
    features = torch.stack([z1, z2])
    with torch.no_grad():
        norm = torch.linalg.vector_norm(features, dim=-1, keepdim=True).clamp_(min=NORM_MIN)
        unit = features / norm
        x, y = unit.unbind()
        scaled = torch.linalg.vecdot(x, y).mul_(1 / TAU).unsqueeze(1)
        e = torch.mm(x * (1 / TAU), y.T)
        e.diagonal().fill_(-torch.inf)
        e.exp_()
        log_sum = torch.stack([e.sum(1), e.sum(0)], dim=1).log_() - scaled
        alpha = F.softplus(log_sum)
        share = 1 / alpha.numel()  # tau times the derivative with respect to similarities, which has 1 / tau
        factor = (-scaled - alpha).exp_().mul_(share)
        a = e.mul_(factor[:, :1] + factor[:, 1])
        gradient = torch.empty_like(unit)
        torch.mm(a, y, out=gradient[0])
        torch.mm(a.T, x, out=gradient[1])
        pull = (log_sum - alpha).exp_().mul_(share).sum(1, keepdim=True)
        for own, other in zip(gradient, (y, x), strict=True):
            own.addcmul_(pull, other, value=-1)
        radial = torch.linalg.vecdot(gradient, unit).unsqueeze(-1)
        gradient.addcmul_(radial, unit, value=-1).div_(norm)
        loss = (TAU * alpha).mean()
    return with_gradients(loss, [(features, gradient)])


def nt_xent(z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    B = len(z1)
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = (z @ z.T / TAU).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * B).roll(B))


def autograd(loss: LossFn):
    return lambda B, d: loss_and_gradients(loss)


PRODUCTS, ALONE, CROSS_ENTROPY, DEFAULT = "products", "operations alone", "cross_entropy", "recommended + step"
BIMODAL = {
    PRODUCTS: Contender("the three matrix products alone, with newly allocated results", products(False)),
    "products, preallocated": Contender("the same, with results in preallocated buffers", products(True)),
    CROSS_ENTROPY: Contender("autograd, `F.cross_entropy` in both directions", autograd(cross_entropy_both_ways)),
    ALONE: Contender(
        "only the operations that `InfoNCEEstimator` needs, without checks, options and state",
        autograd(operations_alone),
    ),
    "InfoNCE": Contender("`InfoNCEEstimator(tau)`", estimator(lambda n: compopt.InfoNCEEstimator(TAU))),
    "DCL": Contender("`DCLEstimator(tau)`", estimator(lambda n: compopt.DCLEstimator(TAU))),
    "SogCLR": Contender("`SogCLREstimator(n, tau)`", estimator(lambda n: compopt.SogCLREstimator(n, tau=TAU))),
    "SogCLR + step": Contender(
        "`SogCLREstimator(n, tau)` and the commit of its rows",
        estimator(lambda n: compopt.SogCLREstimator(n, tau=TAU), commit=True),
    ),
    "SogCLR, chunked": Contender(
        f"SogCLR with `chunk_size={CHUNK}`",
        estimator(lambda n: compopt.SogCLREstimator(n, tau=TAU, chunk_size=CHUNK)),
    ),
    "iSogCLR": Contender(
        "`ISogCLREstimator(n)`: individual temperatures",
        estimator(lambda n: compopt.ISogCLREstimator(n, tau_init=TAU, rho=1.0)),
    ),
    DEFAULT: Contender(
        "`recommended(d)`, a memory of 128 samples, and its commit",
        estimator(compopt.recommended, commit=True, with_dim=True),
    ),
}
UNIMODAL = {
    PRODUCTS: Contender("the two matrix products of the 2B stacked features alone", unimodal_products),
    "NT-Xent": Contender("autograd, `F.cross_entropy` over the 2B views", autograd(nt_xent)),
    "SogCLR unimodal": Contender(
        '`SogCLREstimator(n, tau, mode="unimodal")`',
        estimator(lambda n: compopt.SogCLREstimator(n, tau=TAU, mode="unimodal")),
    ),
}
SMALL = [CROSS_ENTROPY, ALONE, "InfoNCE", "DCL", "SogCLR", "SogCLR + step", "iSogCLR", DEFAULT]
LOW = {
    CROSS_ENTROPY: Contender(
        f"autograd, `F.cross_entropy` in both directions, tau {LOW_TAU}",
        autograd(partial(cross_entropy_both_ways, tau=LOW_TAU)),
    ),
    "DCL": Contender(f"`DCLEstimator({LOW_TAU})`", estimator(lambda n: compopt.DCLEstimator(LOW_TAU))),
    "iSogCLR": Contender(
        f"`ISogCLREstimator(n, tau_init={LOW_TAU})`",
        estimator(lambda n: compopt.ISogCLREstimator(n, tau_init=LOW_TAU, rho=1.0)),
    ),
    "Memory": Contender(
        f"`MemoryEstimator(d, tau={LOW_TAU})`",
        estimator(lambda d: compopt.MemoryEstimator(d, tau=LOW_TAU), with_dim=True),
    ),
}
SPREAD = "bimodal, spread similarities"
SUITES = {"bimodal": BIMODAL, SPREAD: LOW, "unimodal": UNIMODAL, "small": BIMODAL}
