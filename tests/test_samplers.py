"""Batch samplers: what an epoch is, the bank, plans made ahead, states in the middle of an epoch, bad input."""

import copy
import io
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

import compopt
from compopt.samplers import FeatureBank, OrderedBatchSampler, SpectralBatchSampler
from compopt.samplers.pairs import batch_losses
from tests.helpers import features, generator

N, B = 50, 8
DIM = 5


def spectral(n=N, batch_size=B, **options):
    return SpectralBatchSampler(n, batch_size, **{"group": 3, **options})


def ordered(n=N, batch_size=B, **options):
    return OrderedBatchSampler(n, batch_size, **{"candidates": 30, "keep": 5, **options})


KINDS = [spectral, ordered]
both = pytest.mark.parametrize("make", KINDS, ids=["spectral", "ordered"])


def table(n=N, seed=0, dtype=torch.float32):
    return features(n, DIM, seed, dtype=dtype)


def filled(make, n=N, **options):
    sampler = make(n, **options)
    sampler.observe(torch.arange(n), *table(n))
    return sampler


def moving(step, index):
    """Features that training has changed a little by this step."""
    z1, z2 = table()
    g = generator(10_000 + step)
    return tuple(z[index] + 0.1 * torch.randn(len(index), DIM, generator=g) for z in (z1, z2))


def train(sampler, steps, trace=None, clock=0):
    """A loop that goes through epochs; every batch is observed."""
    trace = [] if trace is None else trace
    while steps:
        for batch in sampler:
            trace.append(batch)
            sampler.observe(torch.tensor(batch), *moving(len(trace) + clock, batch))
            steps -= 1
            if not steps:
                return trace
    return trace


# epochs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 9, 16, 47, 48, 50, 73])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_spectral_epochs_have_every_sample_once(n, drop_last, known):
    sampler = spectral(n, drop_last=drop_last, background=False)
    if known:
        sampler.observe(torch.arange(n), *table(n))
    epochs = []
    for _ in range(3):
        epoch = list(sampler)
        reference = [len(b) for b in torch.utils.data.BatchSampler(range(n), B, drop_last)]
        assert [len(batch) for batch in epoch] == reference and len(epoch) == len(sampler)
        assert all(type(i) is int for batch in epoch for i in batch)
        samples = sorted(sum(epoch, []))
        assert len(samples) == len(set(samples)) == sum(reference)
        epochs.append(epoch)
    assert epochs[0] != epochs[1] != epochs[2], "every epoch draws anew"


def test_spectral_batches_are_harder_than_random_ones():
    n = 480
    z1, z2 = (normalize(z, dim=1) for z in table(n))
    sampler = spectral(n, group=10, tau=0.1)
    losses = []
    for _ in range(2):  # random, then clustered
        batches = torch.tensor(list(sampler))
        losses.append(batch_losses(z1[batches], z2[batches], 0.1).mean())
        sampler.observe(torch.arange(n), z1, z2)
    assert losses[1] > 1.2 * losses[0]


def test_samples_with_one_label_are_not_gathered():
    """Four copies of each of sixteen samples are hardest of all, and wrong."""
    z1, z2 = (z.repeat(4, 1) for z in table(16))
    label = torch.arange(64) % 16

    def twins(**options):
        sampler = spectral(64, group=2, **options)  # four groups
        sampler.observe(torch.arange(64), z1, z2)
        return sum(len(batch) - len({i % 16 for i in batch}) for batch in sampler)

    assert twins() > 10
    assert twins(labels=label) == 0


def test_labels_are_dealt_anew_every_epoch_and_fill_every_group():
    labels = torch.arange(73) // 3
    sampler = spectral(73, group=2, labels=labels)
    partners = set()
    for epoch in range(60):
        groups = [piece.samples for piece in sampler.work(epoch)]
        assert sorted(torch.cat(groups).tolist()) == list(range(73))
        assert all(len(labels[group].unique()) == len(group) for group in groups)
        (mine,) = (group for group in groups if 0 in group)
        partners |= set(mine.tolist())
    assert partners == set(range(73)) - {1, 2}


