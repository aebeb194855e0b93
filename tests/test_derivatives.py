"""Only first-order reverse-mode derivatives are supported: others raise a specific error and deposit nothing."""

import pytest
import torch
from torch.autograd import forward_ad, functional

import compopt
from compopt.temperatures.fixed import lower_bound
from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import assert_same_bits, batches, call, features, make, near, run, snapshot

N = 13
SECOND = "create_graph=True.*call backward\\(\\)"
TRANSFORM = "inside a transform of torch.func.*call it outside"
TANGENT = "carries a tangent of forward-mode AD.*detached"


def batch(seed=1, dtype=torch.float64):
    """Return two leaves and an index."""
    z1, z2, index = batches(N, 1, seed=seed, dtype=dtype)[0]
    return z1.requires_grad_(), z2.requires_grad_(), index


def average():
    """Return a moving average used alone, samples of inner functions that require grad, and their index."""
    index = torch.arange(4)
    return compopt.MovingAverageEstimator(N), (torch.rand(4) + 0.5).requires_grad_(), index


def chains_outside():
    """Return an estimator with some chains at samples outside the next batch, and that batch."""
    z1, z2, _ = batch()
    est = compopt.EMC2Estimator(N, tau=0.2, burn_in=0, dtype=torch.float64)  # every visit counts
    call(est, z1, z2, torch.arange(6), encode=lambda missing: (z1[missing], z2[missing]))
    est.step()
    index = torch.tensor([0, 1, 2, 6, 7, 8])
    assert (est.read(index[:3])["chain"] > 2).any()
    return est, (z1, z2, index)


# second derivatives -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")  # torch's own, once
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_a_graph_of_the_gradient_is_refused(info, mode):
    """alpha and w are constants of the closed form: the graph would be empty and the penalty would have no gradient."""
    z1, z2, index = batch()
    est, _ = make(info, mode, N)
    loss = est(z1, z2, index)
    with pytest.raises(RuntimeError, match=SECOND):
        torch.autograd.grad(loss, z1, create_graph=True)
    if info.tau_leaf:
        with pytest.raises(RuntimeError, match=SECOND):
            torch.autograd.grad(loss, info.tau_leaf(est), create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND):
        loss.backward(create_graph=True)
    loss.backward()  # the first derivative is still available


def test_a_graph_of_the_gradient_of_encoded_samples_is_refused():
    est, (z1, z2, index) = chains_outside()
    bank = [z.requires_grad_() for z in features(N, 4, seed=3)]
    loss = call(est, z1.detach(), z2.detach(), index, encode=lambda missing: tuple(z[missing] for z in bank))
    with pytest.raises(RuntimeError, match=SECOND):
        torch.autograd.grad(loss, bank, create_graph=True)


def test_a_compositional_loss_refuses_too():
    u, g, index = average()
    loss = compopt.compositional_loss(g, index, u, torch.log)
    with pytest.raises(RuntimeError, match=SECOND):
        torch.autograd.grad(loss, g, create_graph=True)


