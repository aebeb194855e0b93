"""Rows of samples in tar shards by shard and position, a reader stage that adds them, and lists of shard files."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from compopt import checks
from compopt.data.indexed import SampleIndex

FORMAT = 1
# Files of one sample share the path up to the first dot of the file name, as in webdataset.
_NAME = re.compile(r"^((?:.*/|)[^./][^.]*)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
# Shards to read concurrently when counting samples, which is dominated by seeks.
THREADS = 8
LARGEST_WIDS = 64 << 20  # bytes of a file that may be a wids index; other JSON files beside shards may be large
END = 2 * tarfile.BLOCKSIZE  # zeros at the end of a tar file, at least


class ShardIndex:
    """Rows by shard: the samples of each shard in the order of its tar, shard after shard.

    Example:
        >>> import compopt
        >>> index = compopt.data.ShardIndex({"00000.tar": 3, "00001.tar": 2})
        >>> index.n, index.index({"__url__": "/data/00001.tar"}, 1)
        (5, 4)

    The row of a sample depends only on its shard and its position in the shard, not on the order in which shards are
    read, workers, ranks, shuffling or skipped samples. The position must be counted when the tar is read, before any
    stage selects or shuffles samples: see :class:`~compopt.data.indexed_reader`.

    Shards are identified by the last parts of their path, so that all shards may be moved to another folder or machine.
    Rows are only appended (:meth:`build` with ``extend=``); existing rows never change.

    If no file of a sample can be read, the reader does not count the sample, and the rows of the later samples in that
    shard are shifted by one in that pass. A :class:`~compopt.data.KeyIndex` does not have this limitation.

    Args:
        shards: names of shards and their numbers of samples, in the order of their rows.

    Attributes:
        n: number of rows of all shards.

    State: names, first rows and sizes of the shards, and the file sizes in bytes when the index was built. Every rank
    stores the whole state; nothing is communicated.

    Raises:
        ValueError: a shard occurs twice, or has no samples.
        TypeError: a size is not an integer.
    """

    def __init__(self, shards: Mapping[str, int]) -> None:
        self.n = 0
        self._shards: dict[str, tuple[int, int]] = {}  # name -> first row, count
        self._bytes: dict[str, int] = {}  # file sizes when the index was built
        self._last: tuple[Any, tuple[str, int, int]] = "", ("", 0, 0)  # cache: URL and entry of the latest shard
        for name, count in shards.items():
            self._append(name, checks.positive_int(f"the size of shard {name}", count))

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
        end_blocks: bool = True,
    ) -> ShardIndex:
        """Build an index of shards.

        Sizes are read from ``sizes.json``, a wids index, Energon's ``.nv-meta/.info.json`` or img2dataset's
        ``*_stats.json`` if these exist; the samples of other shards are counted.

        Args:
            shards: a folder, a pattern with braces (``"data/{00000..00099}.tar"``) or wildcards, or a list of files.
                Rows are assigned in this order; for a folder or wildcard in the order of the names.
            extend: an index to append to. Its shards keep their rows.
            root: folder to which the names of shards are relative; by default their deepest common folder. With shards
                of several folders pass the same ``root`` in every call.
            progress: show a progress bar while samples are counted, if tqdm is installed.
            end_blocks: a shard whose samples are counted must end with the two blocks of zeros of a complete tar file;
                ``False``: for writers that leave them out. A shard that was cut between two files is then not noticed.

        Returns:
            The index; ``extend`` is not changed.

        Raises:
            FileNotFoundError: a shard is missing, or a folder or pattern has none.
            ValueError: a shard is a URL, is truncated or empty, or occurs twice; ``extend`` has a shard of its name
                with another size, or its file under a name that is relative to another folder.
        """
        listed: list[str] = []
        for each in [shards] if isinstance(shards, str | os.PathLike) else shards:
            if not (found := shard_list(each)):
                raise FileNotFoundError(f"no shards at {each}")
            listed += found
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
        _check_folders(names, older)
        for name, file, count in zip(names, files, count_all(files, progress, end_blocks), strict=True):
            size = size_of(file)
            if name not in older:
                index._append(name, count)
            elif (count, size) != (before := (older[name][1], index._bytes.get(name, size))):
                raise ValueError(
                    f"shard {name} has {count} samples and {size} bytes, and {before[0]} and {before[1]} in the index "
                    f"to extend: a shard that is new or was written anew needs another name"
                )
            if size:
                index._bytes[name] = size
        return index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to ``path`` as JSON: ``[name, first row, count]`` of each shard, and its file size in bytes.

        An existing file is replaced atomically.
        """
        rows = [[name, first, count] for name, (first, count) in self._shards.items()]
        about = {"format": FORMAT, "n": self.n, "fingerprint": self.fingerprint}
        temporary = Path(f"{os.fspath(path)}.{os.getpid()}")
        temporary.write_text(json.dumps({**about, "shards": rows, "bytes": self._bytes}))
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardIndex:
        """Read a file that :meth:`save` wrote.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is not an index of shards, or was modified.
        """
        try:
            saved = json.loads(Path(path).read_text())
            index = cls({name: count for name, _, count in saved["shards"]})
            index._bytes = dict(saved["bytes"])
            complete = saved["format"] == FORMAT and len(index._shards) == len(saved["shards"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no index of shards: {error}; write it with ShardIndex.save") from error
        if not complete or index.fingerprint != saved.get("fingerprint"):
            raise ValueError(f"{path} was changed since it was saved, or is of another version; build it anew")
        return index

    @property
    def fingerprint(self) -> str:
        """Checksum of names and sizes; equal for indices that map samples to the same rows."""
        text = json.dumps([[name, count] for name, (_, count) in self._shards.items()])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def check(self, shards: Iterable[str]) -> None:
        """Raise if shards (paths or URLs) are not those of the index, by names and file sizes, without reading them.

        Raises:
            ValueError: a shard is not in the index, or the size of a local file has changed since the index was built.
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
        """Return the row, ``0 .. n - 1``, of a sample with ``__url__``; ``position`` is its position in that shard.

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
        """Return name (longest suffix of ``url`` in the index), first row and count, or raise a ``ValueError``."""
        if not isinstance(url, str):
            raise ValueError(f"a sample must say in __url__ from which shard it is, got {url!r}")
        location = url
        if url.startswith("pipe:"):  # pipe:aws s3 cp s3://bucket/00000.tar -: find the name of the tar
            words = (word.strip("'\"") for word in url[5:].split())
            location = next((word for word in words if ".tar" in word), url)
        # try the longest suffix first: root/a/0.tar must not match 0.tar of another folder
        location = re.sub(r"[?#].*$", "", location) if "://" in location else location
        parts = location.replace("\\", "/").split("/")
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

    Example:
        >>> import compopt
        >>> def read(sources):  # webdataset.tarfile_to_samples() in a pipeline
        ...     for source in sources:
        ...         yield from ({"__url__": source["url"], "__key__": key} for key in "ab")
        >>> index = compopt.data.ShardIndex({"0.tar": 2, "1.tar": 2})
        >>> stage = compopt.data.indexed_reader(read, index)
        >>> [sample["index"] for sample in stage([{"url": "1.tar"}, {"url": "0.tar"}])]
        [2, 3, 0, 1]

    The stage calls the reader that it wraps with one shard at a time, and counts the samples. Use it in place of that
    reader: after splitting by node and worker, before shuffling, selecting, renaming and decoding. Later stages may
    then drop, reorder and repeat samples; ``rename`` and ``to_tuple`` must include ``index``.

    Args:
        read: function from an iterable of sources (``{"url": ...}``) to samples, such as webdataset's
            ``tarfile_to_samples(handler=...)``.
        index: index that maps samples to rows.

    Nothing is communicated: a row depends only on the sample, its shard and its position in the shard.

    Raises:
        TypeError: ``read`` is not callable, or ``index`` is not an index.
        ValueError: while reading: a sample is not in the index.

    Warns:
        UserWarning: a shard has fewer samples than the index says, because samples could not be read; the rows of the
            samples after them in this shard are shifted.
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
        """Raise before training if shards are not in the index, by a check of some of them.

        A :class:`ShardIndex` checks names and file sizes. For any other index the first sample of the first shard and
        all samples of the last shard, which has the largest keys, are read. It suffices to call this on one process.

        Raises:
            ValueError: a shard or a sample is not in the index.
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
        # only a ShardIndex contains the number of samples per shard
        if not isinstance(self.index, ShardIndex) or not isinstance(url, str) or url in self._short:
            return
        expected = self.index.entry(url)[2]
        if found < expected:
            self._short[url] = expected - found
            warnings.warn(
                f"shard {url} gave {found} of {expected} samples; by now {sum(self._short.values())} samples of "
                f"{len(self._short)} shards are missing. Samples after a missing one have shifted rows in this pass; "
                f"a KeyIndex does not have this limitation",
                stacklevel=2,
            )


def shard_list(shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Expand a folder, a pattern or a list to paths or URLs of shards.

    Example:
        >>> import compopt
        >>> compopt.data.shard_list("s3://bucket/{00000..00002}.tar")
        ['s3://bucket/00000.tar', 's3://bucket/00001.tar', 's3://bucket/00002.tar']

    Args:
        shards: a folder, a pattern with braces (``"s3://bucket/{00000..00099}.tar"``) or, on local disks, wildcards; or
            a list of these. Files named by braces need not exist.

    Returns:
        One string per shard; for a folder or wildcard in the order of the names.

    Raises:
        ValueError: braces contain neither a list nor an ascending range of numbers; a URL contains wildcards.
    """
    if not isinstance(shards, str | os.PathLike):
        return [name for shard in shards for name in shard_list(shard)]
    text = os.path.expanduser(os.fspath(shards))
    if Path(text).is_dir():
        found = (path for path in Path(text).iterdir() if re.search(r"\.tar(\.(gz|bz2|xz|zst))?$", path.name))
        return [os.fspath(path) for path in sorted(found)]
    if re.search(r"[*?\[]", text) and not os.path.exists(text):  # a name may contain brackets
        if "://" in text:
            raise ValueError(f"{text}: wildcards need a local disk; write a range, such as {{00000..00099}}.tar")
        root = Path(text).anchor
        return [os.fspath(path) for path in sorted(Path(root or ".").glob(text.removeprefix(root)))]
    return _expand_braces(text)


def _check_folders(names: Iterable[str], older: Iterable[str]) -> None:
    """Refuse names that may be those of older shards, relative to another folder."""

    def shortened(name: str) -> Iterator[str]:
        parts = name.split("/")
        return ("/".join(parts[at:]) for at in range(1, len(parts)))

    known = set(older)
    longer = {short: name for name in known for short in shortened(name)}
    for name in (each for each in names if each not in known):
        found = next((short for short in shortened(name) if short in known), longer.get(name))
        if found is not None:
            raise ValueError(
                f"shard {name} cannot be told from {found} of the index to extend; pass root=, the folder to which the "
                f"names of that index are relative, or give new shards other names"
            )


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
    """Return the size of a file in bytes; 0 if the file does not exist."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def count_all(shards: list[Path], progress: bool, end_blocks: bool = True) -> list[int]:
    """Return the number of samples of each shard, in order.

    The number is read from ``sizes.json`` (open_clip, webdataset), ``.nv-meta/.info.json`` (Energon), a wids index or
    img2dataset's ``*_stats.json`` in the folder of the shard; otherwise all headers of the shard are read.
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
        counted: Iterable[int] = pool.map(partial(count_samples, end_blocks=end_blocks), unknown)
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
    """Yield recorded names and counts of shards in a folder; later entries override earlier ones."""
    for path in sorted(folder.glob("*.json")):
        known = path.name == "sizes.json" or path.name.endswith("_stats.json") or size_of(path) > LARGEST_WIDS
        wids = None if known else _read_json(path, required=False)
        if isinstance(wids, Mapping) and isinstance(wids.get("shardlist"), list):
            yield from ((Path(str(entry["url"])).name, int(entry["nsamples"])) for entry in wids["shardlist"])
    energon, sizes = _read_json(folder / ".nv-meta" / ".info.json"), _read_json(folder / "sizes.json")
    for counts in (energon.get("shard_counts") if isinstance(energon, Mapping) else None, sizes):
        if isinstance(counts, Mapping):
            yield from ((Path(name).name, int(count)) for name, count in counts.items())


def _img2dataset(shard: Path) -> int | None:
    stats = _read_json(shard.with_name(f"{shard.name.split('.')[0]}_stats.json"))
    return int(stats["successes"]) if isinstance(stats, Mapping) and "successes" in stats else None


def _read_json(path: Path, required: bool = True) -> Any:
    """Return the content of a file, ``None`` if it does not exist, or cannot be read and is not ``required``."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        if not required:  # any file of the user
            return None
        raise ValueError(
            f"{path} cannot be read: {error}; repair or remove the file; samples are then counted"
        ) from error


def count_samples(shard: Path, end_blocks: bool = True) -> int:
    """Count the samples of a tar file, also a compressed one: runs of members with the same key, as in webdataset."""
    count, before = 0, None
    if not shard.stat().st_size:
        raise ValueError(f"shard {shard} is empty: 0 bytes")
    try:
        with tarfile.open(shard) as archive:
            for member in archive:
                name = _NAME.match(member.name)
                if not member.isreg() or name is None or _META.match(member.name):
                    continue
                count += name[1] != before
                before = name[1]
            # tarfile stops without an error at the end of a file, and at a block that is no header
            end, file = archive.offset, cast(IO[bytes], archive.fileobj)
            file.seek(end)
            tail = file.read(1 << 16)
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"shard {shard} is no complete tar file: {' '.join(str(error).split())}") from error
    zeros = not any(tail)
    if not (zeros and (len(tail) >= END if end_blocks else len(tail) % tarfile.BLOCKSIZE == 0)):
        raise ValueError(
            f"shard {shard} is no complete tar file: {count} samples in {end} bytes, and then "
            f"{f'{len(tail)} bytes of zeros' if zeros else 'other content'} instead of at least {END}; it was cut or "
            f"damaged. If its writer leaves these zeros out, pass end_blocks=False to ShardIndex.build"
        )
    return count
