"""Room on the disk for what a mapped file is about to hold: a write into a hole on a full disk ends the process."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from compopt import files

PAGE = mmap.PAGESIZE

NOTHING_WRITTEN = "no row was written"
# File systems where a page that was never written takes room as soon as it is read through a mapping.
IN_MEMORY = ("tmpfs", "devtmpfs")


def in_memory(path: str | os.PathLike[str]) -> bool:
    """Return whether a path lies on a file system in memory; False where the system does not tell."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo", errors="replace") as mounts:
        for mount in map(str.split, mounts):  # ID PARENT MAJOR:MINOR ROOT POINT OPTIONS ... - TYPE SOURCE OPTIONS
            if mount[2] == number:
                return mount[mount.index("-", 6) + 1] in IN_MEMORY
    return False


class Space:
    """The blocks of a sparse file, at first all holes, for which the file system has given room.

    A block gets it when a row in it is first written, so that the file is as sparse as its rows are: the disk may be
    smaller than the table as long as it holds the rows that were visited. File systems that write every block to a new
    place (btrfs, ZFS), and those that compress, cannot promise that an overwrite finds room.

    On a file system in memory (tmpfs) a block takes room when it is read, so that reads make sure of it as well.

    Stores a byte per block of 4 KiB, which takes memory once rows near it were visited: 256 KiB for a GiB of the file.

    Args:
        descriptor: of the file, open for writing; its owner closes it.
        path: of the file, for errors.

    Attributes:
        in_memory: the file is on such a file system.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path, self._size = descriptor, path, 0
        self.in_memory = in_memory(path)
        self._unit = min(PAGE, os.fstatvfs(descriptor).f_bsize)
        self._per_page = PAGE // self._unit  # a page fault needs all of them
        self._known = np.zeros(0, dtype=np.bool_)

    def resize(self, size: int) -> None:
        """The file has so many bytes; what is new are holes."""
        known = np.zeros(self._count(size), dtype=np.bool_)
        common = self._count(min(size, self._size))
        known[:common] = self._known[:common]
        self._size, self._known = size, known

    def forget(self) -> None:
        """The file is holes again."""
        self._known = np.zeros_like(self._known)

    def for_rows(self, rows: npt.NDArray[np.int64], row_bytes: int, kept: str = NOTHING_WRITTEN) -> None:
        """Make sure of the blocks of some rows.

        Args:
            rows: their numbers.
            row_bytes: of each.
            kept: what an error says of the state.

        Raises:
            OSError: the disk or a quota is full; no row was touched.
        """
        first = rows * row_bytes
        pages = first // PAGE
        if PAGE % row_bytes:
            pages = np.concatenate([pages, (first + (row_bytes - 1)) // PAGE])
        blocks = pages
        if self._per_page > 1:
            blocks = (np.unique(pages)[:, None] * self._per_page + np.arange(self._per_page)).ravel()
            blocks = blocks[blocks < len(self._known)]
        unknown = blocks[~self._known[blocks]]
        if len(unknown):
            self._claim(np.unique(unknown), kept)

    def for_range(self, start: int, stop: int) -> None:
        """The same for a range of bytes."""
        first, last = start // PAGE * self._per_page, -(-stop // PAGE) * self._per_page
        self._claim(first + np.flatnonzero(~self._known[first:last]))

    def _claim(self, blocks: npt.NDArray[np.int64], kept: str = NOTHING_WRITTEN) -> None:
        """Write a zero where there are zeros: the file system answers at once, and nearly as fast as a page fault.

        posix_fallocate takes twice as long, and where it is missing the C library writes zeros itself. File systems in
        memory have it, and there those who only read claim as well: they must not write a zero over a row.
        """
        with files.named(self._path, kept):
            for block in blocks.tolist():
                start = block * self._unit
                if self.in_memory:
                    os.posix_fallocate(self._descriptor, start, min(self._unit, self._size - start))  # no longer file
                else:
                    os.pwrite(self._descriptor, b"\0", start)
        self._known[blocks] = True

    def _count(self, size: int) -> int:
        return -(-size // self._unit)
