"""Stable data-set indices: what every stateful estimator needs and most loaders do not give."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch.utils.data import Dataset


class Indexed(Dataset[tuple[Any, ...]]):
    """A map-style data set whose items end with their position.

    ``(image, text)`` becomes ``(image, text, position)``; an item that is not a tuple or list becomes
    ``(item, position)``; a dict gets the key ``"index"``. Positions in a ``ConcatDataset`` of plain data sets are
    those of sample groups in the same order.

    Example:
        >>> import compopt
        >>> compopt.data.Indexed([("a", "b"), ("c", "d")])[1]
        ('c', 'd', 1)
    """

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset must be map-style (len() and []), got {type(dataset).__name__}; streaming data gets its "
                f"index from key_index"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Any:
        if isinstance(position, list):
            raise TypeError(
                f"position must be an integer, got {position!r}; give a sampler of batches to the DataLoader as "
                f"batch_sampler=, not as sampler="
            )
        position = range(len(self))[position]  # a negative position names the same sample as its positive twin
        item = self.dataset[position]
        if isinstance(item, dict):
            if "index" in item:
                raise ValueError("the items already have a key 'index'; rename it or use it directly")
            return {**item, "index": position}
        return (*item, position) if isinstance(item, tuple | list) else (item, position)


def key_index(keys: Iterable[Hashable]) -> dict[Hashable, int]:
    """Keys of streaming data (URLs, file names) -> stable positions 0, 1, ... in the order given.

    Raises:
        ValueError: a key occurs twice.

    Example:
        >>> import compopt
        >>> compopt.data.key_index(["b.jpg", "a.jpg"])["a.jpg"]
        1
    """
    index: dict[Hashable, int] = {}
    for key in keys:
        if key in index:
            raise ValueError(f"key {key!r} occurs twice (positions {index[key]} and {len(index)}); keys must differ")
        index[key] = len(index)
    return index
