"""Indices of samples: positions in a map-style data set, numbered keys, integer keys, 128-bit identifiers."""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections import namedtuple
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from compopt import checks

_UID = re.compile(r"[0-9a-f]{32}", flags=re.IGNORECASE)
# Number of identifiers to check when a file of identifiers is opened.
SAMPLED = 4096


class Indexed(Dataset[tuple[Any, ...]]):
    """Map-style data set that appends its position to each item.

    Example:
        >>> import compopt
        >>> compopt.data.Indexed([("a", "b"), ("c", "d")])[1]
        ('c', 'd', 1)

    ``(image, text)`` becomes ``(image, text, position)``. A named tuple becomes an instance of a subclass with a field
    ``index``. A dict gets the key ``"index"``. Any other item, including a dataclass, becomes ``(item, position)``,
    which the ``collate_fn`` must handle. Batched reading (``__getitems__``) is used if the data set supports it.

    Several data sets: use ``Indexed(ConcatDataset([a, b]))``; its positions are those of sample groups in the same
    order. ``ConcatDataset([Indexed(a), Indexed(b)])`` would number both from 0, so that samples would share rows. To
    wrap the data sets separately, use ``Indexed(b, first=len(a))``.

    Args:
        dataset: data set with ``len()`` and ``[]``.
        first: position of the first sample.

    Raises:
        TypeError: the data set is iterable-style; a position is a list; ``first`` is not an integer.
        IndexError: a position is outside the data set; negative positions count from the end.
        ValueError: an item already has a field or key ``index``; ``first`` < 0.
    """

    def __init__(self, dataset: Any, first: int = 0) -> None:
        mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not mapped or isinstance(dataset, IterableDataset):
            raise TypeError(
                f"dataset must be map-style (len() and []), got {type(dataset).__name__}; streaming data gets its "
                f"index from key_index"
            )
        self.dataset, self.first = dataset, checks.non_negative_int("first", first)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Any:
        position = self._non_negative(position)
        return _with_index(self.dataset[position], self.first + position)

    def _non_negative(self, position: int) -> int:
        # a negative position must give a sample the same row as the equivalent positive position
        if isinstance(position, list):
            raise TypeError(
                f"position must be an integer, got {position!r}; give a sampler of batches to the DataLoader as "
                f"batch_sampler=, not as sampler="
            )
        return range(len(self))[position]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the items of a batch, for torch's ``DataLoader``; raise a ``ValueError`` if their number is wrong."""
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            return [self[position] for position in positions]
        positions = [self._non_negative(position) for position in positions]
        items = many(positions)
        if not isinstance(items, Sequence) or len(items) != len(positions):
            got = f"{len(items)} items" if isinstance(items, Sequence) else type(items).__name__
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ must return a list of {len(positions)} items, got {got}"
            )
        return [_with_index(item, self.first + position) for item, position in zip(items, positions, strict=True)]


def _with_index(item: Any, position: int) -> Any:
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
    """Return a subclass of a named-tuple class with an additional field ``index``, which inherits its methods."""
    fields = namedtuple(kind.__name__, (*kind._fields, "index"))  # type: ignore[misc]  # fields are known at run time
    # the new class is in no module: pickle its base class and the values
    members = {"__slots__": (), "__doc__": kind.__doc__, "__reduce__": lambda self: (_restored, (kind, tuple(self)))}
    return type(kind.__name__, (fields, kind), members)


def _restored(kind: Any, values: Iterable[Any]) -> Any:
    return _extended(kind)(*values)


def key_index(keys: Iterable[Hashable]) -> dict[Hashable, int]:
    """Number the keys of streaming data (URLs, file names) 0, 1, ... in the order given.

    Example:
        >>> import compopt
        >>> compopt.data.key_index(["b.jpg", "a.jpg"])["a.jpg"]
        1

    Args:
        keys: hashable keys, one per sample, all different.

    Returns:
        A dict from key to position, with all keys in memory.

    Raises:
        ValueError: a key occurs twice.
    """
    index: dict[Hashable, int] = {}
    for key in keys:
        if key in index:
            raise ValueError(f"key {key!r} occurs twice (positions {index[key]} and {len(index)}); keys must differ")
        index[key] = len(index)
    return index


class SampleIndex(Protocol):
    """Protocol of indices, which map samples to rows.

    Example:
        >>> import compopt
        >>> class ByName:  # an index of your own
        ...     n, fingerprint = 2, "names, version 1"
        ...     def index(self, sample, position):
        ...         return {"cat": 0, "dog": 1}[sample["__key__"]]
        >>> ByName().index({"__key__": "dog"}, 0)
        1

    Attributes:
        n: number of rows, an upper bound of the results of ``index``.
    """

    n: int

    @property
    def fingerprint(self) -> str:
        """Text that is equal for indices that map the same samples to the same rows; see ``est.data_fingerprint``."""

    def index(self, sample: dict[str, Any], position: int) -> int:
        """Return the row, ``0 .. n - 1``, of a sample with ``__key__`` and ``__url__``, or raise a ``ValueError``.

        ``position`` is the position of the sample in its shard, from 0.
        """


