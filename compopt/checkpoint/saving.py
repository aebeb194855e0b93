"""``save``: checkpoints of tables that are larger than memory, by any number of ranks, beside training or not."""

from __future__ import annotations

import gc
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from compopt import checks, files
from compopt.checkpoint import manifest
from compopt.checkpoint.manifest import MANIFEST, STATE, Checkpoint, File
from compopt.checkpoint.remote import Directory, open_directory
from compopt.distributed.collectives import doing
from compopt.distributed.ranks import Ranks
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator
from compopt.estimator.engine import Engine
from compopt.estimator.save_handle import SaveHandle
from compopt.stores.snapshot import Snapshot
from compopt.stores.table import RowTable

StrPath = str | os.PathLike[str]
CLAIMS = 4  # directories of an estimator that stay claimed; some trainers name a new one for every save


@overload
def save(
    est: Estimator,
    directory: os.PathLike[str],
    keep: int = ...,
    incremental: bool | None = ...,
    blocking: Literal[True] = ...,
) -> Path: ...


@overload
def save(
    est: Estimator, directory: StrPath, keep: int = ..., incremental: bool | None = ..., blocking: Literal[True] = ...
) -> Path | str: ...


@overload
def save(
    est: Estimator, directory: StrPath, keep: int = ..., incremental: bool | None = ..., *, blocking: Literal[False]
) -> SaveHandle: ...


def save(
    est: Estimator, directory: StrPath, keep: int = 2, incremental: bool | None = None, blocking: bool = True
) -> Path | str | SaveHandle:
    """Write a new checkpoint of everything committed; pending deposits are not part of it.

    Every rank writes the rows that it holds, in files of at most 2^18 rows, and holds a few copies of one file in
    memory. A new directory is made for every save and its manifest comes last, so that a process killed at any moment
    leaves the previous checkpoint or the new one. ``state_dict`` pre-hooks run.

    Every save reads and writes all rows but chunks of 8,192 that were never visited. Each checkpoint is complete by
    itself: earlier ones may be removed.

    *URLs.* ``directory`` may be a URL that fsspec knows, such as ``s3://bucket/run``; it takes ``pip install -e
    ".[remote]"`` and the driver that fsspec names. Each file is written to the local temporary directory, put and
    removed there, the manifest last.

    *Beside training.* With ``blocking=False`` the call returns once the device has done what it was given and the state
    that is not rows is copied; a thread of each rank writes. What is committed meanwhile is not part of the checkpoint:
    a commit copies the former values of rows that are not yet written into an undo log in memory. The next save waits
    for this one, and so do ``load``, ``load_state_dict``, ``add_sample_group`` and the end of the interpreter; call
    ``wait()`` before ``torch.distributed.destroy_process_group()``. An error is raised by ``wait()`` of the handle or,
    if nobody called that, by the next save; the next commit only warns, because a rank that raises alone would leave
    the others waiting.

    One rank may also save in a thread of its own beside training: without ``blocking=False`` the next commit waits
    until the state is written. Several ranks must save in the thread that calls the estimator.

    Args:
        est: the estimator.
        directory: of the run's checkpoints, a path or URL that all ranks see; created if need be. It serves one
            estimator of one run; another one may go on there once it was loaded from it.
        keep: complete checkpoints to keep, the new one included; older and unfinished ones are removed.
        incremental: deprecated, without effect: every save writes all rows.
        blocking: ``False``: write beside training. Equal on all ranks.

    Returns:
        The directory of the new checkpoint, a ``Path``, or its URL as a string; with ``blocking=False`` a handle with
        ``wait()``, which returns that once the checkpoint is complete, and ``done``.

    Raises:
        OSError: a file could not be written; the message names it, and the previous checkpoints are as they were.
        ValueError: the directory is itself a checkpoint, or has those of another method.
        ImportError: fsspec or the driver for a URL is missing.
        TypeError: ``est`` is no estimator, ``directory`` no path, ``keep`` no integer, ``blocking`` neither True nor
            False.
        RuntimeError: another process saves into the directory (the message says which, on which machine, since when),
            or another estimator of this process, from which this one was not loaded; ``est`` is a part of another
            estimator; with several ranks, one does something else, or this is not the thread that calls.
        Exception: whatever the save before raised beside training, if nobody was told; this one was not made.

    Warns:
        DeprecationWarning: ``incremental`` was passed.
        UserWarning: the file system has no locks, so that nobody notices two runs that save there.
        RuntimeWarning: at a later commit, that a save beside training failed.

    Communicates: collective; a few small messages. Beside training they travel over a process group of their own, which
    the first such save forms, once every rank has written; a rank that takes longer than the others by the timeout of
    the group (30 minutes) fails the save.

    Example:
        >>> import compopt, tempfile
        >>> est = compopt.SogCLREstimator(n=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = compopt.save(est, folder)
        ...     path.name.startswith("checkpoint-")
        True
    """
    check_estimator(est)
    checks.count("keep", keep)
    checks.flag("blocking", blocking)
    if incremental is not None:
        warnings.warn("incremental= has no effect: every save writes all rows; leave it out", DeprecationWarning, 2)
    engine = est._engine
    with doing("compopt.save()", est.t):
        root = engine.ranks.agree(lambda: _begin(est, directory))
        with engine.copying(), root.naming():
            job = _prepare(est, root, keep, blocking)
            if blocking:
                return job.run()
            abandon = None if job.snapshot is None else job.snapshot.release  # not of the job, which has the directory
            engine.saving = SaveHandle(root.at(job.target.path), job.run, abandon)
            return engine.saving


