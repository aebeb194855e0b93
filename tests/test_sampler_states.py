"""Batch samplers: seeds, states in the middle of an epoch, loaders with workers."""

import copy
import io
import pickle

import pytest
import torch

from compopt import accelerator
from tests.helpers import whole
from tests.samplers import N, both, filled, loader, moving, ordered, spectral, table, train


@both
@pytest.mark.parametrize("stop", [0, 1, 5, 7, 9, 14])
def test_resume_continues_bit_for_bit(make, stop):
    whole = train(make(), 26)
    first = make()
    trace = train(first, stop)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make()
    second.load_state_dict(torch.load(file, weights_only=True))
    assert train(second, 26 - stop, clock=stop) == whole[stop:]
    assert trace == whole[:stop]


@both
def test_a_state_without_observations_counts_batches_handed_out(make):
    """The loop refreshes the bank instead of observing features."""
    sampler, twin = make(), make()
    for each in (sampler, twin):
        each.refresh(lambda index: tuple(z[index] for z in table()), chunk_size=16)
    batches = iter(sampler)
    first = [next(batches) for _ in range(3)]
    twin.load_state_dict(sampler.state_dict())
    assert first + list(twin) == first + list(batches)
    assert list(twin) == list(sampler)


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


def edited(*path, value):
    """Return a function that replaces an entry of a state, or, with a function as ``value``, changes it."""

    def change(state):
        *owners, last = path
        for key in owners:
            state = state[key]
        state[last] = value(state[last]) if callable(value) else value

    return change


def first(value):
    """Return a function that replaces the first element of a tensor."""
    return lambda x: torch.cat([torch.full_like(x[:1], value), x[1:]])


BAD = [
    (edited("epoch", value=-3), ValueError, "epoch of the checkpoint must be from 0 to"),
    (edited("epoch", value=1.5), TypeError, "epoch of the checkpoint must be an integer, got 1.5"),
    (edited("batch", value=99), ValueError, "batch of the checkpoint must be from 0 to .*, got 99"),
    (edited("batch", value=-1), ValueError, "batch of the checkpoint must be from 0"),
    (edited("follows", value=2), TypeError, "follows must be True or False"),
    (edited("plans", value=None), TypeError, "plans of the checkpoint must be a dict"),
    (edited("plans", 2, value=first(N)), ValueError, rf"samples of plans\[2\] must be >= 0 and <= {N - 1}, got {N}"),
    (edited("plans", 2, value=first(-1)), ValueError, r"samples of plans\[2\] must be >= 0"),
    (edited("plans", 2, value=lambda x: x[:-1]), ValueError, r"samples of plans\[2\] differs: .*, expected \("),
    (edited("plans", 2, value=lambda x: x.double()), ValueError, "torch.float64, expected torch.int64"),
    (edited("bank", "rows", value=lambda x: x[1:]), ValueError, "rows of FeatureBank differs"),
    (edited("bank", "rows", value=first(torch.nan)), ValueError, "rows of FeatureBank must be finite"),
    (edited("bank", "rows", value=None), ValueError, "samples with features, but no rows"),
    (edited("bank", "seen", value=lambda x: x[1:]), ValueError, "seen of FeatureBank differs"),
    (edited("bank", "offered", value=lambda x: x.long()), ValueError, "offered of FeatureBank differs"),
    (edited("bank", value=lambda bank: {"rows": bank["rows"]}), ValueError, "bank lacks seen, offered, device"),
    (lambda state: state.pop("follows"), ValueError, "state_dict lacks follows"),
    (lambda state: state.pop("bank"), ValueError, "state_dict lacks bank"),
]
OF_ORDERED = [
    (edited("covered", value=lambda x: x[1:]), ValueError, "covered of OrderedBatchSampler differs"),
    (lambda state: state.pop("covered"), ValueError, "state_dict lacks covered"),
]


@pytest.mark.parametrize(
    "make, change, error, message",
    [(make, *bad) for make in (spectral, ordered) for bad in BAD] + [(ordered, *bad) for bad in OF_ORDERED],
)
def test_a_refused_state_leaves_the_sampler_as_it_was(make, change, error, message):
    run, sampler = filled(make), make()
    train(run, 2 * len(run) + 2)
    train(sampler, 3)
    state, before = run.state_dict(), whole(sampler)
    change(state)
    with pytest.raises(error, match=message):
        sampler.load_state_dict(state)
    assert whole(sampler) == before


def looped(sampler, workers, steps, trace):
    """Continue for some steps in a loader with workers, which stops in the middle of an epoch."""
    while steps:
        for (index,) in loader(sampler, workers):
            trace.append(index.tolist())
            sampler.observe(index, *moving(len(trace), index))
            steps -= 1
            if not steps:
                break


@both
@pytest.mark.covering("make workers")
@pytest.mark.parametrize("refreshed", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_workers_train_on_the_same_batches(make, workers, refreshed):
    """Workers request batches ahead of the loop; neither the batches nor a state depend on this."""
    sampler, resumed, twin, trace = make(), make(), make(), []
    for each in (sampler, twin) if refreshed else ():
        each.refresh(lambda index: tuple(z[index] for z in table(seed=3)))
    looped(sampler, workers, 9, trace)
    resumed.load_state_dict(sampler.state_dict())
    looped(resumed, workers, 11, trace)
    assert trace == train(twin, 20)


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
def test_autocast_changes_no_plan(make):
    plain, cast = filled(make), make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.observe(torch.arange(N), *table())
        assert list(cast) == list(plain)


class Event:
    """Event of a copy that never seems to end, and cannot be pickled."""

    synchronize = staticmethod(lambda: None)

    def query(self):
        return False

    def __reduce__(self):
        raise TypeError("events of a device cannot be pickled")


@both
@pytest.mark.parametrize("copying", [False, True])
def test_copies_go_on_alike(make, copying, monkeypatch):
    if copying:
        monkeypatch.setattr(accelerator, "event", lambda device: Event())
    sampler = filled(make, offload="cpu" if copying else None)
    train(sampler, 3)
    copies = [copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    for each in copies:
        assert train(each, 12, clock=3) == train(copy.deepcopy(sampler), 12, clock=3)
