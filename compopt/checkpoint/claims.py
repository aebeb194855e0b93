"""Which estimator saves into which directory, so that two runs do not remove each other's checkpoints."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from compopt import locks
from compopt.checkpoint import durable
from compopt.estimator.base import Estimator
from compopt.remote import Folder, RemotePath

KEPT = 4  # directories of an estimator that stay claimed; some trainers name a new one for every save
REMEDY = "two runs that save there remove each other's checkpoints; end that one, or save into another directory"


class _Claims:
    """Those of one estimator, the latest last."""

    def __init__(self, est: Estimator) -> None:
        self._claims: list[locks.Claim] = []
        weakref.finalize(est, self.release)

    def add(self, claim: locks.Claim) -> None:
        self._claims.append(claim)
        while len(self._claims) > KEPT:
            self._claims.pop(0).release()

    def take(self, directory: Folder) -> locks.Claim | None:
        """Take out the claim on a directory."""
        for number, claim in enumerate(self._claims):
            if claim.what == directory:
                return self._claims.pop(number)
        return None

    def release(self) -> None:
        while self._claims:
            self._claims.pop().release()


_all: weakref.WeakKeyDictionary[Estimator, _Claims] = weakref.WeakKeyDictionary()


def claim(est: Estimator, directory: Folder) -> None:
    """From now on this estimator saves into a directory, until it is collected or its process ends.

    A directory of a remote store is claimed by nobody: stores have no locks.

    Raises:
        RuntimeError: an estimator of another process does.
    """
    if isinstance(directory, RemotePath):
        return
    directory = directory.resolve()
    claims = _all.get(est) or _all.setdefault(est, _Claims(est))
    own = claims.take(directory)
    if own is None or not own.valid:
        if own is not None:  # somebody removed the lock file
            own.release()
        path = lock_file(directory)
        with durable.named(path):
            own = locks.Claim(path, directory, REMEDY)
    claims.add(own)


def lock_file(directory: Path) -> Path:
    """Beside the directory, in which there is nothing but checkpoints; in it where its parent cannot be written."""
    beside = directory.name and os.access(directory.parent, os.W_OK | os.X_OK)
    return directory.with_name(f".{directory.name}.lock") if beside else directory / ".lock"