def check_estimator(est: Any) -> None:
    """Refuse what has no rows; a module around an estimator has it in ``.est``."""
    if isinstance(est, Estimator):
        return
    inside = isinstance(getattr(est, "est", None), Estimator)
    remedy = "pass its estimator, .est" if inside else "models go into torch.save(model.state_dict(), ...)"
    raise TypeError(f"est must be an estimator of compopt, got {type(est).__name__}; {remedy}")


# -- between two commits -------------------------------------------------------------------------------------------


def _begin(est: Estimator, directory: StrPath) -> Directory:
    engine, root = est._engine, open_directory(directory)
    engine.await_save()
    before, engine.saving = engine.saving, None
    if before is not None:
        before.raise_untold()
    est._begin_saving()
    return root


def _prepare(est: Estimator, root: Directory, keep: int, blocking: bool) -> _Job:
    """Make the directory of the new save and take a snapshot of the state. Collective."""
    engine = est._engine
    ranks, table = engine.ranks, engine.table
    modes = ranks.gather_objects(blocking)
    if len(set(modes)) > 1:
        raise ValueError(f"blocking= must be the same on all ranks; by rank: {modes}")
    ranks.agree(engine.groups.check)  # else it could not be loaded; now, since `_state` may communicate
    content, state = ranks.agree(lambda: _state(est))
    if table is not None:
        ranks.agree(table.at_rest)
    writers = ranks if blocking else _ranks_beside(engine)
    target = root.of_first_rank(ranks, lambda: _make(est, root, content["config"]))
    return _Job(target, root, writers, content, state, table, None if table is None else table.snapshot(), keep)


