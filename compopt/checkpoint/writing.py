"""The row files of one save: what changed is written, the rest is linked to the files of the save before."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compopt.checkpoint import manifest
from compopt.checkpoint.chunks import Chunks, Owners, plan
from compopt.checkpoint.manifest import STATE, Checkpoint, File
from compopt.distributed.ranks import Ranks
from compopt.stores import table as tables
from compopt.stores.base import RowStore
from compopt.stores.table import RowTable, Saved

REMEMBERED = 4  # checkpoints that a table knows to have been made of its rows


@dataclass(frozen=True)
class Base:
    """The checkpoint that a save takes unchanged rows from, with its row files."""

    checkpoint: Checkpoint
    files: list[File]


def write_rows(table: RowTable, ranks: Ranks, target: Checkpoint, incremental: bool) -> list[File]:
    """Write or link this rank's row files, of the rows between two commits. Collective."""
    found = _choose_base(table, target) if incremental and ranks.rank == 0 else None
    base: Base | None = ranks.gather_objects(found)[0]
    with table.at_rest() as store:
        period = store.changes.cut()
        kept, write, known = _plan(table, ranks, base)
        if base is not None and not all(ranks.gather_objects(_link(kept, base.checkpoint, target))):
            _unlink(kept, target)  # a file system without links
            kept, write, known = _plan(table, ranks, None)
        files = ranks.agree(lambda: _write_packs(table, ranks, target, write, known))
    table.saved = [*table.saved, Saved(target.path.resolve(), target.t, target.save_id, period)][-REMEMBERED:]
    return [*kept, *files]


# -- what the save before had --------------------------------------------------------------------------------------


def _choose_base(table: RowTable, target: Checkpoint) -> Base | None:
    """The newest checkpoint of these rows that is still there, complete, and where links can reach it."""
    for saved in reversed(table.saved):
        try:
            checkpoint = Checkpoint(saved.path, 0, saved.t, saved.save_id)
            content, files = manifest.read(checkpoint)
            rows = [file for file in files if file.name != STATE]
            fits = content["chunk_rows"] == table.store.changes.chunk_rows
            fits &= all(file.stride == table.stride for file in rows)
            fits &= saved.path.stat().st_dev == target.path.stat().st_dev
            if fits and all((saved.path / file.name).stat().st_size == file.bytes for file in rows):
                return Base(checkpoint, rows)
        except (OSError, ValueError):  # removed, unfinished, damaged
            continue
    return None


def _plan(table: RowTable, ranks: Ranks, base: Base | None) -> tuple[list[File], Chunks, Chunks]:
    """Files to link, by this rank; its chunks to write; those that the save before had."""
    changes = table.store.changes
    period, files = 0, []
    if base is not None:
        period = next(saved.period for saved in table.saved if saved.save_id == base.checkpoint.save_id)
        files = [file for file in base.files if file.first == table.first]
    changed = changes.since(period).numpy()
    if not table.sharded:  # of a shared file, the ranks that only read it do not know
        changed = ranks.gather_objects(changed if ranks.rank == 0 else None)[0]
    kept, write, known = plan(Owners(files, changes.chunk_rows), changed, _full(changes.chunk_rows))
    return kept if table.sharded or ranks.rank == 0 else [], write, known


def _full(chunk_rows: int) -> int:
    """Chunks of a large file."""
    return max(1, tables.BLOCK_ROWS // chunk_rows)


def _link(files: Sequence[File], source: Checkpoint, target: Checkpoint) -> bool:
    """Give files another name in the new checkpoint; False where that cannot be done."""
    try:
        for file in files:
            os.link(source.path / file.name, target.path / file.name)
    except OSError:
        return False
    return True


def _unlink(files: Sequence[File], target: Checkpoint) -> None:
    for file in files:
        (target.path / file.name).unlink(missing_ok=True)


# -- what is written -----------------------------------------------------------------------------------------------


def _write_packs(table: RowTable, ranks: Ranks, target: Checkpoint, write: Chunks, known: Chunks) -> list[File]:
    """This rank's new files: of a shard, or, where every rank has all rows, its part of them."""
    chunks = np.flatnonzero(write)
    full = _full(table.store.changes.chunk_rows)
    packs = [chunks[first : first + full] for first in range(0, len(chunks), full)]
    files = []
    for number in range(len(packs)) if table.sharded else range(ranks.rank, len(packs), ranks.size):
        blocks, spans = _read_chunks(table.store, packs[number].tolist(), known)
        if blocks:
            name = f"rows-{table.first:05d}-{number:05d}-{target.save_id}.safetensors"
            columns = table.layout.unpack(torch.cat(blocks))
            files.append(write_tensors(target, name, columns, table.first, table.stride, spans))
    return files


def _read_chunks(
    store: RowStore, chunks: Sequence[int], known: Chunks
) -> tuple[list[Tensor], tuple[tuple[int, int], ...]]:
    """Rows of some chunks, and which they are; without chunks of zeros that the save before did not have either."""
    blocks: list[Tensor] = []
    spans: list[tuple[int, int]] = []
    size = store.changes.chunk_rows
    for chunk in chunks:
        start, stop = chunk * size, min((chunk + 1) * size, store.n)
        block = store.block(start, stop).cpu()
        if known[chunk] or block.view(torch.int64).any():
            blocks.append(block)
            joined = bool(spans) and spans[-1][1] == start
            spans[-1:] = [(spans[-1][0], stop)] if joined else [*spans[-1:], (start, stop)]
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
    manifest.write_file(target.path / name, content)
    return File(name, len(content), zlib.crc32(content), target.save_id, first, stride, spans)
