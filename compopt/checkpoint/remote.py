"""Directories of checkpoints behind a URL, through fsspec: copies of what is needed in a temporary local directory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compopt.checkpoint import manifest
from compopt.checkpoint.manifest import MANIFEST

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")  # what Path makes of a URL


class Remote:
    """A run's directory at a URL, and its local copy, which goes with this object.

    The store's listings are never cached, because other processes write there. Errors of a driver become ``OSError``
    that name the URL.

    Args:
        url: as fsspec understands it. Credentials and options come from where its driver looks for them.

    Attributes:
        local: the local directory: the names of the checkpoints, and the files that were asked for.
    """

    def __init__(self, url: str) -> None:
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
        temporary = tempfile.mkdtemp(prefix="compopt-")
        weakref.finalize(self, shutil.rmtree, temporary, True)
        self.local = Path(temporary).resolve() / self.url.rpartition("/")[2]

    def at(self, local: Path) -> str:
        """Return the URL of something in the local directory."""
        return self.url if local == self.local else f"{self.url}/{local.relative_to(self.local).as_posix()}"

    def list(self) -> None:
        """Make a local directory for each checkpoint, and copy the manifests."""
        self._copy_manifest(self.local)
        for name in self._names(self.local) or ():
            if manifest.parse(self.local / name) is not None:
                self._copy_manifest(self.local / name)

    def _copy_manifest(self, local: Path) -> None:
        names = self._names(local)
        if names is not None:
            local.mkdir(parents=True, exist_ok=True)
            if MANIFEST in names:
                with suppress(FileNotFoundError):  # a run that saves meanwhile has removed it
                    self.get(local / MANIFEST)

    def _names(self, local: Path) -> dict[str, Any] | None:
        with self._named(local) as path:
            self._store.invalidate_cache(path)
            if not self._store.isdir(path):
                return None
            found = {e["name"].rstrip("/").rpartition("/")[2]: e for e in self._store.ls(path, detail=True)}
        return {name: entry for name, entry in found.items() if name}

    def size(self, local: Path) -> int | None:
        """Return the bytes of a file at the URL; ``None`` if it is not there."""
        with self._named(local) as path:
            self._store.invalidate_cache(path)
            return int(self._store.size(path)) if self._store.isfile(path) else None

    def get(self, local: Path) -> None:
        """Copy a file from the URL."""
        with self._named(local) as path:
            self._store.get_file(path, str(local))

    def put(self, directory: Path, names: Iterable[str]) -> None:
        """Copy files to the URL, each all or nothing on an object store."""
        with self._named(directory) as path:
            self._make(path)
        for name in names:
            with self._named(directory / name) as path:
                self._store.put_file(str(directory / name), path)

    def _make(self, path: str) -> None:
        """Make a directory where the store has such; a bucket is never made."""
        try:
            self._store.mkdir(path, create_parents=False)
        except FileExistsError:
            return
        except FileNotFoundError:
            parent = path.rpartition("/")[0]
            if "/" not in parent.strip("/"):  # a bucket
                raise
            self._make(parent)
            self._store.mkdir(path, create_parents=False)

    def remove(self, local: Path) -> None:
        """Remove a checkpoint at the URL, its manifest first."""
        with self._named(local) as path:
            with suppress(FileNotFoundError):
                self._store.rm_file(f"{path}/{MANIFEST}")
            with suppress(FileNotFoundError):
                self._store.rm(path, recursive=True)

    @contextmanager
    def _named(self, local: Path) -> Iterator[str]:
        """Yield the path in the store; name the URL in errors."""
        url = self.at(local)
        try:
            yield self._path + url[len(self.url) :]
        except (FileNotFoundError, FileExistsError, PermissionError) as error:
            raise type(error)(f"{url}: {error}") from error
        except Exception as error:  # drivers have their own
            raise OSError(f"{url}: {type(error).__name__}: {error}") from error

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Name the URL where a refusal names the local copy."""
        try:
            yield
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(str(error).replace(str(self.local), self.url)) from None


def open_directory(directory: str | os.PathLike[str]) -> tuple[Path, Remote | None]:
    """Return the local directory, and the remote one if the user names it by its URL; ``file://`` is a path.

    Raises:
        ImportError: fsspec, or the driver for such URLs, is not installed; the message names it.
        ValueError: no such protocol, or a URL that went through ``Path``.
        TypeError: ``directory`` is no path.
    """
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
        return Path(directory), None
    if match[1].lower() in ("file", "local"):
        return Path(text[match.end() :]), None
    remote = Remote(text)
    return remote.local, remote
