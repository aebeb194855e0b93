"""SogCLR against equations 9 and 10 of its paper, with drifting features, so that every u is out of date."""

import pytest
import torch

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
