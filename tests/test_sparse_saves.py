"""Checkpoints leave out rows that were never visited."""

import os
import random
import shutil

import pytest
import torch

import compopt
from compopt.checkpoint import manifest
from tests.helpers import assert_same_bits, features, run, snapshot

N, CHUNK, PIECE = 203, 4, 16
PLACEMENTS = {"device": {}, "cpu": {"offload": "cpu"}, "disk": {"offload": "disk"}}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_ROWS", PIECE)
    monkeypatch.setattr(manifest, "CHUNK_ROWS", CHUNK)


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
    assert rows_in(first) == 3 * CHUNK and len(inodes(first)) == 2
    visit(est, [200, 202])
    added = compopt.save(est, tmp_path / "c", keep=9)
    assert rows_in(added) == 3 * CHUNK + 3  # the last chunk is shorter
    assert not inodes(first) & inodes(added)
    rows = rows_in(added)
    visit(est, [100, 101])
    changed = compopt.save(est, tmp_path / "c", keep=1)
    assert rows_in(changed) == rows and not first.exists()
    loads(changed, est)


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="holes")
def test_a_sparse_table_file_stays_sparse(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_ROWS", 1 << 18)
    monkeypatch.setattr(manifest, "CHUNK_ROWS", 1 << 13)
    est, other = sogclr(1 << 20), sogclr(1 << 20, offload="disk", offload_dir=tmp_path / "rows")
    visit(est, [5, 1 << 19])
    path = compopt.save(est, tmp_path / "c")
    assert rows_in(path) == 2 << 13
    compopt.load(other, path)
    assert 512 * (tmp_path / "rows" / "normalizer-rows.rows").stat().st_blocks < 1 << 20  # of 16 MiB


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
