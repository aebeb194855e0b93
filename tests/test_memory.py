"""The memory of past features: eviction, excluded candidates and balanced gradients."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import compopt
from tests.database import memory
from tests.helpers import batches, bits, compare_state, features, make, near, run
from tests.pool import the_pool
from tests.test_agreement import compare_forward

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
    assert est.normalizer.state_dict()["state"]["keys"][0].tolist() == list(range(4, 24))


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


def test_the_error_of_what_the_memory_holds():
    """normalizer_error averages over the memory, shifted to the mean of the features, without the sample itself."""
    est = build(length=24)
    z = features(30, D, seed=7)
    assert compopt.diagnostics.normalizer_error(est, *z).isnan()
    filled(est, batches=3)
    queues, unit, alpha = est.normalizer.state_dict()["state"]["queue"], [F.normalize(side) for side in z], []
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
    queue = est.normalizer.state_dict()["state"]["queue"]
    if mode == "unimodal":
        views = torch.cat([z1, z2])
        past = (queue + views.mean(0)).flatten(0, 1)
        diagonals = (-size, 0, size)
        sides = [(views, torch.cat([views, past]))]
        first = [i for start in (0, size) for i in range(start, start + min(128, size))]
    else:
        diagonals, first = (0,), list(range(min(128, size)))
        sides = [(z1, torch.cat([z2, queue[0] + z2.mean(0)]))]
        if mode == "bimodal":
            sides.append((z2, torch.cat([z1, queue[1] + z1.mean(0)])))
    found = []
    for anchors, candidates in sides:
        weights = (anchors @ candidates.T / 0.5).exp()
        for diagonal in diagonals:
            weights[:, : len(anchors)].diagonal(diagonal).zero_()
        found.append((weights.sum(1).square() / weights.square().sum(1))[first])
    torch.testing.assert_close(est.metrics["effective_negatives"], torch.cat(found).mean())


def test_the_queue_of_features_that_are_not_normalised_is_refused_by_an_estimator_that_normalises():
    raw, unit = (compopt.MemoryEstimator(4, 8, normalize=normalize) for normalize in (False, True))
    with pytest.raises(ValueError, match="normalize differs"):
        unit.normalizer.load_state_dict(raw.normalizer.state_dict())
    alike = compopt.MemoryEstimator(4, 8)
    unit.normalizer.load_state_dict(alike.normalizer.state_dict())


# -- batches without negatives, several evaluations per step, keys ---------------------------------------------------


def compared(mode, steps, length=14, **options):
    """Run an estimator and its twin; ``steps`` are lists of calls (features, index, options), a commit after each."""
    info = memory("memory", length=length, dual=options.pop("dual", None))
    est, ref = make(info, mode, 40, tau=0.3)
    for calls in steps:
        for z, index, given in calls:
            compare_forward(info, est, ref, *z, index, **given)
        est.step(), ref.step()
        compare_state(est, ref, 40, info)
        slots = [keys[0] for keys, _ in ref.normalizer.slots]
        assert est.normalizer.state["keys"][0, -len(slots) :].tolist() == slots
    return est


@pytest.mark.parametrize("labels", [[3] * 6, [3, 3, 3, 3, 3, 1], [1, 2, 1, 2, 1, 2]], ids=str)
@pytest.mark.parametrize("dual", [None, "individual"])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_one_label_has_the_memory_as_its_negatives(mode, dual, labels):
    """Also if only some anchors have no negatives in the batch; slots of that label are none."""
    first = (features(6, D, seed=0), torch.arange(6), {"labels": torch.arange(6) % 3})
    batch = (features(6, D, seed=1), torch.arange(10, 16), {"labels": torch.tensor(labels)})
    again = (features(6, D, seed=2), torch.arange(20, 26), {"labels": torch.tensor(labels)})
    est = compared(mode, [[first], [batch], [again]], dual=dual)
    loss, g1, _ = run(est, *batch[0], batch[1] + 20, labels=torch.tensor(labels))
    assert loss != 0 and g1.abs().sum(1).all()


@pytest.mark.parametrize("evaluations", [2, 10])
@pytest.mark.parametrize("mode", MODES)
def test_a_second_evaluation_is_the_first_one(mode, evaluations):
    """Closures (SAM, LBFGS) do not change the loss, nor the slots: the memory is that of one evaluation per step."""
    once, often = build(mode, length=20), build(mode, length=20)
    for step in range(5):
        batch = (*features(8, D, seed=step), torch.arange(8) + 8 * step)
        wanted = run(once, *batch)
        for _ in range(evaluations):
            found = run(often, *batch)
            assert all(bits(a) == bits(b) for a, b in zip(found, wanted, strict=True))
        once.step(), often.step()
    one, other = (est.normalizer.state_dict()["state"] for est in (once, often))
    assert one["keys"][0].unique().numel() == 20 and all(bits(one[name]) == bits(other[name]) for name in one)


def windows(mode):
    """Return windows of 1 to 4 calls whose batches overlap, with repeats within a batch; image 5 has two captions."""
    generator = torch.Generator().manual_seed(4)
    steps, seed = [], 0
    for calls in (1, 3, 2, 4, 2):
        steps.append([])
        for _ in range(calls):
            index = torch.randint(0, 9, (6,), generator=generator)
            index[0] = (index[1] + 1) % 9
            index2 = index + 20 * torch.randint(0, 2, (6,), generator=generator)
            given = {} if mode == "unimodal" else {"index2": index2}
            steps[-1].append((features(6, D, seed=seed), index, given))
            seed += 1
    return steps


@pytest.mark.parametrize("length", [4, 14, 40])
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_of_a_window_replaces_its_own_slots(mode, length):
    """The newest features of a sample are kept, at the end of the queue; other captions are other samples."""
    compared(mode, windows(mode), length)


def in_windows(group, mode, keyed):
    """Run the windows on this rank's part of each batch; return losses, gradients and the state."""
    est = compopt.MemoryEstimator(
        D, 14, tau=0.5, dtype=torch.float64, process_group=group, mode="unimodal" if mode == "unimodal" else "bimodal"
    )
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own, trace = slice(rank * 6 // ranks, (rank + 1) * 6 // ranks), []
    for calls in windows(mode):
        for z, index, given in calls:
            given = {name: value[own] for name, value in given.items()} if keyed else {}
            trace.append(run(est, *(side[own] for side in z), index[own], **given))
        est.step()
    return trace, est.normalizer.state_dict()["state"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_ranks_replace_the_same_slots(mode, ranks):
    whole, state = in_windows(None, mode, True)
    answers = the_pool().run(in_windows, ranks, mode, True)
    for step, want in enumerate(whole):
        parts = [trace[step] for trace, _ in answers]
        near(parts[0][0], want[0], 1e-11)
        near(torch.cat([part[1] for part in parts]) / ranks, want[1], 1e-10)
    for _, own in answers:
        assert torch.equal(own["keys"], state["keys"]) and torch.equal(own["kept"], state["kept"])
        near(own["queue"], state["queue"], 1e-11)


def test_a_second_evaluation_without_an_index_warns():
    """Once, in the second call since a step; the state is unchanged if the warning is an error."""
    est = build()
    z = features(8, D, seed=0)
    run(est, *z, None)
    with pytest.warns(UserWarning, match="SAM, LBFGS.*pass their index"):
        run(est, *z, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(est, *z, None)
        est.step()
        for step in range(3):
            run(est, *z, torch.arange(8) + 8 * step)
            run(est, *z, torch.arange(8) + 8 * step)


def test_a_bad_evaluation_keeps_the_features_of_the_good_one():
    est, z, index = build(), features(8, D, seed=0), torch.arange(8)
    run(est, *z, index)
    bad = z[0].clone()
    bad[3] = torch.nan
    with pytest.warns(UserWarning, match="finite"):
        run(est, bad, z[1], index)
    est.step()
    other = build()
    run(other, *z, index)
    other.step()
    one, two = (e.normalizer.state_dict()["state"] for e in (est, other))
    assert all(bits(one[name]) == bits(two[name]) for name in one)


LEAST, MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
FAR = [LEAST, LEAST + 1, LEAST + 2, LEAST + (1 << 55), LEAST + (1 << 56) - (1 << 40), -1, 0, MOST]


@pytest.mark.parametrize("name", ["index", "index2", "labels"])
@pytest.mark.parametrize("first", FAR)
def test_every_integer_is_a_key(name, first):
    """A key may be any hash: also next to the least one an old feature is no negative of its own sample."""
    plain, far = torch.arange(8) * 1001 + 1, torch.arange(8) * 1001 + 1
    far[2] = first
    traces = []
    for keys in (plain, far):
        est, trace = build(length=8), []
        for step in range(3):
            given = {"index": torch.arange(8) + 100 * (step + 1), name: keys}
            trace += map(bits, run(est, *features(8, D, seed=step), **given))
            est.step()
        traces.append(trace)
    assert traces[0] == traces[1]


def test_a_keeper_of_scores_has_the_negatives_of_the_batch_alone():
    """An anchor whose only negatives are in the memory has a loss, and no place among the negatives of its batch."""
    est, keeper = compopt.recommended(4, n=24, batch_size=4), compopt.ScoreKeeper(24)
    keeper.attach(est)
    for step, labels in enumerate(([0, 1, 2, 3], [5, 5, 5, 5], [5, 5, 5, 6])):
        z1, z2, _ = batches(24, 1, batch=4, seed=step)[0]
        est(z1.requires_grad_(), z2, torch.arange(4) + 4 * step, labels=torch.tensor(labels)).backward()
        assert z1.grad.count_nonzero()
        est.step()
    assert keeper.read(torch.arange(12))["count"].tolist() == [1] * 4 + [0] * 4 + [1] * 4
