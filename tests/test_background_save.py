"""save(blocking=False): a checkpoint written during training has the state at the call; training is unaffected."""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import compopt
from compopt import files
from compopt.checkpoint import manifest
from compopt.stores.table import RowTable
from tests.helpers import assert_same_bits, features, run
from tests.helpers import snapshot as shown
from tests.pool import the_pool
from tests.test_sparse_saves import PLACEMENTS, inodes, placed, sogclr

N, PIECE = 203, 16
WAIT = 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_ROWS", PIECE)


def visit(est, rows, seed=0):
    """Prefetch and commit some rows."""
    z1, z2 = features(len(rows), 8, seed=seed)
    index = torch.as_tensor(list(rows))
    est.prefetch(index)
    run(est, z1, z2, index)
    est.step()


def fill(est, rank=0, size=1, seed=0):
    for step in range(3):
        rows = torch.randperm(N, generator=torch.Generator().manual_seed(seed + step))[:120]
        visit(est, rows[rank::size], seed=10 * (seed + step) + rank)


def loads(path, expected, **options):
    """Assert that the checkpoint has this state."""
    extra = len(expected["count"]) - N
    other = sogclr([{"n": N}, {"n": extra}] if extra else N, **options)
    compopt.load(other, path)
    assert_same_bits(expected, shown(other, other.n))


class Gate:
    """Wait in the `stop`-th call of a function, before or after it runs; as a context manager, replace the function."""

    def __init__(self, where, name, stop=1, after=False):
        self.where, self.name, self.stop, self.after = where, name, stop, after
        self.calls, self.reached, self.go = 0, threading.Event(), threading.Event()
        self.original = getattr(where, name)

    def __call__(self, *args, **options):
        self.calls += 1
        here = self.calls == self.stop
        if here and not self.after:
            self.hold()
        result = self.original(*args, **options)
        if here and self.after:
            self.hold()
        return result

    def hold(self):
        self.reached.set()
        assert self.go.wait(WAIT)

    def __enter__(self):
        setattr(self.where, self.name, self)
        return self

    def __exit__(self, *_):
        setattr(self.where, self.name, self.original)
        self.go.set()


class Reading(Gate):
    """Make the thread that writes a checkpoint wait before or after its `stop`-th read of rows."""

    def __init__(self, stop=1, after=False):
        super().__init__(RowTable, "snapshot", stop, after)

    def __enter__(self):
        def snapshot(table):
            held = make(table)
            if self.original is make:  # only in the first save
                self.original = held.read
                held.read = self.__call__
            return held

        make = self.original
        self.undo = lambda: setattr(RowTable, "snapshot", make)
        RowTable.snapshot = snapshot
        return self

    def __exit__(self, *_):
        self.undo()
        self.go.set()


def writing(stop=1, after=False):
    """Make the thread wait before or after writing its `stop`-th file."""
    return Gate(files, "write_file", stop, after)


# -- the saved state is that at the call -----------------------------------------------------------------------


@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("stop, after", [(1, False), (2, True), (7, False)])
def test_what_is_committed_meanwhile_is_not_in_it(stop, after, options, tmp_path):
    est, twin = sogclr(**placed(options, tmp_path / "rows")), sogclr()
    for one in (est, twin):
        fill(one)
    expected = shown(est, N)
    with Reading(stop, after) as gate:
        handle = compopt.save(est, tmp_path / "c", blocking=False)
        assert gate.reached.wait(WAIT) and not handle.done
        for one in (est, twin):
            fill(one, seed=50)
            visit(one, [0, 1, 202, 0], seed=9)
        assert not list(tmp_path.glob("c/*/manifest.json")) and not handle.done
        gate.go.set()
        path = handle.wait(WAIT)
    assert handle.done and path == handle.path
    loads(path, expected)
    assert_same_bits(shown(twin, N), shown(est, N))
    loads(compopt.save(est, tmp_path / "c"), shown(twin, N))


def test_state_that_is_not_rows(tmp_path):
    def build():
        options = {"prototypes": 8, "learn_tau": "individual", "dtype": torch.float64}
        return compopt.NeuCLIPEstimator(8, [{"n": N, "rho": 0.5}], **options)

    est, other = build(), build()
    z1, z2 = features(16, 8, seed=0)
    for _ in range(2):
        run(est, z1, z2, torch.arange(16))
        est.step()
    expected, t = shown(est, N), est.t
    with writing() as gate:
        handle = compopt.save(est, tmp_path, blocking=False)
        assert gate.reached.wait(WAIT)
        run(est, z2, z1, torch.arange(16, 32))
        est.step()
        est.sample_groups[0]["rho"] = 0.9
        gate.go.set()
        handle.wait(WAIT)
    compopt.load(other, tmp_path)
    assert_same_bits(expected, shown(other, N))
    assert other.t == t and other.sample_groups[0]["rho"] == 0.5


