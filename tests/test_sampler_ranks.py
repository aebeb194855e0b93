"""Batch samplers on several ranks: each gets its part of the batches that one rank would have."""

import pytest
import torch
import torch.distributed as dist

import compopt.samplers.ordered as ordered_module
from tests.pool import the_pool
from tests.samplers import KINDS, N, both, moving, spectral, table, train

pytestmark = pytest.mark.distributed
STEPS = 24


def whole_batches(make, world):
    """Drop the last batch of an epoch if it is too small: its two samples are enough for two ranks only."""
    return {"drop_last": True} if make is spectral and world > 2 else {}


def joined(parts):
    """Return the global batches: the parts of all ranks, joined in the order of the ranks."""
    return [sum(batch, []) for batch in zip(*parts, strict=True)]


def run(group, number, options, stop):
    """Train on this rank's parts of the batches; return the parts, and the state of rank 0 after ``stop`` batches."""
    make = KINDS[number]
    sampler, own, state = make(process_group=group, **options), [], None
    assert sampler.world_size == dist.get_world_size(group)
    while len(own) < STEPS:
        for batch in sampler:
            own.append(batch)
            # features of the global batch, of which this rank computes its own rows
            sizes = [None] * sampler.world_size
            dist.all_gather_object(sizes, batch, group=group)
            everyone = sum(sizes, [])
            start = sum(len(part) for part in sizes[: sampler.rank])
            z1, z2 = (z[start : start + len(batch)] for z in moving(len(own), everyone))
            sampler.observe(torch.tensor(batch, dtype=torch.int64), z1, z2)
            if len(own) == stop and sampler.rank == 0:  # on one rank only
                state = sampler.state_dict()
            if len(own) == STEPS:
                break
    return own, state


@both
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_ranks_of_a_group_have_the_batches_of_one(make, world):
    options = whole_batches(make, world)
    whole = train(make(**options), STEPS)
    results = the_pool().run(run, world, KINDS.index(make), options, 10)
    assert joined([own for own, _ in results]) == whole
    for number in range(STEPS):
        sizes = [len(own[number]) for own, _ in results]
        assert max(sizes) - min(sizes) <= 1
    resumed = make(**options)  # a state of K ranks continues on one
    resumed.load_state_dict(results[0][1])
    assert train(resumed, STEPS - 10, clock=10) == whole[10:]


def refreshed(group, number):
    sampler = KINDS[number](process_group=group)
    asked = []

    def encode(index):
        asked.append(len(index))
        return tuple(z[index] for z in table())

    sampler.refresh(encode, chunk_size=7)  # the last chunk has one sample: less than there are ranks
    return list(sampler), asked


@both
def test_refresh_shares_the_encoding(make):
    one = make()
    one.refresh(lambda index: tuple(z[index] for z in table()))
    results = the_pool().run(refreshed, 2, KINDS.index(make))
    assert joined([own for own, _ in results]) == list(one)
    assert all(len(asked) == 8 and sum(asked) < 0.6 * N for _, asked in results)


def broken(group, number):
    """Fail in the pieces of one rank; return the error of this rank."""
    ordered_module.PIECE, piece = 1, ordered_module.PIECE  # a piece per candidate: work for every rank
    try:
        return _broken(KINDS[number](process_group=group, **whole_batches(KINDS[number], 4)))
    finally:
        ordered_module.PIECE = piece


def _broken(sampler):
    sampler.refresh(lambda index: tuple(z[index] for z in table()))

    def do(piece):
        raise ZeroDivisionError("in a piece")

    if sampler.rank == 1:
        good, sampler.do = sampler.do, do
    try:
        next(iter(sampler))
    except (RuntimeError, ZeroDivisionError) as error:
        message = f"{type(error).__name__}: {error}"
    if sampler.rank == 1:
        sampler.do = good
    assert len(list(sampler)) == len(sampler) and sampler.epoch == 0, "the run may go on, with this epoch"
    return message


@both
def test_an_error_on_one_rank_is_raised_on_all(make):
    found = the_pool().run(broken, 4, KINDS.index(make))
    assert all("rank 1 failed: ZeroDivisionError: in a piece" in found[rank] for rank in (0, 2, 3)), found
    assert found[1] == "ZeroDivisionError: in a piece"


def refused(group, number, where):
    """Pass bad arguments on one rank; return the error of this rank."""
    sampler = KINDS[number](process_group=group)
    batch = torch.tensor(next(iter(sampler)))
    bad = sampler.rank == 1

    def encode(index):
        return tuple(z[: N if bad else len(index)] for z in table())

    try:
        if where == "observe":
            sampler.observe(batch + N * bad, *moving(0, batch))
        else:
            sampler.refresh(encode)
    except (IndexError, RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    sampler.observe(batch, *moving(0, batch))  # the ranks are synchronized again
    return message


@both
@pytest.mark.parametrize("where", ["observe", "refresh"])
def test_what_one_rank_refuses_stops_all(make, where):
    found = the_pool().run(refused, 2, KINDS.index(make), where)
    assert "RuntimeError: rank 1 refused its arguments" in found[0]
    assert found[1].startswith("IndexError: index" if where == "observe" else "ValueError: index has")


def seeded_by_rank(group):
    sampler = spectral(process_group=group, seed=dist.get_rank(group))
    batch = next(iter(sampler))
    with pytest.raises(ValueError, match="the ranks differ in the options of the sampler, seed= for example"):
        sampler.observe(torch.tensor(batch), *moving(0, batch))


def test_ranks_with_other_options_are_refused():
    the_pool().run(seeded_by_rank, 2)
