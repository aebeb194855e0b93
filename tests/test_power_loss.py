"""After a power loss a directory has the earlier checkpoint or the new one, and after save() the new one."""

import contextlib
import random

import pytest
import torch

import compopt
from compopt import files
from compopt.checkpoint import manifest
from tests.helpers import features
from tests.helpers import snapshot as shown
from tests.power import Disk

N = 4_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Use small pieces, so that a checkpoint has five files of rows."""
    monkeypatch.setattr(manifest, "PIECE_ROWS", 800)


TRIALS = 6  # random disks for each moment


def sogclr():
    return compopt.SogCLREstimator(N, gamma=0.6, tau=0.1)


def fill(est, seed):
    """Visit samples of one piece and of the last piece, so that the files of the others are linked."""
    for rows in (torch.arange(8) + 800 * (seed % 4), torch.arange(N - 8, N)):
        est(*features(8, 4, seed), rows)
        est.step()


def judged(disk, tmp_path, states, trials=TRIALS):
    """Load from the possible disks after a power loss; return the states found for each moment, and if it was over."""
    choose, found = random.Random(0), []
    for number, moment in enumerate(disk.moments):
        here = set()
        hows = [(True, None), (False, None), *[(choose, None)] * trials, *((True, name) for name in moment.unsynced())]
        for trial, (how, lost) in enumerate(hows):
            root = tmp_path / f"disk-{number}-{trial}"
            disk.after_power_loss(moment, root, how, lost)
            here.add(loaded(root / "run" / "checkpoints", states))
        found.append((moment.over, here))
    return found


def loaded(directory, states):
    """Return the number of the state that a directory holds; load every checkpoint that looks complete."""
    number = None
    for checkpoint in manifest.checkpoints(directory) if directory.is_dir() else ():
        if checkpoint.complete:
            est = sogclr()
            compopt.load(est, checkpoint.path)  # damage would raise
            number = next(i for i, state in states.items() if compare(shown(est, N), state))
    return number


def compare(found, state):
    return found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


@contextlib.contextmanager
def on(disk):
    try:
        with disk.watching():
            yield
    finally:
        disk.close()


def saved_under_watch(tmp_path, before, **options):
    """Return the disk that was watched during the last save, and the states by number."""
    root = tmp_path / "real"
    root.mkdir()
    est, states = sogclr(), {}
    directory = root / "run" / "checkpoints"
    for number in range(before):
        fill(est, seed=number)
        states[number] = shown(est, N)
        compopt.save(est, directory, keep=2)
    fill(est, seed=before)
    states[before] = shown(est, N)
    disk = Disk(root)
    with on(disk):
        saved = compopt.save(est, directory, keep=2, **options)
        if options.get("blocking") is False:
            saved.wait(30)
    return disk, states


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "beside"])
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(0, id="the-first"),
        pytest.param(1, id="the-second"),
        pytest.param(3, id="one-is-removed", marks=pytest.mark.slow),
    ],
)
def test_a_power_loss_leaves_the_earlier_one_or_the_new_one(before, blocking, tmp_path):
    disk, states = saved_under_watch(tmp_path, before, blocking=blocking)
    found = judged(disk, tmp_path, states)
    assert len(found) > 5 and found[-1][0]
    earlier = before - 1 if before else None
    for over, states_found in found:
        assert states_found <= ({before} if over else {earlier, before}), (over, states_found)
    assert {earlier} in [there for _, there in found]  # both states occur


@pytest.mark.parametrize("left_out", ["files", "names", "parents"])
def test_the_simulation_notices_what_is_not_synced(left_out, tmp_path, monkeypatch):
    """A writer that omits one kind of fsync loses checkpoints or leaves broken ones."""
    real = files.sync_directory
    if left_out == "files":
        monkeypatch.setattr(files, "write_file", lambda path, content: path.write_bytes(content))
    elif left_out == "names":
        monkeypatch.setattr(files, "sync_directory", lambda path: None)
    else:
        monkeypatch.setattr(
            files, "sync_directory", lambda path: real(path) if path.name.startswith("checkpoint") else None
        )
    disk, states = saved_under_watch(tmp_path, 0)
    with pytest.raises((AssertionError, ValueError)):
        found = judged(disk, tmp_path, states)
        assert found[-1][1] == {0}
