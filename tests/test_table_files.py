"""The files of a table on disk: whose they are, what a full disk or a kill leaves of them."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from compopt.stores import DiskStore, MemoryStore, OffloadedRows, describe, read_table
from tests.helpers import generator
from tests.test_stores import CPU, LAYOUT, ONE_WORD, commit_value, value_of


def test_a_table_of_another_run_is_refused_until_a_load_follows(tmp_path):
    all_rows = torch.arange(10)
    first = DiskStore(tmp_path, "rows", 10, 1, describe(ONE_WORD))
    first.scatter(all_rows, torch.full((10, 1), 5, dtype=torch.complex128))
    second = DiskStore(tmp_path, "rows", 10, 1, describe(ONE_WORD))
    rows = OffloadedRows(second)
    for use in (
        lambda: second.gather(all_rows),
        lambda: second.scatter(all_rows, second.block(0, 10)),
        lambda: second.block(0, 10),
        lambda: second.write_block(3, torch.zeros(1, 1, dtype=torch.complex128)),
        lambda: rows.fetch(all_rows),
        lambda: rows.prefetch(all_rows, CPU),
        lambda: commit_value(rows, 1),
    ):
        with pytest.raises(ValueError, match=r"rows\.rows already exists.*load a checkpoint.*offload_dir"):
            use()
    with second.overwriting():
        second.write_block(0, torch.full((6, 1), 7, dtype=torch.complex128))
        with pytest.raises(ValueError, match="already exists"):
            second.gather(all_rows)  # half a load
        with pytest.raises(ValueError, match="while a checkpoint was loaded"):
            read_table(tmp_path, "rows", all_rows)
        killed = DiskStore(tmp_path, "rows", 10, 1, describe(ONE_WORD))  # a process killed there leaves it stale
        assert killed.stale
        second.write_block(8, torch.full((2, 1), 8, dtype=torch.complex128))
    assert second.gather(all_rows).real.flatten().tolist() == [7.0] * 6 + [0.0] * 2 + [8.0] * 2
    commit_value(rows, 1)
    rows.settle()
    assert value_of(second.gather(torch.tensor([2]))) == 1


def test_a_stale_table_can_be_emptied(tmp_path):
    DiskStore(tmp_path, "rows", 10, 1, {}).scatter(torch.arange(10), torch.ones(10, 1, dtype=torch.complex128))
    store = DiskStore(tmp_path, "rows", 10, 1, {})
    with store.overwriting():
        pass
    assert store.gather(torch.arange(10)).abs().max() == 0


def test_a_kill_while_a_table_is_emptied_leaves_it_to_a_load(tmp_path, monkeypatch):
    store = DiskStore(tmp_path, "rows", 10, 1, describe(ONE_WORD))
    store.scatter(torch.arange(10), torch.ones(10, 1, dtype=torch.complex128))
    truncate = os.ftruncate

    def killed(fd, size):
        truncate(fd, size)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "ftruncate", killed)
    with pytest.raises(KeyboardInterrupt), store.overwriting():
        pass
    monkeypatch.undo()
    assert (tmp_path / "rows.rows").stat().st_size == 0
    again = DiskStore(tmp_path, "rows", 10, 1, describe(ONE_WORD))
    with pytest.raises(ValueError, match="load a checkpoint"):
        again.gather(torch.arange(10))
    with again.overwriting():
        again.write_block(0, torch.full((5, 1), 2, dtype=torch.complex128))
    assert again.gather(torch.arange(10)).real.flatten().tolist() == [2.0] * 5 + [0.0] * 5


@pytest.mark.parametrize(
    "change, named", [({"n": 11}, "n is 10 there and 11"), ({"words": 2}, "words is 1"), ({"description": {}}, "count")]
)
def test_another_table_is_refused_with_both_values(change, named, tmp_path):
    options = {"n": 10, "words": 1, "description": describe(ONE_WORD)}
    DiskStore(tmp_path, "rows", **options)
    with pytest.raises(ValueError, match=named) as raised:
        DiskStore(tmp_path, "rows", **{**options, **change})
    assert str(tmp_path) in str(raised.value)


def test_bad_places_and_sizes(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a directory"):
        DiskStore(tmp_path / "file", "rows", 5, 1, {})
    for n in (10**16, 10**30):
        with pytest.raises(ValueError, match=f"n={n}.*cannot be kept"):
            DiskStore(tmp_path / "new", "rows", n, 1, {})
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(ValueError, match="does not exist; a process with writer=True"):
        DiskStore(tmp_path / "new", "rows", 5, 1, {}, writer=False)
    store = DiskStore(tmp_path / "new", "rows", 5, 1, {})
    (tmp_path / "new" / "rows.json").write_text("{")
    with pytest.raises(ValueError, match=r"rows\.json does not describe"):
        DiskStore(tmp_path / "new", "rows", 5, 1, {})
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(store)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="offload_dir"):
        DiskStore(tmp_path, "rows", 5, 1, {})


def test_a_table_larger_than_the_disk_is_warned_of(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.warns(UserWarning, match="commits fail once it is full"):
        DiskStore(tmp_path, "rows", 100_000, 1, {})


def test_description_says_how_to_decode(tmp_path):
    store = DiskStore(tmp_path, "rows", 3, LAYOUT.words, describe(LAYOUT))
    values = {"u": torch.tensor([[1.5, -2.0]], dtype=torch.float64), "count": torch.tensor([[3, 4]], dtype=torch.int32)}
    store.scatter(torch.tensor([1]), LAYOUT.pack(values, torch.zeros(1, 2, dtype=torch.complex128)))
    found = read_table(tmp_path, "rows", torch.tensor([1, 0]))
    assert found["u"].tolist() == [[1.5, -2.0], [0, 0]] and found["count"].tolist() == [[3, 4], [0, 0]]
    told = json.loads((tmp_path / "rows.json").read_text())
    assert (told["n"], told["words"], told["row_bytes"]) == (3, 2, 32)
    offset = told["description"]["offsets"]["count"]
    raw = (tmp_path / "rows.rows").read_bytes()[32 + offset :][:8]
    assert torch.frombuffer(bytearray(raw), dtype=torch.int32).tolist() == [3, 4]
    with pytest.raises(IndexError):
        read_table(tmp_path, "rows", torch.tensor([3]))


def test_a_complete_redo_record_is_applied_and_a_torn_one_ignored(tmp_path, monkeypatch):
    """Killed after the record and before the rows; then the record cut or altered anywhere."""
    store = DiskStore(tmp_path, "rows", 40, 1, describe(ONE_WORD))
    everything, some = torch.arange(40), torch.arange(0, 40, 3)
    before = ONE_WORD.pack({"u": torch.full((40, 2), 1.0)}, torch.zeros(40, 1, dtype=torch.complex128))
    store.scatter(everything, before)
    after = ONE_WORD.pack({"u": torch.full((len(some), 2), 2.0)}, before[some])
    monkeypatch.setattr(MemoryStore.__mro__[1], "scatter", lambda *_: None)
    store.scatter(some, after)
    monkeypatch.undo()
    wanted = torch.randperm(40, generator=generator(0))
    expected = torch.where((wanted % 3 == 0), 2.0, 1.0)
    assert read_table(tmp_path, "rows", wanted)["u"][:, 0].tolist() == expected.tolist()
    whole = (tmp_path / "rows.redo").read_bytes()[: 52 + len(some) * 24]
    for damaged in (b"", whole[:30], whole[:60], whole[:-1], whole[:-1] + b"\x01", b"x" + whole[1:], whole[:9] + whole):
        (tmp_path / "rows.redo").write_bytes(damaged)
        assert set(read_table(tmp_path, "rows", wanted)["u"][:, 0].tolist()) == {1.0}
    (tmp_path / "rows.redo").write_bytes(whole)
    store = DiskStore(tmp_path, "rows", 40, 1, describe(ONE_WORD))
    with store.overwriting():  # the record is the old table's
        store.write_block(0, before)
    assert set(read_table(tmp_path, "rows", wanted)["u"][:, 0].tolist()) == {1.0}


N, COUNT, POOL = 200_000, 20_000, 16

# most of the loop's time is the redo record and the scatter, in the middle of which it should be killed
COMMIT_LOOP = f"""
import sys, torch
from compopt.stores import DiskStore
store = DiskStore(sys.argv[1], "rows", {N}, 1, {{"columns": {{"step": [1, "int64"], "twin": [1, "int64"]}}}})
g = torch.Generator().manual_seed(0)
pool = [torch.randperm({N}, generator=g)[:{COUNT}] for _ in range({POOL})]
block = torch.empty({COUNT}, 2, dtype=torch.int64)
print("go", flush=True)
for k in range(1, 1_000_000):
    store.scatter(pool[k % {POOL}], block.fill_(k).view(torch.complex128))
