"""PrefetchLoader: the loader's batches, unchanged, each announced before its predecessor is handed out."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from compopt.data.prefetch_loader import PrefetchLoader, select_index


class Log(list):
    def announce(self, index):
        self.append(("announce", *index.tolist()))

    def forget(self):
        self.append("forget")


def batches(count):
    return [(f"batch {k}", torch.tensor([k, 10 + k])) for k in range(count)]


def test_each_batch_is_announced_before_its_predecessor_is_handed_out():
    log, loader = Log(), batches(3)
    ahead = PrefetchLoader(loader, log.announce, log.forget)
    for k, batch in enumerate(ahead):
        assert batch is loader[k]
        log.append(k)
    assert log == [("announce", 0, 10), ("announce", 1, 11), 0, ("announce", 2, 12), 1, 2, "forget"]
    assert [b[0] for b in ahead] == [b[0] for b in loader]  # again from the start


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_loaders(count):
    log = Log()
    assert list(PrefetchLoader(batches(count), log.announce, log.forget)) == batches_equal(count)
    assert log.count("forget") == 1 and len(log) == count + 1


def batches_equal(count):
    class Same:
        def __init__(self, batch):
            self.batch = batch

        def __eq__(self, other):
            return other[0] == self.batch[0] and torch.equal(other[1], self.batch[1])

    return [Same(batch) for batch in batches(count)]


def test_the_loader_is_at_most_one_batch_ahead():
    taken = []

    def stream():
        for batch in batches(10):
            taken.append(batch[0])
            yield batch

    for k, _ in enumerate(PrefetchLoader(stream(), Log().announce)):
        assert len(taken) == min(k + 2, 10)


def test_break_forgets_what_was_announced_and_closes_the_loader():
    log, closed = Log(), []

    class Loader:
        def __iter__(self):
            try:
                yield from batches(5)
            finally:
                closed.append(True)

    for _ in PrefetchLoader(Loader(), log.announce, log.forget):
        break
    gc.collect()
    assert log == [("announce", 0, 10), ("announce", 1, 11), "forget"] and closed


def test_an_exception_in_the_loop_forgets():
    log = Log()

    def loop():
        for _ in PrefetchLoader(batches(5), log.announce, log.forget):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()
    gc.collect()
    assert log[-1] == "forget"


def test_an_exception_of_the_loader_comes_after_its_last_good_batch():
    log, seen = Log(), []

    def stream():
        yield from batches(2)
        raise OSError("a broken file")

    with pytest.raises(OSError, match="a broken file"):
        for batch in PrefetchLoader(stream(), log.announce, log.forget):
            seen.append(batch[0])
    assert seen == ["batch 0", "batch 1"] and log[-1] == "forget"


def test_length_and_attributes_are_the_loaders():
    loader = DataLoader(TensorDataset(torch.zeros(10, 2), torch.arange(10)), batch_size=4)
    ahead = PrefetchLoader(loader, Log().announce)
    assert len(ahead) == 3 and ahead.dataset is loader.dataset and ahead.batch_size == 4
    with pytest.raises(TypeError):
        len(PrefetchLoader(iter([]), Log().announce))
    with pytest.raises(AttributeError):
        ahead.nothing  # noqa: B018
    assert len(copy.copy(ahead)) == 3


@pytest.mark.parametrize(
    "batch, index, found",
    [
        (("x", torch.tensor([1, 2])), -1, [1, 2]),
        ([torch.tensor([3]), "x"], 0, [3]),
        ({"i": torch.tensor([4])}, "i", [4]),
        ({"a": {"b": torch.tensor([5], dtype=torch.int32)}}, lambda batch: batch["a"]["b"], [5]),
    ],
)
def test_where_the_index_is(batch, index, found):
    assert select_index(batch, index).tolist() == found


@pytest.mark.parametrize(
    "batch, index, error, message",
    [
        ({"i": torch.tensor([4])}, -1, ValueError, "no key of a batch with the keys 'i'"),
        ((1, 2), 2, ValueError, "no position in a batch of 2"),
        ((1, 2), "i", TypeError, "position in a batch of type tuple"),
        ((1, 2), True, TypeError, "position"),
        (torch.zeros(3), -1, TypeError, "type Tensor has no entry"),
        (("x", torch.zeros(3)), -1, TypeError, "torch.float32"),
        (("x", [1, 2]), -1, TypeError, "selects list"),
        (("x", torch.zeros(3, 1, dtype=torch.int64)), -1, ValueError, r"shape \(3, 1\)"),
    ],
)
def test_where_it_is_not(batch, index, error, message):
    with pytest.raises(error, match=message):
        list(PrefetchLoader([batch], Log().announce, index=index))


def test_what_cannot_be_iterated():
    with pytest.raises(TypeError, match="got int"):
        PrefetchLoader(5, Log().announce)


def test_no_thread_is_left():
    before = threading.active_count()
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=4)
    for _ in PrefetchLoader(loader, Log().announce):
        break
    assert threading.active_count() == before


@pytest.mark.launch
def test_the_interpreter_exits_in_the_middle_of_a_loop():
    """With a ticket under way, a DataLoader with workers, and a loop that never ends properly."""
    code = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from compopt.data.prefetch_loader import PrefetchLoader
from compopt.stores import open_rows
rows = open_rows(40, 1, offload="cpu")
tickets = []
def announce(index):
    tickets.append(rows.prefetch(index, torch.device("cpu")))
if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, num_workers=1)
    loop = iter(PrefetchLoader(loader, announce))
    next(loop)
    rows.commit(torch.tensor([1]), torch.ones(1, 1, dtype=torch.complex128))
    print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip() == "end", done.stderr
