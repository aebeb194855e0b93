"""Checkpoints at URLs: what holds for directories holds there, and nothing of a store is trusted more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
import uuid

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import compopt
from compopt.checkpoint import manifest, reading
from compopt.remote import RemotePath, folder
from compopt.stores import changes, table
from tests.helpers import assert_same_bits, snapshot
from tests.pool import free_port, the_pool
from tests.test_incremental import sogclr, visit

N, CHUNK, BLOCK = 203, 4, 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(changes, "CHUNK_ROWS", CHUNK)
    monkeypatch.setattr(table, "BLOCK_ROWS", BLOCK)


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
    assert str(compopt.load(other, path)).startswith(str(path))
    assert_same_bits(snapshot(est, N), snapshot(other, N))
    return other


def rows_files(path):
    return sorted(name for name in path.sizes() if name.startswith("rows-"))


def save_ids(path):
    """Which save wrote each file of rows."""
    _, files = manifest.read(manifest.parse(path))
    return {file.save_id for file in files if file.name != manifest.STATE}


# -- what holds for directories ------------------------------------------------------------------------------------

PLACEMENTS = [{}, {"offload": "cpu"}, {"offload": "disk"}]


def test_two_estimators_of_one_process_do_not_share_a_directory(url):
    a, b = trained(), trained(range(5))
    compopt.save(a, url)
    with pytest.raises(RuntimeError, match=f"{url} has checkpoints of another SogCLREstimator of this process"):
        compopt.save(b, url)
    loads(url, a)
    compopt.load(b, url)
    compopt.save(b, url)


@pytest.mark.parametrize("options", PLACEMENTS, ids=["device", "cpu", "disk"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "beside"])
def test_round_trip(options, blocking, url, tmp_path):
    if options.get("offload") == "disk":
        options = {**options, "offload_dir": tmp_path / "rows"}
    est = trained(**options)
    path = compopt.save(est, url, blocking=blocking)
    path = path if blocking else path.wait()
    assert str(path).startswith(f"{url}/checkpoint-00000001-t1-")
    loads(url, est), loads(str(path), est), loads(path, est, offload="cpu")


def test_the_files_are_those_of_a_directory(url, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest.secrets, "token_hex", lambda _: "0123abcd")
    est = trained()
    here, there = compopt.save(est, tmp_path), compopt.save(est, url)
    assert here.name == there.name
    local, remote = {file.name: file.stat().st_size for file in here.iterdir()}, there.sizes()
    assert abs(local.pop(manifest.MANIFEST) - remote.pop(manifest.MANIFEST)) < 50  # digits of checksums
    assert local == remote and len(local) > 2
    loads(here, est), loads(there, est)


def test_keep_and_t(url):
    est = sogclr()
    states = {}
    for step in range(4):
        visit(est, range(step, 60, 5), seed=step)
        states[est.t] = snapshot(est, N)
        compopt.save(est, url, keep=2)
    assert [c.t for c in manifest.checkpoints(folder(url))] == [3, 4]
    other = sogclr()
    compopt.load(other, url, t=3)
    assert_same_bits(states[3], snapshot(other, N))
    with pytest.raises(
        FileNotFoundError, match=rf"{url} holds no complete checkpoint with t=1; there are t = \[3, 4\]"
    ):
        compopt.load(other, url, t=1)


def test_what_did_not_change_is_copied_by_the_store(url, monkeypatch):
    est = trained(range(0, 120, 3))
    first = compopt.save(est, url, keep=1)
    visit(est, [200, 202])
    put = []
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", refuse_rows(MemoryFileSystem.cat_file))
        patch.setattr(RemotePath, "write_bytes", noting(put, RemotePath.write_bytes))
        second = compopt.save(est, url, keep=1)
    assert save_ids(second) == {manifest.parse(first).save_id, manifest.parse(second).save_id}
    assert not first.exists() and len([name for name in put if name.startswith("rows-")]) == 1
    other = loads(url, est)
    visit(other, [7, 8])
    third = compopt.save(other, url)  # goes on from what it loaded
    assert save_ids(third) >= save_ids(second)
    loads(url, other)
    whole = compopt.save(other, url, incremental=False)
    assert save_ids(whole) == {manifest.parse(whole).save_id}


def refuse_rows(original):
    def cat_file(self, path, *args, **options):
        assert "rows-" not in path, "rows came here"
        return original(self, path, *args, **options)

    return cat_file


def noting(names, original):
    def write_bytes(self, content):
        names.append(self.name)
        return original(self, content)

    return write_bytes


def test_where_the_store_does_not_copy_everything_is_written(url, monkeypatch):
    est = trained()
    compopt.save(est, url)

    def refuse(*_, **__):
        raise PermissionError("no copies")

    monkeypatch.setattr(MemoryFileSystem, "cp_file", refuse)
    with pytest.warns(UserWarning, match="could not be copied there"):
        path = compopt.save(est, url)
    assert save_ids(path) == {manifest.parse(path).save_id}
    loads(path, est)


def test_from_a_directory_to_a_store_and_back(url, tmp_path):
    est = trained()
    compopt.save(est, tmp_path)
    loads(compopt.save(est, url), est)
    loads(compopt.save(est, tmp_path), est)


# -- damage --------------------------------------------------------------------------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("which", ["rows-", "state", "manifest"])
@pytest.mark.parametrize("damage", [flip, shorten, RemotePath.unlink], ids=["flip", "shorten", "unlink"])
def test_damage_is_named(damage, which, url):
    path = compopt.save(trained(), url)
    file = next(file for file in path.iterdir() if file.name.startswith(which))
    damage(file)
    other = trained(range(5))
    before = snapshot(other, N)
    complaint = "has no manifest" if file.name == manifest.MANIFEST and not file.exists() else "damaged|is missing"
    with pytest.raises((ValueError, FileNotFoundError), match=complaint) as caught:
        compopt.load(other, path)
    assert str(path if "no manifest" in complaint else file) in str(caught.value)
    assert_same_bits(before, snapshot(other, N))


HEADERS = {
    "gap": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
    "two at one place": b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],'
    b'"data_offsets":[0,3]}}',
    "shape": b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,3]}}',
    "negative": b'{"a":{"dtype":"U8","shape":[-3],"data_offsets":[3,0]}}',
    "dtype": b'{"a":{"dtype":"F1","shape":[3],"data_offsets":[0,3]}}',
    "short": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    "list": b"[]",
    "text": b"{",
    "metadata": b'{"__metadata__":3,"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers_that_safetensors_refuses_are_refused(header, url, tmp_path):
    content = len(header).to_bytes(8, "little") + header + b"abc"
    (tmp_path / "x").write_bytes(content)
    file = folder(url) / "x"
    file.write_bytes(content)
    for path in (tmp_path / "x", file):
        with pytest.raises(ValueError, match="is damaged"):
            reading._open(path)
    file.write_bytes(b"abc")
    with pytest.raises(ValueError, match="is damaged"):
        reading._open(file)


def test_a_tensor_is_read_in_pieces(url, monkeypatch):
    """Never more than was asked for or than the rows that are read ahead; and the next ones come from these."""
    from safetensors.torch import save as to_bytes

    tensors = {"a": torch.arange(90.0).reshape(30, 3), "b": torch.arange(30), "c": torch.tensor(2.5).bfloat16()}
    file = folder(url) / "x.safetensors"
    file.write_bytes(to_bytes(tensors))
    opened = reading.RangedFile(file, 1 << 20, ahead=8)
    assert set(opened.keys()) == set(tensors)
    assert all(torch.equal(opened.get_tensor(name), tensors[name]) for name in tensors)
    read = []
    original = RemotePath.read_range

    def counted(self, start, stop):
        read.append(stop - start)
        return original(self, start, stop)

    monkeypatch.setattr(RemotePath, "read_range", counted)
    part = opened.get_slice("a")
    for start, stop in [(0, 2), (3, 8), (8, 9), (9, 30), (29, 30), (30, 30), (2, 2)]:
        assert torch.equal(part[start:stop], tensors["a"][start:stop])
    assert read == [8 * 12, 8 * 12, 21 * 12, 12]


# -- kills and failures --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*could not be copied")
@pytest.mark.parametrize("operation", ["pipe_file", "cp_file", "rm_file", "rm", "info", "ls"])
def test_a_failure_at_any_operation_leaves_the_old_or_the_new(operation, monkeypatch):
    """As a kill at the k-th operation, for every k."""
    old, new = trained(), trained()
    visit(new, [150, 151], seed=3)
    states = {1: snapshot(old, N), 2: snapshot(new, N)}
    original, outcomes = getattr(MemoryFileSystem, operation), set()
    for k in range(1, 200):
        url, calls = f"memory://{uuid.uuid4().hex}/run", [0]
        loaded = sogclr()
        compopt.load(loaded, compopt.save(old, url, keep=1))  # the next save of it copies
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
        compopt.save(loaded, url, keep=1)  # and the run goes on
        assert [c.complete for c in manifest.checkpoints(folder(url))] == [True]
        if calls[0] < k:
            break
    assert k > 1 and 2 in outcomes


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "beside"])
def test_a_kill_between_files_leaves_the_earlier_checkpoint(blocking, url, monkeypatch):
    est = trained()
    compopt.save(est, url)
    before = snapshot(est, N)
    visit(est, range(100, 160))
    original, left = RemotePath.write_bytes, [1]

    def killed(self, content):
        if not left:
            raise OSError("killed")
        left.pop()
        original(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "write_bytes", killed)
        patch.setattr(RemotePath, "remove", lambda self: None)  # whoever is killed tidies nothing up
        with pytest.raises(OSError, match="killed"):
            saved = compopt.save(est, url, blocking=blocking)
            saved if blocking else saved.wait()
    assert [c.complete for c in manifest.checkpoints(folder(url))] == [True, False]
    other = sogclr()
    compopt.load(other, url)
    assert_same_bits(before, snapshot(other, N))
    compopt.save(est, url)
    assert [c.complete for c in manifest.checkpoints(folder(url))] == [True, True]
    loads(url, est)


# -- URLs ----------------------------------------------------------------------------------------------------------


def test_file_urls_are_paths(tmp_path):
    est = trained()
    path = compopt.save(est, f"file://{tmp_path}")
    assert path.parent == tmp_path
    loads(path, est)
    assert folder(tmp_path) == tmp_path and folder("a/b") == folder("file://a/b")


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
    (folder(url) / "notes").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        compopt.load(sogclr(), url)
    with pytest.raises(ValueError, match="is itself a checkpoint"):
        compopt.save(sogclr(), compopt.save(sogclr(), url))


# -- ranks ---------------------------------------------------------------------------------------------------------


class Shared(LocalFileSystem):
    """A store that processes share, by the URL ``shared:///path``."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("shared://"))


