"""Checkpoints leave out rows that were never visited."""

import os
import random
import re
import shutil
import warnings

import pytest
import torch

import compopt
from compopt.checkpoint import manifest
from compopt.distributed.ranks import Ranks
from compopt.estimator import state_dict as states
from compopt.stores import RowStore, base
from tests.helpers import assert_same_bits, features, run, snapshot
from tests.pool import the_pool

N, PIECE = 203, 16
PLACEMENTS = {"device": {}, "cpu": {"offload": "cpu"}, "disk": {"offload": "disk"}}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_ROWS", PIECE)


def placed(options, folder):
    return {**options, "offload_dir": folder} if options.get("offload") == "disk" else options


def sogclr(n=N, **options):
    return compopt.SogCLREstimator(n, gamma=0.6, tau=0.1, **options)


def visit(est, rows, seed=0):
    """Commit some rows."""
    z1, z2 = features(len(rows), 8, seed=seed)
    run(est, z1, z2, torch.as_tensor(list(rows)))
    est.step()


def inodes(path):
    return {file.stat().st_ino for file in path.rglob("rows-*")}


def rows_in(path):
    """Return the number of rows in the files of a checkpoint."""
    return sum(file.rows for file in manifest.read(manifest.checkpoint_at(path))[1])


def loads(path, est, **options):
    other = sogclr(est.n, **options)
    compopt.load(other, path)
    assert_same_bits(snapshot(est, est.n), snapshot(other, est.n))


