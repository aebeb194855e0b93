"""Edge cases of autograd: shared inputs, layouts, frozen sides, inputs changed after the forward."""

import pytest
import torch

import compopt
from tests.database import BY_NAME, MODES
from tests.helpers import batches, features, make, near, run

N = 13


@pytest.mark.parametrize("mode", MODES)
def test_one_tensor_for_both_sides(mode):
    """est(z, z, index): the gradient is the sum of the gradients of both arguments."""
    z, _, index = batches(N, 1, seed=1)[0]
    _, g1, g2 = run(make(BY_NAME["sogclr"], mode, N)[0], z, z, index)
    shared = z.clone().requires_grad_()
    make(BY_NAME["sogclr"], mode, N)[0](shared, shared, index).backward()
    near(shared.grad, g1 + g2, 1e-13)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_an_index_view_or_smaller_dtype(dtype):
    """A strided index of any integer dtype is accepted, and is neither changed nor kept by reference."""
    z1, z2 = features(4, 4, seed=3)
    wide = torch.arange(12, dtype=dtype)
    index = wide[::3]
    est = compopt.SogCLREstimator(N, tau=0.1, dtype=torch.float64)
    run(est, z1, z2, index)
    assert index.tolist() == [0, 3, 6, 9]
    wide.fill_(1)  # as a loader that reuses its buffer does
    est.step()
    assert est.read(torch.arange(12))["count"].nonzero().flatten().tolist() == [0, 3, 6, 9]


def test_features_are_not_changed_or_kept():
    """Features may be overwritten between forward and step, as by an encoder that reuses its output buffer."""
    z1, z2, index = batches(N, 1, seed=4)[0]
    a, b = z1.clone(), z2.clone()
    est, twin = make(BY_NAME["isogclr"], "bimodal", N)[0], make(BY_NAME["isogclr"], "bimodal", N)[0]
    with torch.no_grad():
        est.train()
    est(a, b, index)
    assert torch.equal(a, z1) and torch.equal(b, z2)
    a.zero_()
    b.zero_()
    est.step()
    twin(z1, z2, index)
    twin.step()
    assert torch.equal(est.read(index)["log_u"], twin.read(index)["log_u"])


def test_a_backward_after_the_step():
    """step() may run before backward (accelerate with DeepSpeed commits in it): the gradient is that of the forward."""
    z1, z2, index = batches(N, 1, seed=7)[0]
    want = run(make(BY_NAME["isogclr"], "bimodal", N)[0], z1, z2, index)
    z1.requires_grad_()
    est, _ = make(BY_NAME["isogclr"], "bimodal", N)
    loss = est(z1, z2, index)
    est.step()
    loss.backward()
    near(z1.grad, want[1], 1e-14)


class Constrained(compopt.FixedTemperature):
    """A user-defined temperature: learned, with a constraint."""

    def rho(self, hyper):
        return 0.3


@pytest.mark.parametrize("kind", [compopt.FixedTemperature, Constrained])
def test_only_tau_requires_grad(kind):
    """Towers are frozen; the gradient of tau is that of the returned value, which includes rho."""
    tau = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    z1, z2, index = batches(N, 1, seed=8)[0]

    def loss(tau):
        parts = compopt.BatchNormalizer(), kind(tau)
        return compopt.ContrastiveEstimator(*parts, dtype=torch.float64)(z1, z2, index)

    loss(tau).backward()
    step = 1e-6
    near(tau.grad, (loss(0.2 + step) - loss(0.2 - step)) / (2 * step), 1e-6)
