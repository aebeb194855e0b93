"""Checkpoints of a run: accelerate's, in two folders that take turns, so that a kill leaves one complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator

from recipes import launch

POINTER = "latest"


def latest(folder: Path) -> Path | None:
    """The complete checkpoint in ``folder``, None before the first."""
    pointer = folder / POINTER
    return folder / pointer.read_text().strip() if pointer.exists() else None


@contextlib.contextmanager
def writing(what: Path, folder: Path) -> Iterator[None]:
    """Let a failure, such as a full disk, say what is incomplete and from where ``--resume`` goes on."""
    try:
        yield
    except Exception as error:  # torch, safetensors and the file system have classes of their own
        found = latest(folder)
        kept = f"{found} is complete: --resume goes on from it" if found else "No state was saved before"
        free = shutil.disk_usage(folder.parent).free / 1e6
        raise RuntimeError(f"{what} could not be written ({free:,.0f} MB are free there): {error}. {kept}") from error


def save(accelerator: Accelerator, folder: Path) -> None:
    """On all ranks: write into the folder that is not the latest, then point to it."""
    current = launch.from_main(latest(folder))  # a network's cache may show other nodes an older one
    target = folder / ("b" if current == folder / "a" else "a")
    with writing(target, folder):
        if launch.is_main():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        launch.barrier()
        accelerator.save_state(os.fspath(target))
        launch.barrier()
        if launch.is_main():
            _sync(target)
            _point(folder, target.name)
    launch.barrier()


def _sync(folder: Path) -> None:
    """Make files and names durable before something points to them: a power loss may take what was not."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point(folder: Path, name: str) -> None:
    partial = folder / f"{POINTER}.partial"
    with open(partial, "w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / POINTER)
    _sync_one(folder)


def load(accelerator: Accelerator, folder: Path) -> None:
    """On all ranks: continue from the latest; accelerate unpickles, so trust the folder."""
    found = launch.from_main(latest(folder))
    if found is not None:
        accelerator.load_state(os.fspath(found))
