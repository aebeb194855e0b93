"""Pair policies: random combinations against the float64 reference, on one rank and on several; invalid input."""

import itertools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import PairPolicy
from tests.database import BY_NAME, DATABASE
from tests.helpers import batches, call, compare_state, features, generator, make, near, of_0_3, run
from tests.pool import the_pool
from tests.reference import PolicyReference
from tests.reference.pairs import anchors
from tests.test_agreement import compare_forward

N, BATCH, DIM = 17, 7, 4
KINDS = ("bimodal", "unimodal", "forward")
FAST = ("infonce", "infonce-no-positive", "clip-learned", "sogclr", "sogclr-positive", "isogclr", "isogclr-none-adam")
FAST += ("batch-dual", "global-dual-adam", "memory", "memory-dual", "memory-global-dual-not-multiplied")
SLOW = ("neural", "neural-through-alpha-dual")
NAMES = (*FAST, *FAST, *SLOW)
THRESHOLDS = (None, 0.1, 0.3, -0.05, ("relative", 0.95), ("relative", 0.7))


def random_policy(draw, kept):
    """Return random options; ``kept``: the normalizer keeps features of past batches, for which there is no guide."""
    threshold = draw.choice(THRESHOLDS)
    options = {"false_negatives": threshold, "hardness": draw.choice((None, 0.7, 3.0))}
    if threshold is not None:
        options |= {"guided": not kept and draw.random() < 0.5, "spare_negatives": draw.random() < 0.5}
    return options | {"within": draw.random() < 0.5}


def arguments(policy, seed, step, count):
    """Return the arguments of one step's call besides features and index, with ``count`` further candidates."""
    g = generator(7000 + 10 * seed + step)
    given = {"extra": torch.randn(count, DIM, generator=g, dtype=torch.float64)} if count else {}
    if count and step:
        given["extra_index"] = torch.randint(0, N, (count,), generator=g)  # some are positives of anchors
    if policy["within"]:
        keys = [torch.randint(0, 2, (size,), generator=g) for size in (BATCH, count)]
        given["within"] = tuple(keys) if count else keys[0]
    if policy.get("guided"):
        near_pairs = features(BATCH, 5, seed=3000 + 10 * seed + step)
        judged = count and not policy["spare_negatives"]
        given["guide"] = [*near_pairs, *([torch.randn(count, 5, generator=g, dtype=torch.float64)] if judged else [])]
    return given


def leaves_negatives(kind, policy, batch, given):
    """Return True if every anchor has a negative; the reference divides by their number."""
    z1, z2, index = batch
    positions = given["extra_index"].tolist() if "extra_index" in given else None
    found = anchors([z1, z2], index.tolist(), kind, extra=given.get("extra"), extra_index=positions)
    keys = given.get("within")
    PolicyReference(**policy).apply(
        found, given.get("guide"), keys if isinstance(keys, tuple) or keys is None else (keys,), True
    )
    return all(a.negatives for a in found)


def case(number):
    """Return a random combination: database entry, kind, policy, chunk size, tau, and batches with their arguments."""
    draw = random.Random(number)
    name, kind = NAMES[number % len(NAMES)], draw.choice(KINDS)
    policy = random_policy(draw, name.startswith("memory"))
    if name.startswith("neural"):  # refuses it
        policy["hardness"] = None
    count, chunk_size, tau = draw.choice((0, 0, 3)), draw.choice((None, 1, 3, 64)), draw.choice((0.07, 0.3, 1.0))
    steps = []
    for seed in itertools.count(number):
        batch = batches(N, 2, BATCH, DIM, seed=seed)[len(steps) % 2]
        given = arguments(policy, seed, len(steps), count)
        if leaves_negatives(kind, policy, batch, given):
            steps.append((batch, given))
        if len(steps) == 3:
            return name, kind, policy, chunk_size, tau, steps


def twins(name, kind, policy, chunk_size, tau, **options):
    """Return an estimator with the policy, and its reference."""
    est, ref = make(
        BY_NAME[name], kind, N, tau=tau, gamma=0.6, chunk_size=chunk_size, pairs=PairPolicy(**policy), **options
    )
    ref.policy = PolicyReference(**policy)
    return est, ref