# -- concurrent operations ---------------------------------------------------------------------------------------


def test_the_next_save_waits(tmp_path):
    est = sogclr()
    fill(est)
    first_state = shown(est, N)
    with writing() as gate:
        first = compopt.save(est, tmp_path, blocking=False)
        assert gate.reached.wait(WAIT)
        visit(est, [0, 1], seed=5)
        threading.Timer(0.3, gate.go.set).start()
        second = compopt.save(est, tmp_path, blocking=False)
        assert first.done  # the second save has waited for it
        visit(est, [100, 101], seed=6)
        second.wait(WAIT)
    loads(first.path, first_state)
    third = compopt.save(est, tmp_path)
    loads(third, shown(est, N))
    assert [c.path for c in manifest.checkpoints(tmp_path)] == [second.path, third]


def others(est, folder):
    """Return operations that must wait for a running save."""
    state = sogclr()
    visit(state, range(9), seed=3)
    path = compopt.save(state, folder)
    return {
        "load": lambda: compopt.load(est, path),
        "load_state_dict": lambda: est.load_state_dict(state.state_dict()),
        "add_sample_group": lambda: est.add_sample_group({"n": 40}),
    }


@pytest.mark.parametrize(
    "name, offload", [("load", "disk"), ("load_state_dict", None), ("add_sample_group", "cpu"), ("load", None)]
)
def test_what_replaces_the_rows_waits(name, offload, tmp_path):
    est = sogclr(**placed({"offload": offload}, tmp_path / "rows"))
    fill(est)
    expected = shown(est, N)
    action = others(est, tmp_path / "other")[name]
    with Reading(3) as gate:
        handle = compopt.save(est, tmp_path / "c", blocking=False)
        assert gate.reached.wait(WAIT)
        thread = threading.Thread(target=action)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        gate.go.set()
        thread.join(WAIT)
        assert not thread.is_alive()
    loads(handle.wait(0), expected)
    visit(est, range(30), seed=4)
    loads(compopt.save(est, tmp_path / "c"), shown(est, est.n))


def test_arguments_and_handle(tmp_path, monkeypatch):
    est = sogclr()
    fill(est)
    with pytest.raises(TypeError, match="blocking must be True or False"):
        compopt.save(est, tmp_path, blocking=0)
    with writing() as gate:
        handle = compopt.save(est, tmp_path, blocking=False)
        assert gate.reached.wait(WAIT)
        with pytest.raises(TimeoutError, match="the save continues"):
            handle.wait(timeout=0.01)
        assert "done=False" in repr(handle)
    assert "done=True" in (handle.wait(), repr(handle))[1]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more threads")))
        handle = compopt.save(est, tmp_path, blocking=False)
    assert handle.done
    loads(handle.wait(), shown(est, N))


ENDING = """
import sys, time, torch, compopt
from compopt import files
write = files.write_file
def slow(*args):
    time.sleep(0.3)
    if sys.argv[2] == "fail":
        raise OSError("disk full")
    write(*args)
files.write_file = slow
est = compopt.MovingAverageEstimator(50)
est.update(torch.zeros(5), torch.arange(5))
est.step()
compopt.save(est, sys.argv[1], blocking=False)
"""


@pytest.mark.launch
@pytest.mark.parametrize("how", ["well", "fail"])
def test_the_end_of_the_interpreter_waits(how, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path), how], capture_output=True, text=True, timeout=60
    )
    complete = [c.complete for c in manifest.checkpoints(tmp_path)]
    assert complete == ([True] if how == "well" else []), done.stderr
    assert ("disk full" in done.stderr) == (how == "fail"), done.stderr


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch):
    """Return a function that makes writing the k-th file fail."""

    def fail_at(k):
        calls = []

        def broken(*args):
            calls.append(args)
            if len(calls) == k:
                raise OSError("disk full")
            write(*args)

        monkeypatch.setattr(files, "write_file", broken)

    write = files.write_file
    yield fail_at
    monkeypatch.undo()


