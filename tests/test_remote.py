"""Checkpoints at URLs: the guarantees are those of directories, and content from a store is verified like files."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid

import fsspec
import pytest
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import compopt
from compopt.checkpoint import manifest
from tests.helpers import assert_same_bits, snapshot
from tests.pool import the_pool
from tests.test_sparse_saves import CHUNK, PIECE, PLACEMENTS, N, placed, sogclr, visit


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, tmp_path):
    monkeypatch.setattr(manifest, "PIECE_ROWS", PIECE)
    monkeypatch.setattr(manifest, "CHUNK_ROWS", CHUNK)
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))


@pytest.fixture
def url():
    root = f"memory://{uuid.uuid4().hex}"
    yield f"{root}/run"
    fsspec.filesystem("memory").rm(root.removeprefix("memory:/"), recursive=True)


def trained(rows=range(0, 120, 3), **options):
    est = sogclr(**options)
    visit(est, rows)
    return est


def loads(path, est, **options):
    other = sogclr(**options)
    assert compopt.load(other, path).startswith(path)
    assert_same_bits(snapshot(est, N), snapshot(other, N))
    return other


def names(url, complete=True):
    """Return the names of the checkpoints at a URL."""
    store, path = fsspec.url_to_fs(url)
    store.invalidate_cache(path)
    found = sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in store.ls(path, detail=True))
    return [name for name in found if not complete or store.exists(f"{path}/{name}/manifest.json")]


# -- as for directories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "beside"])
def test_round_trip(options, blocking, url, tmp_path):
    est = trained(**placed(options, tmp_path / "rows"))
    path = compopt.save(est, url, blocking=blocking)
    path = path if blocking else path.wait()
    assert path.startswith(f"{url}/checkpoint-00000001-t1-")
    loads(url, est), loads(path, est), loads(f"{url}/", est, offload="cpu")
    assert not os.listdir(tmp_path / "local")  # no temporary files are left


def test_a_directory_is_of_one_estimator(url):
    a, b = trained(), trained(range(5))
    path = compopt.save(a, url)
    with pytest.raises(RuntimeError, match=f"{url} has checkpoints of another SogCLREstimator of this process"):
        compopt.save(b, url)
    with pytest.raises(ValueError, match=f"{url} holds checkpoints of another estimator: method"):
        compopt.save(compopt.ISogCLREstimator(N), url)
    with pytest.raises(ValueError, match=f"{path} is itself a checkpoint"):
        compopt.save(a, path)
    loads(url, a)
    compopt.load(b, url)
    compopt.save(b, url)


def test_a_load_beside_a_run_that_prunes_takes_the_newest(url, monkeypatch):
    est, get = trained(), MemoryFileSystem.get_file
    compopt.save(est, url)

    def pruned(self, path, *args, **options):
        if "rows-" in path and est.t == 1:
            visit(est, [7, 8])
            compopt.save(est, url, keep=1)
        return get(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", pruned)
    assert loads(url, est).t == 2


# -- damage --------------------------------------------------------------------------------------------------------


def flip(store, path):
    content = bytearray(store.cat_file(path))
    content[len(content) // 2] ^= 1
    store.pipe_file(path, bytes(content))


def shorten(store, path):
    store.pipe_file(path, store.cat_file(path)[:-1])


def remove(store, path):
    store.rm_file(path)


@pytest.mark.parametrize("which", ["rows-", "state", "manifest"])
@pytest.mark.parametrize("damage", [flip, shorten, remove])
def test_damage_is_named(damage, which, url):
    path = compopt.save(trained(), url)
    store, root = fsspec.url_to_fs(path)
    file = next(name for name in store.find(root) if name.rpartition("/")[2].startswith(which))
    damage(store, file)
    other = trained(range(5))
    before = snapshot(other, N)
    lost = damage is remove and which == "manifest"
    with pytest.raises((ValueError, FileNotFoundError), match="has no manifest" if lost else "damaged|is missing") as e:
        compopt.load(other, path)
    assert (path if lost else f"{path}/{file.rpartition('/')[2]}") in str(e.value)
    assert_same_bits(before, snapshot(other, N))


# -- kills and failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["put_file", "get_file", "rm_file", "ls"])
def test_a_failure_at_any_operation_leaves_the_old_or_the_new(operation, monkeypatch):
    """Fail at the k-th operation for every k, as if killed there."""
    old, new = trained(), trained()
    visit(new, [150, 151], seed=3)
    states = {1: snapshot(old, N), 2: snapshot(new, N)}
    original, outcomes = getattr(MemoryFileSystem, operation), set()
    for k in range(1, 200):
        url, calls = f"memory://{uuid.uuid4().hex}/run", [0]
        loaded = sogclr()
        compopt.load(loaded, compopt.save(old, url, keep=1))
        visit(loaded, [150, 151], seed=3)

        def fail(self, *args, k=k, calls=calls, **options):
            calls[0] += 1
            if calls[0] == k:
                raise ConnectionError(f"operation {k}")
            return original(self, *args, **options)

        monkeypatch.setattr(MemoryFileSystem, operation, fail)
        failed = False
        try:
            compopt.save(loaded, url, keep=1)
        except OSError as error:
            failed = True
            assert url in str(error) and f"operation {k}" in str(error)
        monkeypatch.setattr(MemoryFileSystem, operation, original)
        again = sogclr()
        compopt.load(again, url)
        outcomes.add(again.t)
        assert_same_bits(states[again.t], snapshot(again, N))
        assert failed or again.t == 2
        compopt.save(loaded, url, keep=1)  # the run continues
        assert len(names(url, complete=False)) == 1
        if calls[0] < k:
            break
    assert k > 1 and 2 in outcomes


# -- URLs ----------------------------------------------------------------------------------------------------------


def test_file_urls_are_paths(tmp_path):
    est, other = trained(), sogclr()
    path = compopt.save(est, f"file://{tmp_path}/c")
    assert path.parent == tmp_path / "c" and compopt.load(other, path) == path


def test_urls_that_are_refused(tmp_path):
    est = sogclr()
    for call in (compopt.save, compopt.load):
        with pytest.raises(ValueError, match="pass the URL as a string"):
            call(est, type(tmp_path)("s3://bucket/run"))
        with pytest.raises(ValueError, match="nonsense://bucket: Protocol not known"):
            call(est, "nonsense://bucket")
        with pytest.raises(ValueError, match="chained"):
            call(est, "simplecache::memory://x")


def test_missing_packages_are_named(monkeypatch):
    known = {"nosuch": {"class": "no_such_driver.Store", "err": "Install no_such_driver to access it"}}
    monkeypatch.setattr(sys.modules["fsspec.registry"], "known_implementations", known)
    for call in (compopt.save, compopt.load):
        with pytest.raises(ImportError, match="nosuch://b/run: Install no_such_driver"):
            call(sogclr(), "nosuch://b/run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r'memory://b: URLs need fsspec: pip install -e "\.\[remote\]"'):
        compopt.save(sogclr(), "memory://b")


def test_nothing_there(url):
    with pytest.raises(FileNotFoundError, match=f"{url} does not exist"):
        compopt.load(sogclr(), url)
    store, path = fsspec.url_to_fs(url)
    store.pipe_file(f"{path}/notes", b"x")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        compopt.load(sogclr(), url)


# -- ranks ---------------------------------------------------------------------------------------------------------


class Shared(LocalFileSystem):
    """A store that processes share, at URLs ``shared:///path``."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("shared://"))