"""


def test_sigkill_leaves_the_state_after_a_commit(tmp_path):
    """Processes killed at random moments of a commit loop; each commit writes its number into its rows."""
    choose, g = random.Random(0), generator(0)
    pool = [torch.randperm(N, generator=g)[:COUNT] for _ in range(POOL)]
    reached = set()
    server = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for trial in range(200):
        if trial >= 24 and len(reached) > 5:  # killed at different moments; on a busy machine commits take longer
            break
        server.stdin.write(f"{trial}\n")
        server.stdin.flush()
        child = int(server.stdout.readline())
        time.sleep(choose.uniform(0.005, 0.06) * (1 + trial // 24))
        os.kill(child, signal.SIGKILL)
        assert server.stdout.readline().strip() == str(-signal.SIGKILL)
        found = read_table(tmp_path / str(trial), "rows", torch.arange(N))
        assert torch.equal(found["step"], found["twin"])
        step = int(found["step"].max())
        expected = torch.zeros(N, dtype=torch.int64)
        for k in range(max(1, step - POOL + 1), step + 1):  # earlier ones are all overwritten
            expected[pool[k % POOL]] = k
        assert torch.equal(found["step"][:, 0], expected), f"not the state after commit {step}"
        (tmp_path / str(trial) / "rows.rows").unlink()
        reached.add(step)
    server.stdin.close()
    assert server.wait(20) == 0
    assert len(reached) > 5


# forks once torch is imported, so that two dozen processes are cheap
FORKS = f"""
import os, sys, torch
import compopt.stores
torch.set_num_threads(1)
base = sys.argv[1]
for line in sys.stdin:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        sys.stdout = os.fdopen(writing, "w")
        sys.argv[1] = os.path.join(base, line.strip())
        exec({COMMIT_LOOP!r})
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
