"""Pair policies: random combinations against the float64 reference, on one rank and on several; invalid input."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import PairPolicy
from tests.database import BY_NAME, DATABASE
from tests.helpers import batches, compare_state, features, generator, make, near, run
from tests.pool import the_pool
from tests.reference import PolicyReference, policies
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
    options = {"false_negatives": threshold, "hardness": draw.choice((None, 0.7, 3.0, (0.0, 2.0), (1.5, 0.0)))}
    if threshold is not None:
        options |= {"guided": not kept and draw.random() < 0.5, "spare_extra": draw.random() < 0.5}
    return options | {"within": draw.random() < 0.5}


def random_also(draw, kind):
    """Return random further kinds of similarities, which are available for queries ("forward") only."""
    kinds = ("query_to_query", "document_to_query", "document_to_document")
    return tuple(k for k in kinds if draw.random() < 0.4) if kind == "forward" else ()


def arguments(policy, seed, step, count):
    """Return the arguments of one step's call besides features and index, with ``count`` further candidates."""
    g = generator(7000 + 10 * seed + step)
    given = {"extra": torch.randn(count, DIM, generator=g, dtype=torch.float64)} if count else {}
    if policy["within"]:
        keys = [torch.randint(0, 2, (size,), generator=g) for size in (BATCH, count)]
        given["within"] = tuple(keys) if count else keys[0]
    if policy.get("guided"):
        near_pairs = features(BATCH, 5, seed=3000 + 10 * seed + step)
        more = [torch.randn(count, 5, generator=g, dtype=torch.float64)] if count and not policy["spare_extra"] else []
        given["guide"] = [*near_pairs, *more]
    return given


def leaves_negatives(kind, policy, batch, given):
    """Return True if every anchor has a negative; the reference divides by their number."""
    z1, z2, index = batch
    found = anchors([z1, z2], index.tolist(), kind, extra=given.get("extra"), also=policy["also"])
    keys = given.get("within")
    PolicyReference(**policy).apply(
        found, given.get("guide"), keys if isinstance(keys, tuple) or keys is None else (keys,), True
    )
    return all(a.negatives for a in found)


def case(number):
    """Return a random combination: database entry, kind, policy, chunk size, tau, and batches with their arguments."""
    draw = random.Random(number)
    name, kind = NAMES[number % len(NAMES)], draw.choice(KINDS)
    policy = random_policy(draw, name.startswith("memory")) | {"also": random_also(draw, kind)}
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
    ref.policy = PolicyReference(**{key: value for key, value in policy.items() if hasattr(PolicyReference, key)})
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


def on_ranks(group, number, corrections):
    """Run the steps of a combination with this rank's part of each batch; return the results and the rows."""
    name, kind, policy, chunk_size, tau, steps = case(number)
    policy |= corrections
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    est, _ = twins(name, kind, policy, chunk_size, tau, process_group=group)
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


def compare_ranks(number, ranks, **corrections):
    """Compare K ranks with parts of the batch with one rank with the whole batch."""
    name, kind, policy, chunk_size, tau, steps = case(number)
    policy |= corrections
    est, _ = twins(name, kind, policy, chunk_size, tau)
    answers = the_pool().run(on_ranks, ranks, number, corrections)
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
@pytest.mark.parametrize("number, ranks", [(0, 2), (9, 3), (10, 2)])
def test_ranks(number, ranks):
    compare_ranks(number, ranks)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "number", [1, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)]
)
def test_corrections_on_ranks(number):
    compare_ranks(number, 3, hardness=1.5, importance="differentiated", prior=0.05, also=())


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
        for est, given in ((same, {}), (called, {"pairs": PairPolicy(hardness=("mined", 0.0))})):
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
    est(z1, z2, torch.arange(6), within=key).backward()
    est.step()
    h = (s := unit(z1) @ unit(z2).T) - s.diagonal()[:, None]
    h2 = s.T - s.diagonal()[:, None]
    other = (key[:, None] == key) & ~torch.eye(6, dtype=torch.bool)
    terms = [(x / 0.1).masked_fill(~other, -torch.inf)[:5].logsumexp(1) - other[:5].sum(1).log() for x in (h, h2)]
    want = torch.autograd.grad(0.1 * torch.cat(terms).sum() / 12, (z1, z2))
    near(z1.grad, want[0]), near(z2.grad, want[1])
    assert not z1.grad[5].any() and est.read(torch.arange(6))["count"].tolist() == [1, 1, 1, 1, 1, 0]


