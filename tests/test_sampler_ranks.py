"""Batch samplers on several ranks: each gets its part of the batches that one rank would have."""

import pytest
import torch
import torch.distributed as dist

from tests.pool import the_pool
from tests.test_samplers import KINDS, B, N, both, moving, spectral, table, train

pytestmark = pytest.mark.distributed
STEPS = 24


def joined(parts):
    """Batches of all ranks: their parts in the order of the ranks."""
    return [sum(batch, []) for batch in zip(*parts, strict=True)]


@both
@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_of_ranks_without_a_group_join_to_the_batches_of_one(make, world):
    """rank= and world_size= alone: every rank observes the whole batch."""
    whole = train(make(), STEPS)
    parts = []
    for rank in range(world):
        sampler, own = make(rank=rank, world_size=world), []
        while len(own) < STEPS:
            for batch in sampler:
                own.append(batch)
                everyone = whole[len(own) - 1]
                sampler.observe(torch.tensor(everyone), *moving(len(own), everyone))
                if len(own) == STEPS:
                    break
        parts.append(own)
    assert joined(parts) == whole
    sizes = {len(batch) for part in parts for batch in part if len(part) == B}
    assert all(abs(size - B / world) < 1 for size in sizes)


def test_a_part_where_the_whole_batch_is_needed_is_refused():
    sampler = spectral(rank=1, world_size=2)
    batch = torch.tensor(next(iter(sampler)))
    with pytest.raises(ValueError, match="whole batch.*process_group="):
        sampler.observe(batch, *moving(0, batch))


def run(group, number, options, stop):
    """A run on this rank's parts: the parts, a state taken on the way, and what the loaded state goes on with."""
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
            if len(own) == stop and sampler.rank == 0:  # one rank alone
                state = sampler.state_dict()
            if len(own) == STEPS:
                break
    return own, state


@both
@pytest.mark.parametrize("world", [2, 4])  # 4: the default group, whose ranks share the work; 2: each does all of it
def test_ranks_of_a_group_have_the_batches_of_one(make, world):
    whole = train(make(), STEPS)
    results = the_pool().run(run, world, KINDS.index(make), {}, 10)
    assert joined([own for own, _ in results]) == whole
    resumed = make()  # a state of K ranks continues on one
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


def broken(group):
    """One rank's pieces fail in the thread."""
    sampler = spectral(process_group=group, lead=1.0)
    sampler.refresh(lambda index: tuple(z[index] for z in table()))
    batches = iter(sampler)

    def do(piece):
        raise ZeroDivisionError("in a piece")

    next(batches)  # its plan is made in the foreground; the next epoch's in the thread, from here on
    sampler.state_dict()  # waits for the thread
    list(batches)
    batches = iter(sampler)
    if sampler.rank == 1:
        sampler.do = do
    try:
        list(batches)
        list(sampler)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_error_on_one_rank_is_raised_on_all():
    found = the_pool().run(broken, 4)
    assert all("rank 1 failed: ZeroDivisionError: in a piece" in found[rank] for rank in (0, 2, 3)), found
    assert "ZeroDivisionError: in a piece" in found[1]
