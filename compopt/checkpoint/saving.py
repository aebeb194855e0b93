"""``save`` and ``load``: checkpoints of tables that are larger than memory, by any number of ranks."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compopt import checks
from compopt.checkpoint import manifest
from compopt.checkpoint.manifest import STATE, Checkpoint, File
from compopt.distributed.control import doing
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator
from compopt.stores.table import BLOCK_ROWS, RowTable

# safetensors makes what it reads on the default device, which may be another one.
_HOST = torch.device("cpu")


def save(est: Estimator, directory: str | os.PathLike[str], keep: int = 2) -> Path:
    """Write a new checkpoint of everything committed; pending deposits are not part of it.

    Every rank writes the rows that it holds, in blocks of 2^20, and holds a few copies of one block in memory. A
    new directory is made for every save and its manifest comes last, so that a process killed at any moment leaves
    the previous checkpoint or the new one. ``state_dict`` pre-hooks run.

    One rank may save in a thread beside training: what is written is the state between two commits, and the next commit
    waits until it is written. Several ranks save in the thread that calls the estimator; elsewhere that is refused.

    Args:
        est: the estimator.
        directory: of the run's checkpoints, on a file system that all ranks see; created if need be. One directory
            serves one estimator of one run: two that save there would remove each other's checkpoints.
        keep: complete checkpoints to keep, the new one included; older and unfinished ones are removed.

    Returns:
        The directory of the new checkpoint.

    Raises:
        OSError: a file could not be written; the previous checkpoints are as they were.
        ValueError: the directory is itself a checkpoint, or has those of another method.
        RuntimeError: with several ranks, some rank does something else, or this is not the thread that calls.

    Communicates: collective; a few small messages.
    """
    checks.count("keep", keep)
    with doing("compopt.save()", est.t):
        est._ranks.agree(lambda: _begin(est))
        with est._state.copying():
            return _save(est, Path(directory), keep)


def _save(est: Estimator, root: Path, keep: int) -> Path:
    ranks = est._ranks
    content = ranks.agree(lambda: _describe(est))
    state = ranks.agree(lambda: _state(est))  # collective where ranks split it: before anything that may fail
    made = ranks.agree(lambda: manifest.fresh(root, est.t, content["config"]) if ranks.rank == 0 else None)
    target: Checkpoint = ranks.gather_objects(made)[0]
    try:
        files = ranks.agree(lambda: _write_files(est, target, state))
        everyone = [file for own in ranks.gather_objects(files) for file in own]
        ranks.agree(lambda: manifest.write(target, everyone, content) if ranks.rank == 0 else None)
    except Exception:  # on every rank: nobody writes any more
        if ranks.rank == 0 and not target.complete:
            manifest.remove(target)
        raise
    ranks.agree(lambda: manifest.prune(root, keep) if ranks.rank == 0 else None)
    return target.path


def load(est: Estimator, directory: str | os.PathLike[str], t: int | None = None) -> Path:
    """Fill an estimator of the same configuration from a checkpoint; drops anything pending.

    The number of ranks, ``shard`` and ``offload`` may differ from those of the writer. Everything is verified before
    anything is written: files present, of the right length and checksum, of this save, and covering every row once.
    ``load_state_dict`` post-hooks run.

    Args:
        est: the estimator to fill.
        directory: what was given to :func:`save` (its newest complete checkpoint is taken), or what it returned.
        t: take the newest checkpoint with so many commits instead.

    Returns:
        The directory that was loaded.

    Raises:
        FileNotFoundError: no complete checkpoint.
        ValueError: another n, mode, method, dtype or data_fingerprint, or a damaged file; the message names the file
            and both values, and the estimator is as it was.

    Communicates: collective; a few small messages.
    """
    if t is not None and (isinstance(t, bool) or not hasattr(t, "__index__")):
        raise TypeError(f"t must be a number of commits, got {t!r} of type {type(t).__name__}")
    est.stand_alone()
    with doing("compopt.load()", est.t), est._state.writing():
        path = _load(est, Path(directory), t)
    est._run("load_state_dict_post")
    return path


def _load(est: Estimator, root: Path, t: int | None) -> Path:
    ranks = est._ranks
    chosen = ranks.agree(lambda: manifest.choose(root, t) if ranks.rank == 0 else None)
    source: Checkpoint = ranks.gather_objects(chosen)[0]
    content, files, extra = ranks.agree(lambda: _verify(est, source))
    est._forget_prefetched()
    ranks.agree(lambda: _take_groups(est, source, content["sample_groups"]))
    if est._table is not None:
        table = est._table
        ranks.agree(lambda: _read_rows(table, source, files))
    for role, part in est._components.items():
        part.restore_state(extra[role])
    est.t = int(content["t"])
    est.discard()
    return source.path


def _begin(est: Estimator) -> None:
    est.stand_alone()
    est._run("state_dict_pre")


def _describe(est: Estimator) -> dict[str, Any]:
    """What the manifest says of the estimator; refused where it could not be loaded again."""
    est._groups.check()
    told = {} if est.data_fingerprint is None else {"data_fingerprint": est.data_fingerprint}
    return {"config": states.config(est), "sample_groups": est._groups.saved(), **told}


# -- writing ---------------------------------------------------------------------------------------------------


def _state(est: Estimator) -> dict[str, Tensor]:
    """State that is not rows, by role and name."""
    return {
        f"{role}.{name}": value.detach().cpu()
        for role, part in est._components.items()
        for name, value in part.saved_state().items()
    }


def _write_files(est: Estimator, target: Checkpoint, state: dict[str, Tensor]) -> list[File]:
    """This rank's files."""
    files = []
    if est._table is not None:
        with est._table.at_rest():
            files = list(_write_rows(est._table, est._ranks.rank, est._ranks.size, target))
    if est._ranks.rank == 0:
        files.append(_write_tensors(target, STATE, state))
    return files


