"""The estimator inside ordinary training code: checkpointed encoders, accumulation, cached features, learning."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compopt
from tests.database import BY_NAME, DATABASE, MODES, NO_GLOBAL
from tests.helpers import assert_same_bits, bits, features, make, near, snapshot

N = 16


def towers(width=6):
    """Return two small encoders."""
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double() for _ in "12"
    ]


def gradients(*modules):
    """Return all parameter gradients as one vector, and reset them."""
    found = torch.cat([p.grad.flatten() for m in modules for p in m.parameters()])
    for module in modules:
        module.zero_grad()
    return found


@pytest.mark.covering()
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_checkpointed_encoders(info, mode, use_reentrant):
    """Recomputation in backward repeats the encoder, not the deposit."""
    results = []
    for recompute in (False, True):
        first, second = towers()
        est, _ = make(info, mode, N)
        for t in range(2):
            pairs = zip((first, second), features(8, 6, seed=t), strict=True)
            if recompute:
                z1, z2 = (checkpoint(each, x.requires_grad_(), use_reentrant=use_reentrant) for each, x in pairs)
            else:
                z1, z2 = (each(x) for each, x in pairs)
            est(z1, z2, torch.arange(8) + 3 * t).backward()
            assert est.pending == info.has_state
            est.step()
        results.append((gradients(first, second), snapshot(est, N)))
    near(results[0][0], results[1][0], 1e-13)
    assert_same_bits(results[0][1], results[1][1])


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [info for info in NO_GLOBAL if not info.draws], ids=str)
def test_accumulated_gradients_are_the_sum_over_micro_batches(info, mode):
    """Forward reads committed values only, so micro-batches of one window do not see each other."""
    first, second = towers()
    x1, x2 = features(12, 6, seed=5)
    parts = torch.arange(12).split(4)
    est, _ = make(info, mode, N)
    for part in parts:
        est(first(x1[part]), second(x2[part]), part).backward()
    accumulated, total = gradients(first, second), 0
    est.step()
    for part in parts:
        alone, _ = make(info, mode, N)
        alone(first(x1[part]), second(x2[part]), part).backward()
        total = total + gradients(first, second)
        alone.step()
        if info.has_rows:  # disjoint rows: the window commits what each micro-batch alone would
            window, own = est.read(part), alone.read(part)
            assert all(bits(window[key]) == bits(own[key]) for key in window)
    near(accumulated, total, 1e-13)


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_cached_features_make_micro_batches_one_large_batch(info, mode):
    """feature_gradients + one backward per micro-batch equals the large batch (GradCache)."""
    first, second = towers()
    x1, x2 = features(12, 6, seed=6)
    index = torch.arange(12)
    large, _ = make(info, mode, N)
    loss = large(first(x1), second(x2), index)
    loss.backward()
    want = gradients(first, second)
    cached, _ = make(info, mode, N)
    with torch.no_grad():
        z1, z2 = first(x1), second(x2)
    value, g1, g2 = cached.feature_gradients(z1, z2, index)
    for part in index.split(4):
        torch.autograd.backward((first(x1[part]), second(x2[part])), (g1[part], g2[part]))
    near(value, loss, 1e-13)
    near(gradients(first, second), want, 1e-12)
    for learned, other in zip(cached.parameters(), large.parameters(), strict=True):  # a learned temperature
        near(learned.grad, other.grad, 1e-12)
    large.step()
    cached.step()
    assert_same_bits(snapshot(large, N), snapshot(cached, N))


def test_feature_gradients_refuse_a_temperature_that_wants_one():
    est = compopt.InfoNCEEstimator()
    z1, z2 = features(4, 4, seed=0)
    with pytest.raises(ValueError, match="tau= requires a gradient, which this does not return"):
        est.feature_gradients(z1, z2, tau=torch.tensor(0.1, requires_grad=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infonce", "infonce-no-positive", "sogclr", "sogclr-positive", "isogclr"])
@pytest.mark.parametrize("mode", MODES)
def test_a_small_problem_is_learned(name, mode):
    """Batches of 4 out of 32: afterwards every sample's positive is its nearest neighbour."""
    torch.manual_seed(0)
    n, info = 32, BY_NAME[name]
    x1, x2 = features(n, 16, seed=7, spread=0.3, dtype=torch.float32)
    second = torch.nn.Linear(16, 16)
    first = second if mode == "unimodal" else torch.nn.Linear(16, 16)
    parameters = {id(p): p for m in (first, second) for p in m.parameters()}.values()
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    est, _ = make(info, mode, n, dtype=torch.float32, tau=0.1, gamma=0.5)
    est.attach(optimizer)

    def accuracy():
        with torch.no_grad():
            s = torch.nn.functional.normalize(first(x1)) @ torch.nn.functional.normalize(second(x2)).T
        return float((s.argmax(1) == torch.arange(n)).float().mean())

    for _ in range(60):
        for index in torch.randperm(n).split(4):
            optimizer.zero_grad()
            est(first(x1[index]), second(x2[index]), index).backward()
            optimizer.step()
    assert est.pending == 0
    assert accuracy() >= 0.95


def test_the_learned_temperature_learns():
    """CLIP: the user's optimizer updates log(1/tau); tau is clamped to at least 0.01 when it is used."""
    est = compopt.InfoNCEEstimator(tau=0.07, learn_tau=True, multiply_tau=False)
    (parameter,) = est.parameters()
    assert parameter.requires_grad and parameter.dim() == 0
    near(parameter, torch.log(torch.tensor(1 / 0.07, dtype=torch.float64)), 1e-6)
    optimizer = torch.optim.SGD(est.parameters(), lr=0.1)
    z1, z2 = features(6, 8, seed=8, spread=0.1, dtype=torch.float32)  # aligned: a smaller tau is better
    before = parameter.item()
    for _ in range(5):
        optimizer.zero_grad()
        est(z1, z2, torch.arange(6)).backward()
        optimizer.step()
    assert parameter.item() > before
    with torch.no_grad():
        parameter.fill_(9.0)  # tau = 1.2e-4
    at_bound = compopt.InfoNCEEstimator(tau=0.01, multiply_tau=False)
    near(est(z1, z2, torch.arange(6)), at_bound(z1, z2, torch.arange(6)), 1e-6)
