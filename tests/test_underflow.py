"""Underflow by a shift by the wrong maximum: masked candidates, the positive, other rows, unnormalised features."""

import math

import pytest
import torch
from torch.nn.functional import normalize

import compopt
from compopt.kernel.block import MASKED, SMALLEST, exp_
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


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0, 100.0])
@pytest.mark.parametrize("include_positive", [True, False])
def test_unnormalised_features_of_any_length(scale, include_positive):
    """With normalize=False, logits are up to 1e6; the reference is log-sum-exp in float64.

    alpha itself is a float32 number of the logits' size, so the weights carry its rounding.
    """
    n = 7
    z1, z2 = features(n, 5, seed=1, dtype=torch.float32)
    z1, z2 = z1 * scale, z2 * scale
    est = compopt.InfoNCEEstimator(tau=0.05, include_positive=include_positive, normalize=False, multiply_tau=False)
    a, b = z1.clone().requires_grad_(), z2.clone().requires_grad_()
    loss = est(a, b, torch.arange(n))
    loss.backward()
    x, y = z1.double().requires_grad_(), z2.double().requires_grad_()
    logits = x @ y.T / 0.05
    keep = torch.ones(n, n, dtype=torch.bool) if include_positive else ~torch.eye(n, dtype=torch.bool)
    want = 0
    for rows in (logits, logits.T):
        h = rows - rows.diagonal()[:, None]
        want = want + torch.logsumexp(h.masked_fill(~keep, -torch.inf), 1).mean() / 2 - math.log(n - 1) / 2
    want.backward()
    near(loss, want, 1e-4)
    rtol = 5e-7 * float(logits.detach().abs().max())
    near(a.grad, x.grad, rtol)
    near(b.grad, y.grad, rtol)


@pytest.mark.parametrize("mode", MODES)
def test_float16_logits_beyond_its_range(mode):
    """s / tau = 200 is fine, but sums of products of long float16 features would overflow float16 itself."""
    z1, z2 = features(6, 64, seed=2, dtype=torch.float64)
    z1, z2 = (z1 * 100).half(), (z2 * 100).half()
    est = compopt.InfoNCEEstimator(tau=TAU, include_positive=False, mode=mode)
    exact = compopt.InfoNCEEstimator(tau=TAU, include_positive=False, mode=mode)
    near(est(z1, z2, torch.arange(6)), exact(z1.double(), z2.double(), torch.arange(6)), 1e-4)


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


def test_prototypes_far_from_every_anchor_learn_as_in_float64():
    """AdaGrad turns gradients of 1e-10 into steps of about 1, so that the network must not drop small terms."""
    g = torch.Generator().manual_seed(0)
    centres, cluster = unit(32, 16, g), torch.randint(0, 32, (512,), generator=g)
    z1 = normalize(centres[cluster] + 0.6 * unit(512, 16, g), dim=1)
    z2 = normalize(z1 + 0.5 * unit(512, 16, g), dim=1)
    batches = [torch.randperm(512, generator=g)[:32] for _ in range(12)]
    gradients = []
    for dtype in (torch.float32, torch.float64):
        est = compopt.NeuCLIPEstimator(16, tau=TAU, tau_min=TAU, prototypes=256, dtype=dtype)
        for index in batches:
            views = [z[index].float().to(dtype).requires_grad_() for z in (z1, z2)]
            gradients.append(torch.autograd.grad(est(*views, index), views)[0].double())
            est.step()
    for one, two in zip(gradients[:12], gradients[12:], strict=True):
        assert (one - two).norm() < 0.02 * two.norm()


def unit(n, d, generator):
    return normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1)


def test_an_anchor_without_negatives_has_a_finite_gradient():
    """At tau = 0.005 the exponential of minus its log-normalizer overflows, and its factor is 0."""
    policy = compopt.PairPolicy(within=True)
    est = compopt.NeuCLIPEstimator(32, tau=TAU, tau_min=TAU, prototypes=64, pairs=policy)
    g = torch.Generator().manual_seed(0)
    for step in range(6):
        z1 = unit(16, 32, g)
        z2 = z1 + torch.linspace(0.1, 2, 16)[:, None] * unit(16, 32, g)  # sample 0 is the most similar to its positive
        within = torch.zeros(16, dtype=torch.int64)
        within[0] = step == 5
        views = [z.float().requires_grad_() for z in (z1, z2)]
        loss = est(*views, torch.arange(16), pairs=policy.bind(within=within))
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, views)), step
        est.step()
