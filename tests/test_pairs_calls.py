"""Pair policies of single calls, priors of samples, an anchor's own mined negatives, expected positives."""

import math

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import PairPolicy
from tests.database import BY_NAME
from tests.helpers import batches, compare_state, features, generator, make, near, run
from tests.pool import the_pool
from tests.reference import PolicyReference, policies
from tests.reference.pairs import anchors
from tests.test_agreement import compare_forward

N, BATCH, DIM = 17, 6, 4
FULL = pytest.mark.full
unit = torch.nn.functional.normalize


def few(first, *others):
    """Return the values of a parameter, of which the daily suite runs only the first."""
    return [first, *(pytest.param(value, marks=FULL) for value in others)]


# a policy for one call ----------------------------------------------------------------------------------------

SCHEDULE = [{"false_negatives": 0.8}, {"hardness": 2.0}, {}, {"false_negatives": ("relative", 0.95), "hardness": 0.5}]
KEPT = {"false_negatives": 0.9, "hardness": 1.0}  # given at construction


def follow(est, ref, info):
    """Compare with the reference: a policy per step, and then the policy of the construction again."""
    for policy, batch in zip([*SCHEDULE, None], batches(N, 5, BATCH, DIM, seed=60, repeats=False), strict=True):
        ref.policy = PolicyReference(**(KEPT if policy is None else policy))
        given = {} if policy is None else {"pairs": PairPolicy(**policy)}
        z1, z2, index = batch
        loss, g1, g2 = run(est, *batch, **given)
        want, w1, w2 = ref.forward(z1, z2, index)
        near(loss, want, 1e-9), near(g1, w1, 1e-9), near(g2, w2, 1e-9)
        est.step(), ref.step()
        compare_state(est, ref, N, info, rtol=1e-9)


@pytest.mark.parametrize("chunk_size", few(2, None))
@pytest.mark.parametrize("kind", few("unimodal", "bimodal", "forward"))
@pytest.mark.parametrize("name", ["infonce", "sogclr", "isogclr", "memory-dual"])
def test_each_call_has_its_policy(name, kind, chunk_size):
    est, ref = make(BY_NAME[name], kind, N, tau=0.3, chunk_size=chunk_size, pairs=PairPolicy(**KEPT))
    follow(est, ref, BY_NAME[name])


def test_a_policy_of_a_call_is_that_of_a_construction():
    """Results are bit-identical for a stateless estimator; a policy without options equals none."""
    z1, z2, index = batches(N, 1, BATCH, DIM, seed=61, repeats=False)[0]
    for policy in (*SCHEDULE, {"prior": 0.1}, {"mises_fisher": 0.5}):
        built, called = compopt.DCLEstimator(pairs=PairPolicy(**policy)), compopt.DCLEstimator()
        for a, b in zip(run(built, z1, z2, index), run(called, z1, z2, index, pairs=PairPolicy(**policy)), strict=True):
            assert torch.equal(a, b)
    assert called.pairs is None
    found = called.feature_gradients(z1, z2, index, pairs=PairPolicy(hardness=2.0))
    wanted = run(compopt.DCLEstimator(pairs=PairPolicy(hardness=2.0)), z1, z2, index)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


WITHIN = PairPolicy(within=True)
REFUSED = [
    (compopt.DCLEstimator, {"hardness": 1.0}, TypeError, "pairs must be a compopt.PairPolicy, got dict"),
    (lambda: compopt.EMC2Estimator(N), PairPolicy(hardness=1.0), ValueError, "no effect on chains"),
    (lambda: compopt.NeuCLIPEstimator(DIM), PairPolicy(positives="labels"), ValueError, "with the one positive"),
    (lambda: compopt.NeuCLIPEstimator(DIM), PairPolicy(hardness=1.0), ValueError, "hardness=1.0 changes the terms"),
    (lambda: compopt.MemoryEstimator(DIM), WITHIN, ValueError, "within=True differs from within=None at construction"),
    (lambda: compopt.MemoryEstimator(DIM, pairs=WITHIN), PairPolicy(), ValueError, "within=None differs from within"),
    (lambda: compopt.MemoryEstimator(DIM), PairPolicy(mises_fisher=0.5), ValueError, "of the batch's candidates"),
    (compopt.DCLEstimator, PairPolicy(also=("query_to_query",)), ValueError, 'build it with directions="forward"'),
    (compopt.DCLEstimator, PairPolicy(prior="given"), ValueError, "prior is missing"),
    (compopt.InfoNCEEstimator, PairPolicy(targets=0.1), ValueError, "take include_positive=False"),
]


