"""Weights of the samples of a call: the weighted mean, its gradients, and the quantities independent of them."""

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import PairPolicy
from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import batches, features, make, near, run, snapshot
from tests.pool import the_pool
from tests.test_agreement import follow

N, BATCH, DIM = 13, 6, 4
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.25], dtype=torch.float64)


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_every_estimator_equals_its_twin(info, mode):
    """Compare loss, gradients of features and temperatures, and rows, which are also written for weights of 0."""
    est, ref = make(info, mode, N, gamma=0.7)
    follow(info, est, ref, N, batches(N, steps=4, batch=BATCH, dim=DIM, seed=11), sample_weight=WEIGHT)


LABELS, INDEX = torch.tensor([0, 1, 0, 2, 1, 3]), torch.arange(BATCH)
TEACHER, GUIDE = (features(BATCH, 3, seed=seed) for seed in (1, 2))
MINED = features(2 * BATCH, DIM, seed=3)[0]
CALLS = {
    "labels": ({}, {"labels": LABELS}),
    "captions of their own": ({"directions": "forward"}, {"index2": LABELS}),
    "further candidates": ({}, {"extra": MINED}),
    "expected positives": ({}, {"labels": LABELS, "pairs": PairPolicy(positives="labels")}),
    "teacher": ({"mode": "unimodal"}, {"teacher": TEACHER, "pairs": PairPolicy(targets=0.3)}),
    "guide": ({}, {"guide": GUIDE, "pairs": PairPolicy(guided=True, false_negatives=0.2, hardness=1.0)}),
    "importance": ({}, {"pairs": PairPolicy(hardness=2.0, importance="differentiated", prior=0.05)}),
    "weighted positives": ({"mode": "unimodal"}, {"pairs": PairPolicy(mises_fisher=0.5)}),
    "other similarities": (
        {"directions": "forward", "pairs": PairPolicy(also=("query_to_query", "document_to_query"))},
        {"extra": MINED},
    ),
    "blocks": ({"chunk_size": 2}, {}),
}


def assert_linear(build, z1, z2, index=INDEX, **given):
    """Assert that loss and gradients are the weighted means of those of single anchors, from the same state."""
    found = run(build(), z1, z2, index, sample_weight=WEIGHT, **given)
    single = [run(build(), z1, z2, index, sample_weight=one, **given) for one in torch.eye(BATCH, dtype=torch.float64)]
    for number, got in enumerate(found):
        parts = torch.stack([each[number] for each in single])
        near(got, torch.einsum("i,i...->...", WEIGHT, parts) / WEIGHT.sum(), what=number)
    equal = run(build(), z1, z2, index, sample_weight=torch.ones_like(WEIGHT), **given)
    for got, want in zip(equal, run(build(), z1, z2, index, **given), strict=True):
        near(got, want, 1e-12)


@pytest.mark.parametrize("name", CALLS)
def test_any_call_is_linear_in_the_weights(name):
    options, given = CALLS[name]
    assert_linear(lambda: compopt.DCLEstimator(0.3, **options), *features(BATCH, DIM, seed=5), **given)


@pytest.mark.parametrize("scale", [3e38, 1e-44])
def test_only_ratios_of_weights_matter(scale):
    """This also holds if the sum of the weights overflows or vanishes in float32."""
    z1, z2 = features(BATCH, DIM, seed=4, dtype=torch.float32)
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    wanted = run(compopt.DCLEstimator(), z1, z2, INDEX, sample_weight=weight)
    for got, want in zip(run(compopt.DCLEstimator(), z1, z2, INDEX, sample_weight=scale * weight), wanted, strict=True):
        assert want.any() and torch.equal(got, want)


def test_sigmoid_pairs_are_linear_in_the_weights():
    def build():
        return compopt.ContrastiveEstimator(compopt.SigmoidNormalizer(bias=-2.0), compopt.FixedTemperature(0.2))

    assert_linear(build, *features(BATCH, DIM, seed=6))


@pytest.mark.parametrize("mode", MODES)
def test_a_memory_of_a_momentum_copy_is_linear_in_the_weights(mode):
    keys = [features(BATCH, DIM, seed=seed) for seed in (8, 9)]

    def build():
        est = compopt.MemoryEstimator(DIM, 2 * BATCH, 0.3, mode=mode, dtype=torch.float64)
        est(*features(BATCH, DIM, seed=7), INDEX + BATCH, momentum_features=keys[0])
        est.step()
        return est

    assert_linear(build, *features(BATCH, DIM, seed=10), momentum_features=keys[1])


def test_views_share_the_weight_of_their_sample():
    views = torch.stack([*features(BATCH, DIM, seed=7), *features(BATCH, DIM, seed=8)])

    def gradient(weight):
        leaf = views.clone().requires_grad_()
        compopt.DCLEstimator(0.3, mode="unimodal")(leaf, index=INDEX, anchors=3, sample_weight=weight).backward()
        return leaf.grad

    parts = torch.stack([gradient(one) for one in torch.eye(BATCH, dtype=torch.float64)])
    near(gradient(WEIGHT), torch.einsum("i,i...->...", WEIGHT, parts) / WEIGHT.sum())


def test_a_weight_of_0_leaves_a_candidate():
    """The sample stays a candidate, unless a ``within`` key of its own excludes it."""
    z1, z2 = features(BATCH, DIM, seed=9)
    weight = (INDEX != 2).double()
    _, g1, g2 = run(compopt.DCLEstimator(directions="forward"), z1, z2, INDEX, sample_weight=weight)
    assert not g1[2].any() and g2[2].any()
    est = compopt.DCLEstimator(pairs=PairPolicy(within=True))
    loss, *found = run(est, z1, z2, INDEX, sample_weight=weight, within=(weight == 0).long())
    kept = weight > 0
    want, *wanted = run(compopt.DCLEstimator(), z1[kept], z2[kept], INDEX[kept])
    near(loss, want)
    for got, want in zip(found, wanted, strict=True):
        near(got[kept], want)
        assert not got[2].any()


