"""Which estimator saves into which directory, so that two runs do not remove each other's checkpoints."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

from compopt import locks
from compopt.checkpoint import durable, manifest
from compopt.estimator.base import Estimator
from compopt.remote import Folder, RemotePath

KEPT = 4  # directories of an estimator that stay claimed; some trainers name a new one for every save
REMEDY = "two runs that save there remove each other's checkpoints; end that one, or save into another directory"


class _Claims:
    """Claims of one estimator, the latest last; a remote directory has no lock.

    Attributes:
        loaded: the directory that the estimator was last loaded from, until another one saves there.
    """

    def __init__(self, est: Estimator) -> None:
        self._claims: list[tuple[Folder, locks.Claim | None]] = []
        self.loaded: Folder | None = None
        weakref.finalize(est, self.release)

    def has(self, directory: Folder) -> bool:
        return any(claimed == directory for claimed, _ in self._claims)

    def add(self, directory: Folder, lock: locks.Claim | None) -> None:
        self._claims.append((directory, lock))
        while len(self._claims) > KEPT:
            _release(self._claims.pop(0)[1])

    def take(self, directory: Folder) -> locks.Claim | None:
        """Take out the claim on a directory."""
        for number, (claimed, _) in enumerate(self._claims):
            if claimed == directory:
                return self._claims.pop(number)[1]
        return None

    def release(self) -> None:
        while self._claims:
            _release(self._claims.pop()[1])


_all: weakref.WeakKeyDictionary[Estimator, _Claims] = weakref.WeakKeyDictionary()


def claim(est: Estimator, directory: Folder) -> None:
    """From now on this estimator saves into a directory, until it is collected or its process ends.

    An estimator that was loaded from the directory takes it over from the one that saved there before. Stores have no
    locks: other processes do not see a claim on a remote directory.

    Raises:
        RuntimeError: another estimator, of this process or of another one, saves there.
    """
    directory = directory.resolve()
    own = _of(est)
    others = _take_over(est, directory)
    lock = own.take(directory)
    if not isinstance(directory, RemotePath) and (lock is None or not lock.valid):
        _release(lock)  # somebody removed the lock file
        path = lock_file(directory)
        with durable.named(path):
            lock = locks.Claim(path, directory, REMEDY)
    for other in others:
        _release(other.take(directory))
    for known in _living():
        if known.loaded == directory:
            known.loaded = None
    own.add(directory, lock)


def loaded(est: Estimator, directory: Folder) -> None:
    """An estimator has the newest state of a directory, and may go on to save there."""
    _of(est).loaded = directory.resolve()


def _take_over(est: Estimator, directory: Folder) -> list[_Claims]:
    """The other claims on a directory; refused while their checkpoints would be taken for those of ``est``."""
    others = _others(est, directory)
    if others and _of(est).loaded != directory and any(c.complete for c in manifest.checkpoints(directory)):
        others.clear()
        gc.collect()  # one that nothing uses any more may be part of a cycle
        others = _others(est, directory)
        if others:
            raise RuntimeError(
                f"{directory} has checkpoints of another {type(est).__name__} of this process, whose rows a load would "
                f"give to this one and the other way round: save into another directory; or, if this estimator goes on "
                f"from those checkpoints, compopt.load them first; or delete the other estimator"
            )
    return others


def _others(est: Estimator, directory: Folder) -> list[_Claims]:
    own = _of(est)
    return [claims for claims in _living() if claims is not own and claims.has(directory)]


def _living() -> list[_Claims]:
    """All claims of estimators that were not collected."""
    estimators = (reference() for reference in _all.keyrefs())  # a list: other threads may add some meanwhile
    return [claims for est in estimators if est is not None and (claims := _all.get(est)) is not None]


def _of(est: Estimator) -> _Claims:
    return _all.get(est) or _all.setdefault(est, _Claims(est))


def _release(lock: locks.Claim | None) -> None:
    if lock is not None:
        lock.release()


def lock_file(directory: Path) -> Path:
    """Beside the directory, in which there is nothing but checkpoints; in it where its parent cannot be written."""
    beside = directory.name and os.access(directory.parent, os.W_OK | os.X_OK)
    return directory.with_name(f".{directory.name}.lock") if beside else directory / ".lock"