def test_hardness_of_further_candidates_alone():
    """The logit of a curated negative is ``s / tau + beta stop(s)``."""
    z1, z2 = features(5, DIM, seed=6)
    extra = features(3, DIM, seed=7)[0]
    unit = torch.nn.functional.normalize
    leaves = [z.clone().requires_grad_() for z in (z1, z2, extra)]
    est = compopt.InfoNCEEstimator(
        tau=0.2, directions="forward", multiply_tau=False, pairs=PairPolicy(hardness=(0.0, 5.0))
    )
    loss, *found = run(est, z1, z2, torch.arange(5), extra=extra)
    a, b, c = (unit(z) for z in leaves)
    hard = a @ c.T
    logits = torch.cat([a @ b.T / 0.2, hard / 0.2 + 5.0 * hard.detach()], dim=1)
    theirs = torch.nn.functional.cross_entropy(logits, torch.arange(5))
    near(loss + math.log(4 + 3), theirs)  # the estimator averages over the negatives
    for got, want in zip(found, torch.autograd.grad(theirs, leaves), strict=True):
        near(got, want)


def test_a_bad_guide_shows_in_the_loss():
    guide = [torch.randn(6, 3), torch.randn(6, 3)]
    guide[0][2, 1] = torch.nan
    z1, z2, index = batches(N, 1, repeats=False)[0]
    est = compopt.SogCLREstimator(N, pairs=PairPolicy(false_negatives=0.0, guided=True))
    with pytest.warns(UserWarning, match="1 feature rows"):
        assert not est(z1.requires_grad_(), z2, index, guide=guide).isfinite()
    est.step()
    assert not est.read(index)["count"].any()


def test_the_policy_is_shown_and_stored():
    policy = PairPolicy(false_negatives=("relative", 0.95), hardness=(0.0, 5.0))
    assert repr(policy) == "PairPolicy(false_negatives=('relative', 0.95), hardness=(0.0, 5.0))"
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
    ({"spare_extra": 1, "false_negatives": 0.1}, TypeError, "spare_extra must be True or False"),
    ({"hardness": -1.0}, ValueError, "hardness must be 0 or greater, got -1.0"),
    ({"hardness": (1.0, 2.0, 3.0)}, ValueError, r"hardness must be a number or \(of the batch, of extra\)"),
    ({"within": torch.arange(4)}, TypeError, "within must be True or False"),
    ({"hardness": ("own", 2.0)}, ValueError, r"with whose it is, .* or \(\"others\", number\), got \('own', 2.0\)"),
    ({"hardness": (2.0, "mined")}, ValueError, "a number with whose it is"),
    ({"importance": "plane", "hardness": 1.0}, ValueError, "importance must be one of 'plain', 'normalized'"),
    ({"importance": "normalized"}, ValueError, "give one hardness > 0 for all candidates"),
    ({"importance": "normalized", "hardness": (0.0, 1.0)}, ValueError, "give one hardness > 0 for all candidates"),
    ({"prior": 1.0}, ValueError, r"prior must be in \(0, 1\), got 1.0"),
    ({"also": "query_to_query"}, ValueError, "also must be a tuple of different names"),
    ({"also": ("query_to_doc",)}, ValueError, "also must be one of 'query_to_query'"),
    ({"also": ("document_to_document", "document_to_every_document")}, ValueError, "documents against documents twice"),
    ({"positives": "mine"}, ValueError, "positives must be one of 'own', 'labels'"),
    ({"targets": "soft"}, ValueError, "targets must be one of 'classes'"),
    ({"targets": 0.0}, ValueError, "targets must be greater than 0"),
    ({"targets": 0.1, "positives": "labels"}, ValueError, "both say what is positive"),
    ({"inside": True}, ValueError, 'give positives="labels" too'),
    ({"targets": 0.1, "false_negatives": 0.0}, ValueError, "false_negatives=0.0 is for an anchor's one positive"),
    ({"targets": 0.1, "hardness": 2.0}, ValueError, "hardness=2.0 is for an anchor's one positive"),
]


