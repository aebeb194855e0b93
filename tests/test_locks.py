"""Locks on tables and checkpoint directories: one run writes at a time, and a second run's error names the holder."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import compopt
from compopt import files
from compopt.checkpoint import saving
from tests.helpers import features
from tests.launching import ROOT, environment

N = 50
HOLDER = """
import os, sys, time, torch, compopt
est = compopt.SogCLREstimator(50, offload="disk", offload_dir=sys.argv[1])
compopt.save(est, sys.argv[2])
if os.fork() == 0:
    print(os.getpid(), flush=True)  # by the child, which has closed its copies of the locks by now
time.sleep(120)
"""


def estimator(folder=None):
    place = {} if folder is None else {"offload": "disk", "offload_dir": folder}
    return compopt.SogCLREstimator(N, gamma=0.6, tau=0.1, **place)


def locks_held():
    return len(files._locks)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.0)


@pytest.fixture
def holder(tmp_path):
    """Start a run that holds a table and checkpoints in tmp_path and has forked a process, as a data loader does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "rows", tmp_path / "checkpoints"],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    worker = int(process.stdout.readline())
    yield process
    for pid in (process.pid, worker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_a_second_run_is_told_who_holds_them_and_waits_for_one_that_is_about_to_end(holder, tmp_path, monkeypatch):
    """The locks of a killed run are free even while a process that it forked is still alive."""
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.0)
    who = rf"is in use by process {holder.pid} on {re.escape(os.uname().nodename)} since \d{{4}}-.*end that one, or "
    with pytest.raises(RuntimeError, match=who + "name another offload_dir") as raised:
        estimator(tmp_path / "rows")
    assert str(tmp_path / "rows") in str(raised.value)
    est = estimator()
    with pytest.raises(RuntimeError, match=who + "save into another directory") as raised:
        compopt.save(est, tmp_path / "checkpoints")
    assert str(tmp_path / "checkpoints") in str(raised.value)
    compopt.load(est, tmp_path / "checkpoints")  # reading needs no lock
    assert len(list((tmp_path / "checkpoints").glob("checkpoint-*"))) == 1
    monkeypatch.setattr(files, "LOCK_SECONDS", 30.0)
    subprocess.Popen([sys.executable, "-c", f"import time, os; time.sleep(0.5); os.kill({holder.pid}, 9)"])
    started = time.monotonic()
    est = estimator(tmp_path / "rows")
    assert time.monotonic() - started < 20
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.0)
    holder.wait()
    compopt.load(est, tmp_path / "checkpoints")
    compopt.save(est, tmp_path / "checkpoints")


def test_locks_go_with_the_estimator(tmp_path):
    gc.collect()
    est = estimator(tmp_path / "rows")
    compopt.save(est, tmp_path / "checkpoints")
    there = [tmp_path / "rows" / "normalizer-rows.lock", saving.lock_file(tmp_path / "checkpoints")]
    held = locks_held()
    other = estimator()
    compopt.load(other, tmp_path / "checkpoints")
    compopt.save(other, tmp_path / "checkpoints")  # the same process: takes over the lock
    assert locks_held() == held and all(file.exists() for file in there)
    del est
    gc.collect()
    assert [file.exists() for file in there] == [False, True]
    del other
    gc.collect()
    assert not any(file.exists() for file in there) and locks_held() == held - 2


def test_a_trainer_with_a_directory_for_every_save_keeps_few_locks(tmp_path):
    gc.collect()
    est, held = estimator(), locks_held()
    for number in range(10):
        compopt.save(est, tmp_path / str(number))
    assert locks_held() == held + saving.CLAIMS
    assert sorted(path.name for path in tmp_path.glob(".*.lock")) == [".6.lock", ".7.lock", ".8.lock", ".9.lock"]


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_flock", lambda descriptor: OSError(38, "Function not implemented"))
    with pytest.warns(UserWarning, match=f"{tmp_path}.*no locks.*Function not implemented"):
        est = estimator(tmp_path / "rows")
    est(*features(4, 4, 0), torch.arange(4))
    est.step()
    assert est.read(torch.arange(4))["count"].min() == 1


def test_windows_is_refused_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(files.sys, "platform", "win32")
    est, folder = estimator(), tmp_path / "folder"
    for refused in (lambda: estimator(folder).read(torch.arange(4)), lambda: compopt.save(est, folder)):
        with pytest.raises(RuntimeError, match="Windows lacks POSIX file operations; save est.state_dict()"):
            refused()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_neither_has_nor_gives_back_the_lock(tmp_path, impatient):
    est = estimator(tmp_path / "rows")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            estimator(tmp_path / "rows")
        except RuntimeError:
            del est
            gc.collect()
            status = 0
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "rows" / "normalizer-rows.lock").exists()