def follow_case(number):
    """Compare all steps of a combination with the reference."""
    name, kind, policy, chunk_size, tau, steps = case(number)
    est, ref = twins(name, kind, policy, chunk_size, tau)
    for batch, given in steps:
        compare_forward(BY_NAME[name], est, ref, *batch, rtol=1e-9, **given)
        est.step(), ref.step()
        compare_state(est, ref, N, BY_NAME[name], rtol=1e-9)


@pytest.mark.parametrize("number", range(len(FAST)))
def test_random_combinations(number):
    follow_case(number)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(FAST), 100))
def test_more_random_combinations(number):
    follow_case(number)


# -- ranks -----------------------------------------------------------------------------------------------------

SPLITS = {2: [[4, 3], [7, 0], [1, 6]], 3: [[2, 3, 2], [0, 4, 3], [5, 1, 1]]}
EXTRA_SPLITS = {2: [2, 1], 3: [1, 0, 2]}


def on_ranks(group, number):
    """Run the steps of a combination with this rank's part of each batch; return the results and the rows."""
    name, kind, policy, chunk_size, tau, steps = case(number)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shard = BY_NAME[name].has_rows and number % 2 == 1
    est, _ = twins(name, kind, policy, chunk_size, tau, process_group=group, shard=shard)
    found = []
    for step, (batch, given) in enumerate(steps):
        own, more = (
            slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            for sizes in (SPLITS[ranks][(number + step) % 3], EXTRA_SPLITS[ranks])
        )
        given = {name: part(value, own, more) for name, value in given.items()}
        found.append(run(est, *(x[own] for x in batch), **given))
        est.step()
    return found, est.read(torch.arange(N)) if BY_NAME[name].has_rows else {}


def part(value, own, more):
    """Return this rank's part of an argument for the batch, for the further candidates, or for both as a sequence."""
    if isinstance(value, torch.Tensor):
        return value[own if len(value) == BATCH else more]
    return type(value)(each[own if len(each) == BATCH else more] for each in value)


def compare_ranks(number, ranks):
    """Compare K ranks with parts of the batch with one rank with the whole batch."""
    name, kind, policy, chunk_size, tau, steps = case(number)
    est, _ = twins(name, kind, policy, chunk_size, tau)
    answers = the_pool().run(on_ranks, ranks, number)
    for step, (batch, given) in enumerate(steps):
        loss, *gradients = run(est, *batch, **given)
        est.step()
        for found, _ in answers:
            near(found[step][0], loss, 1e-11, atol=1e-11, what=f"loss of step {step}")
        for at, want in enumerate(gradients, start=1):
            near(torch.cat([found[step][at] for found, _ in answers]) / ranks, want, 1e-10, what=f"gradient {at}")
    for _, rows in answers if BY_NAME[name].has_rows else ():
        seen = est.read(torch.arange(N))["count"] > 0
        for column, value in est.read(torch.arange(N)).items():
            near(rows[column][seen], value[seen], 1e-10, what=column)


@pytest.mark.distributed
@pytest.mark.parametrize("number, ranks", [(0, 2), (9, 3), (10, 2), (13, 2), (24, 2), (29, 3), (33, 3), (43, 2)])
def test_ranks(number, ranks):
    compare_ranks(number, ranks)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.covering(all=True)
@pytest.mark.parametrize("number", range(len(FAST), 100))
def test_more_ranks(number):
    compare_ranks(number, ranks=2 + number % 2)


# -- single properties -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("info", [info for info in DATABASE if not info.has_policy], ids=str)
def test_a_policy_without_options_is_none(info):
    """Results are bit-identical, at construction and at a call, also for estimators that reject other policies."""
    plain, same, called = (make(info, "bimodal", N, **given)[0] for given in ({}, {"pairs": PairPolicy()}, {}))
    for z1, z2, index in batches(N, 2, seed=3):
        want = run(plain, z1, z2, index)
        for est, given in ((same, {}), (called, {"pairs": PairPolicy(hardness=0.0)})):
            assert all(map(torch.equal, want, run(est, z1, z2, index, **given)))
            est.step()
        plain.step()
    assert same.pairs is None and repr(same) == repr(plain)