def _state(est: Estimator) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what the manifest says of the estimator, and state that is not rows; collective where ranks split it."""
    saved = states.rest(est._engine)
    content = {key: saved[key] for key in ("config", "sample_groups")}
    if est.data_fingerprint is not None:
        content["data_fingerprint"] = est.data_fingerprint
    return content, states.flat(saved["extra"])


def _make(est: Estimator, root: Directory, config: dict[str, Any]) -> Checkpoint:
    manifest.prepare(root.listed(), config)
    for newest in manifest.complete(root.local)[-1:]:
        _check_rows(est, root.at(root.local), newest)
    if root.shared:
        _lock(est, root.local.resolve())
    made = manifest.new(root.local, est.t)
    note_load(est, made)
    _writers[made.save_id] = est
    return made


_beside: WeakKeyDictionary[Engine, Ranks] = WeakKeyDictionary()


def _ranks_beside(engine: Engine) -> Ranks:
    """Return ranks whose messages do not meet those of training; the first call is collective."""
    if engine not in _beside:
        group = engine.ranks.new_host_group()
        if group is None and engine.ranks.size > 1:
            raise RuntimeError(
                "blocking=False needs a process group of its own, which torch cannot form for process_group= here "
                "(its ranks have formed different numbers of groups before): leave blocking=False out"
            )
        _beside[engine] = Ranks.alone() if group is None else Ranks(group)
    return _beside[engine]


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """One rank's part of a save, as of one moment between two commits."""

    target: Checkpoint
    root: Directory
    ranks: Ranks
    content: Mapping[str, Any]  # of the manifest
    state: Mapping[str, Tensor]  # that is not rows
    table: RowTable | None
    snapshot: Snapshot | None
    keep: int

    def run(self) -> Path | str:
        """Write this rank's files, then on rank 0 the manifest; on return the checkpoint is complete. Collective."""
        ranks, is_first = self.ranks, self.ranks.rank == 0
        with doing("compopt.save()", self.target.t):
            try:
                own = ranks.agree(lambda: list(self._write_files()))
                everyone = [file for each in ranks.gather_objects(own) for file in each]
                ranks.agree(lambda: self._write_manifest(everyone) if is_first else None)
            except Exception:  # on every rank: nobody writes any more
                with suppress(OSError):
                    if is_first and not self.root.is_complete(self.target):  # else it may be loaded already
                        self.root.remove(self.target)
                raise
            finally:
                self._release()
            ranks.agree(lambda: self._prune() if is_first else None)
        return self.root.at(self.target.path)

    def _release(self) -> None:
        if self.snapshot is not None:
            self.snapshot.release()

    def _write_files(self) -> Iterator[File]:
        if self.table is not None and self.snapshot is not None:
            rows, every = self.table.store.n, 1 if self.table.sharded else self.ranks.size
            for start in range(0, rows, manifest.PIECE_ROWS):
                if start // manifest.PIECE_ROWS % every == self.ranks.rank % every:
                    block = self.snapshot.read(start, min(start + manifest.PIECE_ROWS, rows))
                    yield from self._write_rows(self.table, start, block)
        self._release()
        if self.ranks.rank == 0:
            yield self._write(STATE, self.state)

    def _write_rows(self, table: RowTable, start: int, block: Tensor) -> Iterator[File]:
        spans = manifest.nonzero_spans(block)
        if spans:
            number = start // manifest.PIECE_ROWS
            name = f"rows-{table.first:05d}of{table.stride:05d}-{number:05d}.safetensors"
            block = block if spans == [(0, len(block))] else torch.cat([block[low:high] for low, high in spans])
            local = tuple((start + low, start + high) for low, high in spans)
            yield self._write(name, table.layout.unpack(block), table.first, table.stride, local)

    def _write(self, name: str, tensors: Mapping[str, Tensor], *place: Any) -> File:
        from safetensors.torch import save as to_bytes

        content = to_bytes({key: value.contiguous() for key, value in tensors.items()})
        path = self.target.path / name
        with files.named(path, manifest.KEPT):
            files.write_file(path, content)
        self.root.put(path)
        return File(name, len(content), hashlib.sha256(content).hexdigest(), *place)

    def _write_manifest(self, everyone: list[File]) -> None:
        manifest.write(self.target, everyone, self.content)
        self.root.put(self.target.path / MANIFEST)

    def _prune(self) -> None:
        for old in manifest.outdated(self.root.local, self.keep):
            self.root.remove(old)


# -- one estimator per directory -------------------------------------------------------------------------------------

# By estimator: the latest directories that it saved into, with the lock of this process where there is one; and the
# checkpoints (by save_id) that were there when it was saved to, or loaded from, their directory.
_locks: WeakKeyDictionary[Estimator, dict[Path, files.Lock | None]] = WeakKeyDictionary()
_had: WeakKeyDictionary[Estimator, set[str]] = WeakKeyDictionary()
_writers: WeakValueDictionary[str, Estimator] = WeakValueDictionary()


def note_load(est: Estimator, checkpoint: Checkpoint) -> None:
    """Note that an estimator has the rows of a checkpoint, and may go on to save beside it and those after it."""
    beside = manifest.checkpoints(checkpoint.path.parent)
    _had.setdefault(est, set()).update(known.save_id for known in (checkpoint, *beside))


def _check_rows(est: Estimator, directory: Path | str, newest: Checkpoint) -> None:
    """Refuse a directory whose newest checkpoint has rows of another estimator of this process."""
    if newest.save_id in _had.get(est, ()) or newest.save_id not in _writers:
        return
    gc.collect()  # one that nothing uses any more may be part of a cycle
    if newest.save_id in _writers:
        raise RuntimeError(
            f"{directory} has checkpoints of another {type(est).__name__} of this process, whose rows a load would "
            f"give to this one and the other way round: save into another directory; or, if this estimator goes on "
            f"from those checkpoints, compopt.load them first; or delete the other estimator"
        )


def _lock(est: Estimator, directory: Path) -> None:
    """Keep other processes from saving into a directory until the estimator is collected."""
    own, path = _locks.setdefault(est, {}), lock_file(directory)
    remedy = "two runs that save there remove each other's checkpoints; end that one, or save into another directory"
    with files.named(path, manifest.KEPT):
        lock = files.lock(path, directory, remedy)
    own.pop(directory, None)
    own[directory] = lock  # as the latest
    while len(own) > CLAIMS:
        del own[next(iter(own))]


def lock_file(directory: Path) -> Path:
    """Return the lock file of a directory: beside it, or in it where its parent cannot be written."""
    beside = directory.name and os.access(directory.parent, os.W_OK | os.X_OK)
    return directory.with_name(f".{directory.name}.lock") if beside else directory / ".lock"
