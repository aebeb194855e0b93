"""Stores and write-behind: rows equal those in memory bit for bit, with other threads and ending processes."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

import compopt
from compopt import accelerator
from compopt.stores import DiskStore, RowStore, WriteBehind
from compopt.stores.snapshot import Snapshot
from tests.devices import DEVICE, PRETEND, marked, needs_accelerator, quiet
from tests.helpers import bits, generator

CPU = torch.device("cpu")


def random_block(rows, words, g):
    """Return random bits, including NaN and denormals; equal ones where a row occurs twice."""
    raw = torch.randint(-(2**63), 2**63 - 1, (len(rows), 2 * words), generator=g)
    _, inverse = torch.unique(rows, return_inverse=True)
    return raw[inverse]


def random_rows(n, count, g):
    return torch.randint(n, (count,), generator=g)


def make_store(kind, n, words, directory):
    if kind == "disk":
        return DiskStore(directory, "rows", n, words)
    return RowStore(n, words, on_host=kind == "host")


class Slow:
    """A store whose reads and writes are slow and torn: half of the rows first, then a pause, then the rest."""

    def __init__(self, store, g):
        self._store, self._random = store, random.Random(int(torch.randint(1000, (), generator=g)))

    def __getattr__(self, name):
        return getattr(self._store, name)

    def pause(self):
        time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))

    def gather(self, rows):
        self.pause()
        half = len(rows) // 2
        first = self._store.gather(rows[:half])
        self.pause()
        return torch.cat([first, self._store.gather(rows[half:])])

    def scatter(self, rows, block):
        self.pause()
        half = len(rows) // 2
        self._store.scatter(rows[:half], block[:half])
        self.pause()
        self._store.scatter(rows[half:], block[half:])


# stores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [1, 2, 3, 300])  # rows of 48 bytes lie on two pages, those of 4,800 on two or three
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_stores_agree(kind, words, tmp_path):
    g, n = generator(words), 500
    store, twin = make_store(kind, n, words, tmp_path), RowStore(n, words)
    for step in range(40):
        rows = random_rows(store.n, 300, g)
        block = random_block(rows, words, g)
        store.scatter(rows, block)
        twin.scatter(rows, block)
        if step % 10 == 9:
            store.resize(store.n + 77)
            twin.resize(twin.n + 77)
        wanted = random_rows(store.n, 400, g)
        assert bits(store.gather(wanted)) == bits(twin.gather(wanted))
    block = random_block(torch.arange(100), words, g)
    with store.overwriting():
        store.scatter(torch.arange(50, 150), block)
    assert bits(store.gather(torch.arange(50, 150))) == bits(block)
    assert not store.gather(torch.arange(150, store.n)).any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["memory", "host", "disk"])
def test_a_snapshot_reads_rows_as_they_were(kind, seed, tmp_path, monkeypatch):
    """Commit before, between and during its reads, in a thread."""
    monkeypatch.setattr("compopt.stores.snapshot.UNSORTED", 500)
    g, n = generator(seed), 4000
    store = make_store(kind, n, 1, tmp_path)
    store.scatter(random_rows(n, n, g), torch.ones(n, 2, dtype=torch.int64))
    before, snapshot, stop = store.gather(torch.arange(n)), Snapshot(store), threading.Event()

    def commit():
        while not stop.is_set():
            rows = random_rows(n, 300, g)
            store.scatter(rows, random_block(rows, 1, g))

    for _ in range(seed * 10):
        rows = random_rows(n, 300, g)
        store.scatter(rows, random_block(rows, 1, g))
    thread = threading.Thread(target=commit)
    thread.start()
    cuts = [0, 1, 700, 1000, 3000, n]  # rows 1000 to 3000 are not read
    try:
        read = [snapshot.read(torch.arange(low, high)) for low, high in itertools.pairwise(cuts) if low != 1000]
    finally:
        stop.set()
        thread.join()
    assert bits(torch.cat(read)) == bits(torch.cat([before[:1000], before[3000:]]))
    snapshot.release()
    snapshot.release()
    assert store.undo_log is None


def test_a_snapshot_whose_log_cannot_be_kept_fails_and_the_commit_does_not(monkeypatch):
    store = RowStore(10, 1)
    snapshot = Snapshot(store)

    def full(rows):
        raise MemoryError("no memory for the log")

    monkeypatch.setattr(store, "gather", full)
    store.scatter(torch.arange(10), torch.ones(10, 2, dtype=torch.int64))
    monkeypatch.undo()  # only the commit failed to read
    assert store.gather(torch.arange(10)).sum() == 20
    with pytest.raises(MemoryError, match="for the log"):
        snapshot.read(torch.arange(10))


def test_rows_start_unseen_and_stay_on_the_host(tmp_path):
    for kind in ("host", "disk"):
        store = make_store(kind, 10, 1, tmp_path)
        assert store.gather(torch.arange(10)).abs().max() == 0
        store.to(torch.device("meta"))
        assert store.device == CPU


def test_more_rows_than_memory():
    for n in (10**14, 10**19):
        with pytest.raises(MemoryError, match=f"n={n} rows.*offload_dir="):
            RowStore(n, 1, on_host=True)


def test_a_table_that_cannot_be_opened_leaves_no_lock(tmp_path):
    (tmp_path / "rows.rows").mkdir()
    with pytest.raises(IsADirectoryError) as refused:  # the error is kept alive, as in a notebook
        DiskStore(tmp_path, "rows", 10, 1)
    assert refused.value and not (tmp_path / "rows.lock").exists()


def test_memory_is_claimed_when_it_is_written():
    start = time.perf_counter()
    store = RowStore(10**8, 2, on_host=True)  # 3.2 GB, which take seconds to write
    store.scatter(torch.tensor([10**8 - 1]), torch.ones(1, 4, dtype=torch.int64))
    assert time.perf_counter() - start < 1
    assert store._table.data_ptr() % 64 == 0


# the asynchronous front ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("seed", range(3))
def test_offloaded_equals_direct(kind, seed, tmp_path):
    """Random reads, tickets in any order, commits, drops, settling: each take() sees every commit before it."""
    g, n = generator(seed), 60
    choose = random.Random(seed)
    rows, direct = WriteBehind(Slow(make_store(kind, n, 1, tmp_path), g)), RowStore(n, 1)
    tickets = []
    for _ in range(250):
        action = choose.choice(["fetch", "prefetch", "prefetch", "take", "take", "commit", "commit", "drop", "settle"])
        if action == "fetch":
            wanted = random_rows(n, 40, g)
            assert bits(rows.fetch(wanted, wanted.clone())) == bits(direct.fetch(wanted))
        elif action == "prefetch":
            wanted = random_rows(n, 40, g)
            tickets.append((rows.prefetch(wanted, CPU), wanted))
        elif action == "take" and tickets:
            ticket, wanted = tickets.pop(choose.randrange(len(tickets)))
            assert bits(ticket.take()) == bits(direct.fetch(wanted))
        elif action == "commit":
            changed = random_rows(n, 30, g)
            block = random_block(changed, 1, g)
            rows.commit(changed, block)
            direct.commit(changed, block)
        elif action == "drop" and tickets:
            tickets.pop(0)
        elif action == "settle" and choose.random() < 0.1:
            rows.settle()
    rows.settle()
    assert bits(rows.store.gather(torch.arange(n))) == bits(direct.gather(torch.arange(n)))


@marked(needs_accelerator)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_offloaded_on_a_device_equals_direct_and_never_synchronises(kind, tmp_path):
    """Commits are computed on the device behind queued work, and the writer is slow; the loop must not wait."""
    device, g, n = DEVICE, generator(0), 500
    rows, direct = WriteBehind(Slow(make_store(kind, n, 1, tmp_path), g)), RowStore(n, 1)
    direct.to(device)
    busy = torch.randn(*([100, 100] if PRETEND else [2000, 2000]), device=device)
    batches = [random_rows(n, 300, g) for _ in range(60)]
    blocks = [random_block(batch, 1, g).to(device) for batch in batches]
    on_device = [batch.to(device) for batch in batches]
    ticket, results = rows.prefetch(batches[0], device), []
    with quiet():
        for k in range(59):
            following = rows.prefetch(batches[k + 1], device)
            busy @ busy
            results += [(ticket.take(), direct.fetch(on_device[k]))]
            results += [(rows.fetch(on_device[k], batches[k]), direct.fetch(on_device[k]))]
            rows.commit(on_device[k].clone(), blocks[k].clone())
            direct.commit(on_device[k], blocks[k])
            ticket = following
    for found, expected in results:
        assert bits(found.cpu()) == bits(expected.cpu())
    assert bits(rows.fetch(batches[0])) == bits(direct.fetch(batches[0]))  # on the CPU, as est.read() does
    rows.settle()
    assert bits(rows.store.gather(torch.arange(n))) == bits(direct.gather(torch.arange(n)))


class Gated(RowStore):
    """A store whose writes wait until a gate opens, and can be made to fail."""

    def __init__(self, n):
        super().__init__(n, 1, on_host=True)
        self.gate, self.failing = threading.Event(), False

    def scatter(self, rows, block):
        assert self.gate.wait(20)
        if self.failing:
            raise OSError("no space left")
        super().scatter(rows, block)


def commit_value(rows, value):
    rows.commit(torch.tensor([2]), torch.full((1, 2), value))


def value_of(block):
    return block[0, 0].item()


def test_nothing_waits_for_the_thread_until_too_many_commits_are_pending():
    rows = WriteBehind(Gated(5), limit=4)
    early = rows.prefetch(torch.tensor([2]), CPU)
    for value in range(1, 5):
        commit_value(rows, value)
    assert value_of(rows.store.gather(torch.tensor([2]))) == 0 and value_of(rows.fetch(torch.tensor([2]))) == 4
    assert value_of(early.take()) == 4
    start = time.perf_counter()
    threading.Timer(0.2, rows.store.gate.set).start()
    commit_value(rows, 5)  # waits for the gate
    assert time.perf_counter() - start > 0.05
    rows.settle()
    assert value_of(rows.store.gather(torch.tensor([2]))) == 5


def test_a_failed_write_is_raised_by_the_next_call_and_does_not_hang():
    rows = WriteBehind(Gated(5), limit=4)
    rows.store.failing = True
    ticket = rows.prefetch(torch.tensor([2]), CPU)
    commit_value(rows, 1)
    rows.store.gate.set()
    for call in (rows.settle, lambda: rows.fetch(torch.tensor([2])), lambda: commit_value(rows, 2), ticket.take):
        with pytest.raises(RuntimeError, match="commit 1 of 1 could not be written.*no space left"):
            call()


def test_a_failed_read_is_raised_where_it_is_taken():
    rows = WriteBehind(RowStore(5, 1, on_host=True))
    ticket = rows.prefetch(torch.tensor([7]), CPU)
    with pytest.raises(IndexError):
        ticket.take()
    commit_value(rows, 1)
    assert value_of(rows.fetch(torch.tensor([2]))) == 1


def test_tickets_cost_nothing_when_forgotten():
    rows = WriteBehind(RowStore(5, 1, on_host=True))
    dropped = [weakref.ref(rows.prefetch(torch.tensor([2]), CPU)) for _ in range(20)]  # as after a break
    gc.collect()
    assert not any(ref() for ref in dropped)


class GatedSlow(Gated):
    """A store whose rows are read ahead; reads are counted."""

    slow, reads = True, 0

    def gather(self, rows):
        self.reads += 1
        return super().gather(rows)


def test_tickets_that_are_dropped_before_their_turn_are_not_read():
    rows = WriteBehind(GatedSlow(5))
    commit_value(rows, 1)  # waits for the gate
    kept, *dropped = [rows.prefetch(torch.tensor([2]), CPU) for _ in range(20)]
    del dropped
    rows.store.gate.set()
    rows.settle()
    assert rows.store.reads == 1 and value_of(kept.take()) == 1


@marked(needs_accelerator)
def test_reads_on_the_cpu_wait_for_no_write_and_leave_tickets_valid():
    """Read as est.read() does, while batches are on a device."""
    rows, here = WriteBehind(GatedSlow(5)), torch.tensor([2], device=DEVICE)
    ticket = rows.prefetch(torch.tensor([2]), DEVICE)
    rows.commit(here, torch.full((1, 2), 3, device=DEVICE))  # waits for the gate
    assert value_of(rows.fetch(torch.tensor([2]))) == 3 and ticket.ahead is not None
    reads = 2 if accelerator.has_streams(DEVICE) else 3  # without streams a ticket reads when it is taken
    assert value_of(ticket.take()) == 3 and rows.store.reads == reads
    rows.store.gate.set()
    rows.settle()
    assert value_of(rows.fetch(here, torch.tensor([2]))) == 3


def test_tickets_of_two_threads_see_every_commit(switch_often):
    """With shards a background thread requests tickets while the main thread takes and commits."""
    rows, issued = WriteBehind(RowStore(5, 1, on_host=True)), []

    def prefetch():
        for _ in range(300):
            issued.append(rows.prefetch(torch.tensor([2]), CPU))

    thread = threading.Thread(target=prefetch)
    thread.start()
    value = taken = 0
    while thread.is_alive() or taken < len(issued):
        value += 1
        commit_value(rows, value)
        if taken < len(issued):
            assert value_of(issued[taken].take()) == value
            taken += 1
    thread.join()


def test_a_ticket_from_before_a_load_sees_it():
    rows = WriteBehind(RowStore(5, 1, on_host=True))
    ticket = rows.prefetch(torch.tensor([2]), CPU)
    rows.settle()
    rows.store.scatter(torch.arange(5), torch.full((5, 2), 9))
    assert value_of(ticket.take()) == 9


def test_copies_are_independent_and_complete():
    rows = WriteBehind(Slow(RowStore(5, 1, on_host=True), generator(0)))
    rows.store = RowStore(5, 1, on_host=True)
    commit_value(rows, 3)
    for twin in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert value_of(twin.fetch(torch.tensor([2]))) == 3
        commit_value(twin, 4)
        assert value_of(twin.fetch(torch.tensor([2]))) == 4
    assert value_of(rows.fetch(torch.tensor([2]))) == 3


def test_threads_end_with_the_object():
    before = set(threading.enumerate())
    rows = WriteBehind(RowStore(5, 1, on_host=True))
    rows.prefetch(torch.tensor([2]), CPU).take()
    commit_value(rows, 3)
    started = set(threading.enumerate()) - before
    assert len(started) == 1
    alive = weakref.ref(rows)
    del rows
    gc.collect()
    for thread in started:
        thread.join(10)
    assert alive() is None and not any(thread.is_alive() for thread in started)


def exit_code_of_a_fork(check):
    """Return the exit code of a forked process, which is the result of ``check``."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = check()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_goes_on():
    rows = WriteBehind(Gated(5))
    commit_value(rows, 3)  # unwritten at the fork
    ticket = rows.prefetch(torch.tensor([2]), CPU)

    def check():
        rows.store.gate.set()
        if not value_of(rows.fetch(torch.tensor([2]))) == 3 == value_of(ticket.take()):
            return 2
        rows.settle()  # writes the commit of the parent again
        if value_of(rows.store.gather(torch.tensor([2]))) != 3:
            return 3
        commit_value(rows, 4)
        rows.settle()
        return 0 if value_of(rows.store.gather(torch.tensor([2]))) == 4 else 4

    assert exit_code_of_a_fork(check) == 0
    rows.store.gate.set()
    rows.settle()
    assert value_of(rows.store.gather(torch.tensor([2]))) == 3


