"""Storage that fails during a run: full, read-only, truncated or removed. Errors name the file and what is kept."""

import contextlib
import errno
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch

import compopt
from compopt.checkpoint import manifest
from compopt.stores import DiskStore
from tests.disks import CannotMount, fill, full_after, mounted
from tests.helpers import assert_same_bits, features
from tests.helpers import snapshot as shown
from tests.launching import run_code

N = 20_000
STEP = 6


@contextlib.contextmanager
def small_disk(path, size, *options, mount=mounted):
    """Mount a disk of ``size`` bytes; skip the test if file systems cannot be mounted."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(mount(path, size, *options))
        except CannotMount as error:
            pytest.skip(str(error))
        yield disk


def sogclr(n=N, **options):
    return compopt.SogCLREstimator(n, gamma=0.6, tau=0.1, **options)


def on_disk(folder, **options):
    return sogclr(offload="disk", offload_dir=folder, **options)


def visit(est, rows, seed=0):
    est(*features(len(rows), 4, seed), rows)
    est.step()


def spread(seed):
    """Return rows that are on different pages."""
    return torch.randperm(N // 256, generator=torch.Generator().manual_seed(seed))[:STEP] * 256


def block(count, value=1):
    return torch.full((count, 2), value)


# -- a table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 4])
def test_a_commit_on_a_full_disk_changes_nothing(calls, tmp_path, monkeypatch):
    store = DiskStore(tmp_path, "rows", N, 1)
    store.scatter(spread(0), block(STEP))
    before = store.gather(torch.arange(N))
    full_after(monkeypatch, "pwrite", calls)
    with pytest.raises(
        OSError, match=r"No space left.*free space there \(.*MB are left\).*no row was written.*rows\.rows"
    ) as raised:
        store.scatter(spread(1), block(STEP, 2))
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert torch.equal(store.gather(torch.arange(N)), before)
    store.scatter(spread(1), block(STEP, 2))  # after space has become free
    assert store.gather(spread(1)).unique().tolist() == [2]


def test_a_run_learns_that_its_disk_is_full_and_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    est = on_disk(tmp_path / "rows")
    visit(est, spread(0))
    saved = compopt.save(est, tmp_path / "checkpoints")
    state = shown(est, N)
    full_after(monkeypatch, "pwrite", 2)
    with pytest.raises(RuntimeError, match=r"commit 2 of \d+ could not be written \(OSError.*No space left.*load a"):
        for _ in range(20):
            visit(est, spread(1))
    monkeypatch.undo()
    del est
    again = on_disk(tmp_path / "rows")
    compopt.load(again, saved)
    assert_same_bits(shown(again, N), state)


def test_growing_where_files_cannot_leaves_the_estimator(tmp_path, monkeypatch):
    est = on_disk(tmp_path / "rows")
    visit(est, spread(0))
    state, truncate = shown(est, N), os.ftruncate
    size = (tmp_path / "rows" / "normalizer-rows.rows").stat().st_size

    def limited(descriptor, new):
        if new > size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        truncate(descriptor, new)

    monkeypatch.setattr(os, "ftruncate", limited)
    with pytest.raises(ValueError, match="cannot be kept"):
        est.add_sample_group({"n": 5000})
    monkeypatch.undo()
    assert est.n == N and (tmp_path / "rows" / "normalizer-rows.rows").stat().st_size == size
    assert_same_bits(shown(est, N), state)
    est.add_sample_group({"n": 5000})
    visit(est, torch.arange(N, N + STEP))
    assert est.read(torch.arange(N, N + STEP))["count"].min() == 1


TRUNCATED = f"""
import os, sys, torch
from compopt.stores import DiskStore
rows, block = torch.arange(0, {N}, 100), torch.ones({N // 100}, 2, dtype=torch.int64)
for left in (0, 4096):
    store = DiskStore(sys.argv[1], f"rows{{left}}", {N}, 1)
    store.scatter(rows, block)
    os.truncate(store.path, left)
    every = torch.arange({N})
    for use in (lambda: store.gather(rows), lambda: store.scatter(rows, block), lambda: store.gather(every)):
        try:
            use()
        except OSError as error:
            print(error)
"""


@pytest.mark.launch
def test_a_truncated_table_is_an_error_not_a_crash(tmp_path):
    done = run_code(TRUNCATED, tmp_path)
    assert done.returncode == 0, signal.Signals(-done.returncode).name if done.returncode < 0 else done.stderr
    for left in (0, 4096):
        assert done.stdout.count(f"this table was truncated to {left:,} of 323,584 bytes") == 3
        assert done.stdout.count(str(tmp_path / f"rows{left}.rows")) == 3
    assert done.stdout.count("load a checkpoint") == 6


def test_a_removed_table_is_warned_of_and_the_run_goes_on(tmp_path):
    est = on_disk(tmp_path / "rows")
    visit(est, spread(0))
    est.read(spread(0))
    shutil.rmtree(tmp_path / "rows")
    with pytest.warns(UserWarning, match=r"rows\.rows was removed while it was in use.*save a checkpoint"):
        visit(est, spread(1))
        est.read(spread(1))
    state = shown(est, N)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no second warning
        saved = compopt.save(est, tmp_path / "checkpoints")
    again = on_disk(tmp_path / "rows")
    compopt.load(again, saved)
    assert_same_bits(shown(again, N), state)


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "beside"])
def test_a_save_on_a_full_disk_names_the_file_and_leaves_the_earlier_one(blocking, tmp_path):
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        est = sogclr()
        visit(est, spread(0))
        compopt.save(est, disk / "checkpoints")
        state, t = shown(est, N), est.t
        visit(est, spread(1))
        balloon = fill(disk, left=4096)
        with pytest.raises(OSError, match=r"No space left.*earlier checkpoints are as they were.*checkpoint-00000002"):
            saved = compopt.save(est, disk / "checkpoints", blocking=blocking)
            saved.wait(30)
        assert [c.t for c in manifest.checkpoints(disk / "checkpoints")] == [t]
        again = sogclr()
        compopt.load(again, disk / "checkpoints")
        assert_same_bits(shown(again, N), state)
        balloon.unlink()
        compopt.save(est, disk / "checkpoints")
        compopt.load(again, disk / "checkpoints")
        assert_same_bits(shown(again, N), shown(est, N))


@pytest.mark.parametrize("how", ["mounted", "denied"])
def test_a_read_only_directory(how, tmp_path, monkeypatch):
    est = sogclr()
    visit(est, spread(0))
    if how == "mounted":
        with small_disk(tmp_path / "disk", 2 << 20, "ro") as disk:
            refused(est, disk, "read-only: name another directory")
        return
    (tmp_path / "disk").mkdir()
    if os.geteuid() == 0:  # root may write everywhere

        def denied(path, *args, exist_ok=False, **options):
            if exist_ok and os.path.isdir(path):
                return
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))

        monkeypatch.setattr(os, "mkdir", denied)
        monkeypatch.setattr(Path, "mkdir", denied)  # Path has its own reference in Python 3.10
        monkeypatch.setattr(os, "access", lambda *args: False)
    (tmp_path / "disk").chmod(0o500)
    refused(est, tmp_path / "disk", "may not write there: name another directory")


def refused(est, disk, remedy):
    with pytest.raises(OSError, match=remedy) as raised:
        compopt.save(est, disk / "checkpoints")
    assert str(disk / "checkpoints") in str(raised.value)
    with pytest.raises(OSError, match=remedy):
        on_disk(disk / "rows")
    with pytest.raises(PermissionError, match="offload_dir cannot be written; name another") as raised:
        on_disk(disk)
    assert str(disk) in str(raised.value)


def test_a_directory_removed_under_a_save_is_said(tmp_path, monkeypatch):
    est = sogclr()
    visit(est, spread(0))
    real = os.fsync

    def removed(descriptor):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", removed)
    with pytest.raises(FileNotFoundError, match="was removed while it was in use: by another run") as raised:
        compopt.save(est, tmp_path / "checkpoints")
    assert str(tmp_path / "checkpoints") in str(raised.value)