def test_copies_of_the_positive_are_no_negatives():
    """Samples 0 and 1 share a caption, which is less similar to picture 1 than to picture 0."""
    z2 = torch.eye(4)[[0, 0, 2, 3]]
    z1 = z2.clone()
    z1[1, 1] = 0.2
    est = compopt.DCLEstimator(tau=0.1, pairs=PairPolicy(false_negatives=-1e-6))
    est(z1, z2)
    assert est._last.negatives.T.tolist() == [[2, 2, 3, 3], [3, 2, 3, 3]]


def test_an_anchor_without_negatives_contributes_nothing():
    """Data sets of 3, 2 and 1 samples: the last one has no loss, no gradient and no row."""
    z1, z2 = (z.requires_grad_() for z in features(6, DIM, seed=5))
    key, unit = torch.tensor([0, 0, 0, 1, 1, 2]), torch.nn.functional.normalize
    est = compopt.SogCLREstimator(n=6, tau=0.1, gamma=1.0, pairs=PairPolicy(within=True), dtype=torch.float64)
    call(est, z1, z2, torch.arange(6), within=key).backward()
    est.step()
    h = (s := unit(z1) @ unit(z2).T) - s.diagonal()[:, None]
    h2 = s.T - s.diagonal()[:, None]
    other = (key[:, None] == key) & ~torch.eye(6, dtype=torch.bool)
    terms = [(x / 0.1).masked_fill(~other, -torch.inf)[:5].logsumexp(1) - other[:5].sum(1).log() for x in (h, h2)]
    want = torch.autograd.grad(0.1 * torch.cat(terms).sum() / 12, (z1, z2))
    near(z1.grad, want[0]), near(z2.grad, want[1])
    assert not z1.grad[5].any() and est.read(torch.arange(6))["count"].tolist() == [1, 1, 1, 1, 1, 0]


def test_a_bad_guide_shows_in_the_loss():
    guide = [torch.randn(6, 3), torch.randn(6, 3)]
    guide[0][2, 1] = torch.nan
    z1, z2, index = batches(N, 1, repeats=False)[0]
    est = compopt.SogCLREstimator(N, pairs=PairPolicy(false_negatives=0.0, guided=True))
    with pytest.warns(UserWarning, match="1 feature rows"):
        assert not call(est, z1.requires_grad_(), z2, index, guide=guide).isfinite()
    est.step()
    assert not est.read(index)["count"].any()


def test_the_policy_is_shown_and_stored():
    policy = PairPolicy(false_negatives=("relative", 0.95), hardness=5.0)
    assert repr(policy) == "PairPolicy(false_negatives=('relative', 0.95), hardness=5.0)"
    est, plain = compopt.SogCLREstimator(N, pairs=policy), compopt.SogCLREstimator(N)
    assert f"pairs: {policy}" in repr(est) and "pairs" not in repr(plain)
    assert est.pairs is policy and eval(repr(policy)) == policy
    compopt.SogCLREstimator(N, pairs=policy).load_state_dict(est.state_dict())
    for a, b in ((est, plain), (plain, est)):
        with pytest.raises(ValueError, match=r"options.pairs differs: .*PairPolicy"):
            a.load_state_dict(b.state_dict())
    assert "pairs" not in plain.state_dict()["config"]["options"]  # unchanged without a policy


REFUSED = [
    ({"false_negatives": "0.1"}, TypeError, "false_negatives must be a number"),
    ({"false_negatives": ("absolute", 0.1)}, ValueError, r"a margin or \(\"relative\", r\)"),
    ({"false_negatives": ("relative", 1.5)}, ValueError, r"false_negatives\[1\] must be in \(0, 1\], got 1.5"),
    ({"guided": True}, ValueError, "give false_negatives= too"),
    ({"spare_negatives": 1, "false_negatives": 0.1}, TypeError, "spare_negatives must be True or False"),
    ({"hardness": -1.0}, ValueError, "hardness must be 0 or greater, got -1.0"),
    ({"hardness": (1.0, 2.0)}, TypeError, r"hardness must be a number, got \(1.0, 2.0\)"),
    ({"within": torch.arange(4)}, TypeError, "within must be True or False"),
]


@pytest.mark.parametrize("options, kind, message", REFUSED)
def test_options_that_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        PairPolicy(**options)


