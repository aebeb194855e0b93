"""Rows are bit-identical in every placement, with and without prefetch."""

import functools

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import assert_same_bits, batches, bits, make, rows_of, run, snapshot
from tests.pool import the_pool

N = 13
ROWS = [info for info in DATABASE if info.has_rows]


def options(offload, path):
    """Return the constructor arguments of a placement."""
    return {"offload": offload, "offload_dir": path} if offload == "disk" else {"offload": offload}


def train(est, data, prefetch, window=1):
    """Train; with prefetch the rows of batch t + 1 are read before batch t is committed."""
    trace = []
    for step, (z1, z2, index) in enumerate(data):
        if prefetch and step + 1 < len(data):
            est.prefetch(data[step + 1][2])
        trace += [bits(x) for x in run(est, z1, z2, index)]
        if step % window == window - 1:
            est.step()
    return trace


def under_way(est):
    """Return the batches whose rows were requested but not used yet."""
    prefetcher = est._reading().prefetcher
    return [] if prefetcher is None else prefetcher._under_way


@functools.cache
def in_memory(name, mode):
    """Return data, and the trace and state of an estimator without a placement."""
    data = batches(N, 8, seed=11)  # six of thirteen rows each: consecutive batches overlap
    near, _ = make(BY_NAME[name], mode, N, gamma=0.6)
    return data, train(near, data, prefetch=False, window=2), snapshot(near, N)