def test_ordered_keeps_the_hardest_of_its_candidates():
    sampler = filled(ordered, dtype=torch.float32)
    z1, z2 = (normalize(z, dim=1).numpy().astype(np.float64) for z in table())

    def loss(batch):
        total = 0.0
        for x, y in ((z1, z2), (z2, z1)):
            s = x[batch] @ y[batch].T / 0.1
            total += np.mean(np.log(np.exp(s).sum(1)) - np.diag(s)) / 2
        return total

    for epoch in range(3):
        candidates = sampler.orders.batches(30, epoch).tolist()
        best = sorted(candidates, key=loss, reverse=True)[:5]
        got = list(sampler)
        assert {frozenset(batch) for batch in got} == {frozenset(batch) for batch in best}
        assert sampler.metrics["kept_loss"] == pytest.approx(np.mean([loss(b) for b in got]), rel=1e-5)
        assert sampler.metrics["candidate_loss"] == pytest.approx(np.mean([loss(b) for b in candidates]), rel=1e-5)


def test_candidates_use_all_samples_alike():
    counts = torch.bincount(ordered().orders.batches(60, 0).flatten(), minlength=N)
    assert counts.max() <= 10 and counts.min() >= 10 - 6  # ten permutations, two samples left out of each
    assert len({tuple(b) for b in ordered().orders.batches(60, 0).tolist()}) == 60


def test_coverage_is_reported():
    sampler = filled(ordered)
    assert (sampler.coverage, sampler.total_coverage) == (0.0, 0.0)
    seen = set()
    for _ in range(3):
        epoch = set(sum(sampler, []))
        seen |= epoch
        assert sampler.coverage == sampler.metrics["coverage"] == len(epoch) / N <= 5 * B / N
        assert sampler.total_coverage == len(seen) / N


# before the bank is filled ------------------------------------------------------------------------


@both
def test_epochs_are_random_until_every_sample_was_observed(make):
    """The last sample decides; what was observed before changes no batch."""
    plain, partly = make(), make()
    partly.observe(torch.arange(N - 1), *(z[:-1] for z in table()))
    assert not partly.bank.filled
    if make is spectral:
        assert list(plain) == list(partly)
    else:  # the missing sample comes first
        assert N - 1 in next(iter(partly))
    partly.observe(torch.tensor([N - 1]), *(z[-1:] for z in table()))
    assert partly.bank.filled
    next(iter(partly))
    assert "plan_seconds" in partly.metrics and "plan_seconds" not in plain.metrics


def test_random_batches_are_uniform():
    """Pairs share a batch equally often, over seeds."""
    together = torch.zeros(8, 8)
    for seed in range(600):
        for batch in SpectralBatchSampler(8, 4, seed=seed):
            together[torch.tensor(batch)[:, None], torch.tensor(batch)] += 1
    pairs = together[~torch.eye(8, dtype=torch.bool)] / 600
    assert (pairs - 3 / 7).abs().max() < 5 * (3 / 7 * 4 / 7 / 600) ** 0.5


@both
def test_the_loop_fills_the_bank(make):
    """Also where an epoch leaves samples out: those without features come first."""
    sampler = make(drop_last=True) if make is spectral else make()
    least = -(-N // (len(sampler) * B))
    train(sampler, least * len(sampler))
    assert sampler.bank.filled


# seeds and states ---------------------------------------------------------------------------------


@both
def test_the_seed_decides(make):
    a, b, c = (train(make(seed=seed), 40) for seed in (1, 1, 2))
    assert a == b != c


@both
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("stop", [0, 1, 3, 5, 6, 7, 9, 12, 14, 17, 20, 21])
def test_resume_continues_bit_for_bit(make, background, stop):
    whole = train(make(background=background), 40)
    first = make(background=background)
    trace = train(first, stop)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(background=background)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert train(second, 40 - stop, clock=stop) == whole[stop:]
    assert trace == whole[:stop]


@both
def test_a_state_does_not_disturb_the_run(make):
    whole, sampler, trace = train(make(), 30), make(), []
    for batch in (batch for _ in range(6) for batch in sampler):
        trace.append(batch)
        sampler.observe(torch.tensor(batch), *moving(len(trace), batch))
        sampler.state_dict()
    assert trace[:30] == whole


@both
def test_a_state_without_observations_counts_batches_handed_out(make):
    """A loop that refreshes the bank instead."""
    sampler, twin = make(), make()
    for each in (sampler, twin):
        each.refresh(lambda index: tuple(z[index] for z in table()), chunk_size=16)
    batches = iter(sampler)
    first = [next(batches) for _ in range(3)]
    twin.load_state_dict(sampler.state_dict())
    assert first + list(twin) == first + list(batches)
    assert list(twin) == list(sampler)


@both
def test_an_abandoned_epoch_is_over(make):
    sampler, twin = make(), make()
    next(iter(sampler))
    assert sampler.epoch == 0
    second = list(sampler)
    assert sampler.epoch == 1
    list(twin)
    assert second == list(twin)


@both
def test_a_state_of_another_sampler_is_refused(make):
    state = make().state_dict()
    for options in ({"n": 51}, {"batch_size": 7}, {"seed": 1}, {"tau": 0.2}, {"dtype": torch.float32}):
        (name, value), *_ = options.items()
        with pytest.raises(ValueError, match=f"{name}=.*not .*{value}"):
            make(**options).load_state_dict(state)
    with pytest.raises(ValueError, match="labels=None"):
        make(labels=torch.arange(N)).load_state_dict(state)
    make(labels=torch.arange(N)).load_state_dict(make(labels=torch.arange(N, dtype=torch.int32)).state_dict())
    other = ordered if make is spectral else spectral
    with pytest.raises(ValueError, match="kind="):
        other().load_state_dict(state)


# workers ------------------------------------------------------------------------------------------


def loader(sampler, workers):
    data = TensorDataset(torch.arange(N))
    return DataLoader(
        data, batch_sampler=sampler, num_workers=workers, multiprocessing_context="fork" if workers else None
    )


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_workers_train_on_the_same_batches(make, workers):
    """Workers ask for batches ahead of the loop: neither the batches nor a state depend on it."""
    whole = train(make(), 20)
    sampler, trace = make(), []
    while len(trace) < 9:  # leaves in the middle of an epoch
        for (index,) in loader(sampler, workers):
            trace.append(index.tolist())
            sampler.observe(index, *moving(len(trace), index))
            if len(trace) == 9:
                break
    state = sampler.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    while len(trace) < 20:
        for (index,) in loader(resumed, workers):
            trace.append(index.tolist())
            resumed.observe(index, *moving(len(trace), index))
            if len(trace) == 20:
                break
    assert trace == whole


# the thread ---------------------------------------------------------------------------------------


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
    assert len(list(sampler)) == len(sampler), "the run may go on"


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


def test_a_program_that_ends_in_the_middle_of_a_plan_ends_well():
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "busy\n")
    assert time.perf_counter() - started < 60


