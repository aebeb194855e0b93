"""Cache folder of data sets: one file of arrays per data set, with a key of everything that the arrays depend on."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

ENV = "COMPOPT_CACHE"  # the folder, `.cache` when unset


class Unavailable(RuntimeError):
    """Error for unavailable data; the message names a remedy."""


def file(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Return the path of a cached file; the default folder is ``$COMPOPT_CACHE``, else ``.cache``."""
    return Path(folder or os.environ.get(ENV) or ".cache") / name


def read(path: Path, key: str, names: Sequence[str]) -> dict[str, np.ndarray] | None:
    """Return the arrays of a cache file, or None if it is missing or damaged, or if its key differs."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if str(arrays["key"]) != key:
                return None
            return {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def write(path: Path, key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write to a temporary file and rename it, so that readers never get a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as target:
        try:
            np.savez(target, key=np.array(key), **arrays)
        except BaseException:
            os.unlink(target.name)
            raise
    os.replace(target.name, path)


def read_or_make(
    path: Path, key: str, names: Sequence[str], make: Callable[[], Mapping[str, np.ndarray]]
) -> Mapping[str, np.ndarray]:
    """Return the arrays of a cache file; if :func:`read` returns None, make them and write the file."""
    arrays: Mapping[str, np.ndarray] | None = read(path, key, names)
    if arrays is None:
        arrays = make()
        write(path, key, arrays)
    return arrays
