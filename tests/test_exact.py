"""gamma = 1 and the batch equal to the data set: three independent ways to the gradient of the global objective."""

import pytest
import torch

from compopt import diagnostics
from tests.database import DATABASE, MODES
from tests.helpers import features, make, near, run
from tests.reference import dense_global_gradient, dense_global_loss

N = 12
EXACT = [info for info in DATABASE if info.exact_at_gamma_1]


@pytest.mark.covering()
@pytest.mark.parametrize("tau", [0.005, 0.07, 1.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", EXACT, ids=str)
def test_gamma_1_and_the_whole_data_set(info, mode, tau):
    est, _ = make(info, mode, N, tau=tau, gamma=1.0)
    for seed in (1, 2):  # gamma = 1: the second visit replaces the first
        z1, z2 = features(N, 5, seed=seed)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        loss, g1, g2 = run(est, z1[order], z2[order], order)
        est.step()
        near(loss, dense_global_loss(z1, z2, tau, mode, info.views), what="loss")
        want = dense_global_gradient(z1, z2, tau, mode, info.views)
        near(g1, want[0][order], what="g1")
        near(g2, want[1][order], what="g2")
        views = {"views": info.views} if mode == "unimodal" else {}
        theirs = diagnostics.global_gradient(z1, z2, tau, mode=mode, **views)
        near(theirs[0], want[0], what="diagnostics g1")
        near(theirs[1], want[1], what="diagnostics g2")
        near(diagnostics.global_loss(z1, z2, tau, mode=mode, **views), loss, what="diagnostics loss")
