"""A folder of data sets that were built once: arrays in one file each, under a key that says what they depend on."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

ENV = "COMPOPT_CACHE"  # the folder, `.cache` when unset


class Unavailable(RuntimeError):
    """Data that cannot be had; the message says what would help."""


def file(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Path of a cached file; the folder is by default ``$COMPOPT_CACHE``, else ``.cache``."""
    return Path(folder or os.environ.get(ENV) or ".cache") / name


def read(path: Path, key: str, names: Sequence[str]) -> dict[str, np.ndarray] | None:
    """The arrays of a cache file, or None if there is none, it is damaged, or its key differs."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if str(arrays["key"]) != key:
                return None
            return {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def write(path: Path, key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write beside the target and rename, so that a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as target:
        try:
            np.savez(target, key=np.array(key), **arrays)
        except BaseException:
            os.unlink(target.name)
            raise
    os.replace(target.name, path)