@pytest.mark.parametrize("build, policy, kind, message", REFUSED)
def test_policies_that_a_call_refuses(build, policy, kind, message):
    with pytest.raises(kind, match=message):
        build()(*torch.randn(2, 4, DIM), torch.arange(4), pairs=policy)


def on_ranks(group, name, sizes, data, calls):
    """Run this rank's part of some calls; return losses, gradients and rows."""
    rank = dist.get_rank(group)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    est, _ = make(BY_NAME[name], "bimodal", N, tau=0.3, process_group=group)
    found = []
    for batch, given in zip(data, calls, strict=True):
        given = {key: value[own] if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        found.append(run(est, *(x[own] for x in batch), **given))
        est.step()
    return found, est.read(torch.arange(N))["log_u"]


@pytest.mark.distributed
def test_policies_and_priors_of_calls_on_ranks():
    data = batches(N, 4, BATCH, DIM, seed=62, repeats=False)
    prior = 0.02 + 0.2 * torch.rand(BATCH, generator=generator(62), dtype=torch.float64)
    calls = [{"pairs": PairPolicy(**SCHEDULE[0])}, {}, {"pairs": PairPolicy(prior="given"), "prior": prior}]
    calls += [{"pairs": PairPolicy(mises_fisher=0.5)}]
    ((whole, rows),) = the_pool().run(on_ranks, 1, "sogclr", [BATCH], data, calls)
    parts = the_pool().run(on_ranks, 3, "sogclr", [3, 0, 3], data, calls)
    for step, (loss, *gradients) in enumerate(whole):
        for found, _ in parts:
            near(found[step][0], loss, 1e-11)
        for at, want in enumerate(gradients, start=1):
            near(torch.cat([found[step][at] for found, _ in parts]) / 3, want, 1e-10)
    near(parts[2][1], rows, 1e-11)


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


# priors of samples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_a_prior_of_every_sample(tau, chunk_size):
    """At tau = 0.1 the lower bound is active for some anchors."""
    z = [x.requires_grad_() for x in features(8, DIM, seed=63)]
    prior = torch.linspace(0.01, 0.4, 8, dtype=torch.float64)
    options = {"directions": "forward", "multiply_tau": False, "chunk_size": chunk_size}
    est = compopt.InfoNCEEstimator(tau, **options, pairs=PairPolicy(prior="given"))
    loss = est(*z, prior=prior) + math.log(7)
    theirs = policies.debiased(*policies.split(policies.cosines(*z)), tau, prior)
    near(loss, theirs)
    for got, want in zip(torch.autograd.grad(loss, z), torch.autograd.grad(theirs, z), strict=True):
        near(got, want)


@pytest.mark.parametrize("kind", few("unimodal", "bimodal"))
@pytest.mark.parametrize("name", ["sogclr", "isogclr", "infonce"])
def test_equal_priors_are_a_constant(name, kind):
    data = batches(N, 3, BATCH, DIM, seed=64)
    one, _ = make(BY_NAME[name], kind, N, tau=0.5, pairs=PairPolicy(prior=0.1))
    each, _ = make(BY_NAME[name], kind, N, tau=0.5, pairs=PairPolicy(prior="given"))
    for z1, z2, index in data:
        wanted = run(one, z1, z2, index)
        found = run(each, z1, z2, index, prior=torch.full((BATCH,), 0.1, dtype=torch.float64))
        for a, b in zip(found, wanted, strict=True):
            near(a, b, 1e-12)
        one.step(), each.step()


# the weight of positives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", few("unimodal", "bimodal", "forward"))
@pytest.mark.parametrize("name", ["batch-tensor-tau-no-positive", "batch-tensor-tau-with-positive", "sogclr"])
def test_weights_of_positives(name, kind):
    """Test several normalizers and a learned temperature; with gamma = 1 autograd gives the gradient."""
    sigma, tau, info = 0.5, 0.4, BY_NAME[name]
    z1, z2 = (x.requires_grad_() for x in features(BATCH, DIM, seed=65))
    t = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    found = anchors([z1, z2], list(range(BATCH)), kind)
    inner, own = {}, {(a.direction, a.position): a.positive for a in found}
    for a in found:
        others = [s for (direction, _), s in own.items() if direction == a.direction]
        mean = sum(math.exp(s.item() / sigma) for s in others) / BATCH
        less = math.exp(a.positive.item() / sigma) / mean - 1
        shift = a.positive if name != "sogclr" else torch.zeros_like(a.positive)
        inner[(a.direction, a.position)] = ((torch.stack(a.negatives) - shift + less * a.positive) / t).exp().mean()
    terms = []
    for (direction, position), g in inner.items():
        if name == "sogclr":
            g = (inner[(0, position)] + inner[(1, position)]) / 2 if kind == "unimodal" else g
            terms.append(t * g.log() - own[(direction, position)])
        else:
            terms.append(t * (g + 1 / len(found[0].negatives) if "with-" in name else g).log())
    theirs = torch.stack(terms).mean()
    est, _ = make(info, kind, N, tau=tau, gamma=1.0, pairs=PairPolicy(mises_fisher=sigma))
    loss, *gradients = run(est, z1, z2, torch.arange(BATCH))
    near(loss, theirs)
    leaves = [info.tau_leaf(est).grad] if info.tau_leaf else []
    for got, want in zip((*gradients, *leaves), torch.autograd.grad(theirs, (z1, z2, t)), strict=False):
        near(got, want, 1e-9)


# an anchor's own mined negatives ------------------------------------------------------------------------------

MINED, OTHERS = {"hardness": ("mined", 3.0)}, {"hardness": ("others", 2.0)}


def mined(kind, seed):
    """Return kind, a batch of 6, and two further candidates for every anchor."""
    batch = batches(N, 1, BATCH, DIM, seed=seed, repeats=False)[0]
    return kind, batch, torch.randn(2 * BATCH, DIM, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("chunk_size", few(2, None))
@pytest.mark.parametrize("kind", few("unimodal", "bimodal", "forward"))
@pytest.mark.parametrize("name", ["infonce", "sogclr", "memory-dual"])
@pytest.mark.parametrize("hardness", [MINED, OTHERS], ids=str)
def test_hardness_of_own_mined_negatives(hardness, name, kind, chunk_size):
    kind, batch, extra = mined(kind, 66)
    policy = {**hardness, "false_negatives": 0.9}
    est, ref = make(BY_NAME[name], kind, N, tau=0.3, chunk_size=chunk_size, pairs=PairPolicy(**policy))
    ref.policy = PolicyReference(**policy)
    for _ in range(2):
        compare_forward(BY_NAME[name], est, ref, *batch, rtol=1e-9, extra=extra)
        est.step(), ref.step()
        compare_state(est, ref, N, BY_NAME[name], rtol=1e-9)


EVERY = ("query_to_query", "document_to_query", "document_to_every_document")
EVERYTHING = {"hardness": ("others", 3.0), "also": EVERY, "false_negatives": 0.4}


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", ["infonce", "sogclr", pytest.param("isogclr", marks=FULL)])
@pytest.mark.parametrize("options", [{}, {"guided": True}, {"guided": True, "spare_extra": True, "within": True}])
def test_everything_but_an_anchor_s_own_mined_negatives(name, options, chunk_size):
    """The mined negatives are also positives of other anchors."""
    kind, batch, extra = mined("forward", 68)
    policy, g = {**EVERYTHING, **options}, generator(69)
    est, ref = make(BY_NAME[name], kind, N, tau=0.3, chunk_size=chunk_size, pairs=PairPolicy(**policy))
    ref.policy = PolicyReference(**policy)
    given = {"extra": extra, "extra_index": torch.cat([batch[2].roll(2), batch[2].flip(0)])}
    if policy.get("guided"):
        sizes = (BATCH, BATCH) if policy.get("spare_extra") else (BATCH, BATCH, 2 * BATCH)
        given["guide"] = [torch.randn(size, 5, generator=g, dtype=torch.float64) for size in sizes]
    if policy.get("within"):
        given["within"] = torch.arange(BATCH) // 3, torch.arange(2 * BATCH) // 2 % 2
    for _ in range(2):
        compare_forward(BY_NAME[name], est, ref, *batch, rtol=1e-9, **given)
        est.step(), ref.step()
        compare_state(est, ref, N, BY_NAME[name], rtol=1e-9)


def mined_on_ranks(group, kind, sizes, batch, extra, chunk_size, policy=MINED):
    rank = dist.get_rank(group)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    options = {"pairs": PairPolicy(**policy), "process_group": group, "chunk_size": chunk_size}
    est, _ = make(BY_NAME["infonce"], kind, N, tau=0.3, **options)
    extra = torch.cat([column[own] for column in extra.split(BATCH)])
    return run(est, *(x[own] for x in batch), extra=extra)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind, chunk_size, policy",
    [("unimodal", 2, MINED), pytest.param("bimodal", None, MINED, marks=FULL), ("forward", 2, EVERYTHING)],
)
def test_own_mined_negatives_on_ranks(kind, chunk_size, policy):
    kind, batch, extra = mined(kind, 67)
    ((loss, *gradients),) = the_pool().run(mined_on_ranks, 1, kind, [BATCH], batch, extra, None, policy)
    sizes = [2, 0, 4]
    parts = the_pool().run(mined_on_ranks, 3, kind, sizes, batch, extra, chunk_size, policy)
    for found in parts:
        near(found[0], loss, 1e-11)
    for at, want in enumerate(gradients, start=1):
        found = [part[at] for part in parts]
        if at == 3:  # merge the columns of all ranks
            columns = [x.view(2, size, DIM) for x, size in zip(found, sizes, strict=True)]
            found = [torch.cat(columns, dim=1).flatten(0, 1)]
        near(torch.cat(found) / 3, want, 1e-10)


# expected positives: further candidates, more than two views --------------------------------------------------

LABELS = torch.tensor([0, 0, 1, 1, 1, 2])


def twin(views, kind, weights, tau, count, extra=None, barred=None):
    """Return the mean of all anchors' cross-entropies; ``weights(view, other)`` are the target weights, ``(B, B)``."""
    z, terms = [unit(view, dim=1) for view in views], []
    further = None if extra is None else unit(extra, dim=1)
    for view in range(1 if kind == "forward" else count):
        others = range(len(z)) if kind == "unimodal" else (1 - view,)
        t = [weights(view, other) for other in others]
        t = torch.cat(
            [
                x + torch.diag(torch.full((BATCH,), torch.nan)) if o == view else x
                for o, x in zip(others, t, strict=True)
            ],
            1,
        )
        given = (further, barred) if view == 0 else (None, None)
        terms.append(policies.expected(z[view], torch.cat([z[o] for o in others]), t, tau, *given))
    numbers = [(len(z) if kind == "unimodal" else 1) * BATCH - (kind == "unimodal")] * len(terms)
    left = [number - torch.zeros(BATCH, dtype=torch.float64) for number in numbers]
    if extra is not None:
        left[0] = left[0] + (~barred).sum(1)
    return torch.cat([term - number.log() for term, number in zip(terms, left, strict=True)]).mean()


def equal_labels(view, other):
    return (LABELS[:, None] == LABELS).double()


def of_teacher(teacher):
    rows = [unit(t, dim=1) for t in teacher]
    return lambda view, other: (rows[view] @ rows[other].T / 0.5).exp()


def compare(est, views, given, theirs, leaves):
    """Compare value and gradients, for a tensor of views or for two tensors."""
    loss = est(views[0], views[1], **given) if len(views) == 2 else est(torch.stack(views), **given)
    near(loss, theirs, 1e-10)
    for got, want in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        near(got, want, 1e-9)


@pytest.mark.parametrize("chunk_size", few(4, None))
@pytest.mark.parametrize("positions", few(True, False))
@pytest.mark.parametrize("kind", ["bimodal", "unimodal", "forward"])
@pytest.mark.parametrize("policy", [{"positives": "labels"}, {"targets": 0.5}], ids=str)
def test_further_candidates_are_no_positives(policy, kind, positions, chunk_size):
    views, teacher = [x.requires_grad_() for x in features(BATCH, DIM, seed=70)], features(BATCH, 3, seed=71)
    extra = torch.randn(5, DIM, generator=generator(72), dtype=torch.float64).requires_grad_()
    tau, mode = torch.tensor(0.3, dtype=torch.float64), {"directions": kind} if kind == "forward" else {"mode": kind}
    est = compopt.DCLEstimator(
        tau.requires_grad_(), **mode, multiply_tau=False, chunk_size=chunk_size, pairs=PairPolicy(**policy)
    )
    given = {"extra": extra, "index": torch.arange(BATCH)}
    where, barred = torch.tensor([0, 3, 9, 0, 5]), torch.zeros(BATCH, 5, dtype=torch.bool)
    if positions:
        given["extra_index"], barred = where, torch.arange(BATCH)[:, None] == where
    given |= {"labels": LABELS} if "positives" in policy else {"teacher": teacher}
    weights = equal_labels if "positives" in policy else of_teacher(teacher)
    theirs = twin(views, kind, weights, tau, 2, extra, barred)
    compare(est, views, given, theirs, [*views, extra, tau])


@pytest.mark.parametrize("chunk_size", few(4, None))
@pytest.mark.parametrize("count, anchors", [(4, 2), pytest.param(3, None, marks=FULL), pytest.param(3, 1, marks=FULL)])
@pytest.mark.parametrize("policy", [{"positives": "labels"}, {"targets": 0.5}, {"targets": "classes"}], ids=str)
def test_expected_positives_of_several_views(policy, count, anchors, chunk_size):
    g = generator(73)
    views = [torch.randn(BATCH, DIM, generator=g, dtype=torch.float64).requires_grad_() for _ in range(count)]
    teacher = torch.rand(count, BATCH, 3, generator=g, dtype=torch.float64).unbind()
    est = compopt.DCLEstimator(
        0.3, mode="unimodal", multiply_tau=False, chunk_size=chunk_size, pairs=PairPolicy(**policy)
    )
    if "positives" in policy:
        given, weights = {"labels": LABELS}, equal_labels
    elif policy["targets"] == "classes":
        given, weights = {"teacher": teacher[0]}, lambda view, other: teacher[0] @ teacher[0].T
    else:
        given, weights = {"teacher": teacher}, of_teacher(teacher)
    theirs = twin(views, "unimodal", weights, 0.3, anchors or count)
    compare(est, views, {**given, "anchors": anchors}, theirs, views)


@pytest.mark.parametrize("inside", [False, True])
def test_supervised_contrast_of_several_views(inside):
    """SupCon in its original form: a batch of three views with labels."""
    z = torch.randn(3, BATCH, DIM, generator=generator(74), dtype=torch.float64).requires_grad_()
    transcribed = policies.supervised_inside if inside else policies.supervised
    theirs = transcribed(z.flatten(0, 1), LABELS.repeat(3), 0.2)
    policy = PairPolicy(positives="labels", inside=inside)
    loss = compopt.DCLEstimator(0.2, mode="unimodal", multiply_tau=False, pairs=policy)(z, labels=LABELS)
    near(loss + math.log(3 * BATCH - 1), theirs)
    near(torch.autograd.grad(loss, z)[0], torch.autograd.grad(theirs, z)[0])


def test_two_views_of_a_tensor_are_two_tensors():
    z = torch.randn(2, BATCH, DIM, generator=generator(75), dtype=torch.float64)
    est = compopt.SogCLREstimator(N, mode="unimodal", pairs=PairPolicy(positives="labels"))
    one, two = (est.feature_gradients(*each, index=torch.arange(BATCH), labels=LABELS) for each in ((z,), z))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], torch.stack(two[1:]))


