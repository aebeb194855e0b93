"""Ranks that share a table, with a slow writer; ranks that differ; ranks of which one fails. Nobody waits for ever."""

import copy
import functools
import io
import threading
import time

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt.stores import changes, disk, table
from tests.helpers import assert_same_bits, batches, bits, run, snapshot
from tests.pool import the_pool
from tests.test_placements import own_part

pytestmark = pytest.mark.distributed
N, BATCH = 24, 8


def on_two(function, *args):
    return the_pool().run(function, 2, *args)


def train(est, group, steps, seed=0):
    """Steps on this rank's half of global batches; the losses."""
    g, rank, losses = torch.Generator().manual_seed(seed), dist.get_rank(group), []
    for _ in range(steps):
        z1, z2 = torch.randn(2, BATCH, 4, generator=g)
        own = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        losses.append(est(z1[own], z2[own], torch.randperm(N, generator=g)[:BATCH][own]).item())
        est.step()
    return losses


class SlowWriter:
    """The writer of a file needs 50 ms for every commit and every block."""

    def __init__(self, monkeypatch):
        for name in ("scatter", "write_block", "grow"):
            original = getattr(disk.DiskStore, name)

            def slow(store, *args, original=original):
                if store.writer:
                    time.sleep(0.05)
                return original(store, *args)

            monkeypatch.setattr(disk.DiskStore, name, slow)


def shared(group, folder, shard=False):
    return compopt.SogCLREstimator(N, offload="disk", offload_dir=f"{folder}/table", process_group=group, shard=shard)