# the bank -----------------------------------------------------------------------------------------


def put(bank, index, z1, z2):
    bank.write(torch.as_tensor(index), bank.rounded(z1, z2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_bank_keeps_normalised_features(dtype):
    bank = FeatureBank(N, dtype)
    z1, z2 = table()
    put(bank, torch.arange(N).flip(0), z1.flip(0), z2.flip(0))
    assert bank.rows.dtype == dtype and bank.rows.shape == (N, 2, DIM)
    index = torch.tensor([[3, 1], [4, 1]])
    for got, z in zip(bank.read(index), (z1, z2), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, normalize(z, dim=1).to(dtype).float()[index])


def test_rows_that_are_not_finite_are_skipped():
    bank = FeatureBank(3)
    z1, z2 = table(3)
    z2[1, 2] = float("nan")
    put(bank, [0, 1, 2], z1, z2)
    assert bank.seen.tolist() == [True, False, True] and not bank.filled
    put(bank, [1], *(z[:1] for z in table(3)))
    before = bank.rows.clone()
    z1[0, 0] = float("inf")
    put(bank, [0], z1[:1], z1[:1])
    assert bank.filled and torch.equal(bank.rows, before)


def test_a_held_bank_takes_writes_later_and_in_order():
    bank = FeatureBank(3, torch.float32)
    put(bank, [0, 1, 2], *table(3))
    bank.hold()
    before = bank.rows.clone()
    for seed in (1, 2):
        put(bank, [0, 1, 2], *table(3, seed=seed))
    assert torch.equal(bank.rows, before)
    bank.release()
    assert torch.equal(bank.read(torch.arange(3))[0], normalize(table(3, seed=2)[0], dim=1))


def test_observing_keeps_no_graph_and_reads_any_integer_index():
    sampler = spectral()
    z1, z2 = (z.requires_grad_() for z in table())
    sampler.observe(torch.arange(N, dtype=torch.int32), z1, z2)
    assert not sampler.bank.rows.requires_grad and sampler.bank.filled


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@both
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_features_on_a_device(make, offload):
    sampler = make(offload=offload)
    for step in range(3 * len(sampler)):
        for batch in sampler:
            sampler.observe(torch.tensor(batch), *(z.cuda() for z in moving(step, batch)))
    assert sampler.bank.rows.device.type == ("cpu" if offload else "cuda")
    twin = make(offload=offload)
    twin.load_state_dict(sampler.state_dict())
    assert list(twin) == list(sampler)


# bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n": 0}, ValueError, "n must be a positive integer, got 0"),
        ({"n": 5.0}, TypeError, "n must be a positive integer, got 5.0"),
        ({"batch_size": 1}, ValueError, "batch_size must be between 2 and n=50, got 1"),
        ({"batch_size": 51}, ValueError, "batch_size must be between 2 and n=50, got 51"),
        ({"tau": 0.0}, ValueError, "tau must be greater than 0"),
        ({"seed": -1}, ValueError, "seed must be a non-negative integer, got -1"),
        ({"seed": 1 << 63}, ValueError, "seed must be below"),
        ({"lead": 0.0}, ValueError, "lead must be in"),
        ({"background": 1}, TypeError, "background must be True or False"),
        ({"dtype": torch.int8}, ValueError, "dtype must be one of .*float16.*int8"),
        ({"offload": "disk"}, ValueError, "offload must be None or 'cpu', got 'disk'"),
        ({"labels": torch.zeros(49, dtype=torch.int64)}, ValueError, "labels has 49 entries"),
        ({"labels": torch.zeros(50)}, TypeError, "labels must hold integers"),
        ({"rank": 0}, ValueError, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size=2, got 2"),
        ({"rank": 0, "world_size": 9}, ValueError, "batch_size=8 counts over all ranks and must be at least"),
    ],
    ids=str,
)
@both
def test_bad_arguments(make, options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": 31}, ValueError, "keep must be at most candidates=30, got 31"),
        ({"keep": 0}, ValueError, "keep must be a positive integer"),
        ({"candidates": 2.5}, TypeError, "candidates must be a positive integer"),
        ({"n": 4, "batch_size": 2, "keep": 7}, ValueError, "keep must be at most the 6 batches of 2"),
    ],
)
def test_bad_arguments_of_ordered(options, error, message):
    with pytest.raises(error, match=message):
        ordered(**options)


