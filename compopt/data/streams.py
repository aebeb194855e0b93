"""The index of a sample in a stream of tar shards, added where it is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from compopt.data.shard_list import check_files


class SampleIndex(Protocol):
    """What gives samples their rows: :class:`ShardIndex`, :class:`KeyIndex`, :class:`UidIndex`, or your own.

    Attributes:
        n: rows; ``index`` is below it.

    Example:
        >>> import compopt
        >>> class ByName:  # an index of your own
        ...     n, fingerprint = 2, "names, version 1"
        ...     def index(self, sample, position):
        ...         return {"cat": 0, "dog": 1}[sample["__key__"]]
        >>> ByName().index({"__key__": "dog"}, 0)
        1
    """

    n: int

    @property
    def fingerprint(self) -> str:
        """What must be equal for the same sample to have the same row; ``est.data_fingerprint`` takes it."""

    def index(self, sample: dict[str, Any], position: int) -> int:
        """The row of a sample, ``0 .. n - 1``; a ``ValueError`` if it has none.

        Args:
            sample: as the reader gives it, with ``__key__`` and ``__url__``.
            position: its place in its shard, from 0 on.
        """


class indexed_reader:
    """A reader stage of a webdataset pipeline whose samples have ``sample["index"]``.

    It gives one shard at a time to the stage that it wraps, and counts the samples which come out. Put it where that
    stage was: after splitting by node and worker, before shuffling, selecting, renaming and decoding. Later stages may
    then drop, reorder and repeat samples as they like; ``rename`` and ``to_tuple`` must name ``index``.

    Args:
        read: from an iterable of sources (``{"url": ...}``) to samples, such as webdataset's
            ``tarfile_to_samples(handler=...)``.
        index: the rows.

    Nothing is communicated: a row depends on nothing but the sample, its shard and its place in there.

    Raises:
        TypeError: ``read`` is no function, or ``index`` none of the indices.
        ValueError: while reading: a sample that the index does not know.

    Warns:
        UserWarning: a shard gave fewer samples than its index says: samples of which nothing could be read are missing,
            and the rows of those after them in this shard have shifted.

    Example:
        >>> import compopt
        >>> def read(sources):  # webdataset.tarfile_to_samples() in a pipeline
        ...     for source in sources:
        ...         yield from ({"__url__": source["url"], "__key__": key} for key in "ab")
        >>> index = compopt.data.ShardIndex({"0.tar": 2, "1.tar": 2})
        >>> stage = compopt.data.indexed_reader(read, index)
        >>> [sample["index"] for sample in stage([{"url": "1.tar"}, {"url": "0.tar"}])]
        [2, 3, 0, 1]
    """

    def __init__(self, read: Callable[[Iterable[Any]], Iterable[dict[str, Any]]], index: SampleIndex) -> None:
        if not callable(read):
            raise TypeError(f"read must be a reader stage, a function of sources, got {type(read).__name__}")
        if not hasattr(index, "index") or not hasattr(index, "n"):
            raise TypeError(f"index must be a ShardIndex, KeyIndex or UidIndex, got {type(index).__name__}")
        self.read, self.index = read, index
        self._short: dict[str, int] = {}

    def __call__(self, sources: Iterable[Any]) -> Iterator[dict[str, Any]]:
        for source in sources:
            position, url = -1, None
            for position, sample in enumerate(self.read(iter([source]))):
                url = sample.get("__url__", url)
                sample["index"] = self.index.index(sample, position)
                yield sample
            self._compare(url or source, position + 1)

    def check(self, shards: Iterable[str]) -> None:
        """Refuse shards that the index does not know, as far as a look before training shows it.

        A :class:`ShardIndex` looks at names and files. For any other index the first sample of the first shard and all
        of the last shard are read: the largest keys are there. One process of many is enough.

        Args:
            shards: paths or URLs.

        Raises:
            ValueError: a shard or a sample that the index does not know.
            FileNotFoundError: a local shard is missing or empty.
        """
        shards = list(shards)
        check = getattr(self.index, "check", None)
        if check is not None:
            check(shards)
            return
        check_files(shards)
        for shard, count in (shards[0], 1), (shards[-1], None):
            for position, sample in enumerate(islice(self.read(iter([{"url": shard}])), count)):
                self.index.index(sample, position)

    def _compare(self, source: Any, found: int) -> None:
        """Warn once of each shard that gave less than it should."""
        url = source.get("url") if isinstance(source, dict) else source
        count = getattr(self.index, "count", None)  # keys have none: any of them may be missing
        if count is None or not isinstance(url, str) or url in self._short:
            return
        expected = count(url)
        if found < expected:
            self._short[url] = expected - found
            warnings.warn(
                f"shard {url} gave {found} of {expected} samples; by now {sum(self._short.values())} samples of "
                f"{len(self._short)} shards are missing. Samples after a missing one have shifted rows in this pass; "
                f"a KeyIndex has no such hole",
                stacklevel=2,
            )