def of_ranks(group, url, shard):
    """Save and load on every rank; the path, and the rows before and after."""
    fsspec.register_implementation("shared", Shared, clobber=True)
    changes.CHUNK_ROWS, table.BLOCK_ROWS = CHUNK, BLOCK
    options = {"process_group": group, "shard": shard, "offload": "cpu"}
    est = sogclr(**options)
    rank = est._engine.ranks.rank
    visit(est, range(rank, 120, 3), seed=rank)
    compopt.save(est, url)
    visit(est, [200 + rank], seed=rank)
    path = compopt.save(est, url, keep=1)
    with pytest.raises(ValueError, match="signs of life"):
        compopt.save(est, url, blocking=False)
    other = sogclr(**options)
    assert compopt.load(other, url) == path
    return str(path), snapshot(est, N), snapshot(other, N)


@pytest.mark.distributed
@pytest.mark.parametrize("shard", [True, False], ids=["shard", "whole"])
def test_two_ranks(shard, tmp_path):
    fsspec.register_implementation("shared", Shared, clobber=True)
    results = the_pool().run(of_ranks, 2, f"shared://{tmp_path}/run", shard)
    for _, saved, loaded in results:
        assert_same_bits(saved, loaded)
    path, saved, _ = results[0]
    files = rows_files(RemotePath(path))
    assert {name.split("-")[1] for name in files} == ({"00000", "00001"} if shard else {"00000"})
    assert len(save_ids(RemotePath(path))) == 2  # the unchanged ones are copies
    alone = sogclr()
    compopt.load(alone, path)
    assert_same_bits(saved, snapshot(alone, N))


