"""``save``: checkpoints of tables that are larger than memory, by any number of ranks, beside training or not."""

from __future__ import annotations

import gc
import hashlib
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
    est: Estimator, directory: os.PathLike[str], keep: int = ..., incremental: bool = ..., blocking: Literal[True] = ...
) -> Path: ...


@overload
def save(
    est: Estimator, directory: StrPath, keep: int = ..., incremental: bool = ..., blocking: Literal[True] = ...
) -> Path | str: ...


@overload
def save(
    est: Estimator, directory: StrPath, keep: int = ..., incremental: bool = ..., *, blocking: Literal[False]
) -> SaveHandle: ...


def save(
    est: Estimator, directory: StrPath, keep: int = 2, incremental: bool = True, blocking: bool = True
) -> Path | str | SaveHandle:
    """Write a new checkpoint of everything committed; pending deposits are not part of it.

    Every rank writes the rows that it holds, in files of at most 2^18 rows, and holds a few copies of one file in
    memory. A new directory is made for every save and its manifest comes last, so that a process killed at any moment
    leaves the previous checkpoint or the new one. ``state_dict`` pre-hooks run.

    Every save reads and hashes all rows. Chunks of 8,192 rows that were never visited are not written. A file that is
    equal to the one at its place in the newest checkpoint of the same directory becomes a hard link to it. That helps
    where few pieces of 2^18 rows change between two saves, as in large data sets that are read shard by shard. Each
    checkpoint is complete by itself: earlier ones may be removed.

    *URLs.* ``directory`` may be a URL that fsspec knows, such as ``s3://bucket/run``; it takes ``pip install -e
    ".[remote]"`` and the driver that fsspec names. Each file is written to the local temporary directory, put and
    removed there, the manifest last; all rows are put at every save.

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
        incremental: ``False``: write everything anew. A file that several checkpoints share is one file on the disk:
            damage to it is damage to all of them.
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
        UserWarning: equal files cannot be linked, so that all rows are written; the file system has no locks, so that
            nobody notices two runs that save there.
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
    engine = est._engine
    with doing("compopt.save()", est.t):
        root = engine.ranks.agree(lambda: _begin(est, directory))
        with engine.copying(), root.naming():
            job = _prepare(est, root, keep, incremental, blocking)
            if blocking:
                return job.run()
            abandon = None if job.snapshot is None else job.snapshot.release  # not of the job, which has the directory
            engine.saving = SaveHandle(job.place, job.run, abandon)
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


def _prepare(est: Estimator, root: Directory, keep: int, incremental: bool, blocking: bool) -> _Job:
    """Make the directory of the new save and take a snapshot of the state. Collective."""
    engine = est._engine
    ranks, table = engine.ranks, engine.table
    modes = ranks.gather_objects(blocking)
    if len(set(modes)) > 1:
        raise ValueError(f"blocking= must be the same on all ranks; by rank: {modes}")
    content = ranks.agree(lambda: _describe(est))
    state = ranks.agree(lambda: _copy_state(est))
    if table is not None:
        ranks.agree(table.at_rest)
    writers = ranks if blocking else _ranks_beside(engine)
    made = ranks.agree(lambda: _make(est, root, content["config"]) if ranks.rank == 0 else None)
    target = root.of_first_rank(ranks, made)
    snapshot = None if table is None else table.snapshot()
    return _Job(target, root, writers, content, state, table, snapshot, keep, incremental)


def _describe(est: Estimator) -> dict[str, Any]:
    """Return what the manifest says of the estimator; refuse what could not be loaded again."""
    est._engine.groups.check()
    content = {"config": states.config(est._engine), "sample_groups": est._engine.groups.saved()}
    return content if est.data_fingerprint is None else {**content, "data_fingerprint": est.data_fingerprint}


def _copy_state(est: Estimator) -> dict[str, Tensor]:
    """Return state that is not rows, by role and name; collective where ranks split it."""
    saved = {role: part.saved_state() for role, part in est._engine.parts.items()}
    return {f"{role}.{name}": value.detach().cpu() for role, own in saved.items() for name, value in own.items()}


def _make(est: Estimator, root: Directory, config: dict[str, Any]) -> Checkpoint:
    root.list()
    manifest.prepare(root.local, config)
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
    incremental: bool
    base: Path = Path()  # the checkpoint before this one
    known: set[File] = field(default_factory=set)  # files of that

    @property
    def place(self) -> Path | str:
        return self.root.at(self.target.path)

    def release(self) -> None:
        if self.snapshot is not None:
            self.snapshot.release()

    def run(self) -> Path | str:
        """Write this rank's files, then on rank 0 the manifest; on return the checkpoint is complete. Collective."""
        ranks, is_first = self.ranks, self.ranks.rank == 0
        with doing("compopt.save()", self.target.t):
            try:
                own = ranks.agree(self._write_files)
                everyone = [file for each in ranks.gather_objects(own) for file in each]
                ranks.agree(lambda: self._write_manifest(everyone) if is_first else None)
            except Exception:  # on every rank: nobody writes any more
                with suppress(OSError):
                    if is_first and not self.root.is_complete(self.target):  # else it may be loaded already
                        self.root.remove(self.target)
                raise
            finally:
                self.release()
            ranks.agree(lambda: self._prune() if is_first else None)
        return self.place

    def _write_files(self) -> list[File]:
        if self.incremental and self.root.shared:
            before = manifest.complete(self.root.local)
            with suppress(IndexError, OSError, ValueError):  # there is none; it was removed, or is damaged
                self.base, self.known = before[-1].path, set(manifest.read(before[-1])[1])
        own: list[File] = []
        if self.table is not None and self.snapshot is not None:
            table, rows = self.table, self.table.store.n
            for number, start in enumerate(range(0, rows, manifest.PIECE_ROWS)):
                if table.sharded or number % self.ranks.size == self.ranks.rank:
                    block = self.snapshot.read(start, min(start + manifest.PIECE_ROWS, rows))
                    own += self._write_rows(table, number, start, block)
        self.release()
        return [*own, self._write(STATE, self.state)] if self.ranks.rank == 0 else own

    def _write_rows(self, table: RowTable, number: int, start: int, block: Tensor) -> list[File]:
        spans = manifest.nonzero_spans(block)
        if not spans:
            return []
        if spans != [(0, len(block))]:
            block = torch.cat([block[low:high] for low, high in spans])
        name = f"rows-{table.first:05d}of{table.stride:05d}-{number:05d}.safetensors"
        local = tuple((start + low, start + high) for low, high in spans)
        return [self._write(name, table.layout.unpack(block), first=table.first, stride=table.stride, spans=local)]

    def _write(self, name: str, tensors: Mapping[str, Tensor], **place: Any) -> File:
        """Write one file, or link it to an equal one of the checkpoint before."""
        from safetensors.torch import save as to_bytes

        content = to_bytes({key: value.contiguous() for key, value in tensors.items()})
        file = File(name, len(content), hashlib.sha256(content).hexdigest(), **place)
        path = self.target.path / name
        with files.named(path, manifest.KEPT):
            if file not in self.known or not self._link(file, path):
                files.write_file(path, content)
        self.root.put(path)
        return file

    def _link(self, file: File, path: Path) -> bool:
        source = os.path.realpath(self.base / file.name)  # the file, not a symbolic link to it
        try:
            if os.stat(source).st_size != file.bytes:
                return False
            os.link(source, path)
        except FileNotFoundError:
            return False
        except OSError:
            self.known.clear()
            warnings.warn(
                f"{self.root.local}: files of an earlier checkpoint could not be linked there, so that every save "
                f"writes all rows; keep checkpoints on a file system with hard links",
                stacklevel=6,
            )
            return False
        return True

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
    if newest.save_id in _had.get(est, ()):
        return
    if _writers.get(newest.save_id) is not None:
        gc.collect()  # one that nothing uses any more may be part of a cycle
    if _writers.get(newest.save_id) is not None:
        raise RuntimeError(
            f"{directory} has checkpoints of another {type(est).__name__} of this process, whose rows a load would "
            f"give to this one and the other way round: save into another directory; or, if this estimator goes on "
            f"from those checkpoints, compopt.load them first; or delete the other estimator"
        )


def _lock(est: Estimator, directory: Path) -> None:
    """Keep other processes from saving into a directory until the estimator is collected."""
    own = _locks.setdefault(est, {})
    lock = own.pop(directory, None)
    if lock is None or not lock.valid:  # somebody may have removed the lock file
        path = lock_file(directory)
        with files.named(path, manifest.KEPT):
            remedy = "two runs that save there remove each other's checkpoints"
            lock = files.lock(path, directory, f"{remedy}; end that one, or save into another directory")
    own[directory] = lock
    while len(own) > CLAIMS:
        del own[next(iter(own))]


def lock_file(directory: Path) -> Path:
    """Return the lock file of a directory: beside it, or in it where its parent cannot be written."""
    beside = directory.name and os.access(directory.parent, os.W_OK | os.X_OK)
    return directory.with_name(f".{directory.name}.lock") if beside else directory / ".lock"
