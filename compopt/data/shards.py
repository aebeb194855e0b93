"""Rows of samples in tar shards, by shard and position, the reader stage that adds them, and the files themselves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from compopt import checks
from compopt.data.indexed import SampleIndex

FORMAT = 1
# Files of one sample share what is before the first dot of the last part of their name, as in webdataset.
_NAME = re.compile(r"^((?:.*/|)[^./][^.]*)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
# Shards whose headers are read at a time: the work is seeks.
THREADS = 8


class ShardIndex:
    """Rows of shards: the first shard has rows ``0 .. count - 1`` in the order of its tar, the next one follows.

    A sample's row depends on nothing but its shard and its place in there: neither on the order in which shards are
    read, nor on workers, ranks, shuffling or skipped samples. The place must be counted as the tar is read, before
    anything selects or shuffles: see :func:`~compopt.data.indexed_reader`.

    Shards are identified by the end of their path, so that they may move to another folder or another machine together.
    Rows are only ever appended (:meth:`build` with ``extend=``): existing ones keep their place for good.

    A sample of which no file can be read is not counted by the reader, and the rows of those after it in that shard
    shift by one in that pass. A :class:`~compopt.data.KeyIndex` has no such hole.

    Args:
        shards: names and sizes in samples, in the order of their rows.

    Attributes:
        n: rows of all shards.

    State: names, first rows and sizes, and the bytes of the files that were there when it was built. Every rank has all
    of it; nothing is communicated.

    Raises:
        ValueError: a shard occurs twice, or has no sample.
        TypeError: a size is no integer.

    Example:
        >>> import compopt
        >>> index = compopt.data.ShardIndex({"00000.tar": 3, "00001.tar": 2})
        >>> index.n, index.index({"__url__": "/data/00001.tar"}, 1)
        (5, 4)
    """

    def __init__(self, shards: Mapping[str, int]) -> None:
        self.n = 0
        self._shards: dict[str, tuple[int, int]] = {}  # name -> first row, count
        self._bytes: dict[str, int] = {}  # of the files that were there when the index was built
        self._last: tuple[Any, tuple[str, int, int]] = "", ("", 0, 0)  # URL and entry: samples of a shard come in turn
        for name, count in shards.items():
            self._append(name, checks.count(f"the size of shard {name}", count))

    def _append(self, name: str, count: int) -> None:
        if name in self._shards:
            raise ValueError(
                f"shard {name} occurs twice; shards of several folders need root=, a folder that holds all of them"
            )
        self._shards[name] = (self.n, count)
        self.n += count

    @classmethod
    def build(
        cls,
        shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        extend: ShardIndex | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> ShardIndex:
        """List shards with their sizes.

        Sizes come from ``sizes.json``, a wids index, Energon's ``.nv-meta/.info.json`` or img2dataset's
        ``*_stats.json`` if these exist; other shards are counted.

        Args:
            shards: a folder, a pattern with braces (``"data/{00000..00099}.tar"``) or wildcards, or a list of files.
                They get rows in this order; those of a folder or wildcard in the order of their names.
            extend: an index to append to. Shards that it has keep their rows.
            root: shards are named by their path from here; by default from the last folder that they have in common.
            progress: show a bar while shards are counted, if tqdm is installed.

        Returns:
            The index; ``extend`` is not changed.

        Raises:
            FileNotFoundError: a shard is missing.
            ValueError: a shard is a URL, is truncated or empty, occurs twice, or has another size than in ``extend``.
        """
        listed = shard_list(shards)
        if not listed:
            raise FileNotFoundError(f"no shards at {shards}")
        if remote := next((shard for shard in listed if "://" in shard), None):
            raise ValueError(
                f"{remote} is a URL, whose samples cannot be counted from here; build the index where the shards are "
                f"local, and read it with ShardIndex.load"
            )
        files = [Path(shard) for shard in listed]
        base = Path(root) if root is not None else Path(os.path.commonpath([file.parent for file in files]))
        names = [file.relative_to(base).as_posix() for file in files]
        older = {} if extend is None else extend._shards
        index = cls({name: count for name, (_, count) in older.items()})
        index._bytes = {} if extend is None else dict(extend._bytes)
        for name, file, count in zip(names, files, count_all(files, progress), strict=True):
            if size_of(file):
                index._bytes.setdefault(name, size_of(file))
            if name not in older:
                index._append(name, count)
            elif older[name][1] != count:
                raise ValueError(
                    f"shard {name} has {count} samples, and {older[name][1]} in the index to extend; rows of a shard "
                    f"that was written anew are not those of the old one: give it another name"
                )
        return index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to ``path`` as JSON: ``[name, first row, count]`` of each shard, and the bytes of its file.

        An older file is replaced as a whole.
        """
        rows = [[name, first, count] for name, (first, count) in self._shards.items()]
        about = {"format": FORMAT, "n": self.n, "fingerprint": self.fingerprint}
        temporary = Path(f"{os.fspath(path)}.{os.getpid()}")
        temporary.write_text(json.dumps({**about, "shards": rows, "bytes": self._bytes}))
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardIndex:
        """Read the file at ``path``, which :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is something else, or was changed since.
        """
        try:
            saved = json.loads(Path(path).read_text())
            index = cls({name: count for name, _, count in saved["shards"]})
            index._bytes = dict(saved.get("bytes", {}))  # absent in files of early versions
            complete = saved["format"] == FORMAT and len(index._shards) == len(saved["shards"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no index of shards: {error}; write it with ShardIndex.save") from error
        if not complete or index.fingerprint != saved.get("fingerprint"):
            raise ValueError(f"{path} was changed since it was saved, or is of another version; build it anew")
        return index

    @property
    def fingerprint(self) -> str:
        """Checksum of names and sizes: two indices that agree give every sample the same row."""
        text = json.dumps([[name, count] for name, (_, count) in self._shards.items()])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def check(self, shards: Iterable[str]) -> None:
        """Refuse shards (paths or URLs) that are not those of the index, as far as can be told without reading them.

        Raises:
            ValueError: a shard has another name, or as a local file another size than when the index was built.
            FileNotFoundError: a local shard is missing or empty.
        """
        shards = list(shards)
        names = [self.entry(shard)[0] for shard in shards]
        check_files(shards)
        for name, shard in zip(names, shards, strict=True):
            before = self._bytes.get(name)
            if is_local(shard) and before not in (None, size_of(shard)):
                raise ValueError(
                    f"shard {shard} has {size_of(shard)} bytes, and {before} when the index was built: it was "
                    f"replaced, and its rows may be of other samples. Append it under another name; if it holds the "
                    f"same samples in the same order, build the index anew"
                )

    def index(self, sample: Mapping[str, Any], position: int) -> int:
        """Return the row, ``0 .. n - 1``, of a sample with ``__url__``; ``position`` is its place in that shard.

        Raises:
            ValueError: the shard is not in the index, or has more samples than the index says.
        """
        url = sample.get("__url__")
        if url is None or url != self._last[0]:
            self._last = url, self.entry(url)
        name, first, count = self._last[1]
        if not 0 <= position < count:
            raise ValueError(
                f"shard {name} has a sample at position {position} (key {sample.get('__key__')!r}), and {count} "
                f"samples in the index; it was written anew since: append it under another name"
            )
        return first + position

    def entry(self, url: Any) -> tuple[str, int, int]:
        """Name (the longest that ``url`` ends with), first row and count of a shard; a ``ValueError`` if unknown."""
        if not isinstance(url, str):
            raise ValueError(f"a sample must say in __url__ from which shard it is, got {url!r}")
        location = url
        if url.startswith("pipe:"):  # of pipe:aws s3 cp s3://bucket/00000.tar - the word with a tar's name
            words = (word.strip("'\"") for word in url[5:].split())
            location = next((word for word in words if ".tar" in word), url)
        # the longest end first: root/a/0.tar must not be found as another folder's 0.tar
        parts = re.sub(r"[?#].*$", "", location).replace("\\", "/").split("/")
        for start in range(len(parts)):
            name = "/".join(parts[start:])
            if name in self._shards:
                return name, *self._shards[name]
        raise ValueError(
            f"shard {url} is not among the {len(self._shards)} of the index. If it was renamed, give it its old name; "
            f"if it is new, append it with ShardIndex.build(shards, extend=index), and its rows with add_sample_group"
        )

    def __len__(self) -> int:
        return len(self._shards)

    def __repr__(self) -> str:
        return f"ShardIndex({len(self._shards)} shards, n={self.n}, fingerprint={self.fingerprint!r})"


class indexed_reader:
    """Reader stage of a webdataset pipeline that sets ``sample["index"]``.

    It gives one shard at a time to the stage that it wraps, and counts the samples that come out. Put it where that
    stage was: after splitting by node and worker, before shuffling, selecting, renaming and decoding. Later stages may
    then drop, reorder and repeat samples; ``rename`` and ``to_tuple`` must name ``index``.

    Args:
        read: function from an iterable of sources (``{"url": ...}``) to samples, such as webdataset's
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
            position, url = -1, source.get("url") if isinstance(source, dict) else source
            for position, sample in enumerate(self.read(iter([source]))):
                url = sample.get("__url__", url)
                sample["index"] = self.index.index(sample, position)
                yield sample
            self._warn_if_short(url, position + 1)

    def check(self, shards: Iterable[str]) -> None:
        """Refuse shards that the index does not know, as far as a look before training shows it.

        A :class:`ShardIndex` looks at names and files. For any other index the first sample of the first shard and all
        of the last shard are read: the largest keys are there. One process of many is enough.

        Raises:
            ValueError: a shard or a sample that the index does not know.
            FileNotFoundError: a local shard is missing or empty.
        """
        shards = list(shards)
        if isinstance(self.index, ShardIndex):
            self.index.check(shards)
            return
        check_files(shards)
        for shard, count in (shards[0], 1), (shards[-1], None):
            for position, sample in enumerate(islice(self.read(iter([{"url": shard}])), count)):
                self.index.index(sample, position)

    def _warn_if_short(self, url: Any, found: int) -> None:
        # any key may be missing: only a ShardIndex knows how many samples there should be
        if not isinstance(self.index, ShardIndex) or not isinstance(url, str) or url in self._short:
            return
        expected = self.index.entry(url)[2]
        if found < expected:
            self._short[url] = expected - found
            warnings.warn(
                f"shard {url} gave {found} of {expected} samples; by now {sum(self._short.values())} samples of "
                f"{len(self._short)} shards are missing. Samples after a missing one have shifted rows in this pass; "
                f"a KeyIndex has no such hole",
                stacklevel=2,
            )


def shard_list(shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Expand a folder, a pattern or a list to paths or URLs of shards.

    Args:
        shards: a folder, a pattern with braces (``"s3://bucket/{00000..00099}.tar"``) or, on local disks, wildcards; or
            a list of these. Files named by braces need not exist.

    Returns:
        One string per shard; those of a folder or wildcard in the order of their names.

    Raises:
        ValueError: braces that are no list and no ascending range of numbers; wildcards in a URL.

    Example:
        >>> import compopt
        >>> compopt.data.shard_list("s3://bucket/{00000..00002}.tar")
        ['s3://bucket/00000.tar', 's3://bucket/00001.tar', 's3://bucket/00002.tar']
    """
    if not isinstance(shards, str | os.PathLike):
        return [name for shard in shards for name in shard_list(shard)]
    text = os.path.expanduser(os.fspath(shards))
    if Path(text).is_dir():
        found = (path for path in Path(text).iterdir() if re.search(r"\.tar(\.(gz|bz2|xz|zst))?$", path.name))
        return [os.fspath(path) for path in sorted(found)]
    if re.search(r"[*?\[]", text):
        if "://" in text:
            raise ValueError(f"{text}: wildcards need a local disk; write a range, such as {{00000..00099}}.tar")
        root = Path(text).anchor
        return [os.fspath(path) for path in sorted(Path(root or ".").glob(text.removeprefix(root)))]
    return _expand_braces(text)


def _expand_braces(text: str) -> list[str]:
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    words = found[1].split(",")
    if ".." in found[1] and (span is None or int(span[1]) > int(span[2])):
        raise ValueError(f"{text}: {found[0]} must be a range of numbers that ascends, such as {{000..099}}")
    if span is not None:
        words = [str(number).zfill(len(span[1])) for number in range(int(span[1]), int(span[2]) + 1)]
    before, after = text[: found.start()], text[found.end() :]
    return [whole for word in words for whole in _expand_braces(f"{before}{word}{after}")]


def check_files(shards: Iterable[str]) -> None:
    """Raise a ``FileNotFoundError`` for local shards that are missing or empty; URLs and pipes are not opened."""
    shards = list(shards)
    bad = [shard for shard in shards if is_local(shard) and not size_of(shard)]
    if bad:
        raise FileNotFoundError(f"{len(bad)} of {len(shards)} shards are missing or empty, such as {bad[0]}")


def is_local(shard: str) -> bool:
    """Return True for a path, False for a URL or pipe."""
    return "://" not in shard and not shard.startswith(("pipe:", "file:"))


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a file; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def count_all(shards: list[Path], progress: bool) -> list[int]:
    """Samples of each shard, in order.

    Taken from ``sizes.json`` (open_clip, webdataset), ``.nv-meta/.info.json`` (Energon), a wids index or img2dataset's
    ``*_stats.json`` in the shard's folder; otherwise every header of the shard is read.
    """
    recorded = {folder: dict(_recorded(folder)) for folder in {shard.parent for shard in shards}}
    counts: dict[Path, int] = {}
    for shard in shards:
        known = recorded[shard.parent].get(shard.name)
        known = _img2dataset(shard) if known is None else known
        if known is not None:
            counts[shard] = known
    unknown = [shard for shard in shards if shard not in counts]
    with ThreadPoolExecutor(THREADS) as pool:
        counted: Iterable[int] = pool.map(count_samples, unknown)
        if progress and unknown:
            try:
                from tqdm import tqdm

                counted = tqdm(counted, total=len(unknown), desc="counting samples", unit="shard")
            except ImportError:
                pass
        counts |= zip(unknown, counted, strict=True)
    for shard, count in counts.items():
        if count < 1:
            raise ValueError(f"shard {shard} holds no sample; leave it out of the list")
    return [counts[shard] for shard in shards]


def _recorded(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and counts that writers left in the folder; later ones override earlier ones."""
    for path in sorted(folder.glob("*.json")):
        wids = None if path.name == "sizes.json" or path.name.endswith("_stats.json") else _read_json(path)
        if isinstance(wids, Mapping) and isinstance(wids.get("shardlist"), list):
            yield from ((Path(str(entry["url"])).name, int(entry["nsamples"])) for entry in wids["shardlist"])
    energon, sizes = _read_json(folder / ".nv-meta" / ".info.json"), _read_json(folder / "sizes.json")
    for counts in (energon.get("shard_counts") if isinstance(energon, Mapping) else None, sizes):
        if isinstance(counts, Mapping):
            yield from ((Path(name).name, int(count)) for name, count in counts.items())


def _img2dataset(shard: Path) -> int | None:
    stats = _read_json(shard.with_name(f"{shard.name.split('.')[0]}_stats.json"))
    return int(stats["successes"]) if isinstance(stats, Mapping) and "successes" in stats else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; mend or remove it, and the shards are counted") from error


def count_samples(shard: Path) -> int:
    """Count the samples of a tar file: runs of members with one key, as webdataset groups them."""
    count, before, end = 0, None, 0
    if not shard.stat().st_size:
        raise ValueError(f"shard {shard} is empty: 0 bytes")
    try:
        with tarfile.open(shard) as archive:
            for member in archive:
                end = member.offset_data + member.size
                name = _NAME.match(member.name)
                if not member.isreg() or name is None or _META.match(member.name):
                    continue
                count += name[1] != before
                before = name[1]
    except tarfile.TarError as error:
        raise ValueError(f"shard {shard} is no complete tar file: {' '.join(str(error).split())}") from error
    # tarfile ends without an error where the last member's content is cut off
    if shard.suffix == ".tar" and shard.stat().st_size < end:
        raise ValueError(f"shard {shard} is truncated: {shard.stat().st_size} bytes, where {end} are announced")
    return count
