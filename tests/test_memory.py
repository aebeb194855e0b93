"""The memory of past features: eviction, excluded candidates and balanced gradients."""

import pytest
import torch
import torch.nn.functional as F

import compopt
from tests.helpers import features, run

D = 4
MODES = ("bimodal", "unimodal", "forward")


def build(mode="bimodal", length=24, tau=0.5, **options):
    kind = {"directions": "forward"} if mode == "forward" else {"mode": mode}
    return compopt.MemoryEstimator(D, length, tau=tau, dtype=torch.float64, **kind, **options)


def filled(est, batches=3, size=8):
    for step in range(batches):
        run(est, *features(size, D, seed=step), torch.arange(size) + size * step)
        est.step()
    return est


@pytest.mark.parametrize("mode", MODES)
def test_before_the_first_commit_it_is_dcl(mode):
    kind = {"directions": "forward"} if mode == "forward" else {"mode": mode}
    dcl = compopt.DCLEstimator(tau=0.5, dtype=torch.float64, **kind)
    z, index = features(8, D, 0), torch.arange(8)
    for one, other in zip(run(build(mode), *z, index), run(dcl, *z, index), strict=True):
        torch.testing.assert_close(one, other)


def test_the_oldest_leave_first():
    est = filled(build(length=20))
    assert est.state_dict()["extra"]["normalizer"]["keys"][0].tolist() == list(range(4, 24))


def queue_share(est, index, **options):
    """Return the share of the memory in the weights of a batch."""
    run(est, *features(8, D, seed=9), index, **options)
    est.discard()
    return est.metrics["queue_share"].item()


@pytest.mark.parametrize("last", [7, -8])  # an index may be a hash, which can be negative
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_is_no_negative_of_itself(mode, last):
    est = build(mode, length=1)
    run(est, *features(8, D, seed=0), torch.tensor([*range(20, 27), last]))
    est.step()
    strangers = torch.arange(8) + 100
    itself = strangers.clone()
    itself[2] = last
    assert 0 < queue_share(est, itself) < queue_share(est, strangers)


def test_equal_labels_are_no_negatives():
    est, labels = build(length=8), torch.arange(8) % 2
    run(est, *features(8, D, seed=0), torch.arange(8), labels=labels)
    est.step()
    strangers = torch.arange(8) + 100
    assert 0 < queue_share(est, strangers, labels=labels) < queue_share(est, strangers, labels=labels + 10)


def test_without_an_index_all_samples_are_different():
    """Without an index the positions do not serve as keys: no feature of an earlier batch is excluded."""
    named, unnamed = build(), build()
    for step in range(3):
        z = features(8, D, seed=step)
        one, other = run(named, *z, torch.arange(8) + 8 * step), run(unnamed, *z, None)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        named.step(), unnamed.step()


@pytest.mark.parametrize("mode", MODES)
def test_forces_balance(mode):
    """At a high temperature all negatives have equal weights, and the gradients of a batch sum to zero."""
    est = filled(build(mode, tau=1e6, normalize=False))
    z1, z2 = features(8, D, seed=9)
    run(est, z1, z2, torch.arange(8) + 100)
    est.discard()
    _, g1, g2 = run(est, z1 + 5.0, z2 - 3.0, torch.arange(8) + 100)
    assert g1.abs().max() > 1e-3
    sums = g1 + g2 if mode == "unimodal" else torch.cat([g1, g2])
    assert sums.sum(0).abs().max() < 1e-5 * g1.abs().max() * len(z1)


def test_it_follows_the_encoders():
    """If all features of a modality shift equally, the queue shifts with them; loss and gradients do not change."""
    plain, moved = (filled(build("forward", normalize=False)) for _ in range(2))
    z1, z2 = features(8, D, seed=9)
    index, drift = torch.arange(8) + 100, torch.tensor([2.0, -1.0, 0.5, 3.0], dtype=torch.float64)
    for one, other in zip(run(plain, z1, z2, index), run(moved, z1, z2 + drift, index), strict=True):
        torch.testing.assert_close(one, other)  # h changes neither in the batch nor in the memory


def test_the_error_of_what_the_memory_holds():
    """normalizer_error averages over the memory, shifted to the mean of the features, without the sample itself."""
    est = build(length=24)
    z = features(30, D, seed=7)
    assert compopt.diagnostics.normalizer_error(est, *z).isnan()
    filled(est, batches=3)
    queues, unit, alpha = est.state_dict()["extra"]["normalizer"]["queue"], [F.normalize(side) for side in z], []
    for queue, a, b in zip(queues, unit, unit[::-1], strict=True):
        h = (a @ (queue + b.mean(0)).T - (a * b).sum(1, keepdim=True)) / 0.5
        h[torch.arange(24), torch.arange(24)] = -torch.inf  # slot i is sample i
        alpha.append(h.logsumexp(1) - h.isfinite().sum(1).double().log())
    exact = compopt.diagnostics.log_normalizers(*z, 0.5)
    want = (torch.stack(alpha, dim=1) - exact).square().mean()
    torch.testing.assert_close(compopt.diagnostics.normalizer_error(est, *z), want)