@pytest.mark.parametrize("options, kind, message", REFUSED)
def test_options_that_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        PairPolicy(**options)


def test_estimators_that_refuse_a_policy():
    policy = PairPolicy(false_negatives=0.0, guided=True)
    with pytest.raises(ValueError, match="no effect on chains"):
        compopt.EMC2Estimator(N, pairs=PairPolicy(hardness=1.0))
    for other in (policy, PairPolicy(prior=0.1), PairPolicy(hardness=1.0, importance="normalized")):
        with pytest.raises(ValueError, match="of the batch's candidates, and the memory has others"):
            compopt.MemoryEstimator(DIM, pairs=other)
    for make_it in (lambda **o: compopt.MemoryEstimator(DIM, **o), lambda **o: compopt.NeuCLIPEstimator(DIM, **o)):
        with pytest.raises(ValueError, match="compares candidates with the one positive"):
            make_it(pairs=PairPolicy(targets=0.1))
    with pytest.raises(ValueError, match="take include_positive=False, as DCLEstimator has it"):
        compopt.InfoNCEEstimator(pairs=PairPolicy(positives="labels"))
    with pytest.raises(ValueError, match='build it with directions="forward"'):
        compopt.DCLEstimator(pairs=PairPolicy(also=("query_to_query",)))
    with pytest.raises(ValueError, match="build it with normalize=True"):
        compopt.DCLEstimator(normalize=False, pairs=PairPolicy(prior=0.1))
    with pytest.raises(TypeError, match="pairs must be a compopt.PairPolicy, got dict"):
        compopt.DCLEstimator(pairs={"hardness": 1.0})
    with pytest.raises(ValueError, match="ask an estimator without"):
        compopt.diagnostics.normalizer_error(compopt.DCLEstimator(pairs=policy), *torch.randn(2, 6, 3), batch_size=3)


Z = torch.randn(2, 4, 3)
GUIDED = {"false_negatives": 0.0, "guided": True}
CALLS = [
    (None, {"guide": list(Z)}, ValueError, r"or this call pairs=PairPolicy\(guided=True, ...\)"),
    (None, {"within": torch.arange(4)}, ValueError, r"or this call pairs=PairPolicy\(within=True, ...\)"),
    (GUIDED, {}, ValueError, "guide is missing"),
    (GUIDED, {"guide": [Z[0]]}, ValueError, "guide must be 2 tensors of features, .* got 1 of them"),
    (GUIDED, {"guide": list(Z), "extra": Z[0]}, ValueError, "guide must be 3 tensors of features"),
    (
        GUIDED,
        {"guide": [Z[0], Z[1, :3]]},
        ValueError,
        r"guide\[1\] must have shape \(4, g\), one g for all, got \(3, 3\)",
    ),
    (GUIDED, {"guide": [Z[0], Z[1].long()]}, TypeError, r"guide\[1\] must be a floating-point tensor, got torch.int64"),
    ({"within": True}, {}, ValueError, "within is missing"),
    ({"within": True}, {"within": torch.arange(3)}, ValueError, "within has 3 entries for 4 of them"),
    ({"within": True}, {"within": torch.arange(4), "extra": Z[0]}, ValueError, "within must be a pair of tensors"),
    ({"within": True}, {"within": torch.rand(4)}, TypeError, "within must hold integers"),
    (None, {"teacher": list(Z)}, ValueError, r"or this call pairs=PairPolicy\(targets=..., ...\)"),
    ({"positives": "labels"}, {}, ValueError, "labels is missing"),
    ({"hardness": ("mined", 2.0)}, {"extra": Z[0, :3]}, ValueError, "the same number of rows for each of 4 anchors"),
    (None, {"prior": torch.rand(4)}, ValueError, r"or this call pairs=PairPolicy\(prior=\"given\", ...\)"),
    ({"prior": "given"}, {}, ValueError, "prior is missing"),
    ({"prior": "given"}, {"prior": torch.ones(4)}, ValueError, r"prior must be in \(0, 1\), got 1"),
    ({"prior": "given"}, {"prior": torch.rand(3)}, ValueError, r"prior must have shape \(4,\)"),
    ({"prior": "given"}, {"prior": torch.arange(4)}, TypeError, "prior must be a floating-point tensor"),
    ({"targets": 0.1}, {}, ValueError, "teacher is missing"),
    ({"targets": 0.1}, {"teacher": Z[0]}, ValueError, "teacher must be 2 tensors of features"),
    (
        {"targets": 0.1},
        {"teacher": [Z[0], Z[1, :3]]},
        ValueError,
        r"teacher\[1\] must have shape \(4, g\), one g for all, got \(3, 3\)",
    ),
    ({"targets": "classes"}, {"teacher": list(Z)}, TypeError, r"teacher must be a floating-point tensor \(B, C\)"),
    ({"targets": "classes"}, {"teacher": -torch.ones(4, 2)}, ValueError, "shares >= 0 of classes, got -1"),
]


