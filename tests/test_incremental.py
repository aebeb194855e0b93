"""Checkpoints that cost what changed: chunks that were never visited, or not since, are not written."""

import json
import os
import random
import shutil

import numpy as np
import pytest
import torch

import compopt
from compopt.checkpoint import durable, manifest
from compopt.checkpoint.chunks import SMALL_FILES, Owners, plan
from compopt.checkpoint.manifest import File
from compopt.stores import changes, table
from tests.helpers import assert_same_bits, features, run, snapshot
from tests.pool import the_pool

N, CHUNK, BLOCK = 203, 4, 16
PLACEMENTS = [{}, {"offload": "cpu"}, {"offload": "disk"}]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(changes, "CHUNK_ROWS", CHUNK)
    monkeypatch.setattr(table, "BLOCK_ROWS", BLOCK)


def sogclr(n=N, **options):
    return compopt.SogCLREstimator(n, gamma=0.6, tau=0.1, **options)


def visit(est, rows, seed=0):
    """Commit some rows."""
    z1, z2 = features(len(rows), 8, seed=seed)
    run(est, z1, z2, torch.as_tensor(list(rows)))
    est.step()


def inodes(path):
    return {file.stat().st_ino for file in path.glob("rows-*")}


def rows_written(path, save_id=None):
    """Rows in the files of a checkpoint; of those that it wrote itself, if given its id."""
    _, files = manifest.read(manifest.parse(path))
    mine = [file for file in files if save_id in (None, file.save_id)]
    return sum(stop - start for file in mine for start, stop in file.spans)


def own(path):
    return rows_written(path, manifest.parse(path).save_id)


def loads(path, est, **options):
    other = sogclr(est.n, **options)
    compopt.load(other, path)
    assert_same_bits(snapshot(est, est.n), snapshot(other, est.n))


@pytest.mark.parametrize("options", PLACEMENTS, ids=["device", "cpu", "disk"])
def test_what_a_save_writes(options, tmp_path):
    if options.get("offload") == "disk":
        options = {**options, "offload_dir": tmp_path / "rows"}
    est = sogclr(**options)
    assert own(compopt.save(est, tmp_path / "c", keep=9)) == 0
    visit(est, [1, 2, 5, 100])
    first = compopt.save(est, tmp_path / "c", keep=9)
    assert own(first) == 3 * CHUNK
    again = compopt.save(est, tmp_path / "c", keep=9)
    assert own(again) == 0 and inodes(again) == inodes(first)
    visit(est, [200, 202])
    added = compopt.save(est, tmp_path / "c", keep=9)
    assert own(added) == 3  # the last chunk is shorter
    assert inodes(first) < inodes(added)
    visit(est, [100, 101])
    changed = compopt.save(est, tmp_path / "c", keep=1)
    assert own(changed) == CHUNK and not first.exists()
    loads(changed, est)
    whole = compopt.save(est, tmp_path / "c", incremental=False)
    assert own(whole) == rows_written(whole) == 3 * CHUNK + 3 and not inodes(whole) & inodes(changed)
    loads(whole, est)


def test_a_loaded_estimator_goes_on_from_what_it_loaded(tmp_path):
    """In another directory, too; and a file of rows that is loaded sparsely stays sparse."""
    est = sogclr()
    visit(est, range(0, 80, 2))
    path = compopt.save(est, tmp_path / "a")
    other = sogclr(offload="disk", offload_dir=tmp_path / "rows")
    compopt.load(other, path)
    visit(other, [0, 1])
    after = compopt.save(other, tmp_path / "b")
    assert own(after) == CHUNK and inodes(path) < inodes(after)
    shutil.rmtree(tmp_path / "a")
    loads(after, other)


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


def test_chunks_of_zeros_that_were_not_zeros(tmp_path):
    est = sogclr()
    visit(est, [0, 49])
    compopt.save(est, tmp_path)
    est._engine.table.store.write_block(48, torch.zeros(CHUNK, 1, dtype=torch.complex128))
    path = compopt.save(est, tmp_path)
    assert own(path) == CHUNK  # written, lest the former value count
    loads(path, est)


