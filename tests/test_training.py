"""The estimator inside ordinary training code: checkpointed encoders, accumulation, cached features, learning."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compopt
from tests.database import DATABASE, MODES
from tests.helpers import assert_same_bits, features, make, near, run, snapshot

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
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_feature_gradients_are_those_of_a_call(info, mode):
    """Value, gradients, that of a learned temperature, and the committed state are the same."""
    called, cached = (make(info, mode, N)[0] for _ in range(2))
    batch = *features(12, 4, seed=6), torch.arange(12)
    for got, want in zip(cached.feature_gradients(*batch), run(called, *batch), strict=True):
        near(got, want, 1e-13)
    for learned, other in zip(cached.parameters(), called.parameters(), strict=True):
        near(learned.grad, other.grad, 1e-12)
    called.step(), cached.step()
    assert_same_bits(snapshot(called, N), snapshot(cached, N))


def test_feature_gradients_refuse_a_temperature_that_wants_one():
    est = compopt.InfoNCEEstimator()
    z1, z2 = features(4, 4, seed=0)
    with pytest.raises(ValueError, match="tau= requires a gradient, which this does not return"):
        est.feature_gradients(z1, z2, tau=torch.tensor(0.1, requires_grad=True))


def test_a_learned_temperature_is_bounded_where_it_is_used():
    """The parameter is log(1/tau); tau is clamped to at least 0.01."""
    est = compopt.InfoNCEEstimator(tau=0.07, learn_tau=True, multiply_tau=False)
    (parameter,) = est.parameters()
    near(parameter, torch.log(torch.tensor(1 / 0.07, dtype=torch.float64)), 1e-6)
    with torch.no_grad():
        parameter.fill_(9.0)  # tau = 1.2e-4
    z1, z2 = features(6, 8, seed=8, spread=0.1, dtype=torch.float32)
    at_bound = compopt.InfoNCEEstimator(tau=0.01, multiply_tau=False)
    near(est(z1, z2, torch.arange(6)), at_bound(z1, z2, torch.arange(6)), 1e-6)
