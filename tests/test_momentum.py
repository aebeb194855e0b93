"""keys= of a call: keys of a momentum copy in the batch, as positives and in the memory."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import compopt
from compopt import PairPolicy
from tests.helpers import asked, features, generator, near, run, snapshot
from tests.pool import the_pool
from tests.reference import MomentumReference

D, B, LENGTH, TAU = 4, 8, 20, 0.3
KINDS = ("bimodal", "unimodal", "forward")


def build(kind="bimodal", length=LENGTH, tau=TAU, **options):
    mode = {"forward": {"directions": "forward"}}.get(kind, {"mode": kind})
    return compopt.MemoryEstimator(D, length, tau, **{"dtype": torch.float64, **mode, **options})


def batch(step, size=B, dtype=torch.float64):
    """Features, keys, and an index whose samples recur every three steps; in every second batch one sample repeats."""
    index = (torch.arange(size) + size * step) % (3 * size)
    if step % 2:
        index[-1] = index[0]
    return features(size, D, 2 * step, dtype=dtype), features(size, D, 2 * step + 1, dtype=dtype), index


CALLS = {
    "plain": lambda g, kind: {},
    "labels": lambda g, kind: {"labels": torch.randint(0, 5, (B,), generator=g)},
    "index2": lambda g, kind: {} if kind == "unimodal" else {"index2": torch.randint(0, 9, (B,), generator=g)},
    "extra": lambda g, kind: {
        "extra": torch.randn(5, D, generator=g, dtype=torch.float64),
        "extra_index": torch.randint(0, 3 * B, (5,), generator=g),
    },
    "tau": lambda g, kind: {"tau": 0.2 + 0.3 * torch.rand(B, 1, generator=g, dtype=torch.float64)},
    "taus": lambda g, kind: {
        "tau": 0.2 + 0.3 * torch.rand(B, 1 if kind == "forward" else 2, generator=g, dtype=torch.float64)
    },
    "global tau": lambda g, kind: {"tau": torch.tensor(0.4, dtype=torch.float64)},
    "margin": lambda g, kind: {"policy": (0.1, 0.0)},
    "hardness": lambda g, kind: {"policy": (None, 2.0)},
    "within": lambda g, kind: {"within": torch.randint(0, 2, (B,), generator=g), "policy": (0.3, 1.0)},
}


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_it_is_its_reference(call, kind, chunk_size):
    """Compare the loss and the gradients of features, further candidates and temperatures; two calls per commit."""
    est, ref = None, MomentumReference(kind, LENGTH, TAU)
    for step in range(5):
        z, k, index = batch(step)
        given = CALLS[call](generator(step), kind)
        margin, beta = given.get("policy", (None, 0.0))
        policy = PairPolicy(false_negatives=margin, hardness=beta or None, within="within" in given)
        est = est or build(kind, chunk_size=chunk_size, pairs=None if policy == PairPolicy() else policy)
        leaves = {"z1": z[0], "z2": z[1], **{name: given[name] for name in ("extra", "tau") if name in given}}
        leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
        given |= {name: leaves[name] for name in ("extra", "tau") if name in leaves}
        want = ref.loss((leaves["z1"], leaves["z2"]), k, index, **given)
        gradients = torch.autograd.grad(want, [*leaves.values()], allow_unused=True)
        given.pop("policy", None)
        keys = [side.clone().requires_grad_() for side in k]
        found = est(leaves["z1"], leaves["z2"], index, keys=keys, **asked(est, **given))
        near(found, want, 1e-12, what="loss")
        found.backward()
        for (name, leaf), wanted in zip(leaves.items(), gradients, strict=True):
            near(leaf.grad, torch.zeros_like(leaf) if wanted is None else wanted, 1e-10, what=name)
        assert all(side.grad is None for side in keys)
        if step % 2:
            est.step(), ref.step()


@pytest.mark.parametrize("kind", KINDS)
def test_effective_negatives_count_all_candidates(kind):
    est, ref = build(kind), MomentumReference(kind, LENGTH, TAU)
    for step in range(3):
        z, k, index = batch(2 * step)
        ref.loss(z, k, index)
        est(*z, index, keys=k)
        found = est.metrics["effective_negatives"]
        near(found, torch.stack([1 / w.square().sum() for w in ref.weights.values()]).mean(), 1e-10)
        est.step(), ref.step()


def test_a_learned_temperature_and_a_dual_take_the_copy_s_similarities():
    """The gradient of log(1/tau) and the dual's G are those of the objective with the keys."""
    z, k, index = batch(0)
    tau = torch.tensor(TAU, dtype=torch.float64, requires_grad=True)
    want = MomentumReference("bimodal", LENGTH, TAU).loss(z, k, index, tau=tau)
    (slope,) = torch.autograd.grad(want, tau)
    learned = compopt.FixedTemperature(TAU, True, torch.float64)
    est = compopt.ContrastiveEstimator(compopt.MemoryNormalizer(D, LENGTH), learned, dtype=torch.float64)
    est(*z, index, keys=k).backward()
    (parameter,) = est.parameters()
    near(parameter.grad, -TAU * slope, 1e-10)
    dual = compopt.TemperatureDual(3 * B, rho=0.5, tau_init=TAU, mode="global", lr=0.01, beta=0.5, tau_max=1.0)
    est = compopt.ContrastiveEstimator(compopt.MemoryNormalizer(D, LENGTH), dual, dtype=torch.float64)
    est(*z, index, keys=k)
    est.step()
    near(dual.tau, TAU - 0.01 * 0.5 * (slope + 0.5), 1e-9)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_weights_that_overflow_nothing(mode):
    """Positives that are much closer than all negatives, at a small temperature: alpha is far below 0."""
    one = torch.eye(D, dtype=torch.float64)[0]
    z = [F.normalize(one * torch.tensor([1.0, -1.0]).repeat(2)[:, None] + 0.1 * side[:4]) for side in features(4, D, 5)]
    labels, found = torch.arange(4) % 2, []
    for dtype in (torch.float32, torch.float64):
        est = build(mode, tau=0.01, dtype=dtype)
        found.append(run(est, *(side.to(dtype) for side in z), torch.arange(4), keys=z, labels=labels))
    for one, other in zip(*found, strict=True):
        near(one, other, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_of_the_copy_s_candidates(kind):
    est, keeper = build(kind), compopt.ScoreKeeper(B)
    keeper.attach(est)
    z, k = features(B, D, 1), features(B, D, 2)
    index = torch.arange(B)
    est(*z, index, keys=k)
    est.step()
    similar, ranks = [], []
    for view, anchors in enumerate(F.normalize(side) for side in z):
        candidates = [F.normalize(side) for side in (k if kind == "unimodal" else k[1 - view : 2 - view])]
        positive = torch.linalg.vecdot(anchors, F.normalize(k[1 - view]))
        others = torch.cat([(anchors @ side.T)[~torch.eye(B, dtype=torch.bool)].view(B, -1) for side in candidates], 1)
        ranks.append((others > positive[:, None]).double().mean(1))
        similar.append(positive)
    found = keeper.read(index)
    if kind == "unimodal":
        near(found["rank"][:, 0], (ranks[0] + ranks[1]) / 2)
    else:
        near(found["rank"], torch.stack(ranks, 1)[:, : found["rank"].shape[1]])
        near(found["similarity"], torch.stack(similar, 1)[:, : found["rank"].shape[1]])


# -- the memory ------------------------------------------------------------------------------------------------------


def trained(est, steps, first=0, **call):
    trace = []
    for step in range(first, first + steps):
        z, k, index = batch(step, dtype=torch.float32)
        trace += run(est, *z, index, keys=k, **call)
        est.step()
    return trace


def test_without_training_nothing_is_kept():
    est = build()
    z, k, index = batch(0)
    with torch.no_grad():
        est(*z, index, keys=k)
    est.eval()(*z, index, keys=k)
    assert est.pending == 0


@pytest.mark.parametrize("kind", ["bimodal", "forward"])
@pytest.mark.parametrize("where", ["z1", "z2", "k1", "k2"])
def test_a_bad_feature_makes_the_loss_nan_and_enters_no_memory(where, kind):
    for first in (True, False):  # with an empty and with a filled memory
        est = build(kind)
        if not first:
            trained(est, 1)
        kept = est.normalizer.state_dict()["state"]["kept"].sum()
        z, k, index = batch(4)
        given = {"z1": z[0], "z2": z[1], "k1": k[0], "k2": k[1]}
        given[where][2, 0] = torch.nan
        with pytest.warns(UserWarning, match="1 feature rows"):
            loss = est(z[0], z[1], index, keys=k)
        assert loss.isnan()
        est.step()
        assert est.normalizer.state_dict()["state"]["kept"].sum() == kept


def test_half_precision_is_computed_in_float32():
    z, k, index = batch(0, dtype=torch.float32)
    half = [side.bfloat16() for side in k]
    found = [build(dtype=torch.float32)(*z, index, keys=keys) for keys in (half, [h.float() for h in half])]
    assert torch.equal(*found)


# -- errors ----------------------------------------------------------------------------------------------------------


def wrong(change):
    z, k, index = batch(0)
    return z, change(k), index


REFUSED = [
    (lambda: compopt.DCLEstimator(), lambda k: k, ValueError, "serves a memory.*take compopt.MemoryEstimator"),
    (lambda: build(momentum=True), lambda k: None, ValueError, "keys= is missing"),
    (build, lambda k: k[0], ValueError, "must be a pair.*got Tensor"),
    (build, lambda k: (*k, k[0]), ValueError, "must be a pair.*got 3"),
    (build, lambda k: (k[0], k[1][:-1]), ValueError, r"keys\[1\] must have the shape of z1"),
    (build, lambda k: (k[0].long(), k[1]), TypeError, r"keys\[0\] must be a floating-point tensor"),
    (build, lambda k: [side.to("meta") for side in k], ValueError, "on the meta device"),
]


@pytest.mark.parametrize("make, change, kind, message", REFUSED)
def test_what_is_refused(make, change, kind, message):
    est = make()
    z, keys, index = wrong(change)
    with pytest.raises(kind, match=message):
        est(*z, index, keys=keys)
    assert est.pending == 0


def test_the_recommended_estimator_asks_for_them():
    for size in (16, 4096):
        est = compopt.recommended(D, n=40, batch_size=size, momentum=True)
        assert (type(est).__name__, est.normalizer.length) == ("MemoryEstimator", 10)
        with pytest.raises(ValueError, match="keys= is missing"):
            est(*torch.randn(2, B, D), torch.arange(B))
    with pytest.raises(ValueError, match="would train the encoder of z1 alone"):
        compopt.recommended(D, directions="forward", momentum=True)
    lengths = [compopt.recommended(D, n=4000, momentum=momentum).normalizer.length for momentum in (True, False)]
    assert lengths == [512, 128]


# -- cached features -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_a_gradient_cache_gives_the_gradients_of_the_whole_batch(mode):
    towers = [torch.nn.Linear(6, D, dtype=torch.float64) for _ in range(2)]
    encoders = [compopt.MomentumEncoder(tower) for tower in towers]
    one, other = build(mode), build(mode)
    for step in range(3):
        x = features(B, 6, step)
        index = torch.arange(B) + B * step
        keys = [encoder(side) for encoder, side in zip(encoders, x, strict=True)]
        found = []
        for est, cached in ((one, False), (other, True)):
            for tower in towers:
                tower.zero_grad()
            if cached:
                compopt.gradient_cache(est, towers, x, index, micro_batch_size=3, keys=keys)
            else:
                est(*(tower(side) for tower, side in zip(towers, x, strict=True)), index, keys=keys).backward()
            found.append([p.grad.clone() for tower in towers for p in tower.parameters()])
            est.step()
        for a, b in zip(*found, strict=True):
            near(a, b, 1e-12)


# -- ranks -----------------------------------------------------------------------------------------------------------


def on_ranks(group, kind, chunk_size, sizes):
    """Return this rank's losses, gradients and state for calls with a policy, labels and further candidates."""
    rank = dist.get_rank(group)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    policy = PairPolicy(false_negatives=0.2, hardness=1.0, within=True)
    est = build(kind, chunk_size=chunk_size, process_group=group, pairs=policy)
    found = []
    for step in range(4):
        z, k, index = batch(step)
        given = {"labels": index % 6, "within": index % 2}
        extra = torch.randn(B, D, generator=generator(step), dtype=torch.float64)
        if step == 2:
            given |= {"extra": extra, "extra_index": torch.arange(B)}
        given = {name: value[own] for name, value in given.items()}
        given["within"] = (given["within"], torch.arange(B)[own] % 2) if step == 2 else given["within"]
        keys = [side[own] for side in k]
        found.append(run(est, *(side[own] for side in z), index[own], keys=keys, **given))
        est.step()
    return found, snapshot(est, 3 * B)


@pytest.mark.distributed
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_what_one_process_does(kind, chunk_size):
    ((alone, state),) = the_pool().run(on_ranks, 1, kind, chunk_size, [B])
    for sizes in ([3, 5], [3, 0, 5]):
        parts = the_pool().run(on_ranks, len(sizes), kind, chunk_size, sizes)
        for step, (loss, *gradients) in enumerate(alone):
            for found, _ in parts:
                near(found[step][0], loss, 1e-11)
            for at, wanted in enumerate(gradients, start=1):
                near(torch.cat([found[step][at] for found, _ in parts]) / len(sizes), wanted, 1e-10)
        for _, found in parts:
            for name, value in state.items():
                near(found[name], value, 1e-11, what=name)


def one_without(group):
    """Return the error of this rank; of two ranks, the second passes no momentum features."""
    z, k, index = batch(0)
    given = {} if dist.get_rank(group) else {"keys": k}
    est = build(process_group=group)
    with pytest.raises(ValueError) as caught:
        est(*z, index + B * dist.get_rank(group), **given)
    return str(caught.value)


@pytest.mark.distributed
def test_a_rank_without_them_is_told_on_all_ranks():
    for message in the_pool().run(one_without, 2):
        assert "the ranks differ in keys= (0: none, 1: given): by rank [1, 0]" in message