def remove(path):
    shutil.rmtree(path)


def shorten(path):
    file = sorted(path.glob("rows-*"))[0]
    file.write_bytes(file.read_bytes()[:-1])


def unfinish(path):
    (path / "manifest.json").unlink()


def damage(path):
    (path / "manifest.json").write_text("{}")


def no_links(path):
    def refuse(*_):
        raise OSError("no links here")

    os.link = refuse


@pytest.mark.parametrize("loss", [remove, shorten, unfinish, damage, no_links])
def test_without_the_save_before_everything_is_written(loss, tmp_path, monkeypatch):
    est = sogclr()
    visit(est, range(50))
    monkeypatch.setattr(os, "link", os.link)  # put back after the test
    loss(compopt.save(est, tmp_path / "a"))
    path = compopt.save(est, tmp_path / "b")
    assert own(path) == rows_written(path) == 52
    loads(path, est)


def test_a_link_that_fails_midway_leaves_none(tmp_path, monkeypatch):
    est = sogclr()
    visit(est, range(50))
    before, calls, link = compopt.save(est, tmp_path), [], os.link

    def second_fails(*paths):
        calls.append(paths)
        if len(calls) == 2:
            raise OSError("no more links")
        link(*paths)

    monkeypatch.setattr(os, "link", second_fails)
    path = compopt.save(est, tmp_path)
    assert len(calls) == 2 and not inodes(path) & inodes(before)
    _, files = manifest.read(manifest.parse(path))
    assert {file.name for file in files} == {file.name for file in path.iterdir()} - {"manifest.json"}
    loads(path, est)


