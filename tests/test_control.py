"""Ranks in different operations raise on every rank and can continue; waiting ranks report rank and operation."""

from __future__ import annotations

import os
import re
import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import compopt
from compopt.distributed import collectives
from compopt.samplers import OrderedBatchSampler
from tests.helpers import features, generator
from tests.pool import free_port, the_pool

pytestmark = pytest.mark.distributed
N, OWN = 40, 4


def build(group, **options):
    return compopt.ISogCLREstimator(N, rho=0.1, process_group=group, **options)


def call(est, step=0, own=OWN):
    """Call and commit with this rank's part of a batch."""
    rank, ranks = est._engine.ranks.rank, est._engine.ranks.size
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
    return said, second, est.t, {name: value.double().sum() for name, value in est.state_dict()["rows"].items()}


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


def prefetch_on_one_rank(group):
    """Prefetch on rank 1, the only one that offloads its shard, while rank 0 calls; then call on both."""
    alone = dist.get_rank(group) == 1
    est = build(group, shard=True, offload="cpu" if alone else None)
    est.prefetch(torch.arange(OWN)) if not alone else None  # without offloading there is nothing to prefetch
    said = outcome(lambda: est.prefetch(torch.arange(OWN)) if alone else call(est))
    call(est)
    return said, est.t


def test_shards_that_are_offloaded_on_one_rank_alone():
    for said, t in the_pool().run(prefetch_on_one_rank, 2):
        assert "rank 0 is in the estimator's call while rank 1 is in prefetch() of shards" in said
        assert 'offload="cpu" or "disk", which all ranks of shards must have alike' in said and t == 1


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


def openings(group):
    """Return the number of control messages of each call, for batches of different sizes."""
    est, counts = build(group), []
    est._engine.ranks._control.length = 64  # as in a new process; other functions have used this group
    for own in (4, 4, 16, 16, 4):
        with mock.patch.object(collectives, "tell", wraps=collectives.tell) as told:
            call(est, own, own)
        counts.append(told.call_count)
    return counts


def test_a_call_has_one_control_message():
    for counts in the_pool().run(openings, 2):
        assert counts == [1, 1, 2, 1, 1]  # 16 samples do not fit into the first message


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


# -- missing ranks ---------------------------------------------------------------------------------------------

SHORT = 2.0


def _lose(rank, port, folder, pipe):
    """Leave rank 1 alone in several operations, each over its own group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {}

    def attempt(name, action, **options):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT))
        est = build(group, **options)
        call(est)
        dist.barrier()
        if rank == 1:
            try:
                action(est)
            except RuntimeError as error:
                found[name] = str(error), str(error.__cause__)
        dist.barrier()  # rank 0 waits here in the default group

    attempt("call", lambda est: call(est, 1))
    attempt("save", lambda est: compopt.save(est, folder))
    attempt("read", lambda est: est.read(torch.arange(2)), shard=True)
    attempt("features", alone_after_the_opening)
    if rank == 0:
        os._exit(3)
    found["end"] = outcome(lambda: call(build(None)))
    pipe.send(found)


def alone_after_the_opening(est):
    """Gather features without rank 0: collectives on the device fail like the control messages before them."""
    est._engine.ranks.gather([torch.zeros(2, 3)], [2, 2])


@pytest.mark.slow
def test_a_rank_that_waits_says_for_whom_and_in_what(tmp_path):
    here, there = mp.get_context("spawn").Pipe()
    port = free_port()
    processes = [
        mp.get_context("spawn").Process(target=_lose, args=(rank, port, tmp_path, there), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        assert here.poll(120), "the rank that was left alone hangs"
        found = here.recv()
    finally:
        for process in processes:
            process.kill()
    waited = r"rank 1 waited {} s in {} for rank 0, which did not arrive: did it fail, or run out of data\?"
    for name, what in {
        "call": r"the estimator's call \(commit 1\)",
        "save": r"compopt\.save\(\) \(commit 1\)",
        "read": r"read\(\) \(commit 1\)",
        "features": r"the estimator's call \(commit 0\)",
    }.items():
        said, cause = found[name]
        assert re.match(waited.format(r"\d", what), said), said
        assert "imed out" in cause
    assert "RuntimeError: rank 1 lost the connection to rank 0 in the estimator's call (commit 0)" in found["end"]
    assert "did it fail, or end?" in found["end"]
