"""How many samples a tar shard holds: from what its writer left beside it, or by reading its headers."""

from __future__ import annotations

import json
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


def sizes_of(shards: Iterable[Path], progress: bool) -> list[int]:
    """Samples of each shard, in order.

    Taken from ``sizes.json`` (open_clip, webdataset), ``.nv-meta/.info.json`` (Energon), a wids index or img2dataset's
    ``*_stats.json`` in the shard's folder; what is in none of them is counted, which reads every header of the shard.

    Raises:
        FileNotFoundError: a shard is neither there nor in any of these files.
        ValueError: a shard is truncated or holds no sample.
    """
    shards = list(shards)
    known: dict[Path, dict[str, int]] = {}
    sizes: dict[Path, int] = {}
    for shard in shards:
        if shard.parent not in known:
            known[shard.parent] = dict(_written(shard.parent))
        size = known[shard.parent].get(shard.name)
        size = _successes(shard) if size is None else size
        if size is not None:
            sizes[shard] = size
    unknown = [shard for shard in shards if shard not in sizes]
    with ThreadPoolExecutor(THREADS) as pool:
        sizes |= zip(unknown, _shown(pool.map(count_samples, unknown), len(unknown), progress), strict=True)
    for shard, size in sizes.items():
        if size < 1:
            raise ValueError(f"shard {shard} holds no sample; leave it out of the list")
    return [sizes[shard] for shard in shards]


def _shown(counts: Iterable[int], total: int, progress: bool) -> Iterable[int]:
    """With a progress bar, if there is something to wait for and tqdm is installed."""
    if not progress or not total:
        return counts
    try:
        from tqdm import tqdm
    except ImportError:
        return counts
    return tqdm(counts, total=total, desc="counting samples", unit="shard")


def _written(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes of shards in the folder's own files; those read last count."""
    for path in sorted(folder.glob("*.json")):
        listed = _read(path) if path.name != "sizes.json" and not path.name.endswith("_stats.json") else None
        if isinstance(listed, Mapping) and isinstance(listed.get("shardlist"), list):  # wids
            for entry in listed["shardlist"]:
                yield Path(str(entry["url"])).name, int(entry["nsamples"])
    energon = _read(folder / ".nv-meta" / ".info.json")
    if isinstance(energon, Mapping):
        yield from ((Path(name).name, int(size)) for name, size in energon.get("shard_counts", {}).items())
    sizes = _read(folder / "sizes.json")
    if isinstance(sizes, Mapping):
        yield from ((Path(name).name, int(size)) for name, size in sizes.items())


def _successes(shard: Path) -> int | None:
    """The count of img2dataset, which writes ``00000_stats.json`` beside ``00000.tar``."""
    stats = _read(shard.with_name(f"{shard.name.split('.')[0]}_stats.json"))
    return int(stats["successes"]) if isinstance(stats, Mapping) and "successes" in stats else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; mend or remove it, and the shards are counted") from error


def count_samples(shard: Path) -> int:
    """Samples of a tar file: runs of members with one key, as webdataset groups them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no tar file, or ends within a member.
    """
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
    if shard.suffix == ".tar" and shard.stat().st_size < end:
        raise ValueError(f"shard {shard} is truncated: {shard.stat().st_size} bytes, where {end} are announced")
    return count