def run_all(group, folder):
    """Every method that touches the file past the commits, right after commits that are still being written."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        SlowWriter(monkeypatch)
        monkeypatch.setattr(changes, "CHUNK_ROWS", 8)
        monkeypatch.setattr(table, "BLOCK_ROWS", 8)
        near, far = compopt.SogCLREstimator(N, process_group=group), shared(group, folder)
        train(near, group, 3), train(far, group, 3)
        state = far.state_dict()
        compopt.save(far, f"{folder}/c")
        loaded = compopt.SogCLREstimator(N, process_group=group)
        compopt.load(loaded, f"{folder}/c")
        equal = [
            torch.equal(a, b) for a, b in zip(state["rows"].values(), near.state_dict()["rows"].values(), strict=True)
        ]
        assert_same_bits(snapshot(near, N), snapshot(loaded, N))
        train(far, group, 2, seed=1)  # away from it, and back, by either way
        compopt.load(far, f"{folder}/c")
        losses = [train(far, group, 2, seed=2), train(near, group, 2, seed=2)]
        train(far, group, 2, seed=3)
        far.load_state_dict(near.state_dict())
        losses += [train(far, group, 2, seed=4), train(near, group, 2, seed=4)]
        for est in (near, far):
            est.add_sample_group({"n": 5})
        losses += [train(far, group, 1, seed=5), train(near, group, 1, seed=5)]
        assert_same_bits(snapshot(near, N + 5), snapshot(far, N + 5))
        return equal, losses


def test_a_shared_file_is_at_rest_when_it_is_saved_loaded_and_grown(tmp_path):
    for equal, losses in on_two(run_all, str(tmp_path)):
        assert all(equal)
        assert losses[0::2] == losses[1::2]


def growing_badly(group, folder, offload, shard, done):
    """Rank 1 has no room for more rows; afterwards nobody has them, and the run goes on, saves and loads."""
    kind = {"offload": offload, "shard": shard, "process_group": group}
    est = compopt.SogCLREstimator(N, **kind, **({"offload_dir": f"{folder}/table"} if offload == "disk" else {}))
    twin = compopt.SogCLREstimator(N, process_group=group)
    train(est, group, 2), train(twin, group, 2)
    store = est._engine.table.store
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank(group) == 1:
            grow = store.grow

            def fail(n):
                if done:
                    grow(n)
                raise MemoryError("no room")

            monkeypatch.setattr(store, "grow", fail)
        with pytest.raises((MemoryError, RuntimeError), match="no room"):
            est.add_sample_group({"n": 5})
    assert est.n == N and store.n == est._engine.table._local_count(N)
    losses = train(est, group, 2, seed=1), train(twin, group, 2, seed=1)
    compopt.save(est, f"{folder}/c")
    loaded = compopt.SogCLREstimator(N, process_group=group)
    compopt.load(loaded, f"{folder}/c")
    assert_same_bits(snapshot(loaded, N), snapshot(twin, N))
    for each in (est, twin):
        each.add_sample_group({"n": 5})
    assert_same_bits(snapshot(est, N + 5), snapshot(twin, N + 5))
    return losses


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(("offload", "shard"), [(None, True), ("cpu", True), ("disk", True), ("disk", False)])
def test_rows_that_one_rank_cannot_append_are_appended_by_none(offload, shard, done, tmp_path):
    for one, other in on_two(growing_badly, str(tmp_path), offload, shard, done):
        assert one == other


def failing_writer(group, folder, shard):
    """The disk of rank 0 fails; every rank learns it at its next call."""
    est = shared(group, folder, shard)
    train(est, group, 1)
    if dist.get_rank(group) == 0:
        est._engine.table.rows._journal.fail(OSError("disk full"))
    time.sleep(0.01)
    with pytest.raises(RuntimeError) as caught:
        train(est, group, 1)
    return str(caught.value)


@pytest.mark.parametrize("shard", [False, True])
def test_a_failed_writer_stops_every_rank(shard, tmp_path):
    first, second = on_two(failing_writer, str(tmp_path), shard)
    assert "disk full" in first and "rank 0 refused" in second


def reading_badly(group):
    est = compopt.SogCLREstimator(N, shard=True, process_group=group)
    index = torch.tensor([0, 99] if dist.get_rank(group) == 0 else [1])
    with pytest.raises((IndexError, RuntimeError)) as caught:
        est.read(index)
    bad = [0, 1] if dist.get_rank(group) == 0 else index
    with pytest.raises((TypeError, RuntimeError)):
        est.read(bad)
    return str(caught.value), est.read(torch.arange(3))["count"].tolist()


def test_a_bad_read_of_a_shard_is_refused_everywhere():
    (first, zeros), (second, _) = on_two(reading_badly)
    assert "99" in first and "rank 0 failed: IndexError" in second and zeros == [0, 0, 0]


def failing_hook(group, folder):
    est = compopt.SogCLREstimator(N, process_group=group)

    def hook(est):
        raise KeyError("mine")

    if dist.get_rank(group) == 1:
        est.register_state_dict_pre_hook(hook)
    with pytest.raises((KeyError, RuntimeError)) as caught:
        compopt.save(est, folder)
    return str(caught.value)


def test_a_hook_that_raises_on_one_rank_stops_save_everywhere(tmp_path):
    first, second = on_two(failing_hook, str(tmp_path / "c"))
    assert "rank 1 failed: KeyError" in first and "mine" in second


def copying(group):
    """A copy on one rank alone communicates nothing; prefetch still works on both afterwards."""
    est = compopt.SogCLREstimator(N, shard=True, process_group=group, offload="cpu")
    twin = copy.deepcopy(est) if dist.get_rank(group) == 0 else None
    est.prefetch(torch.arange(4) + 4 * dist.get_rank(group))
    train(est, group, 1)
    return twin is None or twin.n == N


def test_a_copy_of_a_shard_needs_no_other_rank():
    assert on_two(copying) == [True, True]


def pickled(group):
    est = compopt.SogCLREstimator(N, shard=True, process_group=group)
    file = io.BytesIO()
    torch.save(est, file)
    return file.getvalue()


def test_a_pickled_shard_is_refused_elsewhere():
    for rank, content in enumerate(on_two(pickled)):
        with pytest.raises(RuntimeError, match=rf"shard of rank {rank} of 2.*compopt\.save"):
            torch.load(io.BytesIO(content), weights_only=False)


# ranks that differ --------------------------------------------------------------------------------


def differing(group, what):
    """Rank 0 and rank 1 were built, or are called, in different ways."""
    second = dist.get_rank(group) == 1
    options = {"gamma": 0.5 if second and what == "gamma" else 0.8, "process_group": group}
    if what == "dtype":
        options["dtype"] = torch.float64 if second else torch.float32
    if what == "n":
        options["n"] = N + second
    if what == "mode":
        options["mode"] = "unimodal" if second else "bimodal"
    if what == "shard":
        options["shard"] = second
    est = compopt.SogCLREstimator(**{"n": N, "tau": 0.2, **options})
    tau = {
        "tau": 0.1 + second,
        "tau kind": torch.full((4,), 0.2) if second else 0.2,
        "tau shape": torch.full((4, 2) if second else (4,), 0.2),
        "tau dtype": torch.full((4,), 0.2, dtype=torch.float64 if second else torch.float32),
        "tau grad": torch.tensor(0.2, requires_grad=second),
        "tau given": 0.2 if second else None,
    }.get(what)
    if what == "index":
        est = compopt.MemoryEstimator(5, process_group=group)
    if what == "encode":
        est = compopt.EMC2Estimator(N, process_group=group)
    index = None if what == "index" and second else torch.arange(4) + 4 * second
    encode = (lambda missing: tuple(torch.randn(2, len(missing), 5))) if what == "encode" and second else None
    z1, z2 = torch.randn(2, 4, 5)
    try:
        est(z1, z2, index, encode=encode, tau=tau)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "what",
    ["gamma", "dtype", "n", "mode", "shard", "index", "encode"]
    + ["tau", "tau kind", "tau shape", "tau dtype", "tau grad", "tau given"],
)
def test_ranks_that_differ_are_told_so(what):
    for message in on_two(differing, what):
        assert "the ranks differ in" in message and ("tau" in message) == what.startswith("tau")


def changing(group):
    """A hyper-parameter that changes alike everywhere is fine; on one rank alone it is not."""
    est = compopt.SogCLREstimator(N, process_group=group)
    est.sample_groups[0]["gamma"] = 0.5
    train(est, group, 1)
    if dist.get_rank(group) == 1:
        est.sample_groups[0]["gamma"] = 0.6
    with pytest.raises(ValueError, match="sample_groups"):
        train(est, group, 1)
    est.sample_groups[0]["gamma"] = 0.6
    return train(est, group, 1)


def test_a_schedule_on_one_rank_only():
    first, second = on_two(changing)
    assert first == second


# the table at rest: a rank that shares a file with a slow writer -----------------------------------


def slow_writer(group, directory, action):
    """Two commits that rank 0 writes late; then what every rank sees and what it should."""
    table.BLOCK_ROWS = changes.CHUNK_ROWS = 4  # every rank writes some blocks of a checkpoint
    est = compopt.SogCLREstimator(N, process_group=group, offload="disk", offload_dir=f"{directory}/{action}")
    near = compopt.SogCLREstimator(N, process_group=group)
    data = batches(N, 5, batch=8, seed=24, dtype=torch.float32)
    own = own_part(group, 8)

    def both(steps):
        for z1, z2, index in data[steps]:
            for other in (est, near):
                run(other, z1[own], z2[own], index[own])
                other.step()

    both(slice(0, 1))
    before, path = near.state_dict(), compopt.save(est, f"{directory}/{action}-c")
    if dist.get_rank(group) == 0:
        slow_down(est._engine.table.store, "scatter", "grow", "write_block")
    both(slice(1, 3))
    if action == "save":
        fresh = compopt.SogCLREstimator(N, process_group=group)
        compopt.load(fresh, compopt.save(est, f"{directory}/{action}-c"))
        return snapshot(fresh, N), snapshot(near, N)
    if action == "state_dict":
        return est.state_dict()["rows"], near.state_dict()["rows"]
    if action == "grow":
        for other in (est, near):
            other.add_sample_group({"n": 2})
    else:
        near.load_state_dict(before)
        est.load_state_dict(before) if action == "load_state_dict" else compopt.load(est, path)
    now = snapshot(est, N), snapshot(near, N)
    both(slice(1, 5))
    return {**now[0], **est.state_dict()["rows"]}, {**now[1], **near.state_dict()["rows"]}


def slow_down(store, *names):
    """What a store does takes a while."""

    def late(method, *args):
        time.sleep(0.2)
        return method(*args)

    for name in names:
        setattr(store, name, functools.partial(late, getattr(store, name)))


@pytest.mark.distributed
@pytest.mark.parametrize("action", ["save", "load", "state_dict", "load_state_dict", "grow"])
def test_ranks_that_share_a_file_wait_for_its_writer(action, tmp_path):
    for seen, expected in the_pool().run(slow_writer, 2, str(tmp_path), action):
        assert_same_bits(seen, expected)


def out_of_step(group, directory):
    """One rank commits once more than the other."""
    est = compopt.SogCLREstimator(N, process_group=group, offload="disk", offload_dir=directory)
    z1, z2, index = batches(N, 1, batch=8, seed=25)[0]
    own = own_part(group, 8)
    run(est, z1[own], z2[own], index[own])
    if dist.get_rank(group) == 0:
        est.step()
    with pytest.raises(RuntimeError, match=r"commits by rank: \[1, 0\]"):
        est.state_dict()


@pytest.mark.distributed
def test_a_table_is_not_copied_between_the_commits_of_its_ranks(tmp_path):
    the_pool().run(out_of_step, 2, str(tmp_path))


def late_exchange(group, directory, action):
    """The ranks learn which rows a prefetched batch has when these are about to be overwritten."""
    est, near = (compopt.SogCLREstimator(N, process_group=group, **p) for p in ({"shard": True, "offload": "cpu"}, {}))
    data = batches(N, 3, batch=8, seed=26, dtype=torch.float32)
    own = own_part(group, 8)
    states, path = [other.state_dict() for other in (est, near)], compopt.save(near, directory)
    for z1, z2, index in data:
        for other in (est, near):
            run(other, z1[own], z2[own], index[own])
            other.step()
    local, issued = est._engine.table.local, threading.Event()

    def late(rows):
        issued.wait(0.3 if threading.current_thread().name.startswith("compopt-prefetch") else 0)
        return local(rows)

    write_block = est._engine.table.store.write_block

    def overwrite(*args):
        time.sleep(0.6)  # the read that came late is over
        write_block(*args)

    est._engine.table.local, est._engine.table.store.write_block = late, overwrite
    est.prefetch(data[0][2][own])
    for other, state in zip((est, near), states, strict=True):
        other.load_state_dict(state) if action == "load_state_dict" else compopt.load(other, path)
    return [bits(run(other, *(x[own] for x in data[0]))[0]) for other in (est, near)]


@pytest.mark.distributed
@pytest.mark.parametrize("action", ["load", "load_state_dict"])
def test_a_prefetch_whose_exchange_ends_during_a_load(action, tmp_path):
    for seen, expected in the_pool().run(late_exchange, 4, str(tmp_path), action):
        assert seen == expected
