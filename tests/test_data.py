"""compopt.data: stable indices for map-style data sets and for streams of keys."""

import pickle
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from compopt.data import Indexed, key_index
from compopt.samplers import SpectralBatchSampler


class Pairs(Dataset):
    """Data set of tuples."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor(float(i)), torch.tensor(-float(i))


def test_indexed_through_a_loader():
    seen = []
    for image, text, index in DataLoader(Indexed(Pairs()), batch_size=4, shuffle=True):
        assert index.dtype == torch.int64 and index.dim() == 1
        assert torch.equal(image.long(), index) and torch.equal(-text.long(), index)
        seen += index.tolist()
    assert sorted(seen) == list(range(10))


def test_parts_of_a_concatenation_begin_where_they_are_told():
    """Parts are wrapped separately: without `first` both begin at 0, and their samples share rows."""
    parts = ConcatDataset([Indexed(Pairs()), Indexed(Pairs(), first=10)])
    assert [int(parts[i][-1]) for i in range(20)] == list(range(20))
    assert int(Indexed(Pairs(), first=10)[-1][-1]) == 19
    assert [int(item[-1]) for item in Indexed(Pairs(), first=10).__getitems__([0, 9])] == [10, 19]
    with pytest.raises(ValueError, match="first must be .*-1"):
        Indexed(Pairs(), first=-1)


class Together(Pairs):
    """Data set that reads whole batches, as data sets on remote storage do."""

    def __init__(self):
        self.asked = []

    def __getitem__(self, i):
        raise AssertionError("item by item")

    def __getitems__(self, positions):
        self.asked.append(positions)
        return [super(Together, self).__getitem__(i) for i in positions]


def test_batched_reading_is_passed_on():
    data = Together()
    batches = list(DataLoader(Indexed(data), batch_size=4))
    assert data.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for image, _, index in batches:
        assert torch.equal(image.long(), index)
    (batch,) = DataLoader(Subset(Indexed(data), [7, 2]), batch_size=2)
    assert batch[-1].tolist() == [7, 2] == batch[0].tolist()


@pytest.mark.parametrize("items, got", [([("a",)], "1 items"), (torch.zeros(2, 3), "Tensor")])
def test_a_batch_that_is_not_one_item_per_position_is_refused(items, got):
    data = Together()
    data.__getitems__ = lambda positions: items
    with pytest.raises(ValueError, match=rf"Together\.__getitems__ .* 2 items.* got {got}"):
        Indexed(data).__getitems__([0, 1])


class Pair(NamedTuple):
    image: torch.Tensor
    text: torch.Tensor

    def total(self):
        return self.image + self.text


class Named(Pairs):
    def __getitem__(self, i):
        return Pair(*super().__getitem__(i))


@pytest.mark.parametrize("workers", [0, 1])
def test_named_tuples_keep_their_names(workers):
    """Test items and batches, also those that a worker pickles."""
    for batch in DataLoader(Indexed(Named()), batch_size=5, num_workers=workers):
        assert isinstance(batch, Pair) and batch._fields == ("image", "text", "index")
        assert torch.equal(batch.image.long(), batch.index) and batch.total().tolist() == [0] * 5
    item = Indexed(Named())[3]
    assert pickle.loads(pickle.dumps(item)) == item == (3.0, -3.0, 3)


def test_items_that_have_an_index_are_refused():
    class Taken(NamedTuple):
        index: int

    for item in (Taken(3), {"index": 3}):
        with pytest.raises(ValueError, match="'index'"):
            Indexed([item])[0]


def test_streams_are_refused_even_with_a_length():
    class Stream(IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(range(3))

    with pytest.raises(TypeError, match="Stream.*key_index"):
        Indexed(Stream())


@pytest.mark.parametrize("size", [1, None, 2])
@pytest.mark.parametrize("together", [False, True])
def test_a_sampler_of_batches_given_as_a_sampler(together, size):
    """Raise an error that names batch_sampler=, since the DataLoader passes lists of positions as positions."""
    batches, data = SpectralBatchSampler(10, 5), Indexed(Together() if together else Pairs())
    with pytest.raises(TypeError, match=r"position must be an integer, got \[.*batch_sampler="):
        next(iter(DataLoader(data, sampler=batches, batch_size=size)))
    assert len(next(iter(DataLoader(data, batch_sampler=batches)))[-1]) == 5


def test_key_index_numbers_keys_in_their_order():
    """Numbers do not depend on hashes, which are salted per process."""
    assert key_index(["b/17.jpg", "a/3.jpg", "c/1.jpg"]) == {"b/17.jpg": 0, "a/3.jpg": 1, "c/1.jpg": 2}
    with pytest.raises(ValueError, match=r"key 'a' occurs twice \(positions 0 and 2\)"):
        key_index(["a", "b", "a"])