# -- S3 ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A store with the S3 protocol, on this machine."""
    pytest.importorskip("moto"), pytest.importorskip("s3fs"), pytest.importorskip("flask")
    address = f"http://127.0.0.1:{free_port()}"
    names = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**names, "AWS_ENDPOINT_URL": address, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", address.rpartition(":")[2]]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    try:
        await_server(server, address)
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        store.mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.kill()
        server.wait()


def await_server(server, address):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(200):
        assert server.poll() is None, "the server ended"
        try:
            opener.open(f"{address}/moto-api/", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the server did not answer")


@pytest.mark.launch
def test_s3(bucket):
    url = f"{bucket}/runs/a"
    est = trained()
    first = compopt.save(est, url)
    loads(url, est)
    visit(est, [200, 202])
    second = compopt.save(est, url, keep=1, blocking=False).wait()
    assert str(second).startswith(url) and not first.exists()
    assert len(save_ids(second)) == 2
    other = loads(url, est, offload="cpu")
    visit(other, [9, 11])
    compopt.save(other, url, keep=9)
    assert [c.complete for c in manifest.checkpoints(folder(url))] == [True, True]
    damaged = next(file for file in second.iterdir() if file.name.startswith("rows-"))
    flip(damaged)
    with pytest.raises(ValueError, match=f"{damaged} is damaged"):
        compopt.load(other, second)
    with pytest.raises(FileNotFoundError, match="s3://bucket/nothing does not exist"):
        compopt.load(other, f"{bucket}/nothing")
    with pytest.raises(OSError, match="s3://nobucket/run"):
        compopt.save(other, "s3://nobucket/run")
