"""``save`` and ``load``: checkpoints of tables that are larger than memory, by any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, overload

from torch import Tensor

from compopt import checks
from compopt.checkpoint import claims, manifest
from compopt.checkpoint.background import Job, Rows
from compopt.checkpoint.manifest import STATE, Checkpoint
from compopt.checkpoint.parts import Parts
from compopt.checkpoint.reading import Contents
from compopt.checkpoint.writing import hold_rows, write_rows, write_tensors
from compopt.distributed.control import doing
from compopt.distributed.ranks import Ranks
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator
from compopt.estimator.save_handle import SaveHandle
from compopt.remote import Folder, RemotePath, folder

RETRIES = 8  # checkpoints that a load finds removed while it reads them, before it raises


@overload
def save(
    est: Estimator,
    directory: str | os.PathLike[str] | RemotePath,
    keep: int = ...,
    incremental: bool = ...,
    blocking: Literal[True] = ...,
) -> Folder: ...


@overload
def save(
    est: Estimator,
    directory: str | os.PathLike[str] | RemotePath,
    keep: int = ...,
    incremental: bool = ...,
    *,
    blocking: Literal[False],
) -> SaveHandle: ...


@overload
def save(
    est: Estimator,
    directory: str | os.PathLike[str] | RemotePath,
    keep: int = ...,
    incremental: bool = ...,
    blocking: bool = ...,
) -> Folder | SaveHandle: ...


def save(
    est: Estimator,
    directory: str | os.PathLike[str] | RemotePath,
    keep: int = 2,
    incremental: bool = True,
    blocking: bool = True,
) -> Folder | SaveHandle:
    """Write a new checkpoint of everything committed; pending deposits are not part of it.

    Every rank writes the rows that it holds, in blocks of 2^20, and holds a few copies of one block in memory. A
    new directory is made for every save and its manifest comes last, so that a process killed at any moment leaves
    the previous checkpoint or the new one. ``state_dict`` pre-hooks run.

    Rows that were never visited are not written. Rows that did not change since an earlier checkpoint, one that this
    estimator wrote or was loaded from, are not written again: the new directory has hard links to the files of that
    one. It is complete by itself: the earlier one may be removed. What counts is a chunk of 8,192 rows, and a
    checkpoint takes at most twice the room of its rows: beyond that some files are written again.

    *Remote stores.* ``directory`` may be a URL that fsspec knows, such as ``s3://bucket/run``; it takes
    ``pip install -e ".[remote]"`` and the driver that fsspec names. Files are put as a whole, the manifest last, and
    unchanged files are copied by the store. ``blocking=False`` is for one rank there.

    *Beside training.* With ``blocking=False`` the call returns once the device has done what it was given, the state
    that is not rows is copied and the ranks agree on what each writes; a thread of each rank writes it. What is
    committed meanwhile is not part of the checkpoint: a commit keeps the former values of the rows that it overwrites
    until they are written. That takes memory for at most two values of each row that is overwritten before it is
    written, and of 2^18 rows more. The next save waits for this one, and so do ``load``, ``load_state_dict``,
    ``add_sample_group`` and the end of the interpreter. What goes wrong is raised by ``wait()`` of the handle or, if
    nobody called that, by the next save; the next commit only warns, because a rank that raises alone would leave the
    others waiting.

    One rank may also save in a thread of its own beside training: what is written is the state between two commits,
    and without ``blocking=False`` the next commit waits until it is written. Several ranks save in the thread that
    calls the estimator; elsewhere that is refused.

    Args:
        est: the estimator.
        directory: of the run's checkpoints, a path or URL that all ranks see; created if need be. One directory
            serves one estimator of one run: two that save there would remove each other's checkpoints, and a load
            would take one's rows for the other's. One that was loaded from the directory goes on there.
        keep: complete checkpoints to keep, the new one included; older and unfinished ones are removed.
        incremental: ``False``: write everything anew. A file that several checkpoints share is one file on the disk:
            damage to it is damage to all of them.
        blocking: ``False``: write beside training. Equal on all ranks.

    Returns:
        The directory of the new checkpoint, a ``Path``, or a ``RemotePath`` of which ``str()`` is the URL; with
        ``blocking=False`` a handle with ``wait()``, which returns that directory once it is complete, and ``done``.

    Raises:
        OSError: a file could not be written; the message names it, and the previous checkpoints are as they were.
        ValueError: the directory is itself a checkpoint, or has those of another method; or several ranks save to a URL
            with ``blocking=False``.
        ImportError: fsspec or the driver for a URL is missing.
        TypeError: ``est`` is no estimator, ``directory`` no path, ``keep`` no integer, ``blocking`` neither True nor
            False.
        RuntimeError: with several ranks, some rank does something else, or this is not the thread that calls; or
            another process saves into the directory: the message says which, on which machine, since when; or another
            estimator of this process does, from which this one was not loaded; or ``est`` is a part of another
            estimator.
        Exception: whatever the save before raised beside training, if nobody was told; this one was not made.

    Warns:
        UserWarning: unchanged files cannot be linked (or copied by the store), so that all rows are written; the file
            system has no locks, so that nobody notices two runs that save there.
        RuntimeWarning: at a later commit, that a save beside training failed.

    Communicates: collective; a few small messages, all of them before it returns. Beside training the ranks learn
    from files in the new directory when all of them have written.

    Example:
        >>> import compopt, tempfile
        >>> est = compopt.SogCLREstimator(n=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = compopt.save(est, folder)
        ...     path.name.startswith("checkpoint-")
        True
    """
    _check_estimator(est)
    checks.count("keep", keep)
    checks.flag("blocking", blocking)
    engine = est._engine
    with doing("compopt.save()", est.t):
        root: Folder = engine.ranks.agree(lambda: _begin(est, directory, blocking))
        with engine.lock.copying():
            return _save(est, root, keep, incremental, blocking)


def _check_estimator(est: Any) -> None:
    """Refuse what has no rows; a module around an estimator has it in ``.est``."""
    if isinstance(est, Estimator):
        return
    inside = isinstance(getattr(est, "est", None), Estimator)
    remedy = "pass its estimator, .est" if inside else "models go into torch.save(model.state_dict(), ...)"
    raise TypeError(f"est must be an estimator of compopt, got {type(est).__name__}; {remedy}")


def _save(est: Estimator, root: Folder, keep: int, incremental: bool, blocking: bool) -> Folder | SaveHandle:
    engine = est._engine
    ranks, table = engine.ranks, engine.table
    content = ranks.agree(lambda: _describe(est))
    state = ranks.agree(lambda: _state(est))  # collective where ranks split it: before anything that may fail
    target = _fresh(est, root, content, blocking)
    try:
        if not blocking:
            parts = Parts(target, ranks.rank, ranks.size)
            ranks.agree(parts.begin)
            rows = None if table is None else Rows(table, *hold_rows(table, ranks, target, incremental))
            return _start(est, Job(ranks.rank, target, parts, root, keep, content, state, rows))
        files = [] if table is None else write_rows(table, ranks, target, incremental)
        others = ranks.agree(lambda: [write_tensors(target, STATE, state)] if ranks.rank == 0 else [])
        everyone = [file for own in ranks.gather_objects([*files, *others]) for file in own]
        ranks.agree(lambda: manifest.write(target, everyone, content) if ranks.rank == 0 else None)
    except Exception:  # on every rank: nobody writes any more
        if ranks.rank == 0 and not target.complete:
            manifest.remove(target)
        raise
    ranks.agree(lambda: manifest.prune(root, keep) if ranks.rank == 0 else None)
    return target.path


def _fresh(est: Estimator, root: Folder, content: dict[str, Any], blocking: bool) -> Checkpoint:
    """The directory of a new save, which rank 0 makes."""
    ranks = est._engine.ranks
    modes = ranks.gather_objects(blocking)
    if len(set(modes)) > 1:
        raise ValueError(f"blocking= must be the same on all ranks; by rank: {modes}")
    made = ranks.agree(lambda: _make(est, root, content["config"]) if ranks.rank == 0 else None)
    target: Checkpoint = ranks.gather_objects(made)[0]
    return target


def _make(est: Estimator, root: Folder, config: dict[str, Any]) -> Checkpoint:
    manifest.prepare(root)
    manifest.refuse_another_method(root, config)
    claims.claim(est, root)
    return manifest.fresh(root, est.t)


def _start(est: Estimator, job: Job) -> SaveHandle:
    """Give a job to a thread."""
    engine = est._engine
    try:
        abandon = None if job.rows is None else job.rows.snapshot.abandon
        engine.saving = SaveHandle(job.target.path, job.run, abandon)
    except BaseException as error:  # no more threads can be had
        job.release()
        job.parts.failed(error)
        raise
    return engine.saving


def load(est: Estimator, directory: str | os.PathLike[str] | RemotePath, t: int | None = None) -> Folder:
    """Fill an estimator of the same configuration from a checkpoint; drops anything pending.

    The number of ranks, ``shard`` and ``offload`` may differ from those of the writer. Everything is verified before
    anything is written: files present, of the right length and checksum, of the saves that the manifest names.
    Where a run that saves meanwhile removes the checkpoint, the one that is newest then is loaded instead.
    ``load_state_dict`` post-hooks run.

    Args:
        est: the estimator to fill.
        directory: what was given to :func:`save` (its newest complete checkpoint is taken), or what it returned. From a
            URL the parts of files that are needed are read, at most a block at a time.
        t: take the newest checkpoint with so many commits instead.

    Returns:
        The directory that was loaded.

    Raises:
        FileNotFoundError: no complete checkpoint.
        OSError: the store does not answer; the message names the URL.
        ImportError: fsspec or the driver for a URL is missing.
        ValueError: another n, mode, method, dtype or data_fingerprint, or a damaged file; the message names the file
            and both values, and the estimator is as it was. Values that no run writes, as :meth:`load_state_dict
            <Estimator.load_state_dict>` refuses them.
        TypeError: ``est`` is no estimator, ``directory`` no path, ``t`` no integer.
        RuntimeError: ``est`` is a part of another estimator; with several ranks, another one failed or does something
            else.

    Communicates: collective; a few small messages.

    Example:
        >>> import compopt, tempfile
        >>> est, again = (compopt.SogCLREstimator(n=10) for _ in range(2))  # the same configuration
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = compopt.save(est, folder)
        ...     compopt.load(again, folder) == path
        True
    """
    if t is not None and (isinstance(t, bool) or not hasattr(t, "__index__")):
        raise TypeError(f"t must be a number of commits, got {t!r} of type {type(t).__name__}")
    _check_estimator(est)
    engine = est._engine
    engine.await_save()
    with doing("compopt.load()", est.t), engine.lock.writing():
        path = _load(est, directory, t)
    est._run("load_state_dict_post")
    return path


def _load(est: Estimator, directory: str | os.PathLike[str] | RemotePath, t: int | None) -> Folder:
    source, contents = _fill(est, directory, t)
    engine = est._engine
    for role, part in engine.parts.items():
        part.take_state(contents.extra[role])
    engine.t = contents.t
    est.discard()
    claims.loaded(est, source.path.resolve().parent)
    return source.path


def _fill(
    est: Estimator, directory: str | os.PathLike[str] | RemotePath, t: int | None, retries: int = RETRIES
) -> tuple[Checkpoint, Contents]:
    """Choose a checkpoint, verify it, and take over its groups and rows; another one, if it is removed meanwhile."""
    engine = est._engine
    ranks = engine.ranks
    chosen = ranks.agree(lambda: _choose(directory, t, ranks.rank))
    source: Checkpoint = ranks.gather_objects(chosen)[0]
    final = not retries or folder(directory).resolve() == source.path.resolve()
    try:
        contents: Contents = _while_there(ranks, source, final, lambda: Contents(est, source))
        engine.forget_prefetched()
        _while_there(ranks, source, final, lambda: _take_groups(est, source, contents.sample_groups))
        if engine.table is not None:
            table = engine.table
            _while_there(ranks, source, final, lambda: contents.read_rows(table))
            table.agree_partial()
    except _Removed:
        return _fill(est, directory, t, retries - 1)
    return source, contents


class _Removed(Exception):
    """The run that writes a checkpoint has removed it while it was read."""


def _while_there(ranks: Ranks, source: Checkpoint, final: bool, action: Callable[[], Any]) -> Any:
    """Run ``action`` on every rank; :class:`_Removed` on every rank, unless ``final``, where it failed for that."""

    def tried() -> tuple[Any, bool]:
        try:
            return action(), False
        except (OSError, ValueError):
            if final or source.complete:
                raise
            return None, True

    result, removed = ranks.agree(tried)
    if any(ranks.gather_objects(removed)):
        raise _Removed
    return result


def _choose(directory: str | os.PathLike[str] | RemotePath, t: int | None, rank: int) -> Checkpoint | None:
    root = folder(directory)  # on every rank: each needs the driver
    return manifest.choose(root, t) if rank == 0 else None


def _begin(est: Estimator, directory: str | os.PathLike[str] | RemotePath, blocking: bool) -> Folder:
    engine = est._engine
    root = folder(directory)
    if isinstance(root, RemotePath) and not blocking and engine.ranks.size > 1:
        raise ValueError(
            f"blocking=False with {engine.ranks.size} ranks needs a directory on a file system, where the ranks see "
            f"each other's signs of life; got {root}: leave blocking=False out, or save to a path and copy that"
        )
    engine.await_save()
    running, engine.saving = engine.saving, None
    if running is not None:
        running.raise_untold()
    est._begin_saving()
    return root


def _describe(est: Estimator) -> dict[str, Any]:
    """What the manifest says of the estimator; refused where it could not be loaded again."""
    engine = est._engine
    engine.groups.check()
    told = {} if est.data_fingerprint is None else {"data_fingerprint": est.data_fingerprint}
    chunk_rows = 1 if engine.table is None else engine.table.store.changes.chunk_rows
    config, groups = states.config(engine), engine.groups.saved()
    return {"config": config, "sample_groups": groups, "chunk_rows": chunk_rows, **told}


def _state(est: Estimator) -> dict[str, Tensor]:
    """State that is not rows, by role and name."""
    return {
        f"{role}.{name}": value.detach().cpu()
        for role, part in est._engine.parts.items()
        for name, value in part.saved_state().items()
    }


def _take_groups(est: Estimator, source: Checkpoint, groups: list[dict[str, Any]]) -> None:
    try:
        est._engine.groups.replace(groups)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{source.path / manifest.MANIFEST}: {error}") from None