def test_bad_arguments_of_spectral():
    with pytest.raises(ValueError, match="group must be a positive integer, got 0"):
        spectral(group=0)
    with pytest.raises(TypeError, match="drop_last must be True or False, got 1"):
        spectral(drop_last=1)
    with pytest.raises(ValueError, match="the last batch has 2 of n=50 samples for world_size=4 ranks"):
        spectral(rank=0, world_size=4)
    with pytest.raises(ValueError, match="sharpness must be greater than 0"):
        spectral(sharpness=0.0)


@pytest.mark.parametrize(
    ("index", "z1", "z2", "error", "message"),
    [
        ([0, 1], torch.ones(2, 3), torch.ones(2, 3), TypeError, "index must be a tensor"),
        (torch.tensor([0, 50]), torch.ones(2, 3), torch.ones(2, 3), IndexError, "index 50 is outside n=50"),
        (torch.tensor([-1, 0]), torch.ones(2, 3), torch.ones(2, 3), IndexError, "index -1 is outside"),
        (torch.tensor([0.0, 1.0]), torch.ones(2, 3), torch.ones(2, 3), TypeError, "index must hold integers"),
        (torch.tensor([0]), torch.ones(2, 3), torch.ones(2, 3), ValueError, "index has 1 entries for a batch of 2"),
        (torch.tensor([0, 1]), torch.ones(2, 3), torch.ones(2, 4), ValueError, "same shape"),
        (torch.tensor([0, 1]), torch.ones(2, 5), torch.ones(2, 5), ValueError, "d=5, but the features so far had d=3"),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor | type) else str(value)[:30],
)
def test_bad_features(index, z1, z2, error, message):
    sampler = spectral()
    sampler.observe(torch.arange(2), torch.ones(2, 3), torch.ones(2, 3))
    before = sampler.bank.rows.clone(), sampler.bank.seen.clone()
    with pytest.raises(error, match=message):
        sampler.observe(index, z1, z2)
    assert torch.equal(sampler.bank.rows, before[0]) and torch.equal(sampler.bank.seen, before[1])


def test_repr_names_the_arguments():
    text = repr(ordered())
    assert (
        text.startswith("OrderedBatchSampler(n=50, batch_size=8, tau=0.1, seed=0") and "candidates=30, keep=5" in text
    )


def test_they_compose_with_an_estimator():
    """The loop of the README, with a sampler: the loss is finite and rows are committed."""
    sampler, est = spectral(), compopt.SogCLREstimator(N, tau=0.1)
    for _ in range(2):
        for (index,) in loader(sampler, 0):
            z1, z2 = (z.requires_grad_() for z in moving(0, index))
            loss = est(z1, z2, index)
            loss.backward()
            est.step()
            sampler.observe(index, z1, z2)
            assert loss.isfinite()
    assert est.read(torch.arange(N))["count"].tolist() == [2] * N