class KeyIndex:
    """Rows by integer key, such as img2dataset's ``__key__``, which combines shard number and row.

    Example:
        >>> import compopt
        >>> compopt.data.KeyIndex(n=20_000).index({"__key__": "000010007"})
        10007

    No manifest is needed, and rows do not change when samples are skipped, reordered or downloaded again from the same
    list. The rows of failed downloads are unused: ``n`` is the number of keys, not of samples.

    Args:
        n: number of keys, which are ``first .. first + n - 1``.
        first: smallest key.

    Raises:
        ValueError: ``n`` < 1 or ``first`` < 0; in :meth:`index`, the key is not an integer, or is out of range.
        TypeError: ``n`` or ``first`` is not an integer.
    """

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = checks.positive_int("n", n), checks.non_negative_int("first", first)

    @property
    def fingerprint(self) -> str:
        """Text with the range of keys."""
        return f"keys {self.first}..{self.first + self.n - 1}"

    def index(self, sample: Mapping[str, Any], position: int = 0) -> int:
        """Return the row of a sample, or raise a ``ValueError``; folders in the key and ``position`` are ignored."""
        key = _base_key(sample)
        if not (key.isascii() and key.isdigit()):
            raise ValueError(f"{_named(sample)} is no integer; use a ShardIndex")
        row = int(key) - self.first
        if not 0 <= row < self.n:
            raise ValueError(
                f"{_named(sample)} is outside {self.first} .. {self.first + self.n - 1}; give KeyIndex the number of "
                f"keys, not of samples"
            )
        return row


class UidIndex:
    """Rows by 128-bit identifier: the position in a sorted file, such as those of DataComp's subsets.

    Example:
        >>> import compopt, numpy, os, tempfile
        >>> uids = numpy.array([(0, 7), (1, 5)], dtype="u8,u8")  # the upper and the lower half, ascending
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     numpy.save(os.path.join(folder, "subset.npy"), uids)
        ...     index = compopt.data.UidIndex(os.path.join(folder, "subset.npy"))
        ...     index.index({"__key__": f"{1:016x}{5:016x}"})
        1

    The file is memory-mapped. The identifier of a sample, 32 hexadecimal digits, is its key (``uid`` or ``uid-17``) or
    otherwise the entry ``"uid"`` of its json.

    Args:
        path: an ``.npy`` file of dtype ``u8,u8``: the upper and lower half of each identifier, in ascending order, 16
            bytes per row.

    Attributes:
        n: number of rows in the file.
        fingerprint: checksum of ``n`` and up to 4,096 of the identifiers.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file has another dtype or no rows, is not sorted, or contains an identifier twice (only a sample
            of the rows is checked); in :meth:`index`, a sample has no identifier, or one that is not in the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._rows = rows = np.load(path, mmap_mode="r")  # a billion identifiers are 16 GB
        if rows.dtype.names is None or [rows.dtype[k] for k in range(len(rows.dtype.names))] != [np.uint64] * 2:
            raise ValueError(f"{self.path} must hold pairs of 64-bit integers (dtype 'u8,u8'), got {rows.dtype}")
        if rows.ndim != 1 or not len(rows):
            raise ValueError(f"{self.path} must hold a list of identifiers, got shape {rows.shape}")
        self.n = len(rows)
        places = np.unique(np.linspace(0, self.n - 1, min(self.n, SAMPLED)).astype(np.int64))
        neighbours = np.union1d(places, np.minimum(places + 1, self.n - 1))
        if any(one >= other for one, other in pairwise(map(self._at, neighbours))):
            raise ValueError(f"{self.path} is not sorted in ascending order, or has an identifier twice")
        sampled = [self._at(place) for place in places]
        self.fingerprint = "uids " + hashlib.sha256(repr((self.n, sampled)).encode()).hexdigest()[:32]

    def __reduce__(self) -> tuple[Any, ...]:
        return UidIndex, (self.path,)  # workers map the file again

    def _at(self, row: int) -> int:
        high, low = self._rows[row]
        return int(high) << 64 | int(low)

    def index(self, sample: Mapping[str, Any], position: int = 0) -> int:
        """Return the row of a sample by bisection, or raise a ``ValueError``; ``position`` is ignored."""
        uid = self._uid(sample)
        row = bisect_left(range(self.n), uid, key=self._at)
        if row == self.n or self._at(row) != uid:
            raise ValueError(f"uid {uid:032x} ({_named(sample)}) is not in {self.path}")
        return row

    @staticmethod
    def _uid(sample: Mapping[str, Any]) -> int:
        found = _UID.match(_base_key(sample))
        if found is not None:
            return int(found[0], 16)
        about = sample.get("json")
        if isinstance(about, bytes | str):
            try:
                about = json.loads(about)
            except ValueError:  # damaged json counts as missing
                about = None
        uid = about.get("uid") if isinstance(about, Mapping) else None
        if not isinstance(uid, str) or _UID.fullmatch(uid) is None:
            raise ValueError(
                f"{_named(sample)} has no identifier of 32 hexadecimal digits, neither in the key nor in its json "
                f"under 'uid'"
            )
        return int(uid, 16)


def _base_key(sample: Mapping[str, Any]) -> str:
    return str(sample.get("__key__")).rsplit("/", 1)[-1]


def _named(sample: Mapping[str, Any]) -> str:
    place = f"of {Path(str(sample['__url__'])).name}" if "__url__" in sample else "(no __url__)"
    return f"key {sample.get('__key__')!r} {place}"
