"""Checkpoints of a run: accelerate's, in two folders that take turns, so that a kill leaves one complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from accelerate import Accelerator

from recipes import launch

POINTER = "latest"


def latest(folder: Path) -> Path | None:
    """The complete checkpoint in ``folder``, None before the first."""
    pointer = folder / POINTER
    return folder / pointer.read_text().strip() if pointer.exists() else None


def save(accelerator: Accelerator, folder: Path) -> None:
    """On all ranks: write into the folder that is not the latest, then point to it."""
    current = latest(folder)
    target = folder / ("b" if current == folder / "a" else "a")
    launch.barrier()  # all have read the pointer
    if launch.is_main():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    launch.barrier()
    accelerator.save_state(os.fspath(target))
    launch.barrier()
    if launch.is_main():
        partial = folder / f"{POINTER}.partial"
        with open(partial, "w") as file:
            file.write(target.name)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / POINTER)
    launch.barrier()


def load(accelerator: Accelerator, folder: Path) -> None:
    """On all ranks: continue from the latest; accelerate unpickles, so trust the folder.

    Raises:
        ValueError: the checkpoint belongs to a run of another configuration.
    """
    found = latest(folder)
    if found is not None:
        accelerator.load_state(os.fspath(found))
