"""Every estimator equals its naive float64 twin: loss, gradients, temperature gradient, state; step after step."""

import pytest
import torch

from tests.database import DATABASE, MODES
from tests.helpers import batches, compare_state, make, near, run

N = 13
SETTINGS = [(0.005, 0.3), (0.07, 0.9), (1.0, 1.0)]  # (tau, gamma)


def compare_forward(info, est, ref, z1, z2, index, rtol=1e-10, **options):
    """Run one forward and backward of both and compare them."""
    leaf = info.tau_leaf(est) if info.tau_leaf else None
    if leaf is not None:
        leaf.grad = None
    found, wanted = run(est, z1, z2, index, **options), ref.forward(z1, z2, index, **options)
    for name, got, want in zip(("loss", "g1", "g2", "extra"), found, wanted, strict=False):
        near(got, want, rtol, what=name)
    assert len(found) == len(wanted)
    if leaf is not None:
        want_tau = ref.tau_grad * info.tau_chain(ref.taus[0])
        near(leaf.grad, want_tau, rtol if leaf.dtype == torch.float64 else 2e-6, what="tau gradient")


def follow(info, est, ref, n, data, **options):
    """Run both through some batches, with a commit after each."""
    for z1, z2, index in data:
        compare_forward(info, est, ref, z1, z2, index, **options)
        est.step(), ref.step()
        compare_state(est, ref, n, info)


# without the first temperature for networks: it is below their min_tau, and their twins take seconds
CASES = [(info, *setting) for info in DATABASE for setting in SETTINGS[bool(info.network) :]]


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info, tau, gamma", CASES, ids=lambda x: str(x))
def test_some_steps(info, mode, tau, gamma):
    est, ref = make(info, mode, N, tau=tau, gamma=gamma)
    steps = 5 if info.network else 8 if info.has_state else 3
    follow(info, est, ref, N, batches(N, steps=steps, seed=1))


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_several_deposits_before_a_step(info, mode):
    """Samples occur in several deposits, twice in one deposit, and beside samples that occur once."""
    est, ref = make(info, mode, N, gamma=0.6)
    for t, (z1, z2, index) in enumerate(batches(N, steps=6, seed=2)):
        compare_forward(info, est, ref, z1, z2, index)
        if t % 3 == 2:
            est.step(), ref.step()
        compare_state(est, ref, N, info)


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_grad_output_scales_every_gradient(info, mode):
    z1, z2, index = batches(N, steps=2, seed=4)[1]
    results = []
    for scale in (1.0, -37.5):
        est, _ = make(info, mode, N)
        _, g1, g2 = run(est, z1, z2, index, grad_output=torch.tensor(scale, dtype=torch.float64))
        leaf = info.tau_leaf(est).grad if info.tau_leaf else torch.zeros(())
        results.append([x / scale for x in (g1, g2, leaf)])
    for a, b in zip(*results, strict=True):
        near(a, b, 1e-12 if a.dtype == torch.float64 else 1e-6)


@pytest.mark.covering("chunk_size mode")
@pytest.mark.parametrize("chunk_size", [1, 4, 64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_chunks_change_nothing(info, mode, chunk_size):
    whole, _ = make(info, mode, N)
    parts, _ = make(info, mode, N, chunk_size=chunk_size)
    for z1, z2, index in batches(N, steps=3, seed=5):
        for leaf in [info.tau_leaf(e) for e in (whole, parts) if info.tau_leaf]:
            leaf.grad = None
        for a, b in zip(run(whole, z1, z2, index), run(parts, z1, z2, index), strict=True):
            near(a, b, 1e-11)
        if info.tau_leaf:
            leaf = info.tau_leaf(whole)
            near(leaf.grad, info.tau_leaf(parts).grad, 1e-11 if leaf.dtype == torch.float64 else 1e-5)
        whole.step()
        parts.step()
    if info.has_rows:
        a, b = whole.read(torch.arange(N)), parts.read(torch.arange(N))
        for name in info.columns:
            near(a[name][a["count"] > 0], b[name][b["count"] > 0], 1e-11, what=name)
