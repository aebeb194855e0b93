"""PrefetchLoader yields the loader's batches unchanged and announces each batch before it yields the previous one."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from compopt.data import PrefetchLoader


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


def test_the_loader_is_at_most_one_batch_ahead():
    taken = []

    def stream():
        for batch in batches(10):
            taken.append(batch[0])
            yield batch

    for k, _ in enumerate(PrefetchLoader(stream(), Log().announce)):
        assert len(taken) == min(k + 2, 10)


def test_leaving_the_loop_forgets_what_was_announced_and_closes_the_loader():
    log, closed = Log(), []

    class Loader:
        def __iter__(self):
            try:
                yield from batches(5)
            finally:
                closed.append(True)

    def loop():
        for _ in PrefetchLoader(Loader(), log.announce, log.forget):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()
    gc.collect()
    assert log == [("announce", 0, 10), ("announce", 1, 11), "forget"] and closed


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


def test_attributes_that_a_framework_assigns_reach_the_loader():
    """Lightning assigns ``worker_init_fn``, so that workers have different seeds."""
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    inner, outer = Log(), Log()
    ahead = PrefetchLoader(PrefetchLoader(loader, inner.announce, inner.forget), outer.announce)
    ahead.worker_init_fn = ahead.mine = print
    assert loader.worker_init_fn is print and not hasattr(loader, "mine") and ahead.mine is print
    list(ahead)
    assert inner[:3] == outer[:3] == [("announce", 0, 1, 2, 3), ("announce", 4, 5, 6, 7), ("announce", 8, 9)]


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
    announced = []
    list(PrefetchLoader([batch], lambda index: announced.append(index.tolist()), index=index))
    assert announced == [found]


@pytest.mark.parametrize(
    "batch, index, error, message",
    [
        ({"i": torch.tensor([4])}, -1, ValueError, "selects nothing from a batch with the keys 'i'"),
        ((1, 2), 2, ValueError, "selects nothing from a batch with 2 entries"),
        ({"index": torch.tensor([4])}, -1, ValueError, 'pass another, such as index="index"'),
        ((1, 2), "i", TypeError, "type tuple has no entry"),
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