@pytest.mark.parametrize("policy, given, kind, message", CALLS)
def test_calls_that_are_refused(policy, given, kind, message):
    est = compopt.DCLEstimator(pairs=None if policy is None else PairPolicy(**policy))
    with pytest.raises(kind, match=message):
        est(*Z, **given)


def test_the_form_inside_the_logarithm_takes_fixed_temperatures():
    est = compopt.DCLEstimator(pairs=PairPolicy(positives="labels", inside=True))
    tau = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(ValueError, match="takes temperatures that do not learn"):
        est(Z[0].clone().requires_grad_(), Z[1], labels=torch.arange(4) // 2, tau=tau)


def test_several_views():
    torch.manual_seed(0)
    views = torch.randn(3, 5, DIM, dtype=torch.float64, requires_grad=True)
    guide = torch.randn(3, 5, 6, dtype=torch.float64)
    est, ref = twins(
        "dcl", "unimodal", {"hardness": 2.0, "within": True, "false_negatives": 0.6, "guided": True}, 2, 0.3
    )
    given = {"within": torch.tensor([0, 0, 0, 1, 1]), "anchors": 2, "guide": [*guide]}
    loss = est(views, index=torch.arange(5), **given)
    loss.backward()
    want, gradient = ref.forward(views, None, torch.arange(5), **given)
    near(loss, want), near(views.grad, gradient)


def test_feature_gradients_take_what_a_call_takes():
    z1, z2, index = batches(N, 1, seed=8, repeats=False)[0]
    given = {"within": index % 2, "guide": features(6, 3, seed=9)}
    est = compopt.DCLEstimator(pairs=PairPolicy(false_negatives=0.1, guided=True, within=True))
    for a, b in zip(est.feature_gradients(z1, z2, index, **given), run(est, z1, z2, index, **given), strict=True):
        near(a, b, 0.0)


# -- losses of papers ------------------------------------------------------------------------------------------


def loss_of(est, z, count, **given):
    """Return loss and gradients; log(``count``) turns the mean over candidates into the sum of a cross-entropy."""
    leaves = [x.detach().requires_grad_() for x in z]
    loss = est(*leaves, **given)
    loss.backward()
    return loss.detach() + math.log(count), *(x.grad for x in leaves)


def same(found, theirs, leaves):
    """Assert equal values and gradients."""
    near(found[0], theirs, what="loss")
    for got, want in zip(found[1:], torch.autograd.grad(theirs, leaves), strict=True):
        near(got, want, what="gradient")


def infonce(tau, **options):
    return compopt.InfoNCEEstimator(tau, directions="forward", multiply_tau=False, pairs=PairPolicy(**options))


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("prior, tau", [(0.01, 0.1), (0.1, 0.5), (0.4, 1.0), (0.4, 0.1)])
def test_debiased_loss(prior, tau, chunk_size):
    """At tau = 0.1 the lower bound is active for some anchors."""
    z = [x.requires_grad_() for x in features(8, DIM, seed=20)]
    est = infonce(tau, prior=prior)
    est.chunk_size = chunk_size
    same(loss_of(est, z, 7), policies.debiased(*policies.split(policies.cosines(*z)), tau, prior), z)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("tau, beta, prior", [(0.5, 1.0, 0.1), (0.2, 0.5, 0.01), (1.0, 2.0, 0.05), (0.1, 1.0, 0.3)])
def test_hard_negative_loss(tau, beta, prior, chunk_size):
    z = [x.requires_grad_() for x in features(8, DIM, seed=21)]
    est = infonce(tau, hardness=beta / tau, importance="differentiated", prior=prior)
    est.chunk_size = chunk_size
    same(loss_of(est, z, 7), policies.hard(*policies.split(policies.cosines(*z)), tau, prior, beta), z)


@pytest.mark.parametrize("importance", ["normalized", "differentiated"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["batch-tensor-tau-no-positive", "batch-tensor-tau-with-positive"])
def test_normalized_importance(name, kind, importance):
    """Compare every kind of anchors, with a learned temperature, with autograd through the whole objective."""
    beta, tau, prior = 2.0, 0.4, 0.02
    policy = {"hardness": beta, "importance": importance, "prior": prior}
    est, _ = make(BY_NAME[name], kind, N, tau=tau, pairs=PairPolicy(**policy))
    z1, z2 = (x.requires_grad_() for x in features(6, DIM, seed=22))
    t = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    terms = []
    for a in anchors([z1, z2], list(range(6)), kind):
        s, own = torch.stack(a.negatives), a.positive
        imp = (beta * s).exp() if importance == "differentiated" else (beta * s).exp().detach()
        ghat = ((s - own) / t).exp().mul(imp / imp.mean()).mean()
        ghat = torch.maximum((ghat - prior) / (1 - prior), ((-1 - own) / t).exp())
        terms.append(t * (ghat + 1 / len(s) if "with" in name else ghat).log())
    theirs = torch.stack(terms).mean()
    loss, *gradients = run(est, z1, z2, torch.arange(6))
    near(loss, theirs)
    wanted = torch.autograd.grad(theirs, (z1, z2, t))
    for got, want in zip((*gradients, est.tau_leaf_for_tests.grad), wanted, strict=True):
        near(got, want, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reference", ["none", "positive"])
def test_debiased_moving_average(kind, reference):
    """With gamma = 1 the average is the batch's own estimate, whose gradient autograd computes."""
    tau, prior = 0.5, 0.1
    mode = {"directions": "forward"} if kind == "forward" else {"mode": kind}
    options = {"reference": reference, "gamma": 1.0, "tau": tau, "dtype": torch.float64}
    est = compopt.SogCLREstimator(N, **options, **mode, pairs=PairPolicy(prior=prior))
    z1, z2 = (x.requires_grad_() for x in features(6, DIM, seed=23, spread=0.3))
    inner = {}
    for a in anchors([z1, z2], list(range(6)), kind):
        s, own = torch.stack(a.negatives), a.positive
        shift = own if reference == "positive" else torch.zeros_like(own)
        g = (((s - shift) / tau).exp().mean() - prior * ((own - shift) / tau).exp()) / (1 - prior)
        inner[(a.direction, a.position)] = torch.maximum(g, ((-1 - shift) / tau).exp()), own - shift
    terms = []
    for (_, position), (g, outer) in inner.items():
        u = g if kind != "unimodal" else (inner[(0, position)][0] + inner[(1, position)][0]) / 2
        terms.append(tau * u.log() - outer)
    theirs = torch.stack(terms).mean()
    loss, *gradients = run(est, z1, z2, torch.arange(6))
    near(loss, theirs)
    for got, want in zip(gradients, torch.autograd.grad(theirs, (z1, z2)), strict=True):
        near(got, want, 1e-9)


def test_hardness_weighted_loss():
    z = [x.requires_grad_() for x in features(8, DIM, seed=24)]
    same(
        loss_of(infonce(0.1, hardness=9.0), z, 7),
        policies.hardness_weighted(*policies.split(policies.cosines(*z)), 0.1, 9.0),
        z,
    )


# -- several positives, soft targets ---------------------------------------------------------------------------

LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])


def dcl(tau, mode="bimodal", **options):
    return compopt.DCLEstimator(tau, mode=mode, multiply_tau=False, pairs=PairPolicy(**options))


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("tau", [0.02, 0.1, 0.7])
def test_supervised_contrastive_loss(tau, chunk_size):
    z = [x.requires_grad_() for x in features(8, DIM, seed=30)]
    for inside, transcribed in ((True, policies.supervised_inside), (False, policies.supervised)):
        est = dcl(tau, "unimodal", positives="labels", inside=inside)
        est.chunk_size = chunk_size
        same(loss_of(est, z, 15, labels=LABELS), transcribed(torch.cat(z), LABELS.repeat(2), tau), z)
    near(est.metrics["info_nce"], loss_of(est, z, 15, labels=LABELS)[0])


def soft_weights(policy, teacher):
    """Return the target weights of both directions."""
    if policy["targets"] == "classes":
        shares = teacher @ teacher.T
        return [shares / shares.sum(1, keepdim=True)] * 2
    s = policies.cosines(*teacher) / policy["targets"]
    return [s.softmax(1), s.T.softmax(1)]


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("targets", [0.05, 1.0, "classes"])
@pytest.mark.parametrize("directions", ["both", "forward"])
def test_soft_targets(directions, targets, chunk_size):
    """CLIP with targets from the similarities of a teacher, or from shared classes."""
    z = [x.requires_grad_() for x in features(8, DIM, seed=31)]
    teacher = features(8, 5, seed=32) if targets != "classes" else torch.rand(8, 3, dtype=torch.float64)
    options = {"directions": directions, "chunk_size": chunk_size, "multiply_tau": False}
    est = compopt.DCLEstimator(0.1, **options, pairs=PairPolicy(targets=targets))
    s, weights = policies.cosines(*z), soft_weights({"targets": targets}, teacher)
    terms = [policies.soft_targets(x, w, 0.1) for x, w in zip((s, s.T), weights, strict=True)]
    theirs = sum(terms) / 2 if directions == "both" else terms[0]
    same(loss_of(est, z, 8, teacher=teacher), theirs, z)


@pytest.mark.parametrize("within", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sogclr", "sogclr-positive", "batch-tensor-tau-no-positive"])
def test_expected_positives_of_every_kind(name, kind, within):
    """Positives are averaged over equal labels, also within data sets; gamma = 1 and a learned temperature."""
    tau, key = 0.4, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    policy = PairPolicy(positives="labels", within=within)
    info = BY_NAME[name]
    est, _ = make(info, kind, N, tau=tau, gamma=1.0, pairs=policy)
    z1, z2 = (x.requires_grad_() for x in features(8, DIM, seed=33))
    t = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    unit = [torch.nn.functional.normalize(z, dim=1) for z in (z1, z2)]
    g = {}
    for direction in range(1 if kind == "forward" else 2):
        views = (0, 1) if kind == "unimodal" else (1 - direction,)
        for i in range(8):
            who = [(v, j) for v in views for j in range(8) if (v, j) != (direction, i)]
            who = [(v, j) for v, j in who if not within or key[j] == key[i]]
            s = torch.stack([unit[direction][i] @ unit[v][j] for v, j in who])
            mean = s[[bool(LABELS[j] == LABELS[i]) for _, j in who]].mean()
            shift = mean if name == "sogclr-positive" else torch.zeros_like(mean)
            g[(direction, i)] = ((s - shift) / t).exp().mean(), mean - shift
    terms = []
    for (_, i), (inner, outer) in g.items():
        if kind == "unimodal" and info.has_rows:
            inner = (g[(0, i)][0] + g[(1, i)][0]) / 2
        terms.append(t * inner.log() - outer)
    theirs = torch.stack(terms).mean()
    given = {"within": key} if within else {}
    loss, *gradients = run(est, z1, z2, torch.arange(8), labels=LABELS, **given)
    near(loss, theirs)
    wanted = torch.autograd.grad(theirs, (z1, z2, t))
    leaves = [info.tau_leaf(est).grad] if info.tau_leaf else []
    for got, want in zip((*gradients, *leaves), wanted, strict=False):
        near(got, want, 1e-9)


def expected_on_ranks(group, kind, policy, given, sizes, z, chunk_size):
    """Return loss and gradients of this rank's part of a batch, and the rows."""
    rank = dist.get_rank(group)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    options = {"process_group": group, "chunk_size": chunk_size, "pairs": PairPolicy(**policy)}
    name = "sogclr" if policy.get("inside") else "isogclr"  # isogclr learns its temperatures
    est, _ = make(BY_NAME[name], kind, N, tau=0.3, gamma=0.6, **options)
    given = {
        name: value[own] if isinstance(value, torch.Tensor) else [x[own] for x in value]
        for name, value in given.items()
    }
    found = run(est, *(x[own] for x in z), torch.arange(8)[own], **given)
    est.step()
    rows = est.read(torch.arange(8))
    return *found, *(rows[column] for column in sorted(rows) if column in ("log_u", "tau"))


EXPECTED = [
    ("unimodal", {"positives": "labels"}, {"labels": LABELS}),
    ("bimodal", {"targets": 0.1, "within": True}, {"teacher": features(8, 5, seed=34), "within": LABELS // 2}),
    ("forward", {"targets": "classes"}, {"teacher": torch.rand(8, 3, generator=generator(35)).double()}),
    pytest.param("unimodal", {"targets": 0.5}, {"teacher": features(8, 5, seed=36)}, marks=pytest.mark.full),
    (
        "bimodal",
        {"positives": "labels", "inside": True, "within": True},
        {"labels": LABELS // 2, "within": LABELS // 3},
    ),
]


@pytest.mark.distributed
@pytest.mark.parametrize("sizes, chunk_size", [([3, 4, 1], 2), pytest.param([0, 8], None, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind, policy, given", EXPECTED, ids=lambda x: str(x) if isinstance(x, str) else None)
def test_expected_positives_on_ranks(kind, policy, given, sizes, chunk_size):
    z = features(8, DIM, seed=37)
    (whole,) = the_pool().run(expected_on_ranks, 1, kind, policy, given, [8], z, None)
    parts = the_pool().run(expected_on_ranks, len(sizes), kind, policy, given, sizes, z, chunk_size)
    for part in parts:
        for at in (0, *range(3, len(whole))):
            near(part[at], whole[at], 1e-10)
    for at in (1, 2):
        near(torch.cat([part[at] for part in parts]) / len(sizes), whole[at], 1e-10)


def test_a_memory_of_several_data_sets_resumes_bit_for_bit():
    """The slots of the memory keep the keys of ``within=``."""
    data = batches(N, 6, BATCH, DIM, seed=40)
    key = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    est, resumed = (compopt.MemoryEstimator(DIM, length=9, pairs=PairPolicy(within=True)) for _ in range(2))
    for z1, z2, index in data[:4]:
        est(z1, z2, index, within=key), est.step()
    resumed.load_state_dict(est.state_dict())
    for z1, z2, index in data[4:]:
        for a, b in zip(*(run(e, z1, z2, index, within=key) for e in (est, resumed)), strict=True):
            assert torch.equal(a, b)
        est.step(), resumed.step()
    assert est.state_dict()["extra"]["normalizer"]["keys"].shape == (4, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Similarities, including those of guide and teacher, are computed in float32 from the same features."""
    z1, z2, guide, teacher = (x.to(dtype) for x in (*features(6, DIM, seed=41), *features(6, DIM, seed=42)))
    for policy, given in (
        ({"false_negatives": 0.0, "guided": True, "hardness": 1.0}, {"guide": [guide, teacher]}),
        ({"targets": 0.5}, {"teacher": [guide, teacher]}),
    ):
        est = compopt.DCLEstimator(pairs=PairPolicy(**policy))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = est(z1, z2, **given)
        full = est(z1.float(), z2.float(), **{name: [x.float() for x in value] for name, value in given.items()})
        assert loss.dtype == torch.float32
        near(loss, full, 1e-6)


# equal policies and their normalized hyper-parameters -----------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"hardness": 5}, {"hardness": np.float64(5.0)}),
        ({"hardness": (5.0, 5.0)}, {"hardness": 5.0}),
        ({"false_negatives": np.float32(0.5)}, {"false_negatives": 0.5}),
        ({"within": False}, {}),
        *(({"hardness": value}, {}) for value in (0, (0.0, 0.0), ("mined", 0.0), ("others", 0))),
        ({"also": ("query_to_query", "document_to_query")}, {"also": ("document_to_query", "query_to_query")}),
    ],
)
def test_equal_policies_have_one_form(one, other):
    one, other = compopt.PairPolicy(**one), compopt.PairPolicy(**other)
    assert one == other and repr(one) == repr(other)


def test_the_positive_is_not_counted_twice_after_an_edit():
    policy = compopt.PairPolicy(positives="labels")
    parts = compopt.BatchNormalizer(), compopt.FixedTemperature(0.1)
    with pytest.raises(ValueError, match="include_positive"):
        compopt.ContrastiveEstimator(*parts, sample_groups=[{"n": 10, "include_positive": True}], pairs=policy)
    est = compopt.DCLEstimator(0.1, pairs=policy)
    est.sample_groups[0]["include_positive"] = True
    with pytest.raises(ValueError, match="include_positive"):
        est(*torch.randn(2, 6, 4), torch.arange(6), labels=torch.arange(6) // 2)


def test_soft_labels_without_a_class_are_refused():
    est = compopt.SogCLREstimator(10, pairs=compopt.PairPolicy(targets="classes"))
    teacher = torch.rand(6, 3)
    teacher[2] = 0
    with pytest.raises(ValueError, match="sample 2"):
        est(*torch.randn(2, 6, 4), torch.arange(6), teacher=teacher)
    with pytest.raises(ValueError, match="at least one column"):
        est(*torch.randn(2, 6, 4), torch.arange(6), teacher=torch.rand(6, 0))


@pytest.mark.parametrize(
    "temperature",
    [
        lambda: compopt.TemperatureDual(10, rho=0.1),
        lambda: compopt.FixedTemperature(0.1, learn=True),
        lambda: compopt.FixedTemperature(torch.tensor(0.1, requires_grad=True)),
    ],
)
def test_the_sum_inside_refuses_a_temperature_that_is_learned(temperature):
    """Raise at construction, or for a policy of a call at the call, before any computation."""
    policy = PairPolicy(positives="labels", inside=True)
    with pytest.raises(ValueError, match="inside=True takes temperatures that do not learn"):
        compopt.ContrastiveEstimator(compopt.MovingAverageEstimator(10), temperature(), pairs=policy)
    est = compopt.ContrastiveEstimator(compopt.MovingAverageEstimator(10), temperature())
    with pytest.raises(ValueError, match="inside=True takes temperatures that do not learn"):
        est(*torch.randn(2, 6, 4), torch.arange(6), labels=torch.arange(6) // 2, pairs=policy)
    compopt.DCLEstimator(torch.tensor(0.1), pairs=policy)  # a constant tensor is not learned
