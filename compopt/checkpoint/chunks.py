"""Which file of a checkpoint has which rows, and which of them the next checkpoint keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from compopt.checkpoint.manifest import File
from compopt.stores.changes import chunk_count

# Files below a quarter of the full size are joined when there are more than these: each save leaves one at least.
SMALL_FILES = 16

Chunks = npt.NDArray[np.bool_]  # which chunks of one rank's rows


@dataclass(frozen=True)
class Run:
    """Successive rows, ``[start, stop)`` of one rank's, that a file has from its row ``offset`` on."""

    file: File
    start: int
    stop: int
    offset: int


class Owners:
    """For each chunk of one rank's rows, the file that has it.

    Args:
        files: of that rank, oldest first; where several have a chunk, the last one counts.
        chunk_rows: rows of a chunk.
    """

    def __init__(self, files: Sequence[File], chunk_rows: int) -> None:
        self.files, self.chunk_rows = files, chunk_rows
        chunks = max((chunk_count(stop, chunk_rows) for file in files for _, stop in file.spans), default=0)
        self.owner = np.full(chunks, -1)  # position in files
        self._offset, self._stop = np.zeros(chunks, dtype=np.int64), np.zeros(chunks, dtype=np.int64)
        for number, file in enumerate(files):
            offset = 0
            for start, stop in file.spans:
                here = slice(start // chunk_rows, chunk_count(stop, chunk_rows))
                first = np.arange(here.start, here.stop) * chunk_rows
                self.owner[here], self._offset[here] = number, offset + first - start
                self._stop[here] = np.minimum(first + chunk_rows, stop)
                offset += stop - start

    def count(self, file: File) -> int:
        """Chunks of a file, those included that a later one has too."""
        return sum(chunk_count(stop - start, self.chunk_rows) for start, stop in file.spans)

    def runs(self) -> list[Run]:
        """All rows that a file has, ascending."""
        chunks = np.flatnonzero(self.owner >= 0)
        start, stop, offset = chunks * self.chunk_rows, self._stop[chunks], self._offset[chunks]
        owner = self.owner[chunks]
        new = np.ones(len(chunks), dtype=bool)
        new[1:] = (
            (owner[1:] != owner[:-1]) | (start[1:] != stop[:-1]) | (offset[1:] != offset[:-1] + stop[:-1] - start[:-1])
        )
        firsts = np.flatnonzero(new)
        lasts = np.append(firsts[1:], len(chunks)) - 1
        ends = zip(firsts, lasts, strict=True) if len(chunks) else ()
        return [Run(self.files[owner[a]], int(start[a]), int(stop[b]), int(offset[a])) for a, b in ends]


def plan(owners: Owners, changed: Chunks, full: int) -> tuple[list[File], Chunks, Chunks]:
    """What a checkpoint takes over from the one before, and what it writes.

    A file is taken over as long as any of it counts, and as the checkpoint takes at most twice the room of its rows:
    beyond that the files of which least counts go, one after the other, and what counts of them is written again.
    A bound for each file by itself would rewrite all of them in the same few saves, since they grow old together.
    Many small files are written again, into one.

    Args:
        owners: of the chunks in the former checkpoint.
        changed: since then; as long as the table has chunks.
        full: chunks of a large file.

    Returns:
        The files to take over; the chunks to write, and those that the former checkpoint had at all: the others need
        not be written where they are zero.
    """
    owner = np.full(len(changed), -1)
    owner[: len(owners.owner)] = owners.owner
    number = np.arange(len(owners.files))
    total = np.array([owners.count(file) for file in owners.files], dtype=np.int64)
    unchanged = owner[~changed]
    counting = np.bincount(unchanged[unchanged >= 0], minlength=len(number))
    room = 2 * (counting.sum() + changed.sum())
    least_first = np.argsort(counting / np.maximum(total, 1), kind="stable")
    # what stays, if so many of these go: the files that do, the chunks that changed, and what is written again
    after = total.sum() + changed.sum() - np.cumsum(total[least_first] - counting[least_first])
    gone = 0 if total.sum() + changed.sum() <= room else int(np.argmax(after <= room)) + 1
    keep = counting > 0
    keep[least_first[:gone]] = False
    small = keep & (4 * total < full)
    if small.sum() > SMALL_FILES:
        keep &= ~small
    write = changed | ((owner >= 0) & ~np.append(keep, True)[owner])
    return [owners.files[i] for i in number[keep]], write, owner >= 0


def by_rank(files: Iterable[File]) -> dict[int, list[File]]:
    """Row files by their ``first``."""
    found: dict[int, list[File]] = {}
    for file in files:
        found.setdefault(file.first, []).append(file)
    return found
