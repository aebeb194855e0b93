"""Policies of pairs: random combinations against the float64 twin, on one rank and on several; what is refused."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import PairPolicy
from tests.database import BY_NAME
from tests.helpers import batches, compare_state, features, generator, make, near, run
from tests.pool import the_pool
from tests.reference import PolicyReference
from tests.reference.pairs import anchors
from tests.test_agreement import compare_forward

N, BATCH, DIM = 17, 7, 4
KINDS = ("bimodal", "unimodal", "forward")
FAST = ("infonce", "infonce-no-positive", "clip-learned", "sogclr", "sogclr-positive", "isogclr", "isogclr-none-adam")
FAST += ("batch-dual", "global-dual-adam", "memory", "memory-dual", "memory-global-dual-not-multiplied")
SLOW = ("neural", "neural-through-alpha-dual", "residual", "residual-queue-dual")
NAMES = (*FAST, *FAST, *SLOW)
THRESHOLDS = (None, 0.1, 0.3, -0.05, ("relative", 0.95), ("relative", 0.7))


def random_policy(draw, kept):
    """Options of a policy; ``kept``: the normalizer keeps features of past batches, for which there is no guide."""
    threshold = draw.choice(THRESHOLDS)
    options = {"false_negatives": threshold, "hardness": draw.choice((None, 0.7, 3.0, (0.0, 2.0), (1.5, 0.0)))}
    if threshold is not None:
        options |= {"guided": not kept and draw.random() < 0.5, "spare_extra": draw.random() < 0.5}
    return options | {"within": draw.random() < 0.5}


def arguments(policy, seed, step, count):
    """What the call of one step brings beside features and index; ``count`` further candidates."""
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
    """True if every anchor has a negative, which a twin divides by."""
    z1, z2, index = batch
    found = anchors([z1, z2], index.tolist(), kind, extra=given.get("extra"))
    keys = given.get("within")
    PolicyReference(**policy).apply(found, given.get("guide"), keys if isinstance(keys, tuple) or keys is None else (keys,), True)
    return all(a.negatives for a in found)


def case(number):
    """One random combination: database entry, kind, policy, and batches with what their calls bring."""
    draw = random.Random(number)
    name, kind = NAMES[number % len(NAMES)], draw.choice(KINDS)
    policy = random_policy(draw, name.startswith("memory"))
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
    """An estimator with the policy, and its twin."""
    est, ref = make(BY_NAME[name], kind, N, tau=tau, gamma=0.6, chunk_size=chunk_size, pairs=PairPolicy(**policy), **options)
    ref.policy = PolicyReference(**policy)
    return est, ref


def follow_case(number):
    """All steps of a combination against the twin."""
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
@pytest.mark.parametrize("number", range(len(FAST), 200))
def test_more_random_combinations(number):
    follow_case(number)