def test_estimators_that_refuse_a_policy():
    policy = PairPolicy(false_negatives=0.0, guided=True)
    with pytest.raises(ValueError, match="no effect on chains"):
        compopt.EMC2Estimator(N, pairs=PairPolicy(hardness=1.0))
    with pytest.raises(ValueError, match="of the batch's candidates, and the memory has others"):
        compopt.MemoryEstimator(DIM, pairs=policy)
    with pytest.raises(ValueError, match="hardness=1.0 changes the terms"):
        compopt.NeuCLIPEstimator(DIM, pairs=PairPolicy(hardness=1.0))
    with pytest.raises(TypeError, match="pairs must be a compopt.PairPolicy, got dict"):
        compopt.DCLEstimator(pairs={"hardness": 1.0})
    with pytest.raises(ValueError, match="pass an estimator without"):
        compopt.diagnostics.normalizer_error(compopt.DCLEstimator(pairs=policy), *torch.randn(2, 6, 3), batch_size=3)


Z = torch.randn(2, 4, 3)
GUIDED = {"false_negatives": 0.0, "guided": True}
CALLS = [
    ({}, {"guide": list(Z)}, ValueError, "guide= of PairPolicy.bind has no effect without guided=True"),
    ({}, {"within": torch.arange(4)}, ValueError, "within= of PairPolicy.bind has no effect without within=True"),
    (GUIDED, {}, ValueError, r"guided=True\) needs tensors of the batch; pass pairs=policy.bind"),
    (GUIDED, {"within": torch.arange(4)}, ValueError, "guide= of PairPolicy.bind is missing, which .* needs"),
    (GUIDED, {"guide": [Z[0]]}, ValueError, "guide must be 2 tensors of features, .* got 1 of them"),
    (GUIDED, {"guide": list(Z), "extra": Z[0]}, ValueError, "guide must be 3 tensors of features"),
    (
        GUIDED,
        {"guide": [Z[0], Z[1, :3]]},
        ValueError,
        r"guide\[1\] must have shape \(4, g\), one g for all, got \(3, 3\)",
    ),
    (GUIDED, {"guide": [Z[0], Z[1].long()]}, TypeError, r"guide\[1\] must be a floating-point tensor, got torch.int64"),
    ({"within": True}, {}, ValueError, "needs tensors of the batch"),
    ({"within": True}, {"within": torch.arange(3)}, ValueError, "within has 3 entries for 4 of them"),
    ({"within": True}, {"within": torch.arange(4), "extra": Z[0]}, ValueError, "within must be a pair of tensors"),
    ({"within": True}, {"within": torch.rand(4)}, TypeError, "within must hold integers"),
]


def test_a_state_of_0_3_with_the_former_name_of_an_option_is_loaded():
    policy = PairPolicy(false_negatives=0.1, spare_negatives=True)
    est, other = (compopt.SogCLREstimator(N, pairs=policy) for _ in range(2))
    run(est, *batches(N, 1, BATCH, DIM)[0])
    est.step()
    state = of_0_3(est.state_dict())
    state["config"]["options"]["pairs"] = "PairPolicy(false_negatives=0.1, spare_extra=True)"
    other.load_state_dict(state)
    assert torch.equal(*(each.read(torch.arange(N))["log_u"] for each in (est, other)))


@pytest.mark.parametrize("policy, given, kind, message", CALLS)
def test_calls_that_are_refused(policy, given, kind, message):
    est, policy = compopt.DCLEstimator(), PairPolicy(**policy)
    with pytest.raises(kind, match=message):
        call(est, *Z, pairs=policy, **given)
    est = compopt.DCLEstimator(pairs=policy)
    with pytest.raises(kind, match=message):
        call(est, *Z, **given)