@pytest.mark.covering("info offload", "offload prefetch")
@pytest.mark.parametrize("prefetch", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", ROWS, ids=str)
def test_every_placement_gives_the_same_bits(info, mode, offload, prefetch, tmp_path):
    data, expected, state = in_memory(info.name, mode)
    far, _ = make(info, mode, N, gamma=0.6, **options(offload, tmp_path))
    assert train(far, data, prefetch, window=2) == expected
    assert_same_bits(state, snapshot(far, N))


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
def test_prefetching_the_second_modality_s_rows(offload, tmp_path):
    z1, z2, index = batches(N, 1, seed=12)[0]
    results = []
    for prefetch in (False, True):
        est = compopt.SogCLREstimator(N, dtype=torch.float64, **options(offload, tmp_path / str(prefetch)))
        for _ in range(3):
            if prefetch:
                est.prefetch(index, index2=(index + 1) % N)
            est(z1, z2, index, index2=(index + 1) % N)
            est.step()
        results.append(snapshot(est, N))
    assert_same_bits(*results)


def test_a_prefetched_batch_that_never_comes(tmp_path):
    """Prefetches of other, repeated or abandoned batches keep values correct and do not accumulate."""
    data = batches(N, 30, seed=13)
    near, far = compopt.SogCLREstimator(N), compopt.SogCLREstimator(N, offload="disk", offload_dir=tmp_path)
    for step, (z1, z2, index) in enumerate(data):
        for other in range(3):
            far.prefetch(data[(step * 7 + other) % 30][2])
        for est in (near, far):
            run(est, z1, z2, index)
            est.step()
    assert_same_bits(snapshot(near, N), snapshot(far, N))
    assert 0 < len(under_way(far)) <= 4


def test_prefetch_takes_one_second_index():
    index = torch.arange(4)
    with pytest.raises(TypeError, match=r"prefetch\(index, index2\)"):
        compopt.SogCLREstimator(N, offload="cpu").prefetch(index, index, index2=index)


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
def test_a_loader_is_looked_ahead(offload, tmp_path):
    data = batches(N, 9, seed=14)
    near = compopt.SogCLREstimator(N)
    train(near, data, prefetch=False)
    far = compopt.SogCLREstimator(N, **options(offload, tmp_path))
    seen = []
    for z1, z2, index in far.prefetch(data):
        run(far, z1, z2, index)
        far.step()
        seen.append(index)
    assert [i.tolist() for i in seen] == [b[2].tolist() for b in data]
    assert_same_bits(snapshot(near, N), snapshot(far, N))
    for _ in far.prefetch(data):
        break
    assert not under_way(far)
    with pytest.raises(RuntimeError, match="mine"):
        for _ in far.prefetch(data):
            raise RuntimeError("mine")
    assert not under_way(far)


def test_growing_while_rows_are_under_way(tmp_path):
    data = batches(N, 4, seed=15)
    results = []
    for place in (None, "cpu", "disk"):
        est = compopt.SogCLREstimator([{"n": N}], **options(place, tmp_path / str(place)))
        train(est, data[:2], prefetch=True)
        est.prefetch(data[2][2])
        est.add_sample_group({"n": 5, "gamma": 0.5})
        train(est, data[2:], prefetch=True)
        run(est, *batches(N, 1, seed=16)[0][:2], torch.arange(12, 18))
        est.step()
        results.append(snapshot(est, N + 5))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_bad_placements(tmp_path):
    for arguments, match in (
        ({"offload": "gpu"}, 'None, "cpu" or "disk", got \'gpu\''),
        ({"offload": True}, "got True"),
        ({"offload": "disk"}, "needs offload_dir"),
        ({"offload": "cpu", "offload_dir": tmp_path}, "got offload='cpu'"),
        ({"offload_dir": tmp_path}, 'needs offload="disk", got offload=None'),
    ):
        with pytest.raises(ValueError, match=match):
            compopt.SogCLREstimator(N, **arguments)
    with pytest.raises(TypeError, match="shard must be True or False"):
        compopt.SogCLREstimator(N, shard=1)
    est = compopt.SogCLREstimator(N)
    with pytest.raises(IndexError, match="index 13"):
        est.prefetch(torch.tensor([0, 13]))
    with pytest.raises(TypeError, match="integers"):
        est.prefetch(torch.tensor([0.5]))


# -- over ranks --------------------------------------------------------------------------------------


def own_part(group, batch):
    """Return this rank's part of a batch, which is split into unequal parts."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    cut = [0, *(batch * (k + 1) // (ranks + 1) for k in range(ranks - 1)), batch]
    return slice(cut[rank], cut[rank + 1])


def on_ranks(group, name, mode, data, placement, prefetch, window):
    """Train on this rank; return the final values of all columns, and the number of rows in its store."""
    est, _ = make(BY_NAME[name], mode, N, gamma=0.6, process_group=group, **placement)
    own = own_part(group, len(data[0][2]))
    parts = [(z1[own], z2[own], index[own]) for z1, z2, index in data]
    train(est, parts, prefetch, window)
    state = snapshot(est, N)
    full = rows_of(est.state_dict())
    assert all(len(column) == N for column in full.values())
    est.normalizer._table.rows.settle()
    return state, est.normalizer._table.store.n


@functools.cache
def on_ranks_in_memory(name, ranks):
    """Return data, and the results of ranks without a placement."""
    data = batches(N, 8, batch=7, seed=21)
    return data, the_pool().run(on_ranks, ranks, name, "bimodal", data, {}, False, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("prefetch", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("offload, shard", [(None, True), ("cpu", False), ("cpu", True), ("disk", False)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["sogclr", "isogclr-adam"])
def test_every_placement_on_several_ranks(name, ranks, offload, shard, prefetch, tmp_path):
    data, near = on_ranks_in_memory(name, ranks)
    placement = {**options(offload, str(tmp_path)), "shard": shard}
    far = the_pool().run(on_ranks, ranks, name, "bimodal", data, placement, prefetch, 2)
    held = [n for _, n in far]
    if shard or offload == "disk":
        assert sum(held) == N and max(held) - min(held) <= 1
    else:
        assert held == [N] * ranks
    for state, _ in (*near, *far):
        assert_same_bits(near[0][0], state)
    files = sorted(path.name for path in tmp_path.glob("*.rows"))
    if offload == "disk":
        names = [name for name in ("normalizer", "temperature") if f"{name}-" in "".join(files)]
        assert files == [f"{name}-rows-{k:05d}-of-{ranks:05d}.rows" for name in names for k in range(ranks)] != []


def grown(group, placement):
    """Append a sample group to sharded rows and return all rows."""
    est = compopt.SogCLREstimator([{"n": N}], process_group=group, dtype=torch.float64, **placement)
    data = batches(N, 3, batch=8, seed=22)
    own = own_part(group, 8)
    run(est, *(x[own] for x in data[0]))
    est.step()
    est.add_sample_group({"n": 9})
    run(est, data[1][0][own], data[1][1][own], torch.arange(10, 18)[own])
    est.step()
    return snapshot(est, N + 9)


@pytest.mark.distributed
@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
def test_shards_grow(offload, tmp_path):
    (alone,) = the_pool().run(grown, 1, {})
    for state in the_pool().run(grown, 3, {**options(offload, str(tmp_path)), "shard": True}):
        for key in alone:
            torch.testing.assert_close(alone[key], state[key], rtol=1e-12, atol=1e-12)


def different_reads(group):
    """Return True if every rank can read rows of its own choice from the shards."""
    est = compopt.SogCLREstimator(N, process_group=group, shard=True, dtype=torch.float64)
    own = own_part(group, 8)
    run(est, *(x[own] for x in batches(N, 1, batch=8, seed=23)[0]))
    est.step()
    rank = dist.get_rank(group)
    asked = torch.arange(N)[rank : rank + 1 + 2 * rank]
    return torch.equal(rows_of(est.state_dict())["log_u"][asked], est.read(asked)["log_u"])


@pytest.mark.distributed
def test_reading_shards():
    assert all(the_pool().run(different_reads, 3))
