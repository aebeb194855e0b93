"""The files of one checkpoint: verified, then read into any number of ranks and any placement."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compopt.checkpoint import durable, manifest
from compopt.checkpoint.chunks import Owners, Run, by_rank
from compopt.checkpoint.manifest import STATE, Checkpoint, File
from compopt.checkpoint.ranged import DTYPES, RangedFile
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator
from compopt.remote import Folder, RemotePath
from compopt.stores import table as tables
from compopt.stores.table import RowTable, Saved

# safetensors makes what it reads on the default device, which may be another one.
_HOST = torch.device("cpu")
_OPEN_FILES = 32
_HEADER = 1 << 20  # bytes of a file that say what is in it
_CHUNKS = 1 << 22  # of which it is kept where they are


class Contents:
    """A checkpoint that was verified.

    Attributes:
        t, sample_groups: of the estimator.
        extra: state that is not rows, by role.
    """

    def __init__(self, est: Estimator, source: Checkpoint) -> None:
        """Refuse whatever does not fit or is damaged; every rank checks every K-th file."""
        engine = est._engine
        content, files = manifest.read(source)
        try:
            states.compare(engine, content["config"])
        except ValueError as error:
            raise ValueError(f"{source.path / manifest.MANIFEST}: {error}") from None
        check_data(est, str(source.path / manifest.MANIFEST), content.get("data_fingerprint"))
        self._source, self._chunk_rows = source, content["chunk_rows"]
        self._files = [file for file in files if file.name != STATE]
        _check_spans(source, self._files, engine.table, self._chunk_rows)
        _check_extra(est, source, next(file for file in files if file.name == STATE))
        for file in files[engine.ranks.rank :: engine.ranks.size]:
            _check_file(source, file, engine.table)
        self.t, self.sample_groups = states.commits(content["t"]), content["sample_groups"]
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
            self._table.find_partial(self._table.layout.unpack(part))
            store.write_block(self._start + first * size, part)


def _open(path: Folder, framework: str = "pt", content: bytes | None = None) -> Any:
    if isinstance(path, RemotePath):
        return _open_remote(path, content)
    from safetensors import safe_open

    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > _HEADER:
        raise ValueError(f"{path} is damaged: it has a header of {header} bytes; load another checkpoint")
    try:
        return safe_open(path, framework=framework)
    except Exception as error:  # safetensors has its own; all of them mean the same here
        raise ValueError(f"{path} is damaged ({error}); load another checkpoint") from None


def _open_remote(path: RemotePath, content: bytes | None) -> RangedFile:
    try:
        ahead = tables.BLOCK_ROWS // _OPEN_FILES  # of all that are open, one block
        return RangedFile(path, _HEADER, ahead, content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); load another checkpoint") from None


# -- verification --------------------------------------------------------------------------------------------------


def check_data(est: Estimator, where: str, saved: str | None) -> None:
    """Rows of other samples would be taken for those of these."""
    if None not in (saved, est.data_fingerprint) and saved != est.data_fingerprint:
        remedy = "load with the old index, then add_sample_group and set the fingerprint of the new one"
        if est.n is None:
            remedy = "nothing is kept per sample; load with data_fingerprint = None, then set that of the new data"
        raise ValueError(
            f"{where}: {'state' if est.n is None else 'rows'} of the data with fingerprint {saved!r}, "
            f"est.data_fingerprint is {est.data_fingerprint!r}: an index would be another sample. Data that grew: "
            f"{remedy}"
        )


def _check_size(source: Checkpoint, file: File) -> Folder:
    """Refuse a file that is not there or of another size; nothing of it is read."""
    path = source.path / file.name
    if not path.is_file():
        raise ValueError(f"{path} is missing from the checkpoint; load another one")
    size = path.stat().st_size
    if size != file.bytes:
        raise ValueError(
            f"{path} is damaged: it has {size} bytes, the manifest says {file.bytes}; load another checkpoint"
        )
    return path


def _check_file(source: Checkpoint, file: File, table: RowTable | None) -> None:
    """Refuse a file that is not the one that was written, or has other tensors than rows of this table."""
    path = _check_size(source, file)
    rows = sum(stop - start for start, stop in file.spans)
    content: bytes | None = None
    if isinstance(path, RemotePath) and rows <= tables.BLOCK_ROWS:  # as every file that save() wrote: read it once
        content = path.read_bytes()
        crc = zlib.crc32(content)
    else:
        _, crc = durable.checksum(path)
    if crc != file.crc32:
        raise ValueError(
            f"{path} is damaged: it has crc32 {crc:08x}, the manifest says {file.crc32:08x}; load another checkpoint"
        )
    opened = _open(path, content=content)
    metadata = opened.metadata() or {}
    if metadata.get("save_id") != file.save_id:
        raise ValueError(f"{path} belongs to save {metadata.get('save_id')}, the manifest says {file.save_id}")
    if table is not None and file.name != STATE:
        _check_columns(path, opened, table, rows)
        with _named(path), _HOST:
            table.check_values({c.name: opened.get_slice(c.name) for c in table.layout.columns}, rows)


def _check_columns(path: Folder, opened: Any, table: RowTable, rows: int) -> None:
    """The tensors of a file are the columns of so many rows, in their own number format."""
    slices = {name: opened.get_slice(name) for name in list(opened.keys())}
    found = {name: (*part.get_shape(), part[:0].dtype if part.get_shape() else None) for name, part in slices.items()}
    needed = {c.name: (rows, c.width, c.dtype) for c in table.layout.columns}
    for name in {**needed, **found}:
        if found.get(name) != needed.get(name):
            raise ValueError(
                f"{path}: column {name!r} is {found.get(name)}, this estimator needs {needed.get(name)}; load another "
                f"checkpoint"
            )


def _check_spans(source: Checkpoint, files: list[File], table: RowTable | None, chunk_rows: int) -> None:
    """The files are of rows that this estimator has, and as large as these are."""
    path, n = source.path / manifest.MANIFEST, 0 if table is None else table.n
    if chunk_rows < 1:
        raise ValueError(f"{path} is damaged: chunks of {chunk_rows!r} rows; load another checkpoint")
    if table is not None and chunk_rows < table.store.changes.chunk_rows and n > _CHUNKS * chunk_rows:
        raise ValueError(f"{path} is damaged: chunks of {chunk_rows!r} rows of {n}; load another checkpoint")
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
        rows = sum(stop - start for start, stop in file.spans)
        if file.bytes > 8 + _HEADER + rows * (0 if table is None else table.layout.row_bytes):
            raise ValueError(f"{path} is damaged: {file.name} has {file.bytes} bytes for {rows} rows")


def _check_extra(est: Estimator, source: Checkpoint, file: File) -> None:
    """State that is not rows has the names, shapes and dtypes of this estimator's; none of it is read."""
    path = _check_size(source, file)
    opened = _open(path, "np")  # torch maps a file as memory of its own, which may be more than there is
    forms = {name: _form(path, name, opened.get_slice(name)) for name in list(opened.keys())}
    for role, state in _by_role(est, path, forms).items():
        with _named(path):
            est._engine.parts[role].check_form(state)


def _form(path: Folder, name: str, part: Any) -> Tensor:
    """Shape and dtype of a tensor that is not read, on the meta device."""
    dtype = DTYPES.get(part.get_dtype())
    if dtype is None:
        raise ValueError(f"{path}: {name} is of {part.get_dtype()}, which no state is; load another checkpoint")
    return torch.empty(part.get_shape(), dtype=dtype, device="meta")


def _read_extra(est: Estimator, source: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """State that is not rows, by role; its values are checked as by ``load_state_dict``."""
    path = source.path / STATE
    with _HOST:
        opened = _open(path)
        extra = _by_role(est, path, {name: opened.get_tensor(name) for name in list(opened.keys())})
    for role, state in extra.items():
        with _named(path):
            est._engine.parts[role].check_state(state)
    return extra


@contextmanager
def _named(path: Folder) -> Iterator[None]:
    """Values that are refused are those of a file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _by_role(est: Estimator, path: Folder, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {role: {} for role in est._engine.parts}
    for key, value in tensors.items():
        role, _, name = key.partition(".")
        if role not in found:
            raise ValueError(f"{path} has {key!r}, which this estimator has not; load another checkpoint")
        found[role][name] = value
    return found
