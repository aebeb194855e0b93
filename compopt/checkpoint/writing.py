"""The row files of one save: what changed is written, the rest is linked to earlier files."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compopt import accelerator
from compopt.checkpoint import durable, manifest, strict
from compopt.checkpoint.chunks import Chunks, Owners, plan
from compopt.checkpoint.manifest import STATE, Checkpoint, File
from compopt.distributed.ranks import Ranks
from compopt.remote import Folder, RemotePath
from compopt.stores import table as tables
from compopt.stores.base import RowStore
from compopt.stores.snapshot import Snapshot, copies, on_host
from compopt.stores.table import RowTable, Saved

# From some chunks to their rows, a block for each, on the host.
Read = Callable[[Sequence[int]], list[Tensor]]


@dataclass(frozen=True)
class Base:
    """The checkpoint that a save takes unchanged rows from.

    Attributes:
        saved: as this rank knows it.
        files: this rank's row files, or, where every rank has all rows, all of them.
    """

    saved: Saved
    files: list[File]


@dataclass(frozen=True)
class Cut:
    """What this rank's part of a checkpoint is, as the ranks agreed between two commits.

    Attributes:
        kept: files of an earlier checkpoint, linked already.
        packs: what it writes: by number of the file, the chunks in it; ascending.
        known: chunks that the earlier checkpoint has.
        saved: the checkpoint, once it is complete.
    """

    kept: list[File]
    packs: dict[int, list[int]]
    known: Chunks
    saved: Saved

    def write(self, table: RowTable, target: Checkpoint, read: Read) -> list[File]:
        """All files of this rank."""
        return [*self.kept, *_write_packs(table, target, self, read)]


def write_rows(table: RowTable, ranks: Ranks, target: Checkpoint, incremental: bool) -> list[File]:
    """Write or link this rank's row files, of the rows between two commits. Collective."""
    store, cut = table.at_rest(), _cut(table, ranks, target, incremental)
    files: list[File] = ranks.agree(lambda: cut.write(table, target, lambda chunks: on_host(copies(store, chunks))))
    table.remember(cut.saved)
    return files


def hold_rows(table: RowTable, ranks: Ranks, target: Checkpoint, incremental: bool) -> tuple[Cut, Snapshot]:
    """Link row files, and hold the rows that are to be written as they are between two commits. Collective."""
    store, cut = table.at_rest(), _cut(table, ranks, target, incremental)
    return cut, Snapshot(store, [chunk for pack in cut.packs.values() for chunk in pack])


def _cut(table: RowTable, ranks: Ranks, target: Checkpoint, incremental: bool) -> Cut:
    """Agree on what is linked and who writes what; the rows are at rest."""
    changes = table.store.changes
    accelerator.synchronize(table.store.device)  # commits of other streams: a cut must not miss them
    period = changes.cut()
    base = _choose_base(table, ranks, target, table.saved if incremental else [])
    kept, write, known = _plan(table, ranks, base)
    if base is not None and not all(ranks.gather_objects(_link(kept, base, target))):
        _unlink(kept, target)
        _warn_of_links(target)
        kept, write, known = _plan(table, ranks, None)
    packs = _share(table, ranks, write)
    return Cut(kept, packs, known, Saved(target.path.resolve(), target.t, target.save_id, period))


# -- what the save before had --------------------------------------------------------------------------------------


def _choose_base(table: RowTable, ranks: Ranks, target: Checkpoint, saved: Sequence[Saved]) -> Base | None:
    """The newest of some checkpoints that every rank can link to, rather one in the directory of this one."""
    here = target.path.resolve().parent
    candidates = [*reversed(saved)]
    candidates.sort(key=lambda one: one.path.parent != here)
    bases = {one.save_id: base for one in candidates if (base := _usable(table, one, target)) is not None}
    common = set.intersection(*map(set, ranks.gather_objects(list(bases))))
    chosen = ranks.gather_objects(next((save_id for save_id in bases if save_id in common), None))[0]
    return None if chosen is None else bases[chosen]


def _usable(table: RowTable, saved: Saved, target: Checkpoint) -> Base | None:
    """A checkpoint that is still there, complete, divided as these rows are, and where links can reach it."""
    with suppress(OSError, ValueError):  # removed, unfinished, damaged
        content, files = manifest.read(Checkpoint(saved.path, 0, saved.t, saved.save_id))
        rows = [file for file in files if file.name != STATE]
        fits = content["chunk_rows"] == table.store.changes.chunk_rows
        fits &= all(file.stride == table.stride for file in rows)
        fits &= _reach(saved.path, target.path)
        sizes = strict.sizes(saved.path)
        if fits and all(sizes.get(file.name) == file.bytes for file in rows):
            return Base(saved, [file for file in rows if file.first == table.first])
    return None


