"""Writing of tar shards whose bytes depend only on their samples; an interrupted run can be continued."""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

# Function from a sample's number in the folder and its key to its files: suffix -> content.
Files = Callable[[int, str], Mapping[str, bytes]]


def key_of(shard: int, row: int, shard_size: int) -> str:
    """Return img2dataset's key: five digits for the shard, and as many as ``shard_size`` needs for the row."""
    digits = math.ceil(math.log10(shard_size))
    return f"{shard * 10**digits + row:0{5 + digits}d}"


def write_img2dataset(folder: Path, count: int, shard_size: int, files: Files, progress: bool = True) -> None:
    """Write ``00000.tar``, ... and ``00000_stats.json`` as img2dataset does, and open_clip's ``sizes.json``."""

    def stats(shard: int, size: int) -> None:
        facts = {"count": size, "successes": size, "failed_to_download": 0, "failed_to_resize": 0}
        write_json(folder / f"{shard:05d}_stats.json", {**facts, "status_dict": {"success": size}})

    sizes = _write(folder, "{:05d}.tar", count, shard_size, files, progress, stats)
    write_json(folder / "sizes.json", sizes)


def write_benchmark(folder: Path, count: int, shard_size: int, files: Files, progress: bool = True) -> None:
    """Write ``0.tar``, ... and ``nshards.txt``, as clip-benchmark reads them."""
    sizes = _write(folder, "{}.tar", count, shard_size, files, progress)
    write_text(folder / "nshards.txt", f"{len(sizes)}\n")


def _write(
    folder: Path,
    name: str,
    count: int,
    shard_size: int,
    files: Files,
    progress: bool,
    before: Callable[[int, int], None] = lambda shard, size: None,
) -> dict[str, int]:
    """Write the missing shards, and return the names and sizes of all; existing shards are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    with tqdm(total=count, desc=str(folder), unit="sample", disable=not progress) as bar:
        for shard, start in enumerate(range(0, count, shard_size)):
            path, size = folder / name.format(shard), min(shard_size, count - start)
            if not path.exists():
                before(shard, size)
                _replace(path, _tar(shard, start, size, shard_size, files))
            sizes[path.name] = size
            bar.update(size)
    return sizes


def _tar(shard: int, start: int, size: int, shard_size: int, files: Files) -> bytes:
    """Return the bytes of one shard, whose owners, modes and times are constants."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for row in range(size):
            key = key_of(shard, row, shard_size)
            for suffix, data in files(start + row, key).items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size, member.mode = len(data), 0o444
                archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def write_text(path: Path, text: str) -> None:
    _replace(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def _replace(path: Path, content: bytes) -> None:
    """Write to a temporary name that does not match shards, and rename."""
    partial = path.with_name(f".{path.stem}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
