"""Ranks that share a table, with a slow writer; ranks that differ; ranks of which one fails. Nobody waits for ever."""

import copy
import io

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import saving
from compopt.stores import disk
from tests.helpers import assert_same_bits, snapshot
from tests.pool import the_pool

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
        import time

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
        monkeypatch.setattr(saving, "BLOCK_ROWS", 8)
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


def failing_writer(group, folder, shard):
    """The disk of rank 0 fails; every rank learns it at its next call."""
    import time

    est = shared(group, folder, shard)
    train(est, group, 1)
    if dist.get_rank(group) == 0:
        est._table.rows._journal.fail(OSError("disk full"))
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
        "tau grad": torch.tensor(0.2, requires_grad=second),
        "tau given": 0.2 if second else None,
    }.get(what)
    z1, z2 = torch.randn(2, 4, 5)
    try:
        est(z1, z2, torch.arange(4) + 4 * second, tau=tau)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "what", ["gamma", "dtype", "n", "mode", "shard", "tau", "tau kind", "tau shape", "tau grad", "tau given"]
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