def test_a_fork_reads_a_file_that_its_parent_writes(tmp_path):
    """Commits unwritten at the fork are overlaid on the file; a commit of the forked process itself raises at once."""

    class GatedFile(DiskStore):
        gate = threading.Event()

        def scatter(self, rows, block):
            self.gate.wait()
            super().scatter(rows, block)

    rows = WriteBehind(GatedFile(tmp_path, "rows", 5, 1))
    commit_value(rows, 3)

    def check():
        rows.store.gate.set()
        rows.settle()
        if value_of(rows.fetch(torch.tensor([2]))) != 3:
            return 2
        with pytest.raises(RuntimeError, match="forked"):
            commit_value(rows, 4)
        return 0

    assert exit_code_of_a_fork(check) == 0
    rows.store.gate.set()
    rows.settle()
    assert value_of(rows.store.gather(torch.tensor([2]))) == 3


def test_rows_that_another_estimator_of_this_process_has_replaced(tmp_path):
    """The kernel's file locks separate processes, but not two objects of one process."""

    def build():
        return compopt.SogCLREstimator(20, offload="disk", offload_dir=tmp_path)

    one, other = build(), build()
    state = compopt.SogCLREstimator(20).state_dict()
    one.load_state_dict(state)
    assert one.read(torch.arange(3))["count"].sum() == 0
    other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="another estimator of this process"):
        one.read(torch.arange(3))
    assert other.read(torch.arange(3))["count"].sum() == 0
    one.load_state_dict(state)  # takes over the table again
    assert one.read(torch.arange(3))["count"].sum() == 0


@pytest.mark.launch
def test_the_interpreter_exits_and_finishes_its_commits(tmp_path):
    code = f"""
import time, torch
from compopt.stores import DiskStore, WriteBehind
class Slow(DiskStore):
    def scatter(self, rows, block):
        time.sleep(0.02)
        super().scatter(rows, block)
rows = WriteBehind(Slow({str(tmp_path)!r}, "rows", 5, 1))
ticket = rows.prefetch(torch.arange(5), torch.device("cpu"))
for k in range(20):
    block = torch.full((5, 4), float(k)).view(torch.int64)
    rows.commit(torch.arange(5), block)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    raw = bytearray((tmp_path / "rows.rows").read_bytes())
    assert torch.frombuffer(raw, dtype=torch.float32)[:20].tolist() == [19.0] * 20