def _write_rows(table: RowTable, rank: int, size: int, target: Checkpoint) -> Iterator[File]:
    """Own rows of a shard; of a table that every rank has, every K-th block."""
    store = table.store
    starts = range(0, store.n, BLOCK_ROWS)
    for number in range(len(starts)) if table.sharded else range(rank, len(starts), size):
        start, stop = starts[number], min(starts[number] + BLOCK_ROWS, store.n)
        columns = table.layout.unpack(store.block(start, stop).cpu())
        first = table.first + start * table.stride
        name = f"rows-{table.first:05d}-{number:05d}.safetensors"
        yield _write_tensors(
            target, name, {k: v.contiguous() for k, v in columns.items()}, (first, table.stride, stop - start)
        )


def _write_tensors(
    target: Checkpoint, name: str, tensors: Mapping[str, Tensor], rows: tuple[int, int, int] = (0, 1, 0)
) -> File:
    from safetensors.torch import save as to_bytes

    content = to_bytes(dict(tensors), {"save_id": target.save_id, "version": str(manifest.FORMAT_VERSION)})
    manifest.write_file(target.path / name, content)
    return File(name, len(content), zlib.crc32(content), *rows)


# -- reading ---------------------------------------------------------------------------------------------------


def _take_groups(est: Estimator, source: Checkpoint, groups: list[dict[str, Any]]) -> None:
    try:
        est._groups.replace(groups)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{source.path / manifest.MANIFEST}: {error}") from None


def _verify(est: Estimator, source: Checkpoint) -> tuple[dict[str, Any], list[File], dict[str, dict[str, Tensor]]]:
    """Refuse whatever does not fit or is damaged; every rank checks every K-th file."""
    content, files = manifest.read(source)
    try:
        states.compare(est, content["config"])
    except ValueError as error:
        raise ValueError(f"{source.path / manifest.MANIFEST}: {error}") from None
    _check_data(est, source, content.get("data_fingerprint"))
    row_files = [file for file in files if file.name != STATE]
    _check_cover(source, row_files, 0 if est._table is None else est._table.n)
    for file in files[est._ranks.rank :: est._ranks.size]:
        _check_file(source, file)
    return content, row_files, _read_extra(est, source)


def _check_data(est: Estimator, source: Checkpoint, saved: str | None) -> None:
    """Rows of other samples would be taken for those of these."""
    if None not in (saved, est.data_fingerprint) and saved != est.data_fingerprint:
        raise ValueError(
            f"{source.path / manifest.MANIFEST}: rows of the data with fingerprint {saved!r}, est.data_fingerprint is "
            f"{est.data_fingerprint!r}: an index would be another sample. Data that grew: load with the old index, "
            f"then add_sample_group and set the fingerprint of the new one"
        )


