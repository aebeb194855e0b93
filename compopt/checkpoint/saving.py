"""Saving of checkpoints, by any number of ranks, in the foreground or in a background thread."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor

from compopt import checks, files
from compopt.checkpoint import manifest
from compopt.checkpoint.manifest import SPANS, STATE, Checkpoint, File
from compopt.checks.context import warn
from compopt.distributed.collectives import doing
from compopt.distributed.ranks import Ranks
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator
from compopt.estimator.save_handle import SaveHandle
from compopt.stores.snapshot import Snapshot
from compopt.stores.table import RowTable

StrPath = str | os.PathLike[str]
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/")
SLOWEST = timedelta(minutes=30)  # that one rank may write longer than another, in the background
CLAIMS = 4  # largest number of directories locked per estimator; some trainers use a new one for every save


@overload
def save(est: Estimator, directory: StrPath, keep: int = ..., blocking: Literal[True] = ...) -> Path: ...


@overload
def save(est: Estimator, directory: StrPath, keep: int = ..., *, blocking: Literal[False]) -> SaveHandle: ...


def save(est: Estimator, directory: StrPath, keep: int = 2, blocking: bool = True) -> Path | SaveHandle:
    """Write a new checkpoint of all committed state; pending deposits are not part of it.

    Example:
        >>> import compopt, tempfile
        >>> est = compopt.SogCLREstimator(n=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = compopt.save(est, folder)
        ...     path.name.startswith("checkpoint-")
        True

    Every rank writes the visited rows that it holds, in files of at most 2^18 rows, and needs memory for a few copies
    of one file. Every save creates a new directory and writes the manifest last, so that the previous or the new
    checkpoint is complete if the process is killed at any time. ``state_dict`` pre-hooks run.

    Time and size of a save grow with the rows that were visited, wherever these are in the table: pages (4 KiB) without
    a visited row are not read, and only visited rows are written. Each checkpoint is independent: earlier ones may be
    removed.

    *Background saves.* With ``blocking=False`` the call returns after the device has finished its queued work and the
    state that is not rows has been copied; a thread of each rank writes the files. Later commits are not part of the
    checkpoint: a commit copies the former values of rows that are not written yet to an undo log in memory. The next
    save, ``load``, ``load_state_dict``, ``add_sample_group`` and the exit of the interpreter wait for the save. Call
    ``wait()`` of the handle before ``torch.distributed.destroy_process_group()``. An error of the save is raised by
    ``wait()``, or by the next save if ``wait()`` was not called. The next commit only warns, because the other ranks
    would wait for a rank that raises alone.

    With one rank, another thread may also call ``save`` during training: without ``blocking=False`` the next commit
    waits until the state is written. With several ranks, the thread that calls the estimator must save.

    Args:
        est: the estimator, each of whose parts gets a folder, or a part of one.
        directory: directory of the run's checkpoints, which all ranks can access; created if necessary. Only one
            estimator of one run may save there. Another one may continue there after it was loaded from it.
        keep: number of complete checkpoints to keep, including the new one; older and unfinished ones are removed.
        blocking: ``False``: write in a background thread. Equal on all ranks.

    Returns:
        The directory of the new checkpoint. With ``blocking=False``, a handle: ``wait()`` returns the directory once
        the checkpoint is complete, and ``done`` tells whether it has ended.

    Raises:
        OSError: a file could not be written; the message contains its path, and previous checkpoints are unchanged.
        ValueError: the directory is a URL or itself a checkpoint, or contains checkpoints of another configuration;
            ``blocking`` differs between ranks.
        TypeError: ``est`` is not an estimator, ``directory`` not a path, ``keep`` not an integer, or ``blocking``
            neither True nor False.
        RuntimeError: another process saves into the directory (the message contains process, machine and time), or
            another estimator of this process has done so since this one was made, and this one was not loaded from
            there; with several ranks, another rank runs another operation, or this thread does not call the estimator.
        Exception: the error of the previous background save, if ``wait()`` has not raised it; no checkpoint is written.

    Warns:
        UserWarning: the file system has no locks, so that two runs that save there are not detected; or the directory
            has checkpoints of an earlier estimator of this process, such as that of an interrupted cell of a notebook.
        RuntimeWarning: at a later commit: a background save failed.

    Communicates: collective; a few small messages. The first background save forms a separate process group, over which
    ranks exchange messages after they have written their files. The save fails if one rank finishes writing later than
    another by more than 30 minutes, the timeout of the group.
    """
    check_estimator(est)
    checks.positive_int("keep", keep)
    checks.flag("blocking", blocking)
    with doing("compopt.save()", est.t):
        root = est._ranks.agree(lambda: _begin(est, directory))
        with est._copying():
            job = _prepare(est, root, keep, blocking)
            path = as_given(job.target.path, root, directory)
            if blocking:
                job.run()
                return path
            # Not job.release: the handle, which outlives the save, must not keep the copied state alive.
            handle = SaveHandle(path, job.run, partial(_release, [each.snapshot for each in job.objects]))
            for each in est._tree():
                each._saving = handle
            return handle


def absolute(directory: StrPath) -> Path:
    """Return an absolute path, since a background save must not depend on the working directory; refuse a URL."""
    if not isinstance(directory, str | os.PathLike):
        remedy = "pass os.fsdecode(directory)" if isinstance(directory, bytes) else "pass a str or a pathlib.Path"
        raise TypeError(f"directory must be a path, got {directory!r} of type {type(directory).__name__}; {remedy}")
    if _URL.match(os.fspath(directory)):  # as a path it would be a new directory here, named s3:
        raise ValueError(f"directory={directory!r} is a URL; pass a local directory, and copy checkpoints with fsspec")
    return Path(directory).absolute()


def as_given(path: Path, root: Path, directory: StrPath) -> Path:
    """Return a path below ``root`` in the form of ``directory``, of which ``root`` is the absolute path."""
    inside = path.is_relative_to(root)  # a link to a checkpoint leads elsewhere
    return Path(directory) / path.relative_to(root) if inside else path


def check_estimator(est: Any) -> None:
    """Refuse an object that is not an estimator; for a module around one, the message suggests ``.est``."""
    if isinstance(est, Estimator):
        return
    inside = isinstance(getattr(est, "est", None), Estimator)
    remedy = "pass its estimator, .est" if inside else "models go into torch.save(model.state_dict(), ...)"
    raise TypeError(f"est must be an estimator of compopt, got {type(est).__name__}; {remedy}")


# -- between two commits -------------------------------------------------------------------------------------------


def _begin(est: Estimator, directory: StrPath) -> Path:
    root = absolute(directory)
    est._await_save()
    before = {id(each._saving): each._saving for each in est._tree() if each._saving is not None}
    for each in est._tree():
        each._saving = None
    for handle in before.values():
        handle.raise_unreported()
    est._begin_saving()
    return root


def _prepare(est: Estimator, root: Path, keep: int, blocking: bool) -> _Job:
    """Create the directory of the new save, and take a snapshot of the state. Collective."""
    ranks = est._ranks
    modes = ranks.gather_objects(blocking)
    if len(set(modes)) > 1:
        raise ValueError(f"blocking= must be the same on all ranks; by rank: {modes}")
    content, tensors = ranks.agree(lambda: _content(est))
    objects = [_Object(name, each._table, tensors[name]) for name, each in est._objects().items()]
    for each in objects:
        if each.table is not None:
            ranks.agree(each.table.readable)
    writers = ranks if blocking else _get_background_ranks(est)
    made = ranks.agree(lambda: _make(est, root, content) if ranks.rank == 0 else None)
    target = ranks.gather_objects(made)[0]
    for each in objects:
        each.snapshot = None if each.table is None else each.table.snapshot()
    return _Job(target, writers, content, objects, keep)


def _content(est: Estimator) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return the entries of the manifest, and state that is not rows by object; collective if that is split.

    Raises for a state that no load would accept, before older checkpoints are removed.
    """
    content, own = states.metadata(est), {name: each.saved_state() for name, each in est._objects().items()}
    for name, each in est._objects().items():
        each.check_state(own[name])
    if not isinstance(est.data_fingerprint, str | None):
        raise TypeError(f"data_fingerprint must be a str or None, got {est.data_fingerprint!r}; pass a hash as text")
    if est.data_fingerprint is not None:
        content["data_fingerprint"] = est.data_fingerprint
    return content, {name: {key: x.detach().cpu() for key, x in state.items()} for name, state in own.items()}


def _make(est: Estimator, root: Path, content: dict[str, Any]) -> Checkpoint:
    manifest.prepare(root, content)
    for newest in manifest.complete(root)[-1:]:
        _check_rows(est, newest)
    _lock(est, root.resolve())
    made = manifest.new(root, est.t, [name for name in est._objects() if name])
    note_load(est, made)
    _writers[made.save_id] = est
    return made


_background_ranks: WeakKeyDictionary[Estimator, Ranks] = WeakKeyDictionary()


def _get_background_ranks(est: Estimator) -> Ranks:
    """Return ranks with a separate group, to keep messages apart from training; the first call is collective."""
    if est not in _background_ranks:
        group = est._ranks.new_host_group(SLOWEST)
        if group is None and est._ranks.size > 1:
            raise RuntimeError(
                "blocking=False needs a process group of its own, which torch cannot form for process_group= here "
                "(its ranks have formed different numbers of groups before): leave blocking=False out"
            )
        _background_ranks[est] = Ranks.alone() if group is None else Ranks(group)
    return _background_ranks[est]


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class _Object:
    """State of one object between two commits: its rows, by a snapshot, and its state that is not rows."""

    folder: str
    table: RowTable | None
    state: Mapping[str, Tensor]
    snapshot: Snapshot | None = None


@dataclass
class _Job:
    """Task of one rank in a save."""

    target: Checkpoint
    ranks: Ranks
    content: Mapping[str, Any]  # entries of the manifest
    objects: Sequence[_Object]
    keep: int

    def run(self) -> None:
        """Write this rank's files, then the manifest on rank 0; the checkpoint is complete on return. Collective."""
        ranks, is_first = self.ranks, self.ranks.rank == 0
        with doing("compopt.save()", self.target.t):
            try:
                own = ranks.agree(lambda: [file for each in self.objects for file in self._write_files(each)])
                everyone = [file for each in ranks.gather_objects(own) for file in each]
                ranks.agree(lambda: manifest.write(self.target, everyone, self.content) if is_first else None)
            except Exception:  # raised on every rank, so that no rank writes any more
                with suppress(OSError):
                    if is_first and not self.target.complete:  # a complete one may be in use by a load
                        shutil.rmtree(self.target.path, ignore_errors=True)
                raise
            finally:
                _release([each.snapshot for each in self.objects])
            ranks.agree(lambda: self._prune() if is_first else None)

    def _write_files(self, each: _Object) -> Iterator[File]:
        if each.table is not None and each.snapshot is not None:
            table, every = each.table, 1 if each.table.sharded else self.ranks.size
            part = self.ranks.rank % every
            for count, (rows, block) in enumerate(each.snapshot.visited(manifest.PIECE_ROWS, part, every)):
                name = f"rows-{table.first:05d}of{table.stride:05d}-{count * every + part:05d}.safetensors"
                tensors = {**table.layout.unpack(block), SPANS: manifest.spans_of(rows)}
                yield self._write(each, name, tensors, table.first, table.stride, len(rows))
        _release([each.snapshot])
        if self.ranks.rank == 0:
            yield self._write(each, STATE, each.state)

    def _write(self, each: _Object, name: str, tensors: Mapping[str, Tensor], *place: Any) -> File:
        from safetensors.torch import save as to_bytes

        content = to_bytes({key: value.contiguous() for key, value in tensors.items()})
        name = f"{each.folder}/{name}" if each.folder else name
        path = self.target.path / name
        with files.explained_errors(path, manifest.KEPT):
            files.write_file(path, content)
        return File(name, len(content), hashlib.sha256(content).hexdigest(), *place)

    def _prune(self) -> None:
        for old in manifest.outdated(self.target.path.parent, self.keep):
            shutil.rmtree(old.path, ignore_errors=True)


def _release(snapshots: Sequence[Snapshot | None]) -> None:
    for snapshot in snapshots:
        if snapshot is not None:
            snapshot.release()


# -- one estimator per directory -------------------------------------------------------------------------------------

# By estimator: the latest directories that it was saved into, with the lock of this process (None without locks); the
# save_ids of the checkpoints in a directory when the estimator was saved into it, or loaded from it; and the time of
# its last save or load.
_locks: WeakKeyDictionary[Estimator, dict[Path, files.Lock | None]] = WeakKeyDictionary()
_known_saves: WeakKeyDictionary[Estimator, set[str]] = WeakKeyDictionary()
_last_used: WeakKeyDictionary[Estimator, float] = WeakKeyDictionary()
_writers: WeakValueDictionary[str, Estimator] = WeakValueDictionary()


def note_load(est: Estimator, checkpoint: Checkpoint) -> None:
    """Record that an estimator contains the rows of a checkpoint and may continue to save into its directory."""
    beside = manifest.checkpoints(checkpoint.path.parent)
    _known_saves.setdefault(est, set()).update(known.save_id for known in (checkpoint, *beside))
    _last_used[est] = time.monotonic()


def _check_rows(est: Estimator, newest: Checkpoint) -> None:
    """Refuse a directory if another estimator of this process, which is in use too, has written its newest checkpoint.

    A writer whose last save or load was before this estimator was made is that of an earlier run, kept alive for
    example by the traceback of an interrupted cell.
    """
    if newest.save_id in _known_saves.get(est, ()) or newest.save_id not in _writers:
        return
    gc.collect()  # an unused writer may still be alive as part of a reference cycle
    other = _writers.get(newest.save_id)
    if other is None:
        return
    what = f"{newest.path.parent} has checkpoints of another {type(est).__name__} of this process"
    if _last_used[other] >= est._made:
        raise RuntimeError(
            f"{what}; checkpoints of both cannot be told apart there: save into another directory, call compopt.load "
            f"first to continue from them, or remove them"
        )
    warn(
        f"{what}, whose last save was before this one was made: they are taken for those of an earlier run, and this "
        f"run replaces them; call compopt.load first to continue from them"
    )
    _known_saves.setdefault(est, set()).update(save_id for save_id, writer in _writers.items() if writer is other)


def _lock(est: Estimator, directory: Path) -> None:
    """Keep other processes from saving into a directory until the estimator is collected."""
    own, path = _locks.setdefault(est, {}), lock_file(directory)
    remedy = "two runs that save there remove each other's checkpoints; end that one, or save into another directory"
    with files.explained_errors(path, manifest.KEPT):
        lock = files.lock(path, directory, remedy)
    own.pop(directory, None)
    own[directory] = lock  # inserted as the latest one
    while len(own) > CLAIMS:
        del own[next(iter(own))]


def lock_file(directory: Path) -> Path:
    """Return the lock file of a directory: beside it, or inside it if its parent is not writable."""
    beside = directory.name and os.access(directory.parent, os.W_OK | os.X_OK)
    return directory.with_name(f".{directory.name}.lock") if beside else directory / ".lock"