@pytest.mark.parametrize("name", ["sogclr", "neural", "memory", "emc2"])
def test_no_state_depends_on_weights(name):
    plain, weighted = (make(BY_NAME[name], "bimodal", N)[0] for _ in range(2))
    for batch in batches(N, steps=3, batch=BATCH, dim=DIM, seed=12):
        run(plain, *batch), run(weighted, *batch, sample_weight=WEIGHT)
        plain.step(), weighted.step()
    for key, value in snapshot(plain, N).items():
        assert torch.equal(snapshot(weighted, N)[key].nan_to_num(), value.nan_to_num()), key
    assert all(torch.equal(value, weighted.metrics[key]) for key, value in plain.metrics.items())


def test_cached_features_and_the_gradient_cache_take_the_weights_of_the_whole_batch():
    z1, z2 = features(BATCH, DIM, seed=13)
    wanted = run(compopt.SogCLREstimator(N), z1, z2, INDEX, sample_weight=WEIGHT)
    found = compopt.SogCLREstimator(N).feature_gradients(z1, z2, INDEX, sample_weight=WEIGHT)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    model = torch.nn.Linear(DIM, DIM, bias=False).double()
    est, call = compopt.SogCLREstimator(N), {"index": INDEX, "sample_weight": WEIGHT}
    est(model(z1), model(z2), **call).backward()
    want, model.weight.grad = model.weight.grad, None
    compopt.gradient_cache(compopt.SogCLREstimator(N), (model, model), (z1, z2), micro_batch_size=2, **call)
    near(model.weight.grad, want)


# -- several ranks ---------------------------------------------------------------------------------------------------


def on_ranks(group, name, mode, sizes, data):
    """Run this rank's part of weighted calls; return the results, the state and the gradient of the temperature."""
    rank = dist.get_rank(group)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    info = BY_NAME[name]
    est, _ = make(info, mode, N, tau=0.3, process_group=group)
    leaf = info.tau_leaf(est) if info.tau_leaf else None
    found = []
    for batch in data:
        found.append(run(est, *(x[own] for x in batch), sample_weight=WEIGHT[own]))
        est.step()
    return found, snapshot(est, N), None if leaf is None else leaf.grad


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "mode"),
    [("isogclr", "bimodal"), ("clip-learned", "unimodal"), ("memory-global-dual", "bimodal"), ("emc2", "unimodal")],
)
def test_ranks_weigh_as_one_process(name, mode):
    """One rank has no samples, another only weights that are 0."""
    data = batches(N, 3, BATCH, DIM, seed=14)
    ((whole, rows, of_tau),) = the_pool().run(on_ranks, 1, name, mode, [BATCH], data)
    parts = the_pool().run(on_ranks, 4, name, mode, [2, 1, 0, 3], data)
    for step, (loss, *gradients) in enumerate(whole):
        for found, _, _ in parts:
            near(found[step][0], loss, 1e-10)
        for at, want in enumerate(gradients, start=1):
            near(torch.cat([found[step][at] for found, _, _ in parts]) / 4, want, 1e-9)
    for _, state, gradient in parts:
        for key, value in rows.items():
            near(state[key].double().nan_to_num(), value.double().nan_to_num(), 1e-9, what=key)
        if of_tau is not None:
            near(gradient, of_tau, 1e-6)


def refused(group, weights):
    """Return the error of a call that all ranks reject."""
    z = torch.randn(2, 3, DIM)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        compopt.DCLEstimator(process_group=group)(*z, sample_weight=weights[dist.get_rank(group)])
    return str(caught.value)


@pytest.mark.distributed
def test_ranks_refuse_together():
    ones, none = torch.ones(3), torch.zeros(3)
    messages = the_pool().run(refused, 2, [ones, None])
    assert all("sample_weight= (0: none, 1: given)" in message for message in messages)
    messages = the_pool().run(refused, 2, [none, none])
    assert all("0 for all samples of the batch, on all ranks" in message for message in messages)
    messages = the_pool().run(refused, 2, [ones, -ones])
    assert "rank 1 refused" in messages[0] and ">= 0, got -1" in messages[1]


REFUSED = [
    (torch.ones(BATCH + 1), ValueError, r"sample_weight must have shape \(6,\)"),
    (torch.ones(BATCH, 1), ValueError, r"sample_weight must have shape \(6,\)"),
    (torch.ones(BATCH, dtype=torch.bool), TypeError, "floating-point tensor"),
    ([1.0] * BATCH, TypeError, "floating-point tensor"),
    (-WEIGHT, ValueError, "finite and >= 0, got -0.5"),
    (WEIGHT / 0, ValueError, "finite and >= 0"),
    (torch.zeros(BATCH), ValueError, "0 for all samples"),
    (torch.ones(BATCH, requires_grad=True), ValueError, "detach"),
]


@pytest.mark.parametrize(("weight", "kind", "message"), REFUSED)
def test_refusals_leave_the_state_as_it_is(weight, kind, message):
    est, _ = make(BY_NAME["neural"], "bimodal", N)
    with pytest.raises(kind, match=message):
        est(*features(BATCH, DIM, seed=15), INDEX, sample_weight=weight)
    assert est._engine.pending == 0 and not est.normalizer.has_pending_state
