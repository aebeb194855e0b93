"""Files of tar shards: the list that a pattern names, and the number of samples in each."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Files of one sample share what is before the first dot of the last part of their name, as in webdataset.
_NAME = re.compile(r"^((?:.*/|)[^./][^.]*)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
# Shards whose headers are read at a time: the work is seeks.
THREADS = 8


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