def test_bad_arguments():
    with pytest.raises(ValueError, match="length"):
        compopt.MemoryEstimator(D, 0)
    with pytest.raises(ValueError, match="dim is 4, the features have 5"):
        build()(*torch.randn(2, 6, 5, dtype=torch.float64), torch.arange(6))


@pytest.mark.parametrize("where", ["z1", "z2", "extra"])
def test_a_bad_batch_is_not_kept(where):
    """A non-finite row of z1 withholds the batch even with one direction, where z1 is not queued."""
    est = filled(build("forward"), batches=1)
    given = dict(zip(("z1", "z2"), features(8, D, seed=1), strict=True), extra=torch.randn(3, D, dtype=torch.float64))
    given[where][2, 0] = torch.nan
    with pytest.warns(UserWarning, match="finite"):
        est(given["z1"], given["z2"], torch.arange(8) + 8, extra=given["extra"])
        est.step()
        est(*features(8, D, seed=2), torch.arange(8))  # warns about the last call
    est.discard()
    assert est.state_dict()["extra"]["normalizer"]["kept"].sum() == 8


def test_the_radius_is_compared_with_all_candidates(recwarn):
    """The warning that rho can never bind counts the memory among the candidates."""
    dual = compopt.TemperatureDual(100, rho=3.0, tau_init=0.1)
    est = compopt.ContrastiveEstimator(compopt.MemoryNormalizer(D, length=512), dual)
    est(*torch.randn(2, 16, D), torch.arange(16))
    assert not [warning for warning in recwarn if "rho" in str(warning.message)]


@pytest.mark.parametrize("size", [8, 140])
@pytest.mark.parametrize("mode", MODES)
def test_effective_negatives_count_the_memory(mode, size):
    """The metric is ``(sum w)^2 / sum w^2`` over batch and queue, averaged over the first 128 anchors of each side."""
    est = filled(build(mode))
    z1, z2 = (F.normalize(z) for z in features(size, D, seed=9))
    run(est, z1, z2, torch.arange(size) + 1000)
    queue = est.state_dict()["extra"]["normalizer"]["queue"]
    if mode == "unimodal":
        views = torch.cat([z1, z2])
        past = (queue + views.mean(0)).flatten(0, 1)
        diagonals = (-size, 0, size)
        sides = [(views, torch.cat([views, past]))]
    else:
        diagonals = (0,)
        sides = [(z1, torch.cat([z2, queue[0] + z2.mean(0)]))]
        if mode == "bimodal":
            sides.append((z2, torch.cat([z1, queue[1] + z1.mean(0)])))
    found = []
    for anchors, candidates in sides:
        weights = (anchors @ candidates.T / 0.5).exp()
        for diagonal in diagonals:
            weights[:, : len(anchors)].diagonal(diagonal).zero_()
        found.append((weights.sum(1).square() / weights.square().sum(1))[:128])
    torch.testing.assert_close(est.metrics["effective_negatives"], torch.cat(found).mean())


def test_a_bad_sample_that_is_in_no_pair_is_not_kept():
    """While the memory is empty the sample is part of no sum, but it is part of the batch's mean."""
    for keys in ({"labels": torch.tensor([7, 7, 8])}, {"index2": torch.tensor([7, 7, 8])}):
        est = build()
        z1, z2 = features(3, D, seed=1)
        z1[0, 0] = torch.nan
        with pytest.warns(UserWarning, match="finite"):
            est(z1, z2, torch.tensor([10, 11, 10]), **keys)
            est.step()
            loss = est(*features(8, D, seed=2), torch.arange(8))
        assert loss.isfinite()
        assert est.state_dict()["extra"]["normalizer"]["kept"].sum() == 0


def test_the_queue_of_features_that_are_not_normalised_is_refused_by_an_estimator_that_normalises():
    raw, unit = (compopt.MemoryEstimator(4, 8, normalize=normalize) for normalize in (False, True))
    with pytest.raises(ValueError, match="normalize differs"):
        unit.normalizer.load_state_dict(raw.normalizer.state_dict())
    alike = compopt.MemoryEstimator(4, 8)
    unit.normalizer.load_state_dict(alike.normalizer.state_dict())