def _check_file(source: Checkpoint, file: File) -> None:
    from safetensors import safe_open

    path = source.path / file.name
    if not path.is_file():
        raise ValueError(f"{path} is missing from the checkpoint; load another one")
    found = manifest.checksum(path)
    if found != (file.bytes, file.crc32):
        raise ValueError(
            f"{path} is damaged: it has {found[0]} bytes with crc32 {found[1]:08x}, the manifest says {file.bytes} "
            f"bytes with {file.crc32:08x}; load another checkpoint"
        )
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
    if metadata.get("save_id") != source.save_id:
        raise ValueError(f"{path} belongs to save {metadata.get('save_id')}, the manifest is of {source.save_id}")


def _check_cover(source: Checkpoint, files: list[File], n: int) -> None:
    """Every row is in exactly one file."""
    ends: dict[int, int] = {}
    for file in sorted(files, key=lambda file: (file.first % file.stride, file.first)):
        residue = file.first % file.stride
        if ends.setdefault(residue, residue) != file.first or file.stride != files[0].stride:
            raise ValueError(f"{source.path}: {file.name} begins at row {file.first}, expected {ends[residue]}")
        ends[residue] = file.first + file.count * file.stride
    stride = files[0].stride if files else 1
    covered = sum(file.count for file in files)
    if covered != n or any(end < n or end >= n + stride for end in ends.values()):
        raise ValueError(f"{source.path / manifest.MANIFEST} lists {covered} rows, this estimator has n={n}")


def _read_extra(est: Estimator, source: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """State that is not rows, by role; checked against the estimator's."""
    from safetensors.torch import load_file

    try:
        with _HOST:
            tensors = load_file(source.path / STATE)
    except Exception as error:  # safetensors has its own; all of them mean the same here
        raise ValueError(f"{source.path / STATE} cannot be read ({error}); load another checkpoint") from None
    extra: dict[str, dict[str, Tensor]] = {role: {} for role in est._components}
    for key, value in tensors.items():
        role, name = key.split(".", 1)
        extra.setdefault(role, {})[name] = value
    for role, part in est._components.items():
        part.check_state(extra[role])
    return extra


def _read_rows(table: RowTable, source: Checkpoint, files: list[File]) -> None:
    """Fill this process's rows block by block, in order, whatever ranks wrote them."""
    with table.at_rest(), _HOST:
        for start in range(0, table.store.n, BLOCK_ROWS):
            _read_block(table, source, files, start)


def _read_block(table: RowTable, source: Checkpoint, files: list[File], start: int) -> None:
    stop = min(start + BLOCK_ROWS, table.store.n)
    block = torch.zeros(stop - start, table.layout.words, dtype=torch.complex128)
    views = table.layout.unpack(block)
    first, last = table.first + start * table.stride, table.first + (stop - 1) * table.stride
    for file in files:
        _read_part(source.path / file.name, file, first, last, table.stride, views)
    table.store.write_block(start, block.to(table.store.device))


def _read_part(path: Path, file: File, first: int, last: int, stride: int, views: Mapping[str, Tensor]) -> None:
    """What a file has of the rows ``first, first + stride, ..., last``, into views of these."""
    from safetensors import safe_open

    low = max(0, -(-(first - file.first) // file.stride))
    high = min(file.count, (last - file.first) // file.stride + 1)
    if low >= high:
        return
    if file.stride == stride and (file.first - first) % stride == 0:
        at: Any = slice(
            (file.first + low * stride - first) // stride, (file.first + (high - 1) * stride - first) // stride + 1
        )
        mine: Any = slice(None)
    else:
        rows = file.first + file.stride * torch.arange(low, high)
        mine = torch.nonzero((rows - first) % stride == 0).flatten()
        if not len(mine):
            return
        at = (rows[mine] - first) // stride
    with safe_open(path, framework="pt") as opened:
        for name, view in views.items():
            view[at] = opened.get_slice(name)[low:high][mine]
