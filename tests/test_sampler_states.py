"""Batch samplers: seeds, states in the middle of an epoch, loaders with workers."""

import io

import pytest
import torch

from tests.samplers import N, both, filled, loader, moving, ordered, spectral, table, train


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
def test_a_loop_may_observe_several_batches_at_once(make):
    """After each update of an accumulation window, with a loader that is ahead."""
    sampler = filled(make)
    batches, handed = iter(sampler), []
    for _ in range(4):
        handed.append(torch.tensor(next(batches)))
    next(batches)  # the loader's
    for first in (0, 2):
        index = torch.cat(handed[first : first + 2])
        sampler.observe(index, *moving(first, index))
    resumed = filled(make)
    resumed.load_state_dict(sampler.state_dict())
    assert sampler.state_dict()["batch"] == 4


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
    for options in ({"n": 51}, {"batch_size": 6}, {"seed": 1}, {"tau": 0.2}, {"dtype": torch.float32}):
        (name, value), *_ = options.items()
        with pytest.raises(ValueError, match=f"{name}=.*not .*{value}"):
            make(**options).load_state_dict(state)
    with pytest.raises(ValueError, match="labels=None"):
        make(labels=torch.arange(N)).load_state_dict(state)
    make(labels=torch.arange(N)).load_state_dict(make(labels=torch.arange(N, dtype=torch.int32)).state_dict())
    other = ordered if make is spectral else spectral
    with pytest.raises(ValueError, match="kind="):
        other().load_state_dict(state)


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
