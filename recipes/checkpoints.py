"""Checkpoints of a run by accelerate, of which a complete one survives a kill, and their copies in a store."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from recipes import launch
from recipes.uploads import COMPLETE, Uploads, download

POINTER = "latest"


def latest(folder: Path) -> Path | None:
    """Return the latest complete checkpoint in ``folder``, or None before the first."""
    pointer = folder / POINTER
    return folder / pointer.read_text().strip() if pointer.exists() else None


@contextlib.contextmanager
def writing(what: Path, folder: Path) -> Iterator[None]:
    """Raise failures, such as a full disk, with the incomplete file and the state from which ``--resume`` continues."""
    try:
        yield
    except Exception as error:  # torch, safetensors and the file system have their own exception classes
        what.with_suffix(".partial").unlink(missing_ok=True)
        found = latest(folder)
        kept = f"{found} is complete: --resume goes on from it" if found else "No state was saved before"
        free = shutil.disk_usage(folder.parent).free / 1e6
        raise RuntimeError(f"{what} could not be written ({free:,.0f} MB are free there): {error}. {kept}") from error


def save(accelerator: Accelerator, folder: Path) -> None:
    """Write a checkpoint into the folder that is not the latest, then make it the latest; called on all ranks."""
    current = launch.from_main(latest(folder))  # other nodes may see an older one through a network cache
    target = folder / ("b" if current == folder / "a" else "a")
    with writing(target, folder):
        _write(accelerator, target)
        if launch.is_main():
            _sync(target)
            point(folder, target.name)
    launch.barrier()


def _write(accelerator: Accelerator, target: Path) -> None:
    if launch.is_main():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    launch.barrier()
    accelerator.save_state(os.fspath(target))
    launch.barrier()


class States:
    """States of a run with ascending names, of which the newest are kept; rows are written during training.

    A thread of the main process waits for the rows, makes the state the latest, removes older states and starts the
    upload. Its errors are raised by the next ``save`` or ``finish``, and end the run on all ranks.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, rows: Any, keep: int, uploads: Uploads | None) -> None:
        self._accelerator, self._folder, self._rows = accelerator, folder, rows
        self._keep, self._uploads = keep, uploads
        self._threads = ThreadPoolExecutor(1, "state") if launch.is_main() else None
        self._before: Future[None] | None = None

    def save(self, name: str, then: Callable[[Path], list[Path]]) -> None:
        """Write a state unless it exists; ``then(state)`` writes further files after the rows; called on all ranks."""
        target = self._folder / name
        self.finish()
        if launch.from_main(latest(self._folder)) == target:
            return
        with writing(target, self._folder):
            _write(self._accelerator, target)
        if self._threads is not None:
            self._before = self._threads.submit(self._complete, target, then)

    def finish(self) -> None:
        """Wait for the previous state, and raise its error, if any; called on all ranks."""
        launch.on_main(lambda: self._before and self._before.result())
        self._rows.wait()  # also for this process's thread, before the process group may be destroyed

    def _complete(self, target: Path, then: Callable[[Path], list[Path]]) -> None:
        with writing(target, self._folder):
            self._rows.wait()
            made = then(target)
            (target / COMPLETE).touch()
            _sync(target)
            point(self._folder, target.name)
        others = [path for path in self._folder.iterdir() if path.is_dir() and path != target]
        older = sorted(path for path in others if (path / COMPLETE).exists())
        kept = older[max(0, len(older) + 1 - self._keep) :]
        for path in set(others) - set(kept):
            if self._uploads is None or not self._uploads.holds(path):
                shutil.rmtree(path, ignore_errors=True)
        if self._uploads is not None:
            self._uploads.put(target, made)


def _sync(folder: Path) -> None:
    """Synchronise files and their names to disk before a pointer refers to them, in case of a power loss."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(folder: Path, name: str) -> None:
    """Make a checkpoint the latest of its folder."""
    partial = folder / f"{POINTER}.partial"
    with open(partial, "w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / POINTER)
    _sync_one(folder)


def fetch(url: str, folder: Path) -> None:
    """Download the newest state of a run at a URL and make it the latest, unless a newer one exists here."""
    name = download(url, folder, latest(folder))
    if name is not None:
        point(folder, name)


def load(accelerator: Accelerator, folder: Path) -> None:
    """Load the latest checkpoint; called on all ranks. accelerate unpickles files, so the folder must be trusted."""
    found = launch.from_main(latest(folder))
    if found is not None:
        accelerator.load_state(os.fspath(found))
