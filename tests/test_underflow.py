"""Underflow by a shift by the wrong maximum: masked candidates, the positive, other rows, unnormalised features."""


import pytest
import torch

import compopt
from compopt.kernel.blocks import MASKED, SMALLEST, exp_
from tests.database import MODES
from tests.helpers import features, near

TAU = 0.005
E0 = torch.tensor([1.0, 0.0, 0.0])
ESTIMATORS = {
    "batch": lambda **o: compopt.InfoNCEEstimator(tau=TAU, include_positive=False, **o),
    "none": lambda **o: compopt.SogCLREstimator(8, gamma=0.5, tau=TAU, reference="none", **o),
    "positive": lambda **o: compopt.SogCLREstimator(8, gamma=0.5, tau=TAU, reference="positive", **o),
    "dual": lambda **o: compopt.ISogCLREstimator(
        8, rho=0.0, lr=0.0, tau_init=TAU, tau_min=TAU, tau_max=0.5, max_grad=1e6, **o
    ),
}


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_candidates_do_not_set_the_scale(name, mode, chunk_size):
    """Three copies of sample 1 (s = 1, masked) and one opposite negative (s = -1): log ghat = -2 / tau = -400.

    exp(-400) is zero in float32: a shift by the largest of all candidates, including masked ones, gives log 0.
    """
    z = torch.stack([E0, E0, E0, -E0])
    index = torch.tensor([1, 1, 1, 2])
    est = ESTIMATORS[name](mode=mode, chunk_size=chunk_size)
    z1, z2 = z.clone().requires_grad_(), z.clone().requires_grad_()
    loss = est(z1, z2, index)
    loss.backward()
    near(loss, TAU * (-2 / TAU), 1e-5)
    assert torch.isfinite(z1.grad).all() and torch.isfinite(z2.grad).all()
    est.step()
    if name != "batch":
        want = -1 / TAU if name == "none" else -2 / TAU
        near(est.read(torch.tensor([1, 2]))["log_u"], torch.full((2, est.read(index)["log_u"].shape[1]), want), 1e-5)


def test_exponentials_on_a_cpu_are_never_subnormal():
    x = torch.cat([torch.linspace(-120, 1, 1000), torch.tensor([MASKED, torch.nan, 80.0])])
    expected = x.double().exp()
    found = exp_(x.clone())
    assert found[-2].isnan()
    kept = expected > SMALLEST
    torch.testing.assert_close(found[kept], expected[kept].float())
    assert (found[expected <= SMALLEST / 2] == 0).all() and (found[~found.isnan()] != 0).sum() == kept.sum()
    torch.testing.assert_close(exp_(x.double()), expected, equal_nan=True, rtol=0, atol=0)  # float64 keeps all


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients_of_spread_similarities(name, mode):
    """Most exponentials underflow at similarities between -1 and 1 and tau = 0.005."""
    z = features(12, 3, seed=5)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        views = [z_view.to(dtype).requires_grad_() for z_view in z]
        est = ESTIMATORS[name](mode=mode)
        est(*views, torch.arange(12) % 8).backward()
        gradients.append(torch.stack([view.grad.double() for view in views]))
    scale = gradients[1].abs().max()
    torch.testing.assert_close(gradients[0] / scale, gradients[1] / scale, rtol=0, atol=2e-4)