@pytest.mark.parametrize("k", [1, 15])  # a file of rows, the manifest
@pytest.mark.parametrize("told", ["wait", "save"])
def test_errors_of_the_disk_arrive(k, told, failing, tmp_path):
    est = sogclr()
    fill(est)
    earlier, state = compopt.save(est, tmp_path), shown(est, N)
    fill(est, seed=20)
    before = inodes(earlier)
    failing(k)
    handle = compopt.save(est, tmp_path, blocking=False)
    if told == "wait":
        for _ in range(2):
            with pytest.raises(OSError, match="disk full"):
                handle.wait(WAIT)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            visit(est, [0, 1])
    else:
        handle.settle()
        with pytest.warns(RuntimeWarning, match="disk full.*the next save raises"):
            visit(est, [0, 1])
        with pytest.raises(OSError, match="disk full"):
            compopt.save(est, tmp_path)
    assert not handle.path.exists()
    loads(tmp_path, state)
    after = compopt.save(est, tmp_path, blocking=False).wait(WAIT)
    assert inodes(earlier) == before
    loads(after, shown(est, N))


# -- ranks -------------------------------------------------------------------------------------------------------

LAYOUTS = {"shard": {"shard": True}, "disk": {"offload": "disk"}}


def on_ranks(group, directory, options):
    """Continue training while each rank's save is held at a different point; return states, paths and file names."""
    manifest.PIECE_ROWS = PIECE
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    est = sogclr(process_group=group, **placed(options, os.path.join(directory, "rows")))
    twin = sogclr(process_group=group)
    for one in (est, twin):
        fill(one, rank, size)
    states, written = [], []
    for number in range(3):
        states.append(shown(est, N))
        with Reading(1 if number == 2 else 1 + rank, after=bool(rank)) as gate:
            handle = compopt.save(est, os.path.join(directory, "c"), keep=3, blocking=False)
            gate.reached.wait(0.3)
            for one in (est, twin):
                for step in range(3):  # many rows in the first save, then few
                    rows = list(range(size * step + rank, N if number == 0 else 20, 2 * size))
                    visit(one, rows, seed=100 * number + 10 * step + rank)
            assert not handle.done
            gate.go.set()
            written.append(str(handle.wait(WAIT)))
        torch.distributed.barrier(group)
    assert_same_bits(shown(twin, N), shown(est, N))
    folder = Path(written[2])
    return states, written, sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [LAYOUTS["shard"], pytest.param(LAYOUTS["disk"], marks=pytest.mark.slow)], ids=LAYOUTS
)
def test_on_ranks(options, tmp_path):
    (states, written, names), *rest = the_pool().run(on_ranks, 4, str(tmp_path), options)
    for other_states, other_written, _ in rest:
        assert other_written == written
        for a, b in zip(states, other_states, strict=True):
            assert_same_bits(a, b)
    for path, state in zip(written, states, strict=True):
        loads(path, state)
    path = tmp_path / "c" / os.path.basename(written[2])
    _, listed = manifest.read(manifest.checkpoint_at(path))
    assert names == sorted([*(file.name for file in listed), "manifest.json"])


def one_fails(group, directory, failing):
    """Save while one rank cannot write, then save again."""
    manifest.PIECE_ROWS = PIECE
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    est = sogclr(process_group=group, shard=True)
    fill(est, rank, size)
    compopt.save(est, directory)
    state = shown(est, N)
    fill(est, rank, size, seed=20)
    original, told = files.write_file, []

    def broken(path, content):
        if rank == failing and path.name.startswith("rows-"):
            raise OSError("disk full")
        original(path, content)

    try:
        files.write_file = broken
        handle = compopt.save(est, directory, blocking=False)
        torch.distributed.barrier(group)
        try:
            handle.wait(WAIT)
        except (OSError, RuntimeError) as error:
            told.append(str(error))
    finally:
        files.write_file = original
    torch.distributed.barrier(group)
    present = sorted(os.listdir(directory))
    torch.distributed.barrier(group)
    after = compopt.save(est, directory, blocking=False).wait(WAIT)
    return state, told, present, str(after), shown(est, N)


@pytest.mark.distributed
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails(failing, tmp_path):
    for rank, result in enumerate(the_pool().run(one_fails, 4, str(tmp_path), failing)):
        _, told, present, after, state = result
        assert "disk full" in told[0] and (rank == failing or f"rank {failing} failed" in told[0])
        assert len(told) == len(present) == 1
        loads(after, state)


def test_a_change_of_the_working_directory_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    est = sogclr()
    save = compopt.save(est, "run", blocking=False)
    monkeypatch.chdir("elsewhere")
    made = save.wait()
    assert not made.is_absolute() and (tmp_path / made).exists() and not list((tmp_path / "elsewhere").iterdir())
