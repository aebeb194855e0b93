"""Batch samplers: plans made in a thread beside the loop."""

import copy
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.samplers import N, both, filled, loader, moving, table, train


def slow(sampler, gate):
    """Pieces that wait for the gate."""
    do = sampler.do

    def waiting(piece):
        assert gate.wait(10)
        return do(piece)

    sampler.do = waiting


def observed(make, **options):
    """A sampler whose loop has observed one epoch, and another that goes on from there without a thread."""
    sampler, twin = filled(make, **options), make(background=False)
    train(sampler, len(sampler))
    twin.load_state_dict(sampler.state_dict())
    return sampler, twin


@both
def test_the_plan_is_made_while_the_epoch_runs(make):
    """The loop reaches the epoch's end while the thread stands still, and what it observes meanwhile does not count."""
    (sampler, twin), gate = observed(make, lead=1.0), threading.Event()
    batches = iter(sampler)
    first = next(batches)
    slow(sampler, gate)
    for number, batch in enumerate([first, *batches]):
        sampler.observe(torch.tensor(batch), *moving(number, batch))
    assert not sampler._planner._job[1].done
    assert len(sampler.bank._queue) == len(sampler) - 1, "all but the batch that started the thread"
    gate.set()
    twin.observe(torch.tensor(next(iter(twin))), *moving(0, first))
    assert list(sampler) == list(twin)
    assert not sampler.bank._queue
    assert sampler.metrics["wait_seconds"] >= 0 and sampler.metrics["plan_seconds"] > 0


@both
@pytest.mark.parametrize("refreshed", [False, True])
def test_a_loop_that_observes_nothing_has_its_plans_made_too(make, refreshed):
    """Whenever it asks for its batches: the bank is what it was when the epoch began."""
    sampler, twin = filled(make), filled(make, background=False)
    if refreshed:
        for each in (sampler, twin):
            each.refresh(lambda index: tuple(z[index] for z in table(seed=3)))
    assert list(sampler) == list(twin)
    assert sampler._planner._job or 1 in sampler._planner.plans
    assert list(sampler) == list(twin)


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing_after_a_refresh(make, workers):
    sampler, trace = make(), []
    sampler.refresh(lambda index: tuple(z[index] for z in table(seed=3)))
    for _ in range(3):
        for (index,) in loader(sampler, workers):
            trace.append(index.tolist())
            sampler.observe(index, *moving(len(trace), index))
    twin = make()
    twin.refresh(lambda index: tuple(z[index] for z in table(seed=3)))
    assert trace == train(twin, len(trace))


@both
def test_samples_that_are_no_batch_are_reported_once(make):
    sampler = filled(make)
    with pytest.warns(UserWarning, match="no batch of it"):
        for _ in range(2):
            for batch in sampler:
                sampler.observe(torch.tensor(batch[::-1]), *moving(1, batch[::-1]))
    assert sampler.state_dict()["batch"] == 0 and sampler.state_dict()["epoch"] == 2
    list(sampler)


@both
def test_samples_that_are_not_finite_are_reported(make):
    sampler = make()
    z1, z2 = table()
    z1[7, 0] = float("nan")
    sampler.observe(torch.arange(N), z1, z2)
    with pytest.warns(UserWarning, match="1 features that were not finite"):
        list(sampler)
    assert sampler.metrics["unseen"] == 1


@both
def test_autocast_changes_no_plan(make):
    plain, cast = filled(make, background=False), make(background=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.observe(torch.arange(N), *table())
        assert list(cast) == list(plain)


@both
def test_neighbouring_seeds_share_no_epoch(make):
    """Epoch 1 of seed 0 is not epoch 0 of seed 1."""
    epochs = {(seed, epoch): list(sampler) for seed in range(3) for sampler in [make(seed=seed)] for epoch in range(3)}
    assert len({str(epoch) for epoch in epochs.values()}) == 9


@both
def test_copies_have_the_plans_and_no_thread(make):
    (sampler, _), gate = observed(make, lead=1.0), threading.Event()
    batches = iter(sampler)
    batch = next(batches)
    slow(sampler, gate)
    sampler.observe(torch.tensor(batch), *moving(0, batch))
    gate.set()
    del sampler.do
    for copied in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert list(copied) == list(copy.deepcopy(sampler))


@both
def test_a_copy_learns_what_it_is_told(make):
    """Although a plan was being made when it was copied."""
    for duplicate in (copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))):
        sampler, _ = observed(make, lead=1.0)
        batch = next(iter(sampler))
        sampler.observe(torch.tensor(batch), *moving(0, batch))  # begins the plan of the next epoch
        copied = duplicate(sampler)
        everything = torch.arange(len(copied.bank.read(torch.arange(N))[0]))
        copied.observe(everything, *moving(5, everything))
        wanted = make()
        wanted.observe(everything, *moving(5, everything))
        assert torch.equal(copied.bank.read(everything)[0], wanted.bank.read(everything)[0])


@both
def test_ahead_or_not_one_snapshot_gives_one_plan(make):
    """The thread's plan is that of the bank at the moment it started."""
    ahead, later = observed(make, lead=1.0)
    for sampler in (ahead, later):
        batches = iter(sampler)
        batch = next(batches)
        sampler.observe(torch.tensor(batch), *moving(1, batch))
        if sampler is ahead:  # too late for the plan
            for batch in batches:
                sampler.observe(torch.tensor(batch), *moving(2, batch))
    assert list(ahead) == list(later)


@both
def test_errors_of_the_thread_are_raised_when_their_epoch_begins(make):
    sampler, _ = observed(make, lead=1.0)
    batches = iter(sampler)
    batch = torch.tensor(next(batches))

    def broken(piece):
        raise ZeroDivisionError("in a piece")

    sampler.do, good = broken, sampler.do
    sampler.observe(batch, *moving(1, batch))
    sampler._planner._job[1].wait()
    for batch in batches:  # neither here
        sampler.observe(torch.tensor(batch), *moving(2, batch))
    sampler.state_dict()  # nor here
    with pytest.raises(RuntimeError, match="background: ZeroDivisionError: in a piece") as caught:
        list(sampler)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    sampler.do = good
    assert len(list(sampler)) == len(sampler) and sampler.epoch == 2, "the run may go on, with this epoch"


@both
def test_refresh_gives_up_what_was_planned(make):
    asked = []

    def encode(index):
        asked.extend(index.tolist())
        return tuple(z[index] for z in table(seed=5))

    sampler = filled(make, lead=1.0)
    train(sampler, 1)
    sampler.refresh(encode, chunk_size=7)
    assert asked == list(range(N))
    twin = make(lead=1.0)
    list(twin)
    twin.refresh(encode, chunk_size=50)
    assert list(sampler) == list(twin)


PROGRAM = """
import torch
from compopt.samplers import SpectralBatchSampler

sampler = SpectralBatchSampler(4800, 32, lead=1.0)
sampler.observe(torch.arange(4800), *torch.randn(2, 4800, 32))
next(iter(sampler))
print("busy" if not sampler._planner._job[1].done else "done", flush=True)
"""


@pytest.mark.launch
def test_a_program_that_ends_in_the_middle_of_a_plan_ends_well():
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "busy\n")
    assert time.perf_counter() - started < 60
