"""Ranks with a part of the rows each, on slow disks; ranks that differ; a failing rank: no rank hangs."""

import io
import threading
import time

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.helpers import assert_same_bits, batches, bits, run, snapshot
from tests.pool import the_pool
from tests.test_placements import own_part

pytestmark = pytest.mark.distributed
N, BATCH = 24, 8


def on_two(function, *args):
    return the_pool().run(function, 2, *args)


def train(est, group, steps, seed=0):
    """Train on this rank's half of global batches and return the losses."""
    g, rank, losses = torch.Generator().manual_seed(seed), dist.get_rank(group), []
    for _ in range(steps):
        z1, z2 = torch.randn(2, BATCH, 4, generator=g)
        own = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        losses.append(est(z1[own], z2[own], torch.randperm(N, generator=g)[:BATCH][own]).item())
        est.step()
    return losses


def on_disk(group, folder):
    return compopt.SogCLREstimator(N, offload="disk", offload_dir=f"{folder}/table", process_group=group)


def folders_of_their_own(group, folder):
    """Train on ranks that share no folder; return losses and rows."""
    est = on_disk(group, f"{folder}/{dist.get_rank(group)}")
    return train(est, group, 2), snapshot(est, N)


def test_ranks_on_disk_need_not_share_a_folder(tmp_path):
    (losses, state), (others, other) = on_two(folders_of_their_own, str(tmp_path))
    assert losses == others
    assert_same_bits(state, other)
    assert [path.name for path in sorted(tmp_path.rglob("*.rows"))] == [
        "normalizer-rows-00000-of-00002.rows",
        "normalizer-rows-00001-of-00002.rows",
    ]


def growing_badly(group, folder, offload, shard, done):
    """Fail to append rows on rank 1; afterwards no rank has them, and the run continues, saves and loads."""
    kind = {"offload": offload, "shard": shard, "process_group": group}
    est = compopt.SogCLREstimator(N, **kind, **({"offload_dir": f"{folder}/table"} if offload == "disk" else {}))
    twin = compopt.SogCLREstimator(N, process_group=group)
    train(est, group, 2), train(twin, group, 2)
    store = est.normalizer._table.store
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank(group) == 1:
            resize, before = store.resize, store.n

            def fail(n):
                if done or n == before:
                    resize(n)
                if n > before:
                    raise MemoryError("no room")

            monkeypatch.setattr(store, "resize", fail)
        with pytest.raises((MemoryError, RuntimeError), match="no room"):
            est.add_sample_group({"n": 5})
    assert est.n == N and store.n == (N if not est.split else N // 2)
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
@pytest.mark.parametrize(("offload", "shard"), [(None, True), ("cpu", True), ("disk", False)])
def test_rows_that_one_rank_cannot_append_are_appended_by_none(offload, shard, done, tmp_path):
    for one, other in on_two(growing_badly, str(tmp_path), offload, shard, done):
        assert one == other


def failing_writer(group, folder):
    """Let the disk of rank 0 fail; return the error, which every rank raises at its next call."""
    est = on_disk(group, folder)

    def full(rows, block):
        raise OSError("disk full")

    if dist.get_rank(group) == 0:
        est.normalizer._table.store.scatter = full
    with pytest.raises(RuntimeError) as caught:
        for _ in range(100):
            train(est, group, 1)
            time.sleep(0.01)
    return str(caught.value)


def test_a_failed_writer_stops_every_rank(tmp_path):
    first, second = on_two(failing_writer, str(tmp_path))
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


def per_anchor(value=0.2, shape=(4,), dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


DIFFERENT_TAU = {  # of rank 0, and of rank 1; other arguments are in tests/test_ranks_differ.py
    "kind": (0.2, per_anchor()),
    "shape": (per_anchor(), per_anchor(shape=(4, 2))),
    "dtype": (per_anchor(), per_anchor(dtype=torch.float64)),
    "grad": (torch.tensor(0.2), torch.tensor(0.2, requires_grad=True)),
    "given": (None, 0.2),
}


def differing(group, what, value):
    """Call the estimators of rank 0 and rank 1 with different arguments; return the error."""
    second = dist.get_rank(group)
    est = compopt.SogCLREstimator(N, tau=0.2, process_group=group)
    call = {"index": torch.arange(4) + 4 * second}
    if what == "tau":
        call["tau"] = DIFFERENT_TAU[value][second]
    if what == "extra" and second:
        call["negatives"] = torch.randn(5, 5)
    if what == "encode":
        encode = (lambda missing: tuple(torch.randn(2, len(missing), 5))) if second else None
        est = compopt.EMC2Estimator(N, process_group=group, encode=encode)
    with pytest.raises(ValueError) as caught:
        est(*torch.randn(2, 4, 5), **call)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "value"),
    [*(("tau", name) for name in DIFFERENT_TAU), ("extra", "given"), ("encode", "")],
)
def test_ranks_that_differ_are_told_so(what, value):
    for message in on_two(differing, what, value):
        assert "the ranks differ in" in message and ("tau" in message) == (what == "tau")
        assert ("differ in negatives=" in message) == (what == "extra")


# a load beside prefetching -------------------------------------------------------------------------


def late_exchange(group, directory, action):
    """Delay the exchange of a prefetched batch's rows until these are about to be overwritten; return the losses."""
    est, near = (compopt.SogCLREstimator(N, process_group=group, **p) for p in ({"shard": True, "offload": "cpu"}, {}))
    data = batches(N, 3, batch=8, seed=26, dtype=torch.float32)
    own = own_part(group, 8)
    states, path = [other.state_dict() for other in (est, near)], compopt.save(near, directory)
    for z1, z2, index in data:
        for other in (est, near):
            run(other, z1[own], z2[own], index[own])
            other.step()
    local, issued = est.normalizer._table.local, threading.Event()

    def late(rows):
        issued.wait(0.3 if threading.current_thread().name.startswith("compopt-prefetch") else 0)
        return local(rows)

    scatter = est.normalizer._table.store.scatter

    def overwrite(*args):
        time.sleep(0.6)  # the delayed read has finished
        scatter(*args)

    est.normalizer._table.local, est.normalizer._table.store.scatter = late, overwrite
    est.prefetch(data[0][2][own])
    for other, state in zip((est, near), states, strict=True):
        other.load_state_dict(state) if action == "load_state_dict" else compopt.load(other, path)
    return [bits(run(other, *(x[own] for x in data[0]))[0]) for other in (est, near)]


@pytest.mark.parametrize("action", ["load", "load_state_dict"])
def test_a_prefetch_whose_exchange_ends_during_a_load(action, tmp_path):
    for seen, expected in the_pool().run(late_exchange, 4, str(tmp_path), action):
        assert seen == expected
