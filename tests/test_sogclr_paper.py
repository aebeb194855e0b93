"""SogCLR against equations 9 and 10 of its paper, with drifting features, so that every u is out of date."""

import math

import pytest
import torch
from torch.nn.functional import normalize

import compopt
from tests.database import MODES
from tests.helpers import features, near, run
from tests.reference import LiteralSogCLR

N, BATCH, DIM, TAU = 13, 6, 5, 0.2


def drifting(steps, seed=0):
    """Yield batches of one data set whose features move by 0.2 standard normal steps between two calls."""
    generator = torch.Generator().manual_seed(seed)
    z1, z2 = features(N, DIM, seed)
    for _ in range(steps):
        index = torch.randperm(N, generator=generator)[:BATCH]
        yield z1[index], z2[index], index
        z1, z2 = (z + 0.2 * torch.randn(z.shape, generator=generator, dtype=z.dtype) for z in (z1, z2))


@pytest.mark.parametrize("gamma", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_equations_9_and_10(mode, gamma):
    paper = LiteralSogCLR(N, gamma, TAU, two_way=mode == "bimodal")
    est = compopt.SogCLREstimator(N, gamma=gamma, tau=TAU, mode=mode, dtype=torch.float64)
    for z1, z2, index in drifting(15):
        _, g1, g2 = run(est, z1, z2, index)
        est.step()
        for got, want in zip((g1, g2), paper.gradients(z1, z2, index), strict=True):
            near(got, want, 1e-12)
    seen = est.read(torch.arange(N))
    near(seen["log_u"].exp().T[:, seen["count"] > 0], paper.u[:, seen["count"] > 0], 1e-12)


def best_tau(h, rho):
    """Return the root of G(tau) = log mean exp(h / tau) + rho - sum_j w_j h_j / tau, which increases with tau."""
    low, high = 1e-6, 1e6
    for _ in range(200):
        tau = (low * high) ** 0.5
        w = (h / tau).softmax(0)
        gradient = torch.logsumexp(h / tau, 0) - math.log(len(h)) + rho - (w * h).sum() / tau
        low, high = (low, tau) if gradient > 0 else (tau, high)
    return tau


@pytest.mark.parametrize(
    "rho", [pytest.param(0.1, marks=pytest.mark.full), 0.5, pytest.param(2.0, marks=pytest.mark.full)]
)
def test_individual_temperatures_reach_their_optimum_below_the_bound_of_lemma_1(rho):
    """tau* <= tau_0 + C / rho, where C is the range of h: at most 2 for unit vectors, like the bound on abs(h)."""
    z1, z2 = (normalize(z, dim=1) for z in features(40, 4, seed=5))
    off = ~torch.eye(40, dtype=torch.bool)
    h = (z1 @ z2.T - (z1 * z2).sum(1, keepdim=True))[off].view(40, 39)
    least = 0.05
    want = torch.tensor([max(least, best_tau(each, rho)) for each in h], dtype=torch.float64)
    assert (want <= least + (h.amax(1) - h.amin(1)) / rho).all() and (want > least).sum() > 5
    options = {"directions": "forward", "beta": 1.0, "dtype": torch.float64}
    bounds = {"tau_init": 0.7, "tau_min": least, "tau_max": 100.0, "max_grad": 1.0}
    est = compopt.ISogCLREstimator(40, gamma=1.0, rho=rho, lr=0.05, **bounds, **options)
    for _ in range(400 if rho == 0.5 else 1500):
        est(z1.requires_grad_(), z2, torch.arange(40))
        est.step()
    near(est.read(torch.arange(40))["tau"][:, 0], want, 1e-3)
