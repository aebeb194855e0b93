"""The files of one checkpoint: verified, then read into any number of ranks and any placement."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compopt.checkpoint import manifest
from compopt.checkpoint.chunks import Owners, Run, by_rank
from compopt.checkpoint.manifest import STATE, Checkpoint, File
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator
from compopt.stores import table as tables
from compopt.stores.table import RowTable, Saved

# safetensors makes what it reads on the default device, which may be another one.
_HOST = torch.device("cpu")
_OPEN_FILES = 32


class Contents:
    """A checkpoint that was verified.

    Attributes:
        t, sample_groups: of the estimator.
        extra: state that is not rows, by role.
    """

    def __init__(self, est: Estimator, source: Checkpoint) -> None:
        """Refuse whatever does not fit or is damaged; every rank checks every K-th file."""
        content, files = manifest.read(source)
        try:
            states.compare(est, content["config"])
        except ValueError as error:
            raise ValueError(f"{source.path / manifest.MANIFEST}: {error}") from None
        check_data(est, str(source.path / manifest.MANIFEST), content.get("data_fingerprint"))
        self._source, self._chunk_rows = source, content["chunk_rows"]
        self._files = [file for file in files if file.name != STATE]
        _check_spans(source, self._files, 0 if est._table is None else est._table.n, self._chunk_rows)
        for file in files[est._ranks.rank :: est._ranks.size]:
            _check_file(source, file)
        self.t, self.sample_groups = int(content["t"]), content["sample_groups"]
        self.extra = _read_extra(est, source)

    def read_rows(self, table: RowTable) -> None:
        """Fill this process's rows block by block, in order, whatever ranks wrote them."""
        runs = {first: Owners(files, self._chunk_rows).runs() for first, files in by_rank(self._files).items()}
        source, stride = self._source, self._files[0].stride if self._files else 1
        opened = lru_cache(_OPEN_FILES)(_open)
        with table.overwriting() as store, _HOST:
            for start in range(0, store.n, tables.BLOCK_ROWS):
                stop = min(start + tables.BLOCK_ROWS, store.n)
                block = _Block(table, start, stop)
                for first, own in runs.items():
                    low, high = block.bounds(first, stride)
                    at = max(0, bisect_right(own, low, key=lambda run: run.start) - 1)
                    while at < len(own) and own[at].start < high:
                        block.take(opened(source.path / own[at].file.name), own[at], low, high)
                        at += 1
                block.write()
            opened.cache_clear()
            table.remember(Saved(source.path.resolve(), source.t, source.save_id, store.changes.cut()))


class _Block:
    """Successive rows of a table, gathered from parts of files."""

    def __init__(self, table: RowTable, start: int, stop: int) -> None:
        self._table, self._start, self._count = table, start, stop - start
        self._first, self._last = (table.first + local * table.stride for local in (start, stop - 1))
        self._views: dict[str, Tensor] = {}
        self._chunks: set[int] = set()

    def bounds(self, first: int, stride: int) -> tuple[int, int]:
        """Which of the rows ``first, first + stride, ...`` may be of this block: ``[low, high)``."""
        return max(0, -(-(self._first - first) // stride)), (self._last - first) // stride + 1

    def take(self, opened: Any, run: Run, low: int, high: int) -> None:
        """What a run has of this block's rows."""
        low, high = max(low, run.start), min(high, run.stop)
        if low >= high:
            return
        first, stride, step = run.file.first, run.file.stride, self._table.stride
        if (stride, first) == (step, self._table.first):
            mine: Any = slice(None)
            at: Any = slice(low - self._start, high - self._start)
            ends = low - self._start, high - 1 - self._start
        else:
            rows = first + stride * torch.arange(low, high)
            mine = torch.nonzero((rows - self._first) % step == 0).flatten()
            if not len(mine):
                return
            at = (rows[mine] - self._first) // step
            ends = int(at[0]), int(at[-1])
        size = self._table.store.changes.chunk_rows
        self._chunks.update(range(ends[0] // size, ends[1] // size + 1))
        for name, view in self._open().items():
            part = opened.get_slice(name)[low - run.start + run.offset : high - run.start + run.offset]
            view[at] = part[mine]

    def _open(self) -> dict[str, Tensor]:
        if not self._views:
            self._block = self._table.layout.zeros(self._count, torch.device("cpu"))
            self._views = self._table.layout.unpack(self._block)
        return self._views

    def write(self) -> None:
        """The chunks that a file has; the others stay what they are, rows that were never visited."""
        size, store = self._table.store.changes.chunk_rows, self._table.store
        chunks = sorted(self._chunks)
        firsts = [chunk for chunk in chunks if chunk - 1 not in self._chunks]
        lasts = [chunk for chunk in chunks if chunk + 1 not in self._chunks]
        for first, last in zip(firsts, lasts, strict=True):
            part = self._block[first * size : (last + 1) * size]
            store.write_block(self._start + first * size, part)


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


# -- verification --------------------------------------------------------------------------------------------------


def check_data(est: Estimator, where: str, saved: str | None) -> None:
    """Rows of other samples would be taken for those of these."""
    if None not in (saved, est.data_fingerprint) and saved != est.data_fingerprint:
        raise ValueError(
            f"{where}: rows of the data with fingerprint {saved!r}, est.data_fingerprint is "
            f"{est.data_fingerprint!r}: an index would be another sample. Data that grew: load with the old index, "
            f"then add_sample_group and set the fingerprint of the new one"
        )


def _check_file(source: Checkpoint, file: File) -> None:
    path = source.path / file.name
    if not path.is_file():
        raise ValueError(f"{path} is missing from the checkpoint; load another one")
    found = manifest.checksum(path)
    if found != (file.bytes, file.crc32):
        raise ValueError(
            f"{path} is damaged: it has {found[0]} bytes with crc32 {found[1]:08x}, the manifest says {file.bytes} "
            f"bytes with {file.crc32:08x}; load another checkpoint"
        )
    metadata = _open(path).metadata() or {}
    if metadata.get("save_id") != file.save_id:
        raise ValueError(f"{path} belongs to save {metadata.get('save_id')}, the manifest says {file.save_id}")


def _check_spans(source: Checkpoint, files: list[File], n: int, chunk_rows: int) -> None:
    """The files are of rows that this estimator has."""
    path = source.path / manifest.MANIFEST
    if not isinstance(chunk_rows, int) or chunk_rows < 1:
        raise ValueError(f"{path} is damaged: chunks of {chunk_rows!r} rows; load another checkpoint")
    for file in files:
        if not (0 <= file.first < file.stride == files[0].stride):
            raise ValueError(f"{path} is damaged: {file.name} is of rank {file.first} of {file.stride}")
        end, count = 0, max(0, -(-(n - file.first) // file.stride))
        for start, stop in file.spans:
            if not end <= start < stop <= count or start % chunk_rows:
                raise ValueError(
                    f"{path}: {file.name} has rows {start} to {stop} after row {end}, of rank {file.first} of "
                    f"{file.stride}, which has {count}; this estimator has n={n}"
                )
            end = stop


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
