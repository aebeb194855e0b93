"""Rows in a file that is mapped into memory."""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from compopt import files
from compopt.stores import tablefile
from compopt.stores.changes import Changes
from compopt.stores.layout import WORD
from compopt.stores.memory import TensorStore
from compopt.stores.space import PAGE, Space, in_memory
from compopt.stores.tablefile import LOADING, READY

# A gather first times this many rows; from this time per row on (a warm row takes 10 ns, a hole in the file some
# microseconds, a read from a disk 50 and more) the pages of all rows are requested at once.
PROBE, COLD_ROW = 32, 20e-6

# By device and inode, the table that this process has loaded last: the kernel's locks do not keep it from itself.
_contents: dict[tuple[int, int], str] = {}


class DiskStore(TensorStore):
    """The placement ``offload="disk"``: a sparse file, mapped.

    The file is scratch space of one run, not a checkpoint. A table that an earlier run left is refused at its first
    use, because its rows belong to other weights: load a checkpoint into it, which overwrites every row. The format is
    that of :mod:`compopt.stores.tablefile`.

    A commit sets room on the disk aside before it touches a row, and on a file system in memory a read does too, see
    :class:`compopt.stores.space.Space`. Before each use the file's length is compared: to touch a mapped page that is
    no longer in the file ends the process.

    Args:
        directory: of the files; created if need be.
        name: of the table in it.
        n: rows.
        words: 16-byte words per row.
        description: what a row holds, as JSON; :func:`compopt.stores.describe` makes it of a layout.

    Raises:
        ValueError: the file belongs to a table of another n, width or description; the directory is no directory;
            more rows than the file system or the address space takes.
        PermissionError: the directory cannot be written.
        RuntimeError: another process writes this table; the message says which.
        OSError: later, in any method: the disk is full, or the file was truncated by somebody else.

    Warns:
        UserWarning: the disk has less room than the whole table takes; later, that the file was removed.

    It cannot be copied or pickled: two estimators would write one file.
    """

    def __init__(
        self, directory: str | os.PathLike[str], name: str, n: int, words: int, description: Mapping[str, Any]
    ) -> None:
        self.n, self.words = n, words
        self._description = json.loads(json.dumps(description))
        self._directory, self._name = Path(directory), name
        self._overwriting, self._pid = False, os.getpid()
        self._removed = False
        self._open()
        self._map()
        self.changes = Changes(n)

    # -- files -------------------------------------------------------------------------------------------------

    def path(self, suffix: str = "rows") -> Path:
        """One of the table's files."""
        return self._directory / f"{self._name}.{suffix}"

    def _bytes(self, n: int) -> int:
        return max(1, n) * self.words * 16  # a file of no bytes cannot be mapped

    def _open(self) -> None:
        self._make_directory()
        remedy = "two runs would write one table; end that one, or name another offload_dir"
        claim = files.Claim(self.path("lock"), self._directory, remedy)
        self._release = weakref.finalize(self, claim.release)
        try:
            self.stale = self.path().exists()
            if self.stale:
                self._check_existing()
            else:
                self._create()
            self._fd = os.open(self.path(), os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            self._release()
            raise
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._space = Space(self._fd, self.path())
        if not self.stale:
            self._register()

    def _make_directory(self) -> None:
        try:
            with files.named(self._directory):
                self._directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"offload_dir {str(self._directory)!r} is not a directory; name one") from None
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "offload_dir cannot be written; name another", str(self._directory))

    def _check_existing(self) -> None:
        """The file is that of a table like this one."""
        found = tablefile.read_json(self.path("json"))
        for key, wanted in (("n", self.n), ("words", self.words), ("description", self._description)):
            if found[key] != wanted:
                raise ValueError(
                    f"{self.path()} holds another table: {key} is {found[key]} there and {wanted} here; use another "
                    f"offload_dir or delete {self._name}.*"
                )
        size, needed = self.path().stat().st_size, self._bytes(self.n)
        if size < needed and found["state"] == LOADING:  # killed while it was emptied
            os.truncate(self.path(), needed)
        elif size < needed:
            raise ValueError(f"{self.path()} has {size} bytes, needs {needed}: it was truncated; delete {self._name}.*")
        self._id, self._state = found["id"], found["state"]

    def _create(self) -> None:
        """Description first, rows last and by renaming: a rows file is never without its description."""
        fresh = self.path("rows.new")
        try:
            with open(fresh, "wb") as file:
                file.truncate(self._bytes(self.n))
            self._warn_of_full_disk()
        except (OSError, OverflowError, ValueError) as error:
            fresh.unlink(missing_ok=True)
            self._refuse_size(error)
        self._id = secrets.token_hex(16)
        self._describe(READY)
        os.replace(fresh, self.path())

    def _describe(self, state: str) -> None:
        content = {"format": tablefile.FORMAT, "id": self._id, "state": state, "n": self.n, "words": self.words}
        content |= {"row_bytes": 16 * self.words, "description": self._description}
        with files.named(self.path("json")):
            tablefile.write_json(self.path("json"), content)
        self._state = state

    def _refuse_size(self, error: Exception) -> NoReturn:
        raise ValueError(
            f"n={self.n} rows of {16 * self.words} bytes ({self._bytes(self.n):,} bytes) cannot be kept in "
            f"{self._directory}: {error}; use another offload_dir or shard=True"
        ) from error

    def _warn_of_full_disk(self) -> None:
        usage = os.statvfs(self._directory)
        free = usage.f_bavail * usage.f_frsize
        if free < self._bytes(self.n):
            what = "calls and commits fail" if in_memory(self._directory) else "commits fail"
            warnings.warn(
                f"a table of {self._bytes(self.n):,} bytes in {self._directory}, where {free:,} bytes are free: "
                f"{what} once it is full",
                stacklevel=2,
            )

    def _register(self) -> None:
        """The file has this table from here on; its inode may have been that of another one, long removed."""
        status = os.fstat(self._fd)
        _contents[status.st_dev, status.st_ino] = self._id

    def _map(self) -> None:
        """Map the file as long as it is now."""
        try:
            mapping = mmap.mmap(self._fd, self._bytes(self.n))
        except (OSError, OverflowError, ValueError) as error:
            self._refuse_size(error)
        # Without it the kernel reads megabytes around every row: the first gather of a large file takes 20 to 40 s.
        mapping.madvise(mmap.MADV_RANDOM)
        self._table = torch.frombuffer(mapping, dtype=WORD)[: self.n * self.words].view(self._shape(self.n))
        self._space.resize(self._bytes(self.n))

    # -- rows --------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Refuse rows of an earlier run."""
        if self.stale:
            raise ValueError(
                f"{self.path()} already exists and holds the rows of another run: load a checkpoint into this "
                f"estimator (which overwrites them), use another offload_dir, or delete {self._name}.* in it"
            )

    def _check_file(self) -> None:
        """Refuse to touch pages that are no longer in the file."""
        status, needed = os.fstat(self._fd), self._bytes(self.n)
        if status.st_size < needed:
            raise OSError(
                errno.EIO,
                f"somebody truncated this table to {status.st_size:,} of {needed:,} bytes while it was in use: load a "
                f"checkpoint into an estimator with another offload_dir",
                str(self.path()),
            )
        if _contents.get((status.st_dev, status.st_ino), self._id) != self._id:
            raise RuntimeError(
                f"{self.path()} has rows of another estimator of this process, which has loaded them since: give each "
                f"an offload_dir of its own"
            )
        if not status.st_nlink and not self._removed:
            self._removed = True
            warnings.warn(
                f"{self.path()} was removed while it was in use: its rows are there until this process ends, and "
                f"cannot be read after it; save a checkpoint",
                stacklevel=4,
            )

    def gather(self, rows: Tensor) -> Tensor:
        self.ready()
        self._check_file()
        if self._space.in_memory:
            self._space.for_rows(rows.contiguous().numpy(), 16 * self.words, "no row was read")
        if len(rows) > 4 * PROBE:
            start = time.perf_counter()
            super().gather(rows[:: len(rows) // PROBE])
            if time.perf_counter() - start > PROBE * COLD_ROW:
                self._request(rows)
        return super().gather(rows)

    def _request(self, rows: Tensor) -> None:
        """Ask for all pages of some rows at once: a disk serves many requests faster than one after the other."""
        first = rows.numpy() * (16 * self.words)
        pages = np.unique(np.concatenate([first // PAGE, (first + 16 * self.words - 1) // PAGE]))
        for page in pages.tolist():
            os.posix_fadvise(self._fd, page * PAGE, PAGE, os.POSIX_FADV_WILLNEED)

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self.path()} is written by process {self._pid}; a forked copy of it only reads")

    def scatter(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows; on a full disk to none of them."""
        self.ready()
        if not len(rows):
            return
        self.check_process()
        self._check_file()
        self._space.for_rows(rows.numpy(), 16 * self.words)
        super().scatter(rows, block)

    # -- whole tables ------------------------------------------------------------------------------------------

    def block(self, start: int, stop: int) -> Tensor:
        self.ready()
        self._check_file()
        return self._copied(start, stop) if self._space.in_memory else super().block(start, stop)

    def _copied(self, start: int, stop: int) -> Tensor:
        """A block that is not read through the mapping, so that holes of the file stay holes."""
        block = torch.empty(stop - start, self.words, dtype=WORD, device="cpu")
        raw, done = block.numpy().reshape(-1).view(np.uint8), 0
        while done < len(raw):
            read = os.preadv(self._fd, [raw[done:].data], start * self.words * 16 + done)
            if not read:
                self._check_file()
                raise OSError(errno.EIO, "the table ends before its last row", str(self.path()))
            done += read
        return block

    def write_block(self, start: int, block: Tensor) -> None:
        if not self._overwriting:
            self.ready()
        self._check_file()
        self._space.for_range(start * self.words * 16, (start + len(block)) * self.words * 16)
        super().write_block(start, block)

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Make an empty file of it, then this run's table.

        A kill or an error in between leaves it stale.
        """
        former, self._id = self._id, secrets.token_hex(16)
        try:
            self._describe(LOADING)
        except BaseException:
            self._id = former
            raise
        self._register()
        self.changes = Changes(self.n)
        self.stale = self._overwriting = True
        try:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, self._bytes(self.n))
            self._space.forget()
            yield
        finally:
            self._overwriting = False
        self._describe(READY)
        self.stale = False

    def grow(self, n: int) -> None:
        self.n = n
        try:
            os.ftruncate(self._fd, self._bytes(n))
        except (OSError, OverflowError, ValueError) as error:
            self._refuse_size(error)
        self._describe(self._state)
        self.changes.grow(n)
        self._map()

    def shrink(self, n: int) -> None:
        self.n = n
        os.ftruncate(self._fd, self._bytes(n))
        with suppress(OSError, ValueError):  # on a full disk: a table that says another n is refused
            if tablefile.read_json(self.path("json"))["n"] != n:
                self._describe(self._state)
        self.changes.shrink(n)
        self._map()

    def close(self) -> None:
        """Unmap the file, which stays."""
        self.await_snapshot()
        self._table = torch.empty(self._shape(0), dtype=WORD, device="cpu")
        self._close_fd()
        self._fd = -1
        self._release()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"rows in {self.path()} cannot be copied or pickled: two estimators would write one file; save a "
            f"checkpoint and load it into an estimator with another offload_dir"
        )
