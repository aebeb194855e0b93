"""Ten thousand updates at tau = 0.005 in float32: u itself would overflow (exp(+-400)), log u must not."""

import numpy as np
import pytest
import torch

import compopt
from tests.database import DATABASE, DIM, MODES

TAU, STEPS = 0.005, 10_000
E0 = torch.tensor([1.0, 0.0])


def constant(kind):
    """Return two samples with exact similarities, and the exact log ghat and log mean exp(s / tau)."""
    if kind == "identical":  # s = 1 everywhere
        return torch.stack([E0, E0]), torch.stack([E0, E0]), 0.0, 1 / TAU
    if kind == "opposite":  # positives 1, negatives -1
        return torch.stack([E0, -E0]), torch.stack([E0, -E0]), -2 / TAU, -1 / TAU
    return torch.stack([E0, -E0]), torch.stack([-E0, E0]), 2 / TAU, 1 / TAU  # "crossed": positives -1, negatives 1


@pytest.mark.parametrize(
    "kind, reference, steps",
    [
        pytest.param("identical", "none", STEPS, marks=pytest.mark.slow),
        pytest.param("opposite", "positive", STEPS, marks=pytest.mark.slow),
        ("identical", "positive", 300),
        ("crossed", "none", 300),
    ],
)
def test_constant_features(kind, reference, steps):
    z1, z2, log_ghat, log_mean = constant(kind)
    est = compopt.SogCLREstimator(2, gamma=0.1, tau=TAU, reference=reference)
    index = torch.arange(2)
    z1.requires_grad_()
    bad = torch.zeros(())
    for t in range(steps):
        loss = est(z1, z2, index)
        if t % 100 == 0:
            (gradient,) = torch.autograd.grad(loss, z1)
            bad += ~torch.isfinite(gradient).all()
        bad += ~torch.isfinite(loss)
        est.step()
    assert bad == 0
    columns = est.read(index)
    assert columns["count"].tolist() == [steps, steps]
    want = log_mean if reference == "none" else log_ghat
    torch.testing.assert_close(columns["log_u"], torch.full((2, 2), want), rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(loss.detach(), torch.tensor(TAU * log_ghat), rtol=1e-5, atol=1e-5)


def test_stale_rows_do_not_overflow_the_weights():
    """Test log u from much smaller similarities (small gamma): w = exp(h/tau - alpha) is bounded by 1 / gamma."""
    z1, z2, _, _ = constant("opposite")
    est = compopt.SogCLREstimator(2, gamma=1e-3, tau=TAU)
    est(z1, z2, torch.arange(2))
    est.step()
    z1, z2, _, _ = constant("crossed")
    z1.requires_grad_()
    loss = est(z1, z2, torch.arange(2))
    (gradient,) = torch.autograd.grad(loss, z1)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    est.step()
    # log(0.999 exp(-200) + 0.001 exp(200)) = 200 - log 1000
    torch.testing.assert_close(
        est.read(torch.arange(2))["log_u"], torch.full((2, 2), 200.0 - float(np.log(1000))), rtol=1e-5, atol=0.0
    )


def extreme_features(kind, step):
    """Return features with extreme similarities or norms."""
    g = torch.Generator().manual_seed(step)
    z1, z2 = torch.randn(2, 6, DIM, generator=g)
    if kind == "opposite positives":
        z2 = -z1
    if kind == "copies":
        z1, z2 = z1[:1].expand(6, -1).clone(), z2[:1].expand(6, -1).clone()
    if kind == "zeros":
        z1[0], z2[1] = 0.0, 1e-30
    if kind == "half precision":
        z1, z2 = z1.half(), z2.half()
        z1[0] = 0.0  # its gradient is divided by 1e-12
    return z1.requires_grad_(), z2.requires_grad_()


@pytest.mark.covering()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["random", "opposite positives", "copies", "zeros", "half precision"])
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_a_gradient_that_is_not_finite_makes_the_loss_nan(info, kind, mode):
    for tau in (1e-30, 1e-4, 1e-2, 1e3):
        est = info.build(mode, 6, torch.float32, tau, 0.5)
        leaves = [info.tau_leaf(est)] if info.tau_leaf else []
        for step in range(3):
            z = extreme_features(kind, step)
            loss = est(*z, torch.arange(6))
            gradients = torch.autograd.grad(loss, [*z, *leaves], allow_unused=True)
            finite = all(g is None or g.isfinite().all() for g in gradients)
            assert finite or not loss.isfinite(), (tau, step, loss, gradients)
            est.step()


def test_a_derivative_of_an_outer_function_that_is_not_finite_makes_the_loss_nan():
    """The root has the value 0 and an infinite derivative at 0."""
    g = torch.zeros(2, requires_grad=True)
    average = compopt.losses.InnerAverage(2)
    loss = compopt.compositional_loss(g, torch.arange(2), average, torch.sqrt)
    loss.backward()
    assert loss.isnan() and not g.grad.isfinite().any()
