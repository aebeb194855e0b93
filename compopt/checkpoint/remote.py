"""Directory of a run's checkpoints, on a file system or at a URL."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from compopt.checkpoint import manifest
from compopt.checkpoint.manifest import MANIFEST, Checkpoint
from compopt.distributed.ranks import Ranks

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")  # a URL after conversion to a Path


class Directory:
    """Directory of a run on a file system; files are written and read in ``local``, the directory itself."""

    shared = True  # all ranks see the same files in ``local``

    def __init__(self, local: Path) -> None:
        self.local, self._given = local.absolute(), local  # a background save must not depend on the working directory

    def at(self, local: Path) -> Path | str:
        """Return a path below ``local`` in the form that the user has passed."""
        inside = local.is_relative_to(self.local)  # a link to a checkpoint leads elsewhere
        return self._given / local.relative_to(self.local) if inside else local

    def listed(self) -> Path:
        """Update ``local`` with the names and manifests of the checkpoints, and return it."""
        return self.local

    def get(self, local: Path, size: int | None = None) -> None:
        """Make a file available at its path ``local``, if it has ``size`` bytes (``None``: any size)."""

    def put(self, local: Path) -> None:
        """Store a file that was written at its path ``local``."""

    def of_first_rank(self, ranks: Ranks, find: Callable[[], Checkpoint]) -> Checkpoint:
        """Return the checkpoint that rank 0 finds or creates, with its path in this rank's ``local``. Collective."""
        found = ranks.agree(lambda: find() if ranks.rank == 0 else None)
        first, its_local = ranks.gather_objects((found, self.local))[0]
        if self.shared:
            return first
        path = self.local / first.path.relative_to(its_local)
        path.mkdir(parents=True, exist_ok=True)
        return replace(first, path=path)

    def is_complete(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.complete

    def remove(self, checkpoint: Checkpoint) -> None:
        shutil.rmtree(checkpoint.path, ignore_errors=True)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Replace the local path in error messages by the URL that the user has passed."""
        try:
            yield
        except (FileNotFoundError, ValueError) as error:
            if self.shared:
                raise
            raise type(error)(str(error).replace(str(self.local), str(self.at(self.local)))) from None


class Remote(Directory):
    """Directory of a run at a URL, with a temporary local directory that is removed with this object.

    The local directory contains the directories of the checkpoints, their manifests, and files in transfer. Listings of
    the store are never cached, because other processes write to the store. Errors of a driver are converted to
    ``OSError`` with the URL in the message.

    Args:
        url: URL of the directory.
        local: a directory to use in place of the temporary one, with files to copy to the store; it is not removed.
    """

    shared = False

    def __init__(self, url: str, local: Path | None = None) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ImportError(
                f'{url}: URLs need fsspec: pip install -e ".[remote]" in the checkout of compopt'
            ) from None
        self.url = url.rstrip("/")
        try:
            self._store, path = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise type(error)(f"{url}: {error}") from error
        self._path = str(path).rstrip("/")
        if local is None:
            temporary = tempfile.mkdtemp(prefix="compopt-")
            weakref.finalize(self, shutil.rmtree, temporary, True)
            local = Path(temporary).resolve() / self.url.rpartition("/")[2]
        super().__init__(local)

    def at(self, local: Path) -> str:
        return self.url if local == self.local else f"{self.url}/{local.relative_to(self.local).as_posix()}"

    def listed(self) -> Path:
        for name in self._copy_manifest(self.local):
            if manifest.checkpoint_at(self.local / name) is not None:
                self._copy_manifest(self.local / name)
        return self.local

    def _copy_manifest(self, local: Path) -> set[str]:
        """Create a local directory, copy the manifest into it, if there is one, and return the names in the store."""
        with self._named(local) as path:
            if not self._store.isdir(path):
                return set()
            names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in self._store.ls(path, detail=True)}
        local.mkdir(parents=True, exist_ok=True)
        if MANIFEST in names:
            with suppress(FileNotFoundError):  # a concurrent save may have removed it
                self.get(local / MANIFEST)
        return names

    def get(self, local: Path, size: int | None = None) -> None:
        with self._named(local) as path:
            if size is None or (self._store.isfile(path) and self._store.size(path) == size):
                self._store.get_file(path, str(local))

    def put(self, local: Path) -> None:
        self.copy(local)
        if local.name != MANIFEST:
            local.unlink()

    def copy(self, local: Path) -> None:
        """Copy a local file to the store, and keep the local file."""
        with self._named(local) as path:
            self._make(path.rpartition("/")[0])
            self._store.put_file(str(local), path)

    def find(self, local: Path) -> Sequence[Path]:
        """Return the files below a directory of the store, as paths in the local directory."""
        with self._named(local) as path:
            return [local / str(file)[len(path) :].lstrip("/") for file in self._store.find(path)]

    def delete(self, local: Path) -> None:
        """Remove a directory of the store and its content."""
        with self._named(local) as path, suppress(FileNotFoundError):
            self._store.rm(path, recursive=True)

    def _make(self, path: str) -> None:
        """Create a directory, if the store has directories; a bucket is never created."""
        try:
            self._store.mkdir(path, create_parents=False)
        except FileExistsError:
            return
        except FileNotFoundError:
            parent = path.rpartition("/")[0]
            if "/" not in parent.strip("/"):  # the parent is a bucket
                raise
            self._make(parent)
            with suppress(FileExistsError):  # another rank may create it too
                self._store.mkdir(path, create_parents=False)

    def is_complete(self, checkpoint: Checkpoint) -> bool:
        with self._named(checkpoint.path) as path:
            return bool(self._store.isfile(f"{path}/{MANIFEST}"))

    def remove(self, checkpoint: Checkpoint) -> None:
        with self._named(checkpoint.path) as path, suppress(FileNotFoundError):
            self._store.rm_file(f"{path}/{MANIFEST}")  # first, so that a partial removal does not look complete
        self.delete(checkpoint.path)

    @contextmanager
    def _named(self, local: Path) -> Iterator[str]:
        """Yield the path in the store, without cached listings; add the URL to errors."""
        url = self.at(local)
        path = self._path + url[len(self.url) :]
        try:
            self._store.invalidate_cache(path)
            yield path
        except (FileNotFoundError, FileExistsError, PermissionError) as error:
            raise type(error)(f"{url}: {error}") from error
        except Exception as error:  # drivers raise types of their own
            raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def open_directory(directory: str | os.PathLike[str]) -> Directory:
    """Return the directory at a path or a URL; a ``file://`` URL is a path."""
    if not isinstance(directory, str | os.PathLike):
        remedy = "pass os.fsdecode(directory)" if isinstance(directory, bytes) else "pass a str or a pathlib.Path"
        raise TypeError(
            f"directory must be a path or a URL, got {directory!r} of type {type(directory).__name__}; {remedy}"
        )
    text = os.fspath(directory)
    if "::" in text and "://" in text:
        raise ValueError(f"directory={text!r} is a chained URL, caches and archives may be stale; pass the store's own")
    match = _URL.match(text)
    if match is None:
        if _COLLAPSED.match(text):
            raise ValueError(f"directory={directory!r} was a URL before it became a path; pass the URL as a string")
        return Directory(Path(directory))
    if match[1].lower() in ("file", "local"):
        return Directory(Path(text[match.end() :]))
    return Remote(text)
