"""Directories by URL, of any file system that fsspec knows; what checkpoints ask of a ``pathlib.Path``, and no more."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")  # what Path makes of a URL
_AHEAD = 1 << 24  # bytes that are read at once of a file that is read as a whole


@dataclass(frozen=True)
class Status:
    """What ``Path.stat`` tells, as far as a store knows it."""

    st_size: int


@dataclass(frozen=True)
class RemotePath:
    """A file or directory on a remote store, by its URL.

    A file is put as a whole: object stores show all of it or nothing. Nothing is kept of what the store said before,
    since others write there too. What goes wrong is an ``OSError`` that names the URL.

    Args:
        url: what fsspec understands, such as ``s3://bucket/run``. Credentials and options come from where its driver
            looks for them: the environment, the driver's files, or fsspec's own configuration.
    """

    url: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url.rstrip("/") if not self.url.endswith("://") else self.url)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The directory."""
        return RemotePath(self.url.rpartition("/")[0])

    def resolve(self) -> RemotePath:
        """Itself: there are no links."""
        return self

    # -- reading -------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """There is something of this name."""
        return self._info() is not None

    def is_file(self) -> bool:
        """It is there, and no directory."""
        info = self._info()
        return info is not None and info["type"] != "directory"

    def is_dir(self) -> bool:
        """It is a directory, or the beginning of the names of objects."""
        info = self._info()
        return info is not None and info["type"] == "directory"

    def is_symlink(self) -> bool:
        """There are no links."""
        return False

    def stat(self) -> Status:
        """Its size; raises ``FileNotFoundError`` if it is not there."""
        info = self._info()
        if info is None:
            raise FileNotFoundError(f"{self.url} does not exist")
        return Status(int(info["size"] or 0))

    def iterdir(self) -> list[RemotePath]:
        """What is in a directory."""
        return [self / name for name in self._entries()]

    def sizes(self) -> dict[str, int]:
        """The files in a directory and their bytes."""
        return {name: int(e["size"] or 0) for name, e in self._entries().items() if e["type"] != "directory"}

    def read_bytes(self) -> bytes:
        """The content of a file as a whole."""
        with self._named() as (store, path):
            content: bytes = store.cat_file(path)
            return content

    def read_range(self, start: int, stop: int) -> bytes:
        """Some bytes of a file; fewer where it ends before."""
        with self._named() as (store, path):
            content: bytes = store.cat_file(path, start=start, end=stop)
            return content

    def pieces(self, size: int) -> Iterator[bytes]:
        """The content of a file, from its beginning to its end."""
        with self._named() as (store, path), store.open(path, "rb", block_size=_AHEAD) as file:
            while piece := file.read(size):
                yield piece

    # -- writing -------------------------------------------------------------------------------------------------

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a directory where the store has such; a bucket is never made."""
        try:
            with self._named() as (store, path):
                store.mkdir(path, create_parents=False)
        except FileExistsError:
            if not exist_ok:
                raise
        except FileNotFoundError:
            if not parents or "/" not in self.parent._path:  # the parent is a bucket
                raise
            self.parent.mkdir(parents=True, exist_ok=True)
            self.mkdir(exist_ok=exist_ok)

    def write_bytes(self, content: bytes) -> None:
        """Put a file: there is all of it or nothing."""
        with self._named() as (store, path):
            store.pipe_file(path, content)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            with self._named() as (store, path):
                store.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove a directory and what is in it."""
        with self._named() as (store, path):
            store.invalidate_cache(path)
            store.rm(path, recursive=True)

    def shares_store(self, other: RemotePath) -> bool:
        """The store can copy from one to the other by itself."""
        with self._named() as (mine, _), other._named() as (its, _):
            return bool(mine == its)

    def copy_into(self, names: Sequence[str], target: RemotePath) -> None:
        """Give files of this directory another copy; the store does it, and nothing of them comes here."""
        with target._named() as (store, there):
            if names:
                store.copy([f"{self._path}/{name}" for name in names], [f"{there}/{name}" for name in names])

    # -- fsspec --------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return _open_store(self.url)[1]

    def _info(self) -> Any:
        try:
            with self._named() as (store, path):
                store.invalidate_cache(path)
                return store.info(path)
        except FileNotFoundError:
            return None

    def _entries(self) -> dict[str, Any]:
        with self._named() as (store, path):
            store.invalidate_cache(path)
            found = {e["name"].rstrip("/").rpartition("/")[2]: e for e in store.ls(path, detail=True)}
        found.pop("", None)
        return found

    @contextmanager
    def _named(self) -> Iterator[tuple[Any, str]]:
        """The store and the path in it; errors become such as name the URL."""
        try:
            yield _open_store(self.url)
        except (FileNotFoundError, FileExistsError, PermissionError) as error:
            raise type(error)(f"{self.url}: {error}") from error
        except Exception as error:  # drivers have their own
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error


Folder = Path | RemotePath


def folder(directory: str | os.PathLike[str] | RemotePath) -> Folder:
    """The directory that a user names by its path or its URL; ``file://`` is a path.

    Raises:
        ImportError: fsspec, or the driver for such URLs, is not installed; the message names it.
        ValueError: no such protocol, or a URL that went through ``Path``.
        TypeError: ``directory`` is no path.
    """
    if isinstance(directory, RemotePath):
        return directory
    if not isinstance(directory, str | os.PathLike):
        remedy = "pass os.fsdecode(directory)" if isinstance(directory, bytes) else "pass a str or a pathlib.Path"
        raise TypeError(
            f"directory must be a path or a URL, got {directory!r} of type {type(directory).__name__}; {remedy}"
        )
    text = os.fspath(directory)
    if "::" in text and "://" in text:
        raise ValueError(f"directory={text!r} is a chained URL, caches and archives may be stale; pass the store's own")
    if (match := _URL.match(text)) is None:
        if _COLLAPSED.match(text):
            raise ValueError(f"directory={directory!r} was a URL before it became a path; pass the URL as a string")
        return Path(directory)
    if match[1].lower() in ("file", "local"):
        return Path(text[match.end() :])
    remote = RemotePath(text)
    try:
        _open_store(remote.url)
    except ImportError as error:
        raise ImportError(f"{text}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error
    return remote


def _open_store(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ImportError('URLs need fsspec: pip install -e ".[remote]" in the checkout of compopt') from None
    store, path = url_to_fs(url)  # fsspec keeps one store for all equal URLs
    return store, str(path).rstrip("/")