@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS)
def test_what_a_save_writes(options, tmp_path):
    est = sogclr(**placed(options, tmp_path / "rows"))
    assert rows_in(compopt.save(est, tmp_path / "c", keep=9)) == 0
    visit(est, [1, 2, 5, 100])
    first = compopt.save(est, tmp_path / "c", keep=9)
    assert rows_in(first) == 4 and len(inodes(first)) == 1
    visit(est, range(180, 203))
    added = compopt.save(est, tmp_path / "c", keep=9)
    assert rows_in(added) == 4 + 23 and len(inodes(added)) == 2
    assert not inodes(first) & inodes(added)
    rows = rows_in(added)
    visit(est, [100, 101])
    changed = compopt.save(est, tmp_path / "c", keep=1)
    assert rows_in(changed) == rows + 1 and not first.exists()
    loads(changed, est)


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="holes")
def test_a_sparse_table_file_stays_sparse(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_ROWS", 1 << 18)
    est, other = sogclr(1 << 20), sogclr(1 << 20, offload="disk", offload_dir=tmp_path / "rows")
    visit(est, [5, 1 << 19])
    path = compopt.save(est, tmp_path / "c")
    assert rows_in(path) == 2
    for load in (compopt.load, lambda other, _: other.load_state_dict(est.state_dict())):
        load(other, path)
        assert 512 * (tmp_path / "rows" / "normalizer-rows.rows").stat().st_blocks < 1 << 16  # of 16 MiB


LARGE = 10**6
PASSES = {
    "save": lambda est, folder: compopt.save(est, folder),
    "background save": lambda est, folder: compopt.save(est, folder, blocking=False).wait(),
    "state_dict": lambda est, folder: est.state_dict(),
    "scores": lambda est, folder: compopt.curation.scores(est),
    "growth": lambda est, folder: est.add_sample_group({"n": 5}),
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_pass_over_the_table_reads_only_pages_that_were_visited(options, name, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_ROWS", 1 << 18)
    est = sogclr(LARGE, reference="positive", **placed(options, tmp_path / "rows"))
    rows = torch.randperm(LARGE, generator=torch.Generator().manual_seed(0))[:64]
    visit(est, rows)
    read, gather = [], RowStore.gather

    def counted(store, rows):
        read.append(len(rows))
        return gather(store, rows)

    monkeypatch.setattr(RowStore, "gather", counted)
    result = PASSES[name](est, tmp_path / "c")
    monkeypatch.undo()
    assert sum(read) <= 64 * 256 + 100  # pages of 4 KiB, and those of the disk that are tried first
    if name == "scores":
        assert result.visits.nonzero().flatten().tolist() == sorted(rows.tolist())
    if name == "state_dict":
        found = result["parts"]["normalizer"]["rows"]
        assert found["count"].any(dim=1).nonzero().flatten().tolist() == sorted(rows.tolist())
        assert torch.equal(found["log_u"][rows], est.read(rows)["log_u"])
    if "save" in name:
        assert rows_in(result) == 64 and sum(file.stat().st_size for file in result.rglob("*")) < 1 << 16
        again = sogclr(LARGE, reference="positive")
        compopt.load(again, result)
        assert_same_bits(est.read(rows), again.read(rows))
        assert again.state_dict()["parts"]["normalizer"]["rows"]["count"].any(dim=1).sum() == 64


def gather_shards(group):
    """Gather a large sharded table; return the bytes that were sent, the warnings, the visited rows and the state."""
    n, sent, add = 10**6, [], Ranks.sum
    rank = torch.distributed.get_rank(group)
    est, twin = sogclr(n, shard=True, process_group=group), sogclr(n, process_group=group)
    rows = torch.tensor([17, 400_003, 999_999]) - rank
    for one in (est, twin):
        visit(one, rows, seed=rank)

    def summed(ranks, tensor):
        sent.append(tensor.nbytes)
        return add(ranks, tensor)

    states.GATHERED, Ranks.sum = 1000, summed
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            state = est.state_dict()["parts"]["normalizer"]["rows"]
    finally:
        states.GATHERED, Ranks.sum = 1 << 30, add
    expected = twin.state_dict()["parts"]["normalizer"]["rows"]
    return sum(sent), [str(each.message) for each in told], all(map(torch.equal, state.values(), expected.values()))


@pytest.mark.distributed
def test_shards_gather_only_pages_that_were_visited_and_say_how_much(tmp_path):
    for sent, told, equal in the_pool().run(gather_shards, 2):
        assert equal and sent < 100_000  # of 16 MB
        assert len(told) == 1 and re.search(r"gathers 16,000,000 bytes.*compopt\.save\(est, directory\)", told[0])


def one_lacks_memory(group):
    est = sogclr(1000, shard=True, process_group=group)
    if torch.distributed.get_rank(group) == 1:
        base.available_memory = lambda: 15_999
    try:
        est.state_dict()
    except (MemoryError, RuntimeError) as error:
        return str(error)
    finally:
        base.available_memory = available
    return ""


available = base.available_memory


@pytest.mark.distributed
def test_a_rank_without_the_memory_tells_the_others():
    for told in the_pool().run(one_lacks_memory, 2):
        assert re.search(r"needs 16,000 bytes of memory, 15,999 are available; compopt\.save", told)


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="only Linux tells the available memory")
@pytest.mark.parametrize("what", ["whole", "part", "dcp"])
def test_a_state_that_cannot_fit_is_refused_before_it_is_copied(what, tmp_path):
    n = int(base.available_memory()) // 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the disk has less free space
        est = sogclr(n, offload="disk", offload_dir=tmp_path)
    if what == "dcp":
        pytest.importorskip("torch.distributed.tensor")
        from compopt.integrations.dcp import Stateful
    one = {"whole": lambda: est, "part": lambda: est.normalizer, "dcp": lambda: Stateful(est)}[what]()
    with pytest.raises(MemoryError, match=rf"{16 * n:,} bytes of memory, .* available; compopt.save\(est, directory\)"):
        one.state_dict()


def test_the_memory_that_a_container_has_left_counts_what_it_uses(tmp_path, monkeypatch):
    for name, text in {"max": "5000", "current": "3000", "stat": "anon 1000\ninactive_file 500\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(base, "CGROUP", tmp_path)
    assert base.available_memory() == 2500  # the cache of files gives way
    (tmp_path / "memory.max").write_text("max")
    assert base.available_memory() > 2500


@pytest.mark.parametrize("overwrite", ["load", "load_state_dict"])
def test_rows_that_were_overwritten_are_not_taken_from_before(overwrite, tmp_path):
    est, other = sogclr(), sogclr()
    visit(est, range(20)), visit(other, range(10, 30), seed=1)
    compopt.save(est, tmp_path / "a")
    if overwrite == "load":
        compopt.load(est, compopt.save(other, tmp_path / "b"))
    else:
        est.load_state_dict(other.state_dict())
    loads(compopt.save(est, tmp_path / "a"), other)


def shorten(path):
    file = sorted(path.rglob("rows-*"))[0]
    file.write_bytes(file.read_bytes()[:-1])


LOSSES = {
    "removed": shutil.rmtree,
    "a short file": shorten,
    "unfinished": lambda path: (path / "manifest.json").unlink(),
    "damaged": lambda path: (path / "manifest.json").write_text("{}"),
    "without a file": lambda path: sorted(path.rglob("rows-*"))[0].unlink(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_checkpoint_that_was_lost_is_not_needed(loss, tmp_path):
    est = sogclr()
    visit(est, range(50))
    LOSSES[loss](compopt.save(est, tmp_path))
    loads(compopt.save(est, tmp_path), est)


@pytest.mark.slow
def test_any_history(tmp_path):
    """Visits, saves, loads, growth and older checkpoints in random order."""
    draw = random.Random(0)
    est, kept = sogclr(), {}
    for step in range(80):
        n, first = est.n, draw.randrange(est.n)
        near = [(first + i) % n for i in range(draw.randint(2, 30))]
        visit(est, near if draw.random() < 0.7 else draw.sample(range(n), 12), seed=step)
        if step % 30 == 29:
            est.add_sample_group({"n": 10})
        path = compopt.save(est, tmp_path, keep=3)
        kept[path] = snapshot(est, est.n)
        if step % 5 == 4:
            some = draw.choice([path for path in kept if path.exists() and len(kept[path]["count"]) == est.n])
            again = sogclr(est.sample_groups, offload=draw.choice([None, "cpu"]))
            compopt.load(again, some)
            assert_same_bits(kept[some], snapshot(again, est.n))
            if draw.random() < 0.5:
                est = again


@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_load_in_inference_mode(options, tmp_path):
    est, other = sogclr(), sogclr(**placed(options, tmp_path / "rows"))
    visit(est, range(9)), visit(other, range(3, 12), seed=1)
    path = compopt.save(est, tmp_path / "c")
    with torch.inference_mode():
        compopt.load(other, path)
    for one in (est, other):
        visit(one, range(4), seed=2)
    assert_same_bits(snapshot(est, N), snapshot(other, N))


def test_symbolic_links_are_followed(tmp_path):
    """File names are symbolic links to content, as in the cache of a hub."""
    est = sogclr()
    visit(est, range(20))
    path = compopt.save(est, tmp_path / "a", keep=1)
    (tmp_path / "content").mkdir()
    for file in path.rglob("rows-*"):
        moved = file.rename(tmp_path / "content" / file.name)
        file.symlink_to(os.path.relpath(moved, file.parent))
    loads(path, est)
    saved = compopt.save(est, tmp_path / "a", keep=1)
    assert not any(file.is_symlink() for file in saved.rglob("*"))
    shutil.rmtree(tmp_path / "content")
    loads(saved, est)
