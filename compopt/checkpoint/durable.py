"""Files and directories of checkpoints: durable when they are said to be, with errors that say where."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from compopt import failures
from compopt.remote import Folder, RemotePath

_READ = 1 << 22


def named(path: Folder) -> AbstractContextManager[None]:
    """What goes wrong in writing says where; a remote store's errors do so themselves."""
    return (
        nullcontext() if isinstance(path, RemotePath) else failures.named(path, "earlier checkpoints are as they were")
    )


def make_directory(directory: Folder) -> None:
    """Make a directory and those above it, durably: a power loss takes none of them from a checkpoint in it."""
    if isinstance(directory, RemotePath):
        directory.mkdir(parents=True, exist_ok=True)
        return
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    with named(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_directory(path.parent)


def write_file(path: Folder, content: bytes) -> None:
    """Write a new file, and make it durable; its name in the directory is not."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with named(path), open(path, "xb") as file:  # never into one that other checkpoints share
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Folder) -> None:
    """Make the names in a directory durable; remote stores have no directories."""
    if isinstance(path, RemotePath):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum(path: Folder) -> tuple[int, int]:
    """``(bytes, crc32)`` of a file, read in pieces."""
    size, crc = 0, 0
    for piece in path.pieces(_READ) if isinstance(path, RemotePath) else _pieces(path):
        size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_READ):
            yield piece
