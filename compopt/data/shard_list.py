"""The shards that a folder, a pattern or a list names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path


def shard_list(shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Paths or URLs of shards; names and braces are spelled out without a look whether the files are there.

    Args:
        shards: a folder, a pattern with braces (``"s3://bucket/{00000..00099}.tar"``) or, on local disks, wildcards; or
            a list of these.

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
    return _braces(text)


def check_files(shards: Iterable[str]) -> None:
    """Refuse local shards that are missing or empty; others are met while reading.

    Raises:
        FileNotFoundError: it names the first one.
    """
    shards = list(shards)
    bad = [shard for shard in shards if is_local(shard) and not size_of(shard)]
    if bad:
        raise FileNotFoundError(f"{len(bad)} of {len(shards)} shards are missing or empty, such as {bad[0]}")


def is_local(shard: str) -> bool:
    """Whether it is a path, and no URL or pipe."""
    return "://" not in shard and not shard.startswith(("pipe:", "file:"))


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a file; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _braces(text: str) -> list[str]:
    """``{000..099}`` and ``{a,b}`` spelled out, from left to right."""
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
    return [whole for word in words for whole in _braces(f"{before}{word}{after}")]
