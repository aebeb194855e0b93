"""Store of rows in a memory-mapped sparse file."""

from __future__ import annotations

import errno
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from compopt import files
from compopt.stores.base import PAGE, WORD, RowStore

# A gather first reads PROBE rows. If these take COLD_ROW seconds per row or more (a cached row takes 10 ns, a disk read
# at least 50 microseconds), the pages of all rows are requested at once.
PROBE, COLD_ROW = 32, 20e-6

# By device and inode, a token of the store that last created or loaded the file in this process. The kernel's locks
# exclude other processes only.
_latest: dict[tuple[int, int], object] = {}


class DiskStore(RowStore):
    """Store for ``offload="disk"``: a sparse file of whole pages, the scratch space of one run.

    A table of an earlier run is refused at its first use, because its rows belong to other weights. Loading a
    checkpoint into the store overwrites every row and makes it usable. The store cannot be copied or pickled, because
    two estimators would write one file.

    A write into a hole of a mapped file on a full disk would kill the process (SIGBUS). A commit therefore first writes
    zeros to the groups that were never written, with a system call that returns an error instead, and then writes its
    rows. Rows of groups that were never written are read as zeros without access to the mapping. The disk may thus be
    smaller than the table, as long as the visited rows fit. Copy-on-write file systems (btrfs, ZFS) and compressing
    ones cannot guarantee space for an overwrite. Access to a page beyond the end of the file would kill the process
    too; the length of the file is therefore checked before each use.

    Args:
        directory, name: directory and base name of the table's files; the directory is created if necessary.
        n, words: number of rows, and of 16-byte words per row.

    Raises:
        ValueError: ``directory`` is not a directory; the file system or the address space is too small for ``n`` rows;
            later: the table is that of an earlier run.
        PermissionError: the directory cannot be written.
        RuntimeError: another process writes this table (the message names the process); later: another estimator of
            this process has overwritten the table.
        OSError: later, in any method: the disk is full, or another program has truncated the file.

    Warns:
        UserWarning: the disk has less free space than the whole table needs; later: the file was removed.
    """

    slow = True
    _on_host = True

    def __init__(self, directory: str | os.PathLike[str], name: str, n: int, words: int) -> None:
        self.n, self.words, self._row_bytes = n, words, 16 * words
        self._directory = Path(directory)
        self.path = self._directory / f"{name}.rows"
        self._overwriting, self._removed, self._pid = False, False, os.getpid()
        try:
            with files.explained_errors(self._directory):
                self._directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"offload_dir {str(self._directory)!r} is not a directory; name one") from None
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "offload_dir cannot be written; name another", str(self._directory))
        remedy = "two runs would write one table; end that one, or name another offload_dir"
        self._lock = files.lock(self.path.with_suffix(".lock"), self._directory, remedy)
        self.stale = self.path.exists()
        self._table = torch.empty(self._shape(0), dtype=WORD, device="cpu")
        self._record(0)
        self.n = n
        try:
            with files.explained_errors(self.path):
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, self._fd)
            if not self.stale:
                self.resize(n)
                self._own()
                self._warn_of_room()
        except BaseException:
            if not self.stale:
                self.path.unlink(missing_ok=True)
            self._lock = None  # unlock now, since the traceback keeps this object alive
            raise

    def _warn_of_room(self) -> None:
        usage = os.statvfs(self._directory)
        free, size = usage.f_bavail * usage.f_frsize, self._bytes(self.n)
        if free < size:
            warnings.warn(
                f"a table of {size:,} bytes in {self._directory}, where {free:,} bytes are free: commits fail once it "
                f"is full",
                stacklevel=3,
            )

    def _bytes(self, n: int) -> int:
        whole = -(-n // self.group) * self.group * self._row_bytes
        return max(1, -(-whole // PAGE)) * PAGE  # at least one page: an empty file cannot be mapped

    def resize(self, n: int) -> None:
        """Set the length of the file to ``n`` rows in whole pages, and map the file."""
        size = self._bytes(n)
        try:
            os.ftruncate(self._fd, size)
            mapping = mmap.mmap(self._fd, size)
        except (OSError, OverflowError, ValueError) as error:
            raise ValueError(
                f"n={n} rows of {self._row_bytes} bytes ({size:,} bytes) cannot be kept in {self._directory}: {error}; "
                f"use another offload_dir or shard=True"
            ) from error
        # Without it the kernel reads megabytes around every row, and the first gather of a large file takes 20 to 40 s.
        mapping.madvise(mmap.MADV_RANDOM)
        self._table = torch.frombuffer(mapping, dtype=WORD)[: n * self.words].view(self._shape(n))
        self._record(n, self.written)

    def _own(self) -> None:
        """Register this object as the owner of the file, also if a removed file has had the same inode."""
        status = os.fstat(self._fd)
        self._token = _latest[status.st_dev, status.st_ino] = object()

    def ready(self) -> None:
        """Refuse rows of an earlier run, and a file that another program or estimator has changed."""
        status, needed = os.fstat(self._fd), self._bytes(self.n)
        if self.stale and not self._overwriting:
            owner = "estimator of this process" if (status.st_dev, status.st_ino) in _latest else "run"
            raise ValueError(
                f"{self.path} already exists and holds the rows of another {owner}: load a checkpoint into this "
                f"estimator (which overwrites them), use another offload_dir, or delete {self.path.stem}.* in it"
            )
        if status.st_size < needed:
            raise OSError(
                errno.EIO,
                f"this table was truncated to {status.st_size:,} of {needed:,} bytes while it was in use: load a "
                f"checkpoint into an estimator with another offload_dir",
                str(self.path),
            )
        if _latest.get((status.st_dev, status.st_ino)) is not self._token:
            raise RuntimeError(
                f"{self.path} has rows of another estimator of this process, which has loaded them since: give each an "
                f"offload_dir of its own"
            )
        if not status.st_nlink and not self._removed:
            self._removed = True
            warnings.warn(
                f"{self.path} was removed while it was in use: its rows are there until this process ends, and cannot "
                f"be read after it; save a checkpoint",
                stacklevel=3,
            )

    @property
    def writable(self) -> bool:
        return self._pid == os.getpid()

    def gather(self, rows: Tensor) -> Tensor:
        self.ready()
        written = self.written.gather(0, rows >> self._shift)
        if written.all():
            return self._gather_written(rows)
        at = written.nonzero().flatten()
        block = torch.zeros(len(rows), 2 * self.words, dtype=torch.int64, device="cpu")
        block[at] = self._gather_written(rows[at])
        return block

    def _gather_written(self, rows: Tensor) -> Tensor:
        if len(rows) > 4 * PROBE:
            start = time.perf_counter()
            super().gather(rows[:: len(rows) // PROBE])
            cold = time.perf_counter() - start > PROBE * COLD_ROW
            if cold and hasattr(os, "posix_fadvise"):  # many requests at once are faster on a disk; macOS lacks it
                size = self.group * self._row_bytes
                for group in (rows >> self._shift).unique().tolist():
                    os.posix_fadvise(self._fd, group * size, size, os.POSIX_FADV_WILLNEED)
        return super().gather(rows)

    def scatter(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows; on a full disk, raise without writing any row."""
        self.ready()
        if not self.writable:
            raise RuntimeError(f"{self.path} is written by process {self._pid}; a forked copy of it only reads")
        self._make_room(rows)
        super().scatter(rows, block)

    def _make_room(self, rows: Tensor) -> None:
        """Write zeros to groups that are holes; nearly as fast as a page fault, faster than posix_fallocate."""
        groups = rows >> self._shift
        holes = groups[~self.written.gather(0, groups)].unique_consecutive().unique()
        zeros = bytes(self.group * self._row_bytes)
        with files.explained_errors(self.path, "no row was written"):
            for group in holes.tolist():
                done = 0
                while done < len(zeros):
                    done += os.pwrite(self._fd, zeros[done:], group * len(zeros) + done)
        self.written[holes] = True  # after all writes: concurrent readers must not access a hole

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Empty the file, then fill it in the context; after an error the table is refused until the next load."""
        self.stale, self._overwriting, n = True, True, self.n
        try:
            self._own()
            os.ftruncate(self._fd, 0)
            self._record(0)
            self.resize(n)
            yield
        finally:
            self._overwriting = False
        self.stale = False

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"rows in {self.path} cannot be copied or pickled: two estimators would write one file; save a checkpoint "
            f"and load it into an estimator with another offload_dir; forked workers of a DataLoader can read them"
        )
