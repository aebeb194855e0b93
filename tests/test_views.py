"""Several views in one call: every estimator against its naive reference, on one rank and on several."""

import functools

import pytest
import torch
from torch import Tensor

import compopt
from tests.database import BY_NAME, DATABASE
from tests.helpers import assert_same_bits, batches, bits, compare_state, generator, make, near, run, snapshot
from tests.pool import the_pool

N, D = 13, 4


def data(views, steps, seed=0, batch=5, repeats=True, dtype=torch.float64):
    """Return views (V, B, d) and indices; every second batch repeats a sample."""
    result = []
    for t, (z1, z2, index) in enumerate(batches(N, steps, batch=batch, seed=seed, repeats=repeats, dtype=dtype)):
        noise = torch.randn(views - 2, batch, D, generator=generator(50 + t), dtype=torch.float64).to(dtype)
        result.append((torch.cat([torch.stack([z1, z2]), z1 + 0.9 * noise]), index))
    return result


def step(est, views, index, **options) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of one call."""
    leaf = views.clone().requires_grad_()
    loss = est(leaf, index=index, **options)
    loss.backward()
    return loss.detach(), leaf.grad


def follow(info, est, ref, batches, tolerance=1e-10, **options):
    """Compare an estimator with its reference over some batches, each with a commit."""
    for views, index in batches:
        leaf = info.tau_leaf(est) if info.tau_leaf else None
        if leaf is not None:
            leaf.grad = None
        found, wanted = step(est, views, index, **options), ref.forward(views, None, index, **options)
        for name, got, want in zip(("loss", "gradient"), found, wanted, strict=True):
            near(got, want, tolerance, what=name)
        if leaf is not None:
            want = ref.tau_grad * info.tau_chain(ref.taus[0])
            near(leaf.grad, want, 1e-10 if leaf.dtype == torch.float64 else 2e-6, what="tau gradient")
        est.step(), ref.step()
        compare_state(est, ref, N, info, tolerance)


# -- against the references --------------------------------------------------------------------------------------------


# a memory with candidates= refuses more than two views
NETWORKS = [info for info in DATABASE if info.network and not info.name.startswith("memory-candidates")]


@pytest.mark.covering()
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("anchors", [None, 2, 1])
@pytest.mark.parametrize("views", [2, 3, 5])
@pytest.mark.parametrize("info", [info for info in DATABASE if not info.network], ids=str)
def test_every_estimator(info, views, anchors, chunk_size):
    est, ref = make(info, "unimodal", N, gamma=0.6, chunk_size=chunk_size)
    follow(info, est, ref, data(views, 4), anchors=anchors)


def compare_network(info, views, anchors, chunk_size):
    """Compare over two small batches, since a reference network takes seconds."""
    est, ref = make(info, "unimodal", N, gamma=0.6, chunk_size=chunk_size)
    # With one anchor view parts of the gradient are zero except for rounding, which AdaGrad amplifies by 1 / eps.
    follow(info, est, ref, data(views, 2, 1, 4), 1e-6 if anchors == 1 else 1e-10, anchors=anchors)


@pytest.mark.parametrize("views, anchors", [(3, None), (5, 2)])
@pytest.mark.parametrize("name", ["neural-through-alpha", "neural-through-alpha-dual"])
def test_some_networks(name, views, anchors):
    compare_network(BY_NAME[name], views, anchors, None)


@pytest.mark.full
@pytest.mark.covering()
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("anchors", [None, 2, 1])
@pytest.mark.parametrize("views", [2, 3, 5])
@pytest.mark.parametrize("info", NETWORKS, ids=str)
def test_every_network(info, views, anchors, chunk_size):
    compare_network(info, views, anchors, chunk_size)


@pytest.mark.parametrize("views", [3, 4])
@pytest.mark.parametrize("info", [BY_NAME[name] for name in ("sogclr", "batch-dual", "memory", "emc2")], ids=str)
def test_labels(info, views):
    """All views of samples with equal labels are not negatives of each other."""
    est, ref = make(info, "unimodal", N, gamma=0.6)
    for number, batch in enumerate(data(views, 2, seed=2, repeats=False)):
        follow(info, est, ref, [batch], labels=torch.tensor([7, 2, 7, 5, 2 + number]))


@pytest.mark.parametrize("name", ["sogclr", "isogclr-adam", "infonce", "clip-learned", "emc2"])
def test_accumulation(name):
    est, ref = make(BY_NAME[name], "unimodal", N, gamma=0.6)
    for number, (views, index) in enumerate(data(3, 4, seed=3)):
        near(step(est, views, index)[1], ref.forward(views, None, index)[1])
        if number % 2:
            est.step(), ref.step()
            compare_state(est, ref, N, BY_NAME[name])


@pytest.mark.parametrize("anchors", [None, 2])
@pytest.mark.parametrize("include_positive", [True, False])
def test_an_objective_written_out(include_positive, anchors):
    """Compare with InfoNCE and DCL over ordered pairs, written out and differentiated by autograd."""
    (views, index), tau = data(4, 1, seed=4, repeats=False)[0], 0.2
    leaf = views.clone().requires_grad_()
    z = leaf / leaf.norm(dim=2, keepdim=True)
    terms = []
    for v in range(anchors or 4):
        for p in set(range(4)) - {v}:
            for i in range(5):
                positive = z[v, i] @ z[p, i] / tau
                scores = torch.stack([z[v, i] @ z[u, j] / tau for u in range(4) for j in range(5) if j != i])
                total = torch.cat([positive[None], scores]) if include_positive else scores
                terms.append(tau * (total.logsumexp(0) - positive - torch.tensor(len(scores)).double().log()))
    loss = torch.stack(terms).mean()
    loss.backward()
    est = compopt.InfoNCEEstimator(tau, include_positive=include_positive, mode="unimodal", dtype=torch.float64)
    got = step(est, views, index, anchors=anchors)
    near(got[0], loss), near(got[1], leaf.grad)


@pytest.mark.parametrize("shape", [(), (5,), (5, 1)])
def test_a_temperature_of_each_sample(shape):
    est = compopt.SogCLREstimator(N, mode="unimodal", dtype=torch.float64)
    views, index = data(3, 1, seed=5)[0]
    tau = torch.full(shape, 0.3, dtype=torch.float64, requires_grad=True)
    got = step(est, views, index, tau=tau)
    near(got[1], step(compopt.SogCLREstimator(N, tau=0.3, mode="unimodal", dtype=torch.float64), views, index)[1])
    ref = make(BY_NAME["sogclr"], "unimodal", N, tau=0.3)[1]
    ref.forward(views, None, index)
    near(tau.grad.sum(), ref.tau_grad)


# -- two views are two views -------------------------------------------------------------------------------------------


@pytest.mark.covering()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=["whole", "chunks"])
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_two_views_to_the_bit(info, options, dtype):
    one, other = (make(info, "unimodal", N, dtype, **options)[0] for _ in range(2))
    for views, index in data(2, 3, seed=6, dtype=dtype):
        loss, g1, g2 = run(one, *views, index)
        assert [bits(x) for x in step(other, views, index)] == [bits(loss), bits(torch.stack([g1, g2]))]
        one.step(), other.step()
        assert_same_bits(snapshot(one, N), snapshot(other, N))


# -- the call ----------------------------------------------------------------------------------------------------------


def test_feature_gradients_prefetch_and_metrics():
    made = [compopt.ISogCLREstimator(N, mode="unimodal") for _ in range(2)]
    batch = data(3, 3, seed=7, dtype=torch.float32)
    for views, index in made[1].prefetch(batch):
        wanted = step(made[0], views, index, anchors=2)
        got = made[1].feature_gradients(views, index=index, anchors=2)
        assert all(bits(a) == bits(b) for a, b in zip(got, wanted, strict=True))
        made[0].step(), made[1].step()
    assert_same_bits(snapshot(made[0], N), snapshot(made[1], N))
    assert 0 < made[0].metrics["effective_negatives"] <= 3 * 4


def test_only_views_that_require_it_get_a_gradient():
    views, index = data(3, 1, seed=8)[0]
    assert not compopt.DCLEstimator(mode="unimodal")(views, index=index).requires_grad
    part = views[:2].clone().requires_grad_()
    est = compopt.DCLEstimator(mode="unimodal", dtype=torch.float64)
    est(torch.cat([part, views[2:]]), index=index).backward()
    near(part.grad, step(est, views, index)[1][:2])


@pytest.mark.parametrize("view", [0, 2])
@pytest.mark.parametrize("name", ["sogclr", "isogclr", "memory", "emc2"])
def test_a_bad_feature_stays_out_of_the_rows(name, view):
    est, _ = make(BY_NAME[name], "unimodal", N)
    good, bad = data(3, 2, seed=9, repeats=False)
    step(est, *good), est.step()
    before = snapshot(est, N)
    bad[0][view, 1, 0] = torch.nan
    with pytest.warns(UserWarning, match="1 feature rows"):
        assert est(bad[0], index=bad[1], anchors=2).isnan()
        est.step()
    assert_same_bits(before, snapshot(est, N))


V = torch.randn(3, 4, D)


@pytest.mark.parametrize(
    "kind, match, given, options",
    [
        (TypeError, "z2 is missing", (V[0],), {}),
        (TypeError, r"torch.stack\(views\)", (list(V),), {}),
        (ValueError, "V >= 2", (V[:1],), {}),
        (ValueError, r"goes without z2: est\(views, index=index\)", (V, torch.arange(4)), {}),
        (TypeError, "floating-point", (V.long(),), {}),
        (ValueError, "at most 3", (V,), {"anchors": 4}),
        (ValueError, "anchors", (V,), {"anchors": 0}),
        (ValueError, r"\(4, 1\)", (V,), {"tau": torch.ones(4, 2)}),
        (ValueError, "extra= serves two views", (V,), {"extra": V[0]}),
    ],
)
def test_refusals(kind, match, given, options):
    est = compopt.DCLEstimator(mode="unimodal")
    with pytest.raises(kind, match=match):
        est(*given, **options)
    assert est.pending == 0


def test_refusals_of_modes_and_samplers():
    with pytest.raises(ValueError, match='needs mode="unimodal"'):
        compopt.DCLEstimator()(V)
    with pytest.raises(ValueError, match='directions="forward"'):
        compopt.DCLEstimator()(V[0], V[1], anchors=1)
    with pytest.raises(ValueError, match="pass anchors=2"):
        compopt.EMC2Estimator(N, mode="unimodal")(V, index=torch.arange(4), encode=lambda i: V[0, i])


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_ranks(group, name, views, anchors, options):
    """Run a few steps of one rank with its part of the batch; parts have different sizes, and one is empty."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    shard = {"shard": True} if options.get("shard") and size > 1 else {}
    est, _ = make(BY_NAME[name], "unimodal", N, gamma=0.6, process_group=group, **{**options, "shard": False} | shard)
    found = []
    for t, (features, index) in enumerate(data(views, 3, seed=10, batch=8)):
        mine = torch.arange(8).tensor_split([3 + t, 8][: size - 1])[rank]
        loss, gradient = step(est, features[:, mine], index[mine], anchors=anchors)
        found.append((loss, gradient / size))
        est.step()
    return found, snapshot(est, N)