def test_any_history(tmp_path):
    """Visits, saves, loads, growth and older checkpoints in random order; room and number of files stay bounded."""
    draw = random.Random(0)
    est, kept = sogclr(), {}
    for step in range(150):
        n, first = est.n, draw.randrange(est.n)
        near = [(first + i) % n for i in range(draw.randint(2, 30))]
        visit(est, near if draw.random() < 0.7 else draw.sample(range(n), 12), seed=step)
        if step % 60 == 59:
            est.add_sample_group({"n": 10})
        path = compopt.save(est, tmp_path, keep=3)
        kept[path] = snapshot(est, est.n)
        if step % 10 == 9:
            some = draw.choice([path for path in kept if path.exists() and len(kept[path]["count"]) == est.n])
            again = sogclr(est.sample_groups, offload=draw.choice([None, "cpu"]))
            compopt.load(again, some)
            assert_same_bits(kept[some], snapshot(again, est.n))
            if draw.random() < 0.5:
                est = again
        chunks = -(-est.n // CHUNK) * CHUNK
        assert rows_written(path) <= 2 * chunks
        assert len(inodes(path)) <= SMALL_FILES + 2 * chunks // BLOCK + 2


# -- ranks -----------------------------------------------------------------------------------------------------


def on_ranks(group, action, directory, options):
    """Two saves of few rows each, or one load."""
    changes.CHUNK_ROWS, table.BLOCK_ROWS = CHUNK, BLOCK
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if options.get("offload") == "disk":
        options = {**options, "offload_dir": os.path.join(directory, f"rows-{action}")}
    est = sogclr(process_group=group, **options)
    if action == "load":
        compopt.load(est, os.path.join(directory, "c"))
        return snapshot(est, N)
    paths = []
    for seed, rows in enumerate((range(0, 160, 2), range(40, 72))):
        mine = list(rows)[rank::size]
        visit(est, mine, seed=10 * seed + rank)
        paths.append(compopt.save(est, os.path.join(directory, "c")))
    return snapshot(est, N), own(paths[1]), inodes(paths[0]) & inodes(paths[1])


LAYOUTS = [{}, {"shard": True}, {"offload": "disk"}]


@pytest.mark.distributed
@pytest.mark.parametrize("options", LAYOUTS, ids=["whole", "shard", "disk"])
def test_on_ranks(options, tmp_path):
    saved = the_pool().run(on_ranks, 4, "save", str(tmp_path), options)
    for state, written, shared in saved:
        assert_same_bits(saved[0][0], state)
        assert written < 100 and shared
    for ranks, other in ((1, {}), (2, {"shard": True}), (3, {"offload": "disk"}), (4, {"shard": True})):
        for state in the_pool().run(on_ranks, ranks, "load", str(tmp_path), other):
            assert_same_bits(saved[0][0], state)
        shutil.rmtree(tmp_path / "rows-load", ignore_errors=True)


# -- files and chunks --------------------------------------------------------------------------------------------


def test_owners_and_plans_against_a_dictionary():
    draw = random.Random(1)
    for _ in range(300):
        rows, files, owner = draw.randint(1, 90), [], {}
        chunks = -(-rows // CHUNK)
        for number in range(draw.randint(0, 25)):
            picked = sorted(draw.sample(range(chunks), draw.randint(1, chunks)))
            spans = tuple((c * CHUNK, min((c + 1) * CHUNK, rows)) for c in picked)
            files.append(File(str(number), 0, 0, "", spans=spans))
            owner |= {chunk: (number, at * CHUNK) for at, chunk in enumerate(picked)}
        owners = Owners(files, CHUNK)
        found = {
            row: (int(run.file.name), run.offset + row - run.start)
            for run in owners.runs()
            for row in range(run.start, run.stop)
        }
        assert found == {
            row: (owner[row // CHUNK][0], owner[row // CHUNK][1] + row % CHUNK)
            for row in range(rows)
            if row // CHUNK in owner
        }
        changed = np.array([draw.random() < 0.3 for _ in range(chunks)])
        kept, write, known = plan(owners, changed, BLOCK // CHUNK)
        assert known.tolist() == [chunk in owner for chunk in range(chunks)]
        names = {int(file.name) for file in kept}
        for chunk in range(chunks):  # each chunk that ever was is written, or its newest file stays
            assert write[chunk] == (changed[chunk] or (chunk in owner and owner[chunk][0] not in names))
        live = sum(write) + sum(of in names and not write[chunk] for chunk, (of, _) in owner.items())
        assert sum(len(files[number].spans) for number in names) + sum(write) <= 2 * live
        assert all(any(of == number and not write[c] for c, (of, _) in owner.items()) for number in names)


@pytest.mark.slow
def test_old_files_are_not_all_rewritten_in_the_same_saves():
    """Epochs over shards in random order: files grow old together, and yet a save writes what was visited."""
    draw, chunks, visited, full, chunk_rows = random.Random(2), 12800, 640, 128, 4
    files, order = [], []
    for save in range(60):
        if not order:
            order = draw.sample(range(chunks // 8), chunks // 8)  # shards of 8 chunks
        changed = np.zeros(chunks, dtype=bool)
        for shard in [order.pop() for _ in range(visited // 8)]:
            changed[8 * shard : 8 * shard + 8] = True
        changed |= save == 0
        kept, write, _ = plan(Owners(files, chunk_rows), changed, full)
        written = np.flatnonzero(write)
        packs = [written[first : first + full] for first in range(0, len(written), full)]
        spans = [tuple((int(c) * chunk_rows, (int(c) + 1) * chunk_rows) for c in pack) for pack in packs]
        files = [*kept, *(File(f"{save}-{number}", 0, 0, "", spans=these) for number, these in enumerate(spans))]
        assert len(written) <= 1.01 * changed.sum()
        assert sum(len(file.spans) for file in files) <= 2 * chunks


@pytest.mark.parametrize("way", ["load", "load_state_dict"])
@pytest.mark.parametrize("options", PLACEMENTS, ids=["device", "cpu", "disk"])
def test_a_load_in_inference_mode(way, options, tmp_path):
    if options.get("offload") == "disk":
        options = {**options, "offload_dir": tmp_path / "rows"}
    est, other = sogclr(), sogclr(**options)
    visit(est, range(9)), visit(other, range(3, 12), seed=1)
    path, state = compopt.save(est, tmp_path / "c"), est.state_dict()
    with torch.inference_mode():
        compopt.load(other, path) if way == "load" else other.load_state_dict(state)
    for one in (est, other):
        visit(one, range(4), seed=2)
    assert_same_bits(snapshot(est, N), snapshot(other, N))


def test_symbolic_links_are_followed(tmp_path):
    """As in the cache of a hub: names are links to content."""
    est = sogclr()
    visit(est, range(20))
    path = compopt.save(est, tmp_path / "a")
    (tmp_path / "content").mkdir()
    for file in path.glob("rows-*"):
        moved = file.rename(tmp_path / "content" / file.name)
        file.symlink_to(os.path.relpath(moved, path))
    other = sogclr()
    compopt.load(other, path)
    saved = compopt.save(other, tmp_path / "b")
    shutil.rmtree(tmp_path / "a"), shutil.rmtree(tmp_path / "content")
    loads(saved, est)


def test_each_directory_has_its_own_latest(tmp_path):
    est = sogclr()
    visit(est, range(100))
    slow = compopt.save(est, tmp_path / "slow")
    for number in range(6):
        visit(est, [0, 1], seed=number)
        compopt.save(est, tmp_path / "fast")
    shutil.rmtree(tmp_path / "fast")
    after = compopt.save(est, tmp_path / "slow")
    assert own(after) == CHUNK and inodes(slow) & inodes(after)
    loads(after, est)


def test_a_write_that_is_interrupted_is_a_change(tmp_path, monkeypatch):
    est = sogclr()
    visit(est, range(20))
    compopt.save(est, tmp_path)
    store = est._engine.table.store
    with monkeypatch.context() as patch:

        def interrupted(*_):
            store._table[3] = 7
            raise KeyboardInterrupt

        patch.setattr(torch.Tensor, "index_copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            visit(est, range(8), seed=1)
    est.discard()
    loads(compopt.save(est, tmp_path), est)


def one_rank_forgot(group, directory):
    """One rank does not know the latest checkpoint: all ranks write everything."""
    changes.CHUNK_ROWS, table.BLOCK_ROWS = CHUNK, BLOCK
    rank = torch.distributed.get_rank(group)
    est = sogclr(process_group=group, shard=True)
    visit(est, list(range(rank, 40, 2)), seed=rank)
    compopt.save(est, directory)
    if rank == 1:
        est._engine.table.saved.clear()
    path = compopt.save(est, directory)
    return own(path), rows_written(path), snapshot(est, N)


@pytest.mark.distributed
def test_ranks_that_know_different_checkpoints(tmp_path):
    for written, rows, state in the_pool().run(one_rank_forgot, 2, str(tmp_path)):
        assert written == rows == 40
        again = sogclr()
        compopt.load(again, tmp_path)
        assert_same_bits(state, snapshot(again, N))


def test_version_2_is_read(tmp_path):
    """All rows, in files that are known by their first row; here of two ranks."""
    from safetensors.torch import save as to_bytes

    est = sogclr()
    visit(est, range(0, N, 3))
    path = compopt.save(est, tmp_path)
    content, state = json.loads((path / "manifest.json").read_text()), est.state_dict()
    files = [file for file in content["files"] if file["name"] == "state.safetensors"]
    for first in (0, 1):
        name = f"rows-{first:05d}-00000.safetensors"
        part = {key: value[first::2].contiguous() for key, value in state["rows"].items()}
        (path / name).write_bytes(to_bytes(part, {"save_id": content["save_id"]}))
        size, crc = durable.checksum(path / name)
        entry = {"name": name, "bytes": size, "crc32": crc, "first": first, "stride": 2}
        files.append(entry | {"count": len(part["count"])})
    for file in files[:1]:
        file.pop("save_id"), file.pop("spans")
        file["count"] = 0
    content = {key: value for key, value in content.items() if key != "chunk_rows"} | {"version": 2, "files": files}
    (path / "manifest.json").write_text(json.dumps(content | {"crc32": manifest._body_crc(content)}))
    loads(path, est)
    loads(path, est, offload="cpu")
