"""compopt.data: stable indices for map-style data sets and for streams of keys."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from compopt.data import Indexed, key_index
from compopt.samplers import SpectralBatchSampler


class Pairs(Dataset):
    """Tuples."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor(float(i)), torch.tensor(-float(i))


def test_indexed_appends_the_position():
    data = Indexed(Pairs())
    assert len(data) == 10
    image, text, index = data[7]
    assert (float(image), float(text), int(index)) == (7.0, -7.0, 7)


def test_indexed_through_a_loader():
    seen = []
    for image, text, index in DataLoader(Indexed(Pairs()), batch_size=4, shuffle=True):
        assert index.dtype == torch.int64 and index.dim() == 1
        assert torch.equal(image.long(), index) and torch.equal(-text.long(), index)
        seen += index.tolist()
    assert sorted(seen) == list(range(10))


def test_indexed_over_a_concatenation():
    """The index runs over the concatenation, as sample groups do."""
    data = Indexed(ConcatDataset([Pairs(), TensorDataset(torch.arange(5.0), torch.zeros(5))]))
    assert len(data) == 15
    assert float(data[12][0]) == 2.0 and int(data[12][-1]) == 12


def test_negative_positions_are_normalised_or_refused():
    data = Indexed(Pairs())
    try:
        item = data[-1]
    except (IndexError, ValueError):
        return
    assert int(item[-1]) == 9


def test_key_index_is_stable_and_numbers_from_zero():
    keys = ["b/17.jpg", "a/3.jpg", "c/1.jpg"]
    index = key_index(keys)
    table = {key: index[key] for key in keys}
    assert sorted(table.values()) == [0, 1, 2]
    assert {key: key_index(keys)[key] for key in keys} == table


def test_key_index_does_not_depend_on_the_process():
    """Python's str hash is salted per process; rows must not be."""
    code = "from compopt.data import key_index; k = ['x', 'y', 'z', 'w']; t = key_index(k); print([t[i] for i in k])"
    results = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "PYTHONPATH": "."},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(results) == 1


def test_key_index_refuses_duplicates_or_maps_them_to_one_row():
    try:
        index = key_index(["a", "b", "a"])
    except ValueError as error:
        assert "a" in str(error)
        return
    assert index["a"] != index["b"]


def test_an_unknown_key_is_an_error():
    with pytest.raises(KeyError):
        key_index(["a", "b"])["c"]


def test_a_sampler_of_batches_given_as_a_sampler():
    """The DataLoader then collects batches of batches, and asks for a list where it means a position."""
    batches = SpectralBatchSampler(10, 5)
    with pytest.raises(TypeError, match=r"position must be an integer, got \[.*batch_sampler="):
        next(iter(DataLoader(Indexed(Pairs()), sampler=batches)))
    assert len(next(iter(DataLoader(Indexed(Pairs()), batch_sampler=batches)))[-1]) == 5