@functools.cache
def alone(*case):
    """Run one process with the whole batch."""
    return the_pool().run(on_ranks, 1, *case[:3], dict(case[3]))[0]


RANKED = ["infonce", "isogclr-adam", "global-dual", "memory-dual", "emc2-dual"]
CASES = [(name, *(((3, None), (4, 2))[number % 2]), {}) for number, name in enumerate(RANKED)]
CASES += [("sogclr", 4, 2, {"shard": True}), ("isogclr", 5, 2, {"chunk_size": 2})]
RANKED_NETWORKS = [("neural-through-alpha", 3, None, {}), ("neural-no-updates", 4, 2, {})]  # they take seconds to start


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", RANKED_NETWORKS, ids=lambda case: "-".join(map(str, case)))
def test_ranks_with_a_network(case, ranks):
    test_ranks_compute_what_one_process_does(case, ranks)


@pytest.mark.distributed
@pytest.mark.covering()
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ranks_compute_what_one_process_does(case, ranks):
    wanted, state = alone(*case[:3], tuple(case[3].items()))
    answers = the_pool().run(on_ranks, ranks, *case)
    for number, (loss, gradient) in enumerate(wanted):
        for found, _ in answers:
            near(found[number][0], loss, what="loss")
        near(torch.cat([found[number][1] for found, _ in answers], dim=1), gradient, 1e-9, what="gradient")
    for _, other in answers:
        for name, value in state.items():
            near(other[name].double().nan_to_num(0, 0, 0), value.double().nan_to_num(0, 0, 0), 1e-9, what=name)


def test_a_memory_with_candidates_refuses_more_than_two_views():
    est = compopt.MemoryEstimator(4, 8, candidates=20, mode="unimodal")
    with pytest.raises(ValueError, match="candidates=20 supports two views, got 3"):
        est(torch.randn(3, 6, 4, requires_grad=True), index=torch.arange(6))
