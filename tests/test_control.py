"""Ranks in different operations raise on every rank and can continue; so do threads that communicate."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt.samplers import OrderedBatchSampler
from tests.helpers import features, generator, rows_of
from tests.pool import the_pool

pytestmark = pytest.mark.distributed
N, OWN = 40, 4


def build(group, **options):
    return compopt.ISogCLREstimator(N, rho=0.1, process_group=group, **options)


def call(est, step=0, own=OWN):
    """Call and commit with this rank's part of a batch."""
    rank, ranks = est._ranks.rank, est._ranks.size
    index = torch.randperm(N, generator=generator(step))[: own * ranks]
    z1, z2 = (z[rank * own : (rank + 1) * own].requires_grad_() for z in features(own * ranks, 3, step))
    est(z1, z2, index[rank * own : (rank + 1) * own]).backward()
    est.step()


def outcome(action):
    """Return type and message of the error that an action raises, or None."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def observe(sampler):
    rank = sampler.rank
    sampler.observe(torch.arange(OWN) + rank * OWN, *(z[:OWN] for z in features(OWN, 3, rank)))


# -- different operations --------------------------------------------------------------------------------------

OPERATIONS = {
    "compopt.save()": lambda est, folder: compopt.save(est, folder / "new"),
    "compopt.load()": lambda est, folder: compopt.load(est, folder),
    "state_dict()": lambda est, folder: est.state_dict(),
    "read()": lambda est, folder: est.read(torch.arange(3)),
    "add_sample_group()": lambda est, folder: est.add_sample_group({"n": 2}),
    "a diagnostic": lambda est, folder: compopt.diagnostics.normalizer_error(est, *features(N, 3, 0)),
}


def one_rank_alone(group, folder, operation):
    """Run an operation on rank 0 and another one on the other ranks; afterwards run the same on all ranks."""
    est = build(group, shard=True)
    sampler = OrderedBatchSampler(N, 8, candidates=6, keep=2, process_group=group)
    call(est)
    compopt.save(est, folder)
    other = (lambda: observe(sampler)) if operation == "observe() of a sampler" else lambda: call(est, 1)
    name = "compopt.save()" if operation == "observe() of a sampler" else operation
    alone = dist.get_rank(group) == 0
    said = outcome(lambda: OPERATIONS[name](est, folder) if alone else other())
    call(est, 2, own=9)  # a larger batch than before
    second = outcome(lambda: OPERATIONS[name](est, folder) if alone else other())
    call(est, 3)
    compopt.save(est, folder)
    return said, second, est.t, {name: value.double().sum() for name, value in rows_of(est.state_dict()).items()}


@pytest.mark.parametrize(
    "operation, ranks", [*((name, 2) for name in OPERATIONS), ("state_dict()", 3), ("observe() of a sampler", 2)]
)
def test_an_operation_on_one_rank_alone(operation, ranks, tmp_path):
    found = the_pool().run(one_rank_alone, ranks, tmp_path / "runs", operation)
    first, others = operation, "the estimator's call"
    if operation == "observe() of a sampler":
        first, others = "compopt.save()", operation
    who = "rank 1 is" if ranks == 2 else "ranks 1, 2 are"
    for said, second, t, rows in found:
        assert said.startswith(f"RuntimeError: rank 0 is in {first} while {who} in {others}; ")
        assert "call them on every rank" in said and second == said
        assert t == 3 and rows == found[0][3]


def keys_on_one_rank(group):
    """Return the error of a call in which rank 0 alone passes labels; the next call has them on both ranks."""
    est, rank = build(group), dist.get_rank(group)
    index = torch.arange(OWN) + rank * OWN
    z = [side[:OWN] for side in features(OWN, 3, rank)]
    said = outcome(lambda: est(*z, index, **({} if rank else {"labels": index})))
    est(*z, index, labels=index)
    return said


def test_keys_that_one_rank_alone_passes_are_named():
    for said in the_pool().run(keys_on_one_rank, 2):
        assert said.startswith("ValueError: all ranks must pass the same arguments")
        assert said.endswith("got by rank [['index', 'labels'], ['index']]")


def a_mistake_beside(group, folder):
    """Return the error of this rank: rank 0 calls with a bad index while the others save."""
    est = build(group)
    call(est)
    if dist.get_rank(group) == 0:
        return outcome(lambda: est(*features(OWN, 3, 0), torch.arange(OWN) + N))
    return outcome(lambda: compopt.save(est, folder))


def test_a_rank_s_own_mistake_comes_first(tmp_path):
    mine, others = the_pool().run(a_mistake_beside, 2, tmp_path)
    assert mine.startswith(f"IndexError: index {N + OWN - 1} is outside")
    assert others.startswith("RuntimeError: rank 0 is in the estimator's call while rank 1 is in compopt.save()")


# -- threads ---------------------------------------------------------------------------------------------------


def in_a_thread(action):
    """Return the error that an action raises in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(outcome(action)), name="beside")
    thread.start()
    thread.join(20)
    return found[0]


def threads(group, folder):
    est, shards = build(group), build(group, shard=True)
    before = in_a_thread(lambda: compopt.save(est, folder))  # no call has been made yet
    call(est)
    call(shards)
    refused = [
        in_a_thread(lambda: compopt.save(est, folder)),
        in_a_thread(shards.state_dict),
        in_a_thread(lambda: shards.read(torch.arange(2))),
    ]
    own = in_a_thread(est.state_dict)  # every rank has all rows: no communication
    call(est, 1)
    elsewhere = in_a_thread(lambda: call(est, 2))  # the whole training moves to another thread
    return before, refused, own, elsewhere, compopt.save(est, folder).name.split("-")[2]


def test_what_communicates_is_refused_beside_the_thread_that_calls(tmp_path):
    for before, refused, own, elsewhere, saved in the_pool().run(threads, 2, tmp_path):
        assert before is own is elsewhere is None and saved == "t3"
        for said, what in zip(refused, ("compopt.save() (commit 1)", "state_dict()", "read()"), strict=True):
            assert said.startswith(f"RuntimeError: {what}") and "'beside'" in said and "'MainThread'" in said
