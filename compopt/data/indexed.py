"""Stable data-set indices: what every stateful estimator needs and most loaders do not give."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from compopt import checks


class Indexed(Dataset[tuple[Any, ...]]):
    """A map-style data set whose items end with their position.

    ``(image, text)`` becomes ``(image, text, position)``; a named tuple gets a field ``index`` and stays one of its
    kind; a dict gets the key ``"index"``; any other item, a dataclass too, becomes ``(item, position)``, which a
    ``collate_fn`` must expect. Batched reading (``__getitems__``) is passed on to a data set that has it.

    Several data sets: ``Indexed(ConcatDataset([a, b]))``, whose positions are those of sample groups in the same order.
    Not ``ConcatDataset([Indexed(a), Indexed(b)])``: both would begin at 0, and samples of both would share rows. Where
    each must be wrapped by itself, tell where it begins: ``Indexed(b, first=len(a))``.

    Args:
        dataset: with ``len()`` and ``[]``.
        first: position of its first sample.

    Nothing is stored beside the data set, and nothing communicated.

    Raises:
        TypeError: the data set is a stream; a position that is a list; ``first`` is no integer.
        IndexError: a position outside the data set; negative ones count from its end.
        ValueError: an item has a field or key ``index`` already; ``first`` < 0.

    Example:
        >>> import compopt
        >>> compopt.data.Indexed([("a", "b"), ("c", "d")])[1]
        ('c', 'd', 1)
    """

    def __init__(self, dataset: Any, first: int = 0) -> None:
        mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not mapped or isinstance(dataset, IterableDataset):
            raise TypeError(
                f"dataset must be map-style (len() and []), got {type(dataset).__name__}; streaming data gets its "
                f"index from key_index"
            )
        self.dataset, self.first = dataset, checks.whole("first", first)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Any:
        position = self._checked(position)
        return _with_index(self.dataset[position], self.first + position)

    def _checked(self, position: int) -> int:
        """A position from 0 on: a negative one names the same sample as its positive twin."""
        if isinstance(position, list):
            raise TypeError(
                f"position must be an integer, got {position!r}; give a sampler of batches to the DataLoader as "
                f"batch_sampler=, not as sampler="
            )
        return range(len(self))[position]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """The items of a batch, as torch's ``DataLoader`` asks for them; read at once if the data set can.

        Raises:
            ValueError: the data set's own ``__getitems__`` does not return one item per position.
        """
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            return [self[position] for position in positions]
        positions = [self._checked(position) for position in positions]
        items = many(positions)
        if not isinstance(items, Sequence) or len(items) != len(positions):
            got = f"{len(items)} items" if isinstance(items, Sequence) else type(items).__name__
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ must return a list of {len(positions)} items, one for "
                f"each position, got {got}; Indexed gives each its position, and collate_fn makes the batch"
            )
        return [_with_index(item, self.first + position) for item, position in zip(items, positions, strict=True)]


def _with_index(item: Any, position: int) -> Any:
    """An item that ends with its position."""
    fields = item if isinstance(item, dict) else getattr(item, "_fields", ()) if isinstance(item, tuple) else ()
    if "index" in fields:
        raise ValueError("the items already have a field or key 'index'; rename it or use it directly")
    if isinstance(item, dict):
        return {**item, "index": position}
    if not isinstance(item, tuple | list):
        return item, position
    return _extended(type(item))(*item, position) if fields else (*item, position)


@cache
def _extended(kind: Any) -> Any:
    """A kind of named tuple, with its methods, that has one more field."""
    fields = namedtuple(kind.__name__, (*kind._fields, "index"))  # type: ignore[misc]  # the names are known later
    # workers send batches to the process that trains; a class made here is found there by the one it extends
    members = {"__slots__": (), "__doc__": kind.__doc__, "__reduce__": lambda self: (_restored, (kind, tuple(self)))}
    return type(kind.__name__, (fields, kind), members)


def _restored(kind: Any, values: Iterable[Any]) -> Any:
    """A pickled named tuple of an extended kind."""
    return _extended(kind)(*values)


def key_index(keys: Iterable[Hashable]) -> dict[Hashable, int]:
    """Keys of streaming data (URLs, file names) -> stable positions 0, 1, ... in the order given.

    Args:
        keys: one per sample, hashable, all different.

    Returns:
        A dict, which holds all keys in memory: one position for each.

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
