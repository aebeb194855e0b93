"""The files of a table on disk: their owner, and their state after a full disk or a kill."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch

import compopt
from compopt.stores import DiskStore, WriteBehind
from tests.helpers import assert_same_bits, batches, run, snapshot, train
from tests.test_stores import CPU, commit_value, value_of


def test_a_table_of_another_run_is_refused_until_a_load_follows(tmp_path):
    all_rows = torch.arange(10)
    first = DiskStore(tmp_path, "rows", 10, 1)
    first.scatter(all_rows, torch.full((10, 2), 5))
    second = DiskStore(tmp_path, "rows", 10, 1)
    rows = WriteBehind(second)
    for use in (
        lambda: second.gather(all_rows),
        lambda: second.scatter(all_rows, second.gather(torch.arange(10))),
        lambda: second.gather(torch.arange(10)),
        lambda: rows.fetch(all_rows),
        lambda: rows.prefetch(all_rows, CPU),
        lambda: commit_value(rows, 1),
    ):
        with pytest.raises(ValueError, match=r"rows\.rows already exists.*load a checkpoint.*offload_dir"):
            use()
    with second.overwriting():
        second.scatter(all_rows[:6], torch.full((6, 2), 7))
        killed = DiskStore(tmp_path, "rows", 10, 1)  # a process killed here leaves the table stale
        assert killed.stale
        second.scatter(all_rows[8:], torch.full((2, 2), 8))
    assert second.gather(all_rows)[:, 0].tolist() == [7] * 6 + [0] * 2 + [8] * 2
    commit_value(rows, 1)
    rows.settle()
    assert value_of(second.gather(torch.tensor([2]))) == 1


@pytest.mark.parametrize("n", [10, 5000])
def test_a_stale_table_of_any_size_can_be_emptied(n, tmp_path):
    DiskStore(tmp_path, "rows", 2000, 1).scatter(torch.arange(2000), torch.full((2000, 2), 1))
    store = DiskStore(tmp_path, "rows", n, 1)
    with store.overwriting():
        pass
    assert store.gather(torch.arange(n)).abs().max() == 0 and store.gather(torch.arange(n)).shape == (n, 2)


def test_bad_places_and_sizes(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a directory"):
        DiskStore(tmp_path / "file", "rows", 5, 1)
    for n in (10**16, 10**30):
        with pytest.raises(ValueError, match=f"n={n}.*cannot be kept"):
            DiskStore(tmp_path / "new", "rows", n, 1)
    assert not list((tmp_path / "new").iterdir())
    store = DiskStore(tmp_path / "new", "rows", 5, 1)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(store)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="offload_dir"):
        DiskStore(tmp_path, "rows", 5, 1)


def test_a_table_larger_than_the_disk_is_warned_of(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.warns(UserWarning, match="commits fail once it is full"):
        DiskStore(tmp_path, "rows", 100_000, 1)


def test_an_estimator_refuses_the_table_of_another_run_until_a_load_follows(tmp_path):
    def build():
        return compopt.SogCLREstimator(50, gamma=0.6, offload="disk", offload_dir=tmp_path / "rows")

    est = build()
    for batch in batches(50, 3, dtype=torch.float32):
        run(est, *batch)
        est.step()
    state, path = snapshot(est, 50), compopt.save(est, tmp_path / "checkpoints")
    again = build()
    with pytest.raises(ValueError, match="exists and holds the rows of another estimator of this process: load a"):
        again.read(torch.arange(50))
    compopt.load(again, path)
    assert_same_bits(snapshot(again, 50), state)
    assert sorted(os.listdir(tmp_path / "rows")) == ["normalizer-rows.lock", "normalizer-rows.rows"]


@pytest.mark.filterwarnings("ignore:.*was removed while it was in use")
def test_an_interrupted_run_with_rows_on_the_disk_can_begin_again(tmp_path):
    """The remedies of the message work while a traceback keeps the first estimator alive."""

    def cell():
        est = compopt.SogCLREstimator(10, offload="disk", offload_dir=tmp_path)
        train(est, batches(10, 2, dtype=torch.float32))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        cell()
    with pytest.raises(ValueError, match=r"another offload_dir, or delete normalizer-rows\.\* in it"):
        cell()
    for file in tmp_path.glob("*rows.*"):
        file.unlink()
    with pytest.raises(KeyboardInterrupt):
        cell()
    del kept
