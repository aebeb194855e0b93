"""A feature row that is not finite never enters the state; the loss shows it; a warning counts it."""

import re
import warnings

import pytest
import torch

import compopt
from tests.database import BY_NAME, GLOBAL, MODES, STATEFUL
from tests.helpers import assert_same_bits, batches, bits, make, run, snapshot

N = 20


def poisoned(z, rows, value):
    """z with some rows spoiled in one coordinate."""
    z = z.clone()
    z[rows, 1] = value
    return z


def warmed(info, mode, **options):
    """Two committed steps."""
    est, _ = make(info, mode, N, gamma=0.6, **options)
    for z1, z2, index in batches(N, 2, seed=90):
        run(est, z1, z2, index)
        est.step()
    return est


def quietly(function, *args):
    """Call and collect the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args)
    return result, [str(w.message) for w in caught]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_the_state_keeps_its_values(info, mode, side, value):
    est, twin = warmed(info, mode), warmed(info, mode)
    before = snapshot(est, N)
    z1, z2, index = batches(N, 1, seed=91)[0]
    z = [z1, z2]
    z[side] = poisoned(z[side], [2], value)
    messages = []
    loss, caught = quietly(est, *z, index)
    messages += caught
    assert not torch.isfinite(loss), "the user's own guards must see it"
    _, caught = quietly(est.step)
    messages += caught
    assert_same_bits(before, snapshot(est, N))
    for z1, z2, index in batches(N, 2, seed=92):  # and nothing hidden was spoiled
        (got, caught) = quietly(run, est, z1, z2, index)
        messages += caught
        want = run(twin, z1, z2, index)
        if not (info.global_tau or info.restarts or info.draws):  # what depends on the number of commits
            assert all(bits(a) == bits(b) for a, b in zip(got, want, strict=True))
        assert torch.isfinite(got[0])
        est.step()
        twin.step()
    spoken = [m for m in messages if "finite" in m.lower() or "nan" in m.lower()]
    assert spoken, "no warning"


@pytest.mark.parametrize("info", [info for info in GLOBAL if not info.draws], ids=str)
def test_a_global_state_is_not_advanced_by_a_bad_batch(info):
    """Momentum, Adam sums and the step count continue as if the bad batch had not been."""
    est, twin = warmed(info, "bimodal"), warmed(info, "bimodal")
    z1, z2, index = batches(N, 1, seed=93)[0]
    quietly(est, poisoned(z1, [0], float("nan")), z2, index)
    quietly(est.step)
    for z1, z2, index in batches(N, 3, seed=94):
        run(est, z1, z2, index)
        run(twin, z1, z2, index)
        est.step()
        twin.step()
    torch.testing.assert_close(est.temperature.tau, twin.temperature.tau, rtol=1e-6, atol=0)
    assert torch.isfinite(est.temperature.tau)


def test_the_warning_names_the_count():
    """Two bad feature rows among seven samples."""
    est = compopt.SogCLREstimator(N, tau=0.1)
    z1, z2, index = batches(N, 1, batch=7, seed=95, repeats=False, dtype=torch.float32)[0]
    messages = []
    for bad in (True, False):
        a = poisoned(z1, [1, 4], float("nan")) if bad else z1
        messages += quietly(est, a, z2, index)[1]
        messages += quietly(est.step)[1]
    spoken = [m for m in messages if "finite" in m.lower() or "nan" in m.lower()]
    assert spoken
    assert any(re.search(r"\b2\b", m) for m in spoken), spoken


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["sogclr", "isogclr-adam", "batch-dual"])
def test_the_finite_deposits_of_a_window_are_committed(name, mode, order):
    """Two deposits with different samples, one of them spoiled."""
    est, twin = (warmed(BY_NAME[name], mode) for _ in range(2))
    z1, z2, _ = batches(N, 1, batch=6, seed=96)[0]
    good, bad = torch.arange(0, 6), torch.arange(6, 12)
    for which in order:
        if which == 0:
            run(est, z1, z2, good)
        else:
            quietly(est, poisoned(z1, [3], float("nan")), z2, bad)
    quietly(est.step)
    run(twin, z1, z2, good)
    twin.step()
    assert_same_bits(snapshot(twin, N), snapshot(est, N))


def test_a_bad_row_is_a_negative_of_all_and_withholds_the_batch():
    est = compopt.SogCLREstimator(4, tau=0.1)
    generator = torch.Generator().manual_seed(0)
    z1, z2 = (torch.randn(4, 3, generator=generator) for _ in range(2))
    loss, _ = quietly(est, poisoned(z1, [2], float("nan")), z2, torch.arange(4))
    quietly(est.step)
    assert not torch.isfinite(loss)
    assert est.read(torch.arange(4))["count"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_stateless_estimator_shows_it_in_the_loss(mode):
    est = compopt.InfoNCEEstimator(tau=0.1, mode=mode)
    z1, z2, index = batches(N, 1, seed=97)[0]
    assert not torch.isfinite(quietly(est, poisoned(z1, [0], float("nan")), z2, index)[0])
    assert torch.isfinite(quietly(est, z1, z2, index)[0])


def test_clean_batches_do_not_warn_after_a_bad_one():
    """One bad batch is reported once, not for ever."""
    est = compopt.SogCLREstimator(N, tau=0.1)
    z1, z2, index = batches(N, 1, seed=98, dtype=torch.float32)[0]
    quietly(est, poisoned(z1, [0], float("nan")), z2, index)
    quietly(est.step)
    for _ in range(2):
        quietly(est, z1, z2, index)
        quietly(est.step)
    for _ in range(3):
        assert quietly(est, z1, z2, index)[1] == []
        assert quietly(est.step)[1] == []