def test_the_lower_bound_of_a_learned_temperature_can_be_differentiated_twice():
    x = torch.tensor([0.5, 0.05], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((lower_bound(x, 0.1) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    near(second, torch.tensor([6 * 0.5, 0.0]), 1e-12)


# transforms -------------------------------------------------------------------------------------------------------

TRANSFORMS = {
    "grad": lambda f, z: torch.func.grad(f)(z),
    "vjp": lambda f, z: torch.func.vjp(f, z),
    "jvp": lambda f, z: torch.func.jvp(f, (z,), (torch.ones_like(z),)),
    "jacrev": lambda f, z: torch.func.jacrev(f)(z),
    "jacfwd": lambda f, z: torch.func.jacfwd(f)(z),
    "hessian": lambda f, z: torch.func.hessian(f)(z),
    "vmap": lambda f, z: torch.func.vmap(f)(torch.stack([z, z])),
    "functional_call": lambda f, z: torch.func.grad(
        lambda p: f(torch.func.functional_call(torch.nn.Linear(4, 4, dtype=z.dtype), p, (z,)))
    )({"weight": torch.eye(4, dtype=z.dtype)}),
}


@pytest.mark.parametrize("transform", list(TRANSFORMS))
@pytest.mark.parametrize("name", ["infonce", "sogclr", "isogclr", "neural", "emc2"])
def test_transforms_are_refused(name, transform):
    z1, z2, index = (x.detach() for x in batch())
    est, twin = (make(BY_NAME[name], "bimodal", N)[0] for _ in range(2))
    before = snapshot(est, N)
    for entry in (est, lambda *given: est.feature_gradients(*given)[0]):
        with pytest.raises(RuntimeError, match=TRANSFORM):
            TRANSFORMS[transform](lambda z, entry=entry: entry(z, z2, index), z1)
    assert est.pending == 0
    assert_same_bits(before, snapshot(est, N))
    for got, want in zip(run(est, z1, z2, index), run(twin, z1, z2, index), strict=True):
        assert torch.equal(got, want)


def test_transforms_of_a_moving_average_are_refused():
    """vmap over update() would deposit wrapped tensors."""
    u, g, index = average()
    with pytest.raises(RuntimeError, match=TRANSFORM):
        torch.func.vmap(lambda g: u.update(g.log(), index))(torch.stack([g.detach()] * 2))
    with pytest.raises(RuntimeError, match=TRANSFORM):
        torch.func.grad(lambda g: compopt.compositional_loss(g, index, u, torch.log))(g.detach())
    assert u.pending == 0


# forward mode -----------------------------------------------------------------------------------------------------


def dual(x):
    """Return a dual number."""
    return forward_ad.make_dual(x.detach(), torch.ones_like(x))


@pytest.mark.parametrize("grad", [False, True])
def test_tangents_are_refused(grad):
    """Every argument with a tangent is refused; no_grad does not disable forward mode."""
    z1, z2, index = batch()
    tau = torch.tensor(0.2, dtype=torch.float64)
    est = compopt.SogCLREstimator(N, tau=0.1)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        for call in (
            lambda: est(dual(z1), z2, index),
            lambda: est(z1, dual(z2), index),
            lambda: est(z1, z2, index, tau=dual(tau)),
            lambda: est.feature_gradients(z1, dual(z2), index),
        ):
            with pytest.raises(RuntimeError, match=TANGENT):
                call()
        assert est.pending == 0
        fixed = compopt.ContrastiveEstimator(
            compopt.MovingAverageEstimator(N), compopt.FixedTemperature(dual(tau)), dtype=torch.float64
        )
        with pytest.raises(RuntimeError, match=f"the temperature {TANGENT}"):
            fixed(z1, z2, index)
        assert fixed.pending == 0
        u, g, own = average()
        with pytest.raises(RuntimeError, match=f"g {TANGENT}"):
            compopt.compositional_loss(dual(g), own, u, torch.log)
        assert u.pending == 0
        est(z1, z2, index)  # a call without tangents is allowed


# supported derivatives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["infonce", "sogclr", "clip-learned"])
def test_first_derivatives_by_every_other_way(name):
    """Test backward twice, functional.vjp and jacobian, batched gradients, functional_call without a transform."""
    z1, z2, index = batch()
    new = lambda: make(BY_NAME[name], "bimodal", N)[0]  # noqa: E731
    _, want, _ = run(new(), z1, z2, index)
    loss = new()(z1, z2, index)
    loss.backward(retain_graph=True)
    loss.backward(torch.tensor(2.0, dtype=torch.float64))
    near(z1.grad, 3 * want, 1e-13)
    given = z1.detach()
    near(functional.vjp(lambda z: new()(z, z2, index), given)[1], want, 1e-13)
    for vectorize in (False, True):
        near(functional.jacobian(lambda z: new()(z, z2, index), given, vectorize=vectorize), want, 1e-13)
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64)
    (both,) = torch.autograd.grad(new()(z1, z2, index), z1, weights, is_grads_batched=True)
    near(both, weights[:, None, None] * want, 1e-13)
    module = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    weight = torch.eye(4, dtype=torch.float64, requires_grad=True)
    new()(torch.func.functional_call(module, {"weight": weight}, (given,)), z2, index).backward()
    near(weight.grad, want.T @ given, 1e-12)


def test_feature_gradients_in_inference_mode():
    """Features of a window are usually encoded in it."""
    est, other, index = compopt.DCLEstimator(), compopt.DCLEstimator(), torch.arange(6)
    z1, z2 = torch.randn(2, 6, 4)
    expected = other.feature_gradients(z1, z2, index)
    with torch.inference_mode():
        found = est.feature_gradients(z1.clone(), z2.clone(), index)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs) and not ours.is_inference()