def _reach(source: Folder, target: Folder) -> bool:
    """Files of one can be linked to the other, or copied by the store."""
    if isinstance(source, RemotePath) or isinstance(target, RemotePath):
        return isinstance(source, RemotePath) and isinstance(target, RemotePath) and source.shares_store(target)
    return source.stat().st_dev == target.stat().st_dev


def _plan(table: RowTable, ranks: Ranks, base: Base | None) -> tuple[list[File], Chunks, Chunks]:
    """Files to link, by this rank; its chunks to write; those that the save before had."""
    changes = table.store.changes
    period, files = (0, []) if base is None else (base.saved.period, base.files)
    changed = changes.since(period).numpy()
    if not table.sharded:  # one plan of all ranks, also where one of them has loaded rows by itself
        changed = ranks.gather_objects(changed if ranks.rank == 0 else None)[0]
    size = changes.chunk_rows
    kept, write, known = ranks.agree(lambda: plan(Owners(files, size), changed, _full(size)))
    return kept if table.sharded or ranks.rank == 0 else [], write, known


def _full(chunk_rows: int) -> int:
    """Chunks of a large file."""
    return max(1, tables.BLOCK_ROWS // chunk_rows)


def _link(files: Sequence[File], base: Base, target: Checkpoint) -> bool:
    """Give files another name in the new checkpoint; False where that cannot be done."""
    try:
        if isinstance(base.saved.path, RemotePath) or isinstance(target.path, RemotePath):
            assert isinstance(base.saved.path, RemotePath) and isinstance(target.path, RemotePath)
            base.saved.path.copy_into([file.name for file in files], target.path)
            return True
        for file in files:  # the file itself, not a symbolic link to it
            os.link(os.path.realpath(base.saved.path / file.name), target.path / file.name)
    except OSError:
        return False
    return True


def _unlink(files: Sequence[File], target: Checkpoint) -> None:
    for file in files:
        (target.path / file.name).unlink(missing_ok=True)


def _warn_of_links(target: Checkpoint) -> None:
    how, remedy = "linked", "keep checkpoints on a file system with hard links"
    if isinstance(target.path, RemotePath):
        how, remedy = "copied", "allow its credentials to copy objects"
    warnings.warn(
        f"{target.path.parent}: files of an earlier checkpoint could not be {how} there, so that every save writes "
        f"all rows; {remedy}",
        stacklevel=6,
    )


# -- what is written -----------------------------------------------------------------------------------------------


def _share(table: RowTable, ranks: Ranks, write: Chunks) -> dict[int, list[int]]:
    """The files that a rank writes: those of its shard, or, where every rank has all rows, its part of them."""
    chunks = np.flatnonzero(write)
    full = _full(table.store.changes.chunk_rows)
    packs = [chunks[first : first + full].tolist() for first in range(0, len(chunks), full)]
    if table.sharded:
        return dict(enumerate(packs))
    return {number: pack for number, pack in enumerate(packs) if number % ranks.size == ranks.rank}


def _write_packs(table: RowTable, target: Checkpoint, cut: Cut, read: Read) -> list[File]:
    """This rank's new files."""
    files = []
    for number, chunks in cut.packs.items():
        blocks, spans = _without_zeros(table.store, chunks, read(chunks), cut.known)
        if blocks:
            name = f"rows-{table.first:05d}-{number:05d}-{target.save_id}.safetensors"
            columns = table.layout.unpack(torch.cat(blocks))
            files.append(write_tensors(target, name, columns, table.first, table.stride, spans))
    return files


def _without_zeros(
    store: RowStore, chunks: Sequence[int], read: Sequence[Tensor], known: Chunks
) -> tuple[list[Tensor], tuple[tuple[int, int], ...]]:
    """Rows of some chunks, and which they are; without chunks of zeros that the save before did not have either."""
    blocks: list[Tensor] = []
    spans: list[tuple[int, int]] = []
    size = store.changes.chunk_rows
    for chunk, block in zip(chunks, read, strict=True):
        start, stop = chunk * size, chunk * size + len(block)
        if known[chunk] or block.view(torch.int64).any():
            blocks.append(block)
            if spans and spans[-1][1] == start:
                start, _ = spans.pop()
            spans.append((start, stop))
    return blocks, tuple(spans)


def write_tensors(
    target: Checkpoint,
    name: str,
    tensors: Mapping[str, Tensor],
    first: int = 0,
    stride: int = 1,
    spans: tuple[tuple[int, int], ...] = (),
) -> File:
    """Write one file, durably."""
    from safetensors.torch import save as to_bytes

    tensors = {key: value.contiguous() for key, value in tensors.items()}
    content = to_bytes(tensors, {"save_id": target.save_id, "version": str(manifest.FORMAT_VERSION)})
    durable.write_file(target.path / name, content)
    return File(name, len(content), zlib.crc32(content), target.save_id, first, stride, spans)
