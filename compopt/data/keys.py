"""Rows of streaming samples that carry a number or a unique identifier of their own."""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compopt import checks

_UID = re.compile(r"[0-9a-f]{32}", flags=re.IGNORECASE)
# Rows of a file of identifiers that are looked at when it is opened.
SAMPLED = 4096


class KeyIndex:
    """The row of a sample is its integer key: img2dataset's ``__key__``, shard number and row in one.

    No manifest is needed, and nothing moves when samples are skipped, reordered or downloaded again from the same list.
    Keys of failed downloads are rows that stay idle: ``n`` counts keys, not samples.

    Args:
        n: keys are ``first .. first + n - 1``.
        first: the smallest one.

    Nothing else is stored, and nothing communicated.

    Raises:
        ValueError: n < 1 or first < 0.
        TypeError: n or first is no integer.

    Example:
        >>> import compopt
        >>> compopt.data.KeyIndex(n=20_000).index({"__key__": "000010007"})
        10007
    """

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = checks.count("n", n), checks.whole("first", first)

    @property
    def fingerprint(self) -> str:
        """The range of keys, in words."""
        return f"keys {self.first}..{self.first + self.n - 1}"

    def index(self, sample: Mapping[str, Any], position: int = 0) -> int:
        """The row of a sample, ``0 .. n - 1``; its position does not matter.

        Args:
            sample: with ``__key__``; folders before the key do not count.
            position: ignored.

        Raises:
            ValueError: the key is no integer, or outside the range.
        """
        del position
        key = str(sample.get("__key__")).rsplit("/", 1)[-1]
        if not (key.isascii() and key.isdigit()):
            raise ValueError(f"key {sample.get('__key__')!r} {_place(sample)} is no integer; use a ShardIndex")
        row = int(key) - self.first
        if not 0 <= row < self.n:
            raise ValueError(
                f"key {sample.get('__key__')!r} {_place(sample)} is outside {self.first} .. {self.first + self.n - 1}; "
                f"give KeyIndex the number of keys, not of samples"
            )
        return row


class UidIndex:
    """The row of a sample is the place of its 128-bit identifier in a sorted file: DataComp's subsets.

    The file is mapped into memory, not read. Identifiers are looked for in the key (``uid`` or ``uid-17``), then in
    the sample's json under ``"uid"``: 32 hexadecimal digits.

    Args:
        path: an ``.npy`` file of dtype ``u8,u8``: the upper and lower half of each identifier, ascending, 16 bytes a
            row.

    Attributes:
        n: rows of the file.
        fingerprint: checksum of ``n`` and some 4,096 of the identifiers.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another dtype or no rows, is not sorted, or has an identifier twice (as far as the
            places that are looked at show).

    Example:
        >>> import compopt, numpy, os, tempfile
        >>> uids = numpy.array([(0, 7), (1, 5)], dtype="u8,u8")  # the upper and the lower half, ascending
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     numpy.save(os.path.join(folder, "subset.npy"), uids)
        ...     index = compopt.data.UidIndex(os.path.join(folder, "subset.npy"))
        ...     index.index({"__key__": f"{1:016x}{5:016x}"})
        1
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        rows = np.load(path, mmap_mode="r")
        if rows.dtype.names is None or [rows.dtype[k] for k in range(len(rows.dtype.names))] != [np.uint64] * 2:
            raise ValueError(f"{self.path} must hold pairs of 64-bit integers (dtype 'u8,u8'), got {rows.dtype}")
        if rows.ndim != 1 or not len(rows):
            raise ValueError(f"{self.path} must hold a list of identifiers, got shape {rows.shape}")
        self.n, self._rows = len(rows), rows
        places = np.unique(np.linspace(0, self.n - 1, min(self.n, SAMPLED)).astype(np.int64))
        seen = [self._at(place) for place in places]
        beside = [(self._at(place), self._at(place + 1)) for place in places if place + 1 < self.n]
        if any(one >= other for one, other in [*zip(seen, seen[1:], strict=False), *beside]):
            raise ValueError(f"{self.path} is not sorted in ascending order, or has an identifier twice")
        self.fingerprint = "uids " + hashlib.sha256(repr((self.n, seen)).encode()).hexdigest()[:32]

    def _at(self, row: int) -> int:
        high, low = self._rows[row]
        return int(high) << 64 | int(low)

    def index(self, sample: Mapping[str, Any], position: int = 0) -> int:
        """The row of a sample, ``0 .. n - 1``, by bisection; its position does not matter.

        Args:
            sample: with ``__key__``, perhaps ``json``.
            position: ignored.

        Raises:
            ValueError: the sample has no identifier, or one that is not in the file.
        """
        del position
        uid = _uid(sample)
        row = bisect_left(range(self.n), uid, key=self._at)
        if row == self.n or self._at(row) != uid:
            raise ValueError(f"uid {uid:032x} (key {sample.get('__key__')!r} {_place(sample)}) is not in {self.path}")
        return row

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows = np.load(self.path, mmap_mode="r")


def _uid(sample: Mapping[str, Any]) -> int:
    found = _UID.match(str(sample.get("__key__")).rsplit("/", 1)[-1])
    if found is not None:
        return int(found[0], 16)
    about = sample.get("json")
    if isinstance(about, bytes | str):
        about = _parsed(about)
    uid = about.get("uid") if isinstance(about, Mapping) else None
    if not isinstance(uid, str) or _UID.fullmatch(uid) is None:
        raise ValueError(
            f"key {sample.get('__key__')!r} {_place(sample)} has no identifier of 32 hexadecimal digits, neither in "
            f"the key nor in its json under 'uid'"
        )
    return int(uid, 16)


def _parsed(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # damaged, as if it were not there
        return None


def _place(sample: Mapping[str, Any]) -> str:
    return f"of {Path(str(sample['__url__'])).name}" if "__url__" in sample else "(no __url__)"
