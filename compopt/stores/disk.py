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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from compopt.stores import tablefile
from compopt.stores.changes import Changes
from compopt.stores.layout import WORD
from compopt.stores.memory import TensorStore
from compopt.stores.tablefile import LOADING, READY

PAGE = mmap.PAGESIZE
# A gather first times this many rows; from this time per row on (a warm row takes 10 ns, a hole in the file some
# microseconds, a read from a disk 50 and more) the pages of all rows are requested at once.
PROBE, COLD_ROW = 32, 20e-6


class DiskStore(TensorStore):
    """The placement ``offload="disk"``: a sparse file, mapped, shared by the ranks of one node.

    The file is scratch space of one run, not a checkpoint. A table that an earlier run left is refused at its first
    use, because its rows belong to other weights: load a checkpoint into it, which overwrites every row;
    :func:`compopt.stores.read_table` shows what it holds. What a commit guarantees when the process is killed, and
    the format, is said in :mod:`compopt.stores.tablefile`.

    Args:
        directory: of the files; created if need be.
        name: of the table in it.
        n: rows.
        words: 16-byte words per row.
        description: what a row holds, as JSON; :func:`compopt.stores.describe` makes it of a layout.
        writer: the one process of the node that writes. The others map the same file read-only, after the writer
            has created it (the caller's barrier); their :meth:`scatter` and :meth:`write_block` do nothing.

    Raises:
        ValueError: the file belongs to a table of another n, width or description; the directory is no directory;
            more rows than the file system or the address space takes.
        PermissionError: the directory cannot be written.

    It cannot be copied or pickled: two estimators would write one file.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        n: int,
        words: int,
        description: Mapping[str, Any],
        writer: bool = True,
    ) -> None:
        self.n, self.words, self.writer, self.stale = n, words, writer, False
        self._description = json.loads(json.dumps(description))
        self._directory, self._name = Path(directory), name
        self._number, self._overwriting, self._pid = 0, False, os.getpid()
        if writer:
            self._open_writer()
        else:
            self._check_existing()
        self._map()
        self.changes = Changes(n)

    # -- files -------------------------------------------------------------------------------------------------

    def path(self, suffix: str = "rows") -> Path:
        """One of the table's files."""
        return self._directory / f"{self._name}.{suffix}"

    def _bytes(self, n: int) -> int:
        return max(1, n) * self.words * 16  # a file of no bytes cannot be mapped

    def _open_writer(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"offload_dir {str(self._directory)!r} is not a directory; name one") from None
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "offload_dir cannot be written; name another", str(self._directory))
        self.stale = self.path().exists()
        if self.stale:
            self._check_existing()
        else:
            self._create()
        fd = os.open(self.path("redo"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._redo, self._close_redo = fd, weakref.finalize(self, os.close, fd)

    def _check_existing(self) -> None:
        """The file is that of a table like this one."""
        if not self.path().exists():
            raise ValueError(f"{self.path()} does not exist; a process with writer=True must have created it before")
        found = tablefile.read_json(self.path("json"))
        for key, wanted in (("n", self.n), ("words", self.words), ("description", self._description)):
            if found[key] != wanted:
                raise ValueError(
                    f"{self.path()} holds another table: {key} is {found[key]} there and {wanted} here; use another "
                    f"offload_dir or delete {self._name}.*"
                )
        size, needed = self.path().stat().st_size, self._bytes(self.n)
        if size < needed and self.writer and found["state"] == LOADING:  # killed while it was emptied
            os.truncate(self.path(), needed)
        elif size < needed:
            raise ValueError(f"{self.path()} has {size} bytes, needs {needed}")
        self._id = found["id"]

    def _create(self) -> None:
        """Description first, rows last and by renaming: a rows file is never without its description."""
        self.path("redo").unlink(missing_ok=True)
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
        tablefile.write_json(self.path("json"), content)

    def _refuse_size(self, error: Exception) -> NoReturn:
        raise ValueError(
            f"n={self.n} rows of {16 * self.words} bytes ({self._bytes(self.n):,} bytes) cannot be kept in "
            f"{self._directory}: {error}; use another offload_dir or shard=True"
        ) from error

    def _warn_of_full_disk(self) -> None:
        usage = os.statvfs(self._directory)
        free = usage.f_bavail * usage.f_frsize
        if free < self._bytes(self.n):
            warnings.warn(
                f"a table of {self._bytes(self.n):,} bytes in {self._directory}, where {free:,} bytes are free: "
                f"commits fail once it is full",
                stacklevel=2,
            )

    def _map(self) -> None:
        flags = os.O_RDWR if self.writer else os.O_RDONLY
        access = mmap.PROT_READ | mmap.PROT_WRITE if self.writer else mmap.PROT_READ
        fd = os.open(self.path(), flags | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(fd, self._bytes(self.n), mmap.MAP_SHARED, access)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            self._refuse_size(error)
        # Without it the kernel reads megabytes around every row: the first gather of a large file takes 20 to 40 s.
        mapping.madvise(mmap.MADV_RANDOM)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a reader's memory is not writable, and is never written
            table = torch.frombuffer(mapping, dtype=WORD)[: self.n * self.words]
        self._table = table.view(self._shape(self.n))
        self._fd, self._close_fd = fd, weakref.finalize(self, os.close, fd)

    # -- rows --------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Refuse rows of an earlier run."""
        if self.stale:
            raise ValueError(
                f"{self.path()} already exists and holds the rows of another run: load a checkpoint into this "
                f"estimator (which overwrites them), use another offload_dir, or delete {self._name}.* in it"
            )

    def gather(self, rows: Tensor) -> Tensor:
        self.ready()
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

    def scatter(self, rows: Tensor, block: Tensor) -> None:
        """Write a block to rows, atomically against a kill of the process."""
        self.ready()
        if not self.writer or not len(rows):
            return
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self.path()} is written by process {self._pid}; a forked copy of it only reads")
        self._check_space(len(rows))
        rows, block = rows.contiguous(), block.contiguous()
        self._number += 1
        tablefile.write_redo(self._redo, self._id, self._number, rows, block)
        super().scatter(rows, block)

    def _check_space(self, count: int) -> None:
        """A write into a hole of a mapped file on a full disk kills the process: stop before."""
        usage = os.fstatvfs(self._fd)
        if usage.f_bavail * usage.f_frsize >= 2 * count * PAGE:
            return
        status = os.fstat(self._fd)
        if status.st_blocks * 512 < status.st_size:
            raise OSError(errno.ENOSPC, "no space is left for more rows", str(self.path()))

    # -- whole tables ------------------------------------------------------------------------------------------

    def block(self, start: int, stop: int) -> Tensor:
        self.ready()
        return super().block(start, stop)

    def write_block(self, start: int, block: Tensor) -> None:
        if not self.writer:
            return
        if not self._overwriting:
            self.ready()
        super().write_block(start, block)

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Make an empty file of it, then this run's table.

        What ends in between, by a kill or an error, leaves it stale, and :func:`read_table` refuses it.
        """
        self.changes = Changes(self.n)
        if not self.writer:
            yield
            return
        self._id, self.stale, self._overwriting = secrets.token_hex(16), True, True
        self._describe(LOADING)  # with a new id: the old redo record is no longer this table's
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self._bytes(self.n))
        try:
            yield
        finally:
            self._overwriting = False
        self._describe(READY)
        self.stale = False

    def grow(self, n: int) -> None:
        self.n = n
        if self.writer:
            try:
                os.ftruncate(self._fd, self._bytes(n))
            except (OSError, OverflowError, ValueError) as error:
                self._refuse_size(error)
            self._describe(tablefile.read_json(self.path("json"))["state"])
        else:
            self._check_existing()  # the writer has grown the file: the caller's barrier
        self.changes.grow(n)
        self._close_fd()
        self._map()

    def shrink(self, n: int) -> None:
        self.n = n
        if self.writer:
            os.truncate(self.path(), self._bytes(n))
            self._describe(tablefile.read_json(self.path("json"))["state"])
        self.changes.shrink(n)
        self._close_fd()
        self._map()

    def close(self) -> None:
        """Unmap the file, which stays."""
        self.await_snapshot()
        self._table = torch.empty(self._shape(0), dtype=WORD, device="cpu")
        self._close_fd()
        if self.writer:
            self._close_redo()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"rows in {self.path()} cannot be copied or pickled: two estimators would write one file; save a "
            f"checkpoint and load it into an estimator with another offload_dir"
        )
