"""Uploads of a run's finished files to a store, by a background thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from fsspec.core import url_to_fs
from tqdm import tqdm

WAITS = (1.0, 5.0, 25.0)  # seconds before each further attempt
COMPLETE = "complete"  # marker file of each complete state; it is uploaded last


class Remote:
    """Files at a URL, by their paths in a local folder. Errors are ``OSError``s that contain the URL.

    Listings of the store are never cached, because other processes write to the store.

    Args:
        url: URL that corresponds to the folder.
        folder: local folder.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url.rstrip("/"), folder
        self._store, path = url_to_fs(self._url)
        self._path = str(path).rstrip("/")

    def copy(self, file: Path) -> None:
        """Copy a local file to the store."""
        with self._named(file) as path:
            self._make(path.rpartition("/")[0])
            self._store.put_file(str(file), path)

    def get(self, file: Path) -> None:
        """Copy a file from the store into its existing local folder."""
        with self._named(file) as path:
            self._store.get_file(path, str(file))

    def find(self, folder: Path) -> list[Path]:
        """Return the files below a folder of the store."""
        with self._named(folder) as path:
            return [folder / str(file)[len(path) :].lstrip("/") for file in self._store.find(path)]

    def delete(self, place: Path) -> None:
        """Remove a file, or a folder and its content, from the store."""
        with self._named(place) as path, suppress(FileNotFoundError):
            self._store.rm(path, recursive=True)

    def _make(self, path: str) -> None:
        """Create a folder, if the store has folders; a bucket is never created."""
        try:
            self._store.mkdir(path, create_parents=False)
        except FileExistsError:
            return
        except FileNotFoundError:
            parent = path.rpartition("/")[0]
            if "/" not in parent.strip("/"):  # the parent is a bucket
                raise
            self._make(parent)
            self._store.mkdir(path, create_parents=False)

    @contextmanager
    def _named(self, local: Path) -> Iterator[str]:
        """Yield the path in the store, without cached listings; add the URL to errors."""
        inside = f"/{local.relative_to(self._folder).as_posix()}" if local != self._folder else ""
        try:
            self._store.invalidate_cache(self._path + inside)
            yield self._path + inside
        except Exception as error:  # drivers raise types of their own
            raise OSError(f"{self._url}{inside}: {type(error).__name__}: {error}") from error


class Uploads:
    """Copies of states and models at a URL supported by fsspec, with the same names as in the run's local folder.

    A state is skipped if a newer one is waiting. Failed uploads are retried after ``waits``, then reported, and retried
    with the next upload.

    Args:
        url: URL of the run's folder in the store.
        folder: local folder of the run.
        always: files beside the states, whose newest version is uploaded with every state.
        keep: number of states that are kept in the store.
        waits: seconds before each further attempt.
    """

    def __init__(
        self, url: str, folder: Path, always: Sequence[Path], keep: int, waits: Sequence[float] = WAITS
    ) -> None:
        self._remote, self._always, self._keep, self._waits = Remote(url, folder), always, keep, waits
        self._lock = threading.Lock()
        self._newest: Path | None = None
        self._current: Path | None = None  # the state that is being uploaded
        self._owed: dict[Path, str] = {}  # files missing from the store, with the reason
        self._threads = ThreadPoolExecutor(1, "upload")
        self._last: Future[None] | None = None
        self._hurried = threading.Event()

    def put(self, state: Path, others: Iterable[Path]) -> None:
        """Upload a complete state and other files or folders in the background."""
        self._newest = state
        self._owed |= dict.fromkeys(others, "not tried")
        self._last = self._threads.submit(self._upload, state)

    def holds(self, state: Path) -> bool:
        """Return whether a state is being uploaded and must not be removed."""
        with self._lock:
            return state == self._current

    def finish(self, hurry: bool = False) -> dict[Path, str]:
        """Wait for all uploads; return the files missing from the store, with reasons. ``hurry``: do not retry."""
        if hurry:
            self._hurried.set()
        if self._last is not None:
            self._last.result()
        return self._owed

    def _upload(self, state: Path) -> None:
        for path in list(self._owed):
            if path.parent == state.parent:  # a failed state, which this one replaces
                self._owed.pop(path)
            else:
                self._attempt(path, _files(path))
        with self._lock:
            if state != self._newest:
                return
            self._current = state
        if self._attempt(state, [*self._always, *_files(state)], anew=True):
            self._rotate(state)
        self._current = None

    def _attempt(self, path: Path, files: Sequence[Path], anew: bool = False) -> bool:
        """Upload files in order; return whether all are in the store. ``anew``: first remove existing files."""
        for wait in (*self._waits, None):
            try:
                if anew:
                    self._delete(path)
                for file in files:
                    self._remote.copy(file)
                self._owed.pop(path, None)
                return True
            except Exception as error:  # drivers have their own exception classes
                self._owed[path] = str(error)
                if wait is None or self._hurried.wait(wait):
                    break
        tqdm.write(f"{path} is not in the store ({self._owed[path]}); training goes on, and the next save tries again")
        return False

    def _rotate(self, newest: Path) -> None:
        """Remove old and incomplete states from the store, and later states left from before a resume."""
        states = newest.parent
        try:
            older = sorted(file.parent for file in _complete(self._remote, states) if file.parent < newest)
            kept = {newest, *older[max(0, len(older) + 1 - self._keep) :]}
            found = {states / file.relative_to(states).parts[0] for file in self._remote.find(states)}
            for state in found - kept:
                self._delete(state)
        except OSError as error:
            tqdm.write(f"older states stay in the store: {error}")

    def _delete(self, state: Path) -> None:
        """Remove a state from the store, its marker first, so that a partly removed state does not look complete."""
        self._remote.delete(state / COMPLETE)
        self._remote.delete(state)


def _files(path: Path) -> list[Path]:
    """Return the files at a path; the marker of a complete state is last."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return sorted(files, key=lambda file: file.name == COMPLETE)


def _complete(remote: Remote, states: Path) -> list[Path]:
    """Return the markers of the complete states in the store."""
    return [file for file in remote.find(states) if file.name == COMPLETE and file.parent.parent == states]


def holds_run(url: str, states: Path) -> bool:
    """Return whether the store contains complete states of a run."""
    return bool(_complete(Remote(url, states.parent), states))


def download(url: str, states: Path, newest: Path | None) -> str | None:
    """Fetch the newest state at the URL of a run, and files beside the states; return its name.

    Returns ``None`` if there is no state, or no state newer than ``newest``.
    """
    remote = Remote(url, states.parent)
    found = max(_complete(remote, states), default=None)
    if found is None or (newest is not None and found.parent.name <= newest.name):
        return None
    beside = [file for file in remote.find(states.parent) if file.parent == states.parent and file.suffix == ".json"]
    for file in [*beside, *sorted(remote.find(found.parent), key=lambda file: file == found)]:
        file.parent.mkdir(parents=True, exist_ok=True)
        remote.get(file)
    return found.parent.name