def test_a_memory_of_several_data_sets_resumes_bit_for_bit():
    """The slots of the memory keep the keys of ``within=``."""
    data = batches(N, 6, BATCH, DIM, seed=40)
    key = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    est, resumed = (compopt.MemoryEstimator(DIM, length=9, pairs=PairPolicy(within=True)) for _ in range(2))
    for z1, z2, index in data[:4]:
        call(est, z1, z2, index, within=key), est.step()
    resumed.load_state_dict(est.state_dict())
    for z1, z2, index in data[4:]:
        for a, b in zip(*(run(e, z1, z2, index, within=key) for e in (est, resumed)), strict=True):
            assert torch.equal(a, b)
        est.step(), resumed.step()
    assert est.normalizer.state_dict()["state"]["keys"].shape == (4, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Similarities, including those of the guide, are computed in float32 from the same features."""
    z1, z2, *guide = (x.to(dtype) for x in (*features(6, DIM, seed=41), *features(6, DIM, seed=42)))
    est = compopt.DCLEstimator(pairs=PairPolicy(false_negatives=0.0, guided=True, hardness=1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(est, z1, z2, guide=guide)
    assert loss.dtype == torch.float32
    near(loss, call(est, z1.float(), z2.float(), guide=[x.float() for x in guide]), 1e-6)


# equal policies and their normalized hyper-parameters -----------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"hardness": 5}, {"hardness": np.float64(5.0)}),
        ({"false_negatives": np.float32(0.5)}, {"false_negatives": 0.5}),
        ({"within": False}, {}),
        ({"hardness": 0}, {}),
    ],
)
def test_equal_policies_have_one_form(one, other):
    one, other = compopt.PairPolicy(**one), compopt.PairPolicy(**other)
    assert one == other and repr(one) == repr(other)


# a policy for one call ----------------------------------------------------------------------------------------

SCHEDULE = [{"false_negatives": 0.8}, {"hardness": 2.0}, {}, {"false_negatives": ("relative", 0.95), "hardness": 0.5}]
KEPT = {"false_negatives": 0.9, "hardness": 1.0}  # given at construction


def follow_calls(est, ref, info):
    """Compare with the reference: a policy per step, and then the policy of the construction again."""
    for policy, batch in zip([*SCHEDULE, None], batches(N, 5, 6, DIM, seed=60, repeats=False), strict=True):
        ref.policy = PolicyReference(**(KEPT if policy is None else policy))
        given = {} if policy is None else {"pairs": PairPolicy(**policy)}
        z1, z2, index = batch
        loss, g1, g2 = run(est, *batch, **given)
        want, w1, w2 = ref.forward(z1, z2, index)
        near(loss, want, 1e-9), near(g1, w1, 1e-9), near(g2, w2, 1e-9)
        est.step(), ref.step()
        compare_state(est, ref, N, info, rtol=1e-9)


@pytest.mark.parametrize("chunk_size", [2, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "kind", ["unimodal", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("bimodal", "forward"))]
)
@pytest.mark.parametrize("name", ["infonce", "sogclr", "isogclr", "memory-dual"])
def test_each_call_has_its_policy(name, kind, chunk_size):
    est, ref = make(BY_NAME[name], kind, N, tau=0.3, chunk_size=chunk_size, pairs=PairPolicy(**KEPT))
    follow_calls(est, ref, BY_NAME[name])


WITHIN = PairPolicy(within=True)
REFUSED_CALLS = [
    (compopt.DCLEstimator, {"hardness": 1.0}, TypeError, "pairs must be a compopt.PairPolicy, got dict"),
    (lambda: compopt.EMC2Estimator(N), PairPolicy(hardness=1.0), ValueError, "no effect on chains"),
    (lambda: compopt.NeuCLIPEstimator(DIM), PairPolicy(hardness=1.0), ValueError, "hardness=1.0 changes the terms"),
    (lambda: compopt.MemoryEstimator(DIM), WITHIN, ValueError, "within=True differs from within=False at construction"),
    (lambda: compopt.MemoryEstimator(DIM, pairs=WITHIN), PairPolicy(), ValueError, "within=False differs from within"),
    (lambda: compopt.MemoryEstimator(DIM), PairPolicy(**GUIDED), ValueError, "of the batch's candidates"),
]


@pytest.mark.parametrize("build, policy, kind, message", REFUSED_CALLS)
def test_policies_that_a_call_refuses(build, policy, kind, message):
    with pytest.raises(kind, match=message):
        build()(*torch.randn(2, 4, DIM), torch.arange(4), pairs=policy)


def differing(group, first, second):
    """Return the error of a call whose policies differ between ranks."""
    est = compopt.DCLEstimator(process_group=group)
    with pytest.raises(ValueError) as caught:
        est(*torch.randn(2, 4, DIM), pairs=second if dist.get_rank(group) else first)
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("second", [None, PairPolicy(hardness=2.0)])
def test_ranks_with_different_policies_are_told_so(second):
    for message in the_pool().run(differing, 2, PairPolicy(hardness=1.0), second):
        assert "the ranks differ in pairs= of the call" in message