def of_ranks(group, url, shard):
    """Save and load on every rank; return the path, the saved rows and the loaded rows."""
    fsspec.register_implementation("shared", Shared, clobber=True)
    manifest.CHUNK_ROWS, manifest.PIECE_ROWS = CHUNK, PIECE
    options = {"process_group": group, "shard": shard, "offload": "cpu"}
    est = sogclr(**options)
    rank = dist.get_rank(group)
    visit(est, range(rank, 120, 4), seed=rank)
    compopt.save(est, url)
    visit(est, [196 + rank], seed=rank)
    path = compopt.save(est, url, keep=1, blocking=False).wait(20)
    other = sogclr(**options)
    assert compopt.load(other, url) == path
    return path, snapshot(est, N), snapshot(other, N)


@pytest.mark.distributed
@pytest.mark.parametrize("shard", [True, False], ids=["shard", "whole"])
def test_four_ranks(shard, tmp_path):
    fsspec.register_implementation("shared", Shared, clobber=True)
    results = the_pool().run(of_ranks, 4, f"shared://{tmp_path}/run", shard)
    for path, saved, loaded in results:
        assert path == results[0][0]
        assert_same_bits(saved, loaded)
    alone = sogclr()
    compopt.load(alone, path)
    assert_same_bits(saved, snapshot(alone, N))