def expected_on_ranks(group, views, labels, extra, sizes, more, chunk_size):
    """Return loss and gradients of this rank's views and further candidates, and the rows of all samples."""
    rank = dist.get_rank(group)
    own, further = (slice(sum(x[:rank]), sum(x[: rank + 1])) for x in (sizes, more))
    options = {"process_group": group, "chunk_size": chunk_size, "pairs": PairPolicy(positives="labels")}
    est, _ = make(BY_NAME["isogclr"], "unimodal", N, tau=0.3, gamma=0.6, **options)
    given = {"index": torch.arange(BATCH)[own], "labels": labels[own]}
    if extra is not None:
        given |= {"extra": extra[further], "extra_index": torch.arange(len(extra))[further]}
    z = views[:, own]
    found = est.feature_gradients(*(z if len(z) == 2 else (z,)), **given)
    est.step()
    return found, est.read(torch.arange(BATCH))["log_u"]


@pytest.mark.distributed
@pytest.mark.parametrize("count, chunk_size", [(3, None), (2, 2)])
def test_expected_positives_of_views_and_further_candidates_on_ranks(count, chunk_size):
    """Test three views, and two views with further candidates."""
    g = generator(76)
    views = torch.randn(count, BATCH, DIM, generator=g, dtype=torch.float64)
    extra = torch.randn(5, DIM, generator=g, dtype=torch.float64) if count == 2 else None
    sizes, more = [1, 0, 5], [2, 3, 0]
    ((whole, rows),) = the_pool().run(expected_on_ranks, 1, views, LABELS, extra, [BATCH], [5], None)
    parts = the_pool().run(expected_on_ranks, 3, views, LABELS, extra, sizes, more, chunk_size)
    for found, u in parts:
        near(found[0], whole[0], 1e-11), near(u, rows, 1e-10)
    for at, want in enumerate(whole[1:], start=1):
        axis = 1 if want.dim() == 3 else 0
        near(torch.cat([found[at] for found, _ in parts], axis) / 3, want, 1e-10)
