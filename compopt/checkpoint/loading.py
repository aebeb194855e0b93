"""Verification and loading of checkpoints, for any number of ranks and any placement of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compopt import files
from compopt.checkpoint import manifest
from compopt.checkpoint.manifest import MANIFEST, SPANS, STATE, Checkpoint, File
from compopt.checkpoint.saving import StrPath, absolute, as_given, check_estimator, note_load
from compopt.distributed.collectives import doing
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator
from compopt.stores.table import RowTable

RETRIES = 8  # times that a load starts again because its checkpoint was removed meanwhile, before it raises
# Used as a context: safetensors creates tensors on the default device, which may not be the CPU.
_HOST = torch.device("cpu")
_HEADER = 1 << 20  # largest size of a file in bytes, without its rows

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"C64": torch.complex64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}


def load(est: Estimator, directory: StrPath, t: int | None = None) -> Path:
    """Load a checkpoint, also one of version 0.3, into an estimator of the same configuration.

    Example:
        >>> import compopt, tempfile
        >>> est, again = (compopt.SogCLREstimator(n=10) for _ in range(2))  # the same configuration
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = compopt.save(est, folder)
        ...     compopt.load(again, folder) == path
        True

    The number of ranks, ``shard`` and ``offload`` may differ from those of the writer. Before anything is written, the
    existence, length and checksum of all files and their values are verified. If a run that saves meanwhile removes the
    checkpoint, the newest remaining one is loaded instead. ``load_state_dict`` post-hooks run.

    Args:
        est: the estimator to load into, or a part of one.
        directory: the directory passed to :func:`save`, of which the newest complete checkpoint is loaded, or the
            result of :func:`save`; for a part either of them followed by its name, ``path / "normalizer"``.
        t: load the newest checkpoint with ``t`` commits; ``None``: the newest checkpoint.

    Returns:
        The directory of the loaded checkpoint.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: another n, mode, method, dtype or data_fingerprint, or a damaged file; the message contains the file
            and both values, and the estimator is unchanged. Also values that no run writes, as for
            :meth:`load_state_dict <Estimator.load_state_dict>`.
        TypeError: ``est`` is not an estimator, ``directory`` not a path, or ``t`` not an integer.
        RuntimeError: with several ranks, another rank failed or runs another operation.

    Communicates: collective; a few small messages.
    """
    if t is not None and (isinstance(t, bool) or not hasattr(t, "__index__")):
        raise TypeError(f"t must be a number of commits, got {t!r} of type {type(t).__name__}")
    check_estimator(est)
    est._await_save()
    with doing("compopt.load()", est.t), est._writing():
        root = est._ranks.agree(lambda: absolute(directory))
        for left in reversed(range(RETRIES + 1)):
            source = _attempt(est, root, t, last=not left)
            if source is not None:
                break
    assert source is not None  # the last attempt raises
    note_load(est, source)
    est._end_loading()
    return as_given(source.path, root, directory)


def _attempt(est: Estimator, root: Path, t: int | None, last: bool) -> Checkpoint | None:
    """Load the newest checkpoint; return ``None`` if another run has removed it meanwhile. Collective."""
    ranks = est._ranks
    source = ranks.gather_objects(ranks.agree(lambda: manifest.choose(root, t) if ranks.rank == 0 else None))[0]
    try:
        state, found = ranks.agree(lambda: _verify(est, source))
        for name, each in est._objects().items():
            own = {**states.entries_of(state, name), "state": found[name].state}
            ranks.agree(partial(states.load_object, each, own, partial(_read_rows, each, found[name])))
        states.reset_progress(est, state)
    except Exception:  # raised on every rank
        named = source.path.resolve() == root.resolve()
        if last or named or all(ranks.gather_objects(ranks.agree(lambda: source.complete))):
            raise
        return None
    return source


@dataclass
class _Found:
    """Files of the rows of one object, and its state that is not rows.

    ``old``: the files of 0.3 contain the columns of all objects.
    """

    folder: Path
    rows: list[File]
    state: dict[str, Tensor]
    old: bool


def _verify(est: Estimator, source: Checkpoint) -> tuple[Mapping[str, Any], dict[str, _Found]]:
    """Verify a checkpoint, and return its manifest in the present form, and the files of each object."""
    path = source.path / MANIFEST
    content, files_of = manifest.read(source)
    old = content["version"] == manifest.OLD_VERSION
    if source.part:
        if source.part not in content.get("parts", {}):
            raise ValueError(f"{path} has no object {source.part!r}; load another checkpoint")
        content = {**content["parts"][source.part], "data_fingerprint": content.get("data_fingerprint")}
    est._take_form_of(content["config"])
    with _prefix_errors(path):
        state = states.upgraded(est, {**content, "version": 1 if old else states.FORMAT_VERSION})
        states.check_tree(est, state)
    check_data(est, str(path), content.get("data_fingerprint"))
    found = {}
    for name, each in est._objects().items():
        folder = "" if old else source.part or name
        found[name] = _verify_object(each, source.path, folder, files_of, content["config"] if old else None)
    return state, found


def _verify_object(
    est: Estimator, path: Path, folder: str, everything: list[File], old: Mapping[str, Any] | None
) -> _Found:
    """Verify the files of one object, and return them; ``old`` is the configuration of a checkpoint of 0.3."""
    own = [file for file in everything if Path(file.name).parent == Path(folder)]
    state = next(file for file in own if Path(file.name).name == STATE)
    rows = [file for file in own if file is not state]
    rows = rows if est._table is not None or old is None else []
    ranks = est._ranks
    _check_places(path / MANIFEST, rows, est._table, old is not None)
    prefix = "" if old is None else f"{states.old_role(est, old.get('method'))}."
    found = _Found(path, rows, _read_state(est, path / state.name, state, prefix), old is not None)
    for file in rows[ranks.rank :: ranks.size]:
        _check_rows(path / file.name, file, est, found.old)
    return found


# -- rows ----------------------------------------------------------------------------------------------------------


def _read_rows(est: Estimator, found: _Found) -> None:
    """Overwrite this process's rows, from the files of any number of ranks."""
    if est._table is not None:
        with _HOST:
            est._table.load(_parts(est, est._table, found))


def _parts(est: Estimator, table: RowTable, found: _Found) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield row numbers and columns of each file, in the order of the manifest."""
    for file in found.rows:
        if file.rows and (file.first - table.first) % gcd(file.stride, table.stride) == 0:
            path = found.folder / file.name
            opened, local = _open(path), manifest.rows_of(_spans(path, file))
            columns = {name: opened.get_tensor(name) for name in table.layout.offsets}
            yield local * file.stride + file.first, states.split_rows(est, columns) if found.old else columns


def _spans(path: Path, file: File) -> Tensor:
    """Return the local rows of the writer in a file, as ranges ``(S, 2)``."""
    return torch.tensor(file.spans) if file.spans else _open(path).get_tensor(SPANS)


def _open(path: Path, framework: str = "pt") -> Any:
    from safetensors import safe_open

    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > _HEADER:
        raise ValueError(f"{path} is damaged: it has a header of {header} bytes; load another checkpoint")
    try:
        return safe_open(path, framework=framework)
    except Exception as error:  # safetensors raises its own types; all of them mean a damaged file
        raise ValueError(f"{path} is damaged ({error}); load another checkpoint") from None


# -- verification --------------------------------------------------------------------------------------------------


@contextmanager
def _prefix_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def check_data(est: Estimator, where: str, saved: str | None) -> None:
    """Raise if a checkpoint has another data fingerprint, since its rows belong to other samples."""
    if None not in (saved, est.data_fingerprint) and saved != est.data_fingerprint:
        remedy = "load with the old index, then add_sample_group and set the fingerprint of the new one"
        if est.n is None:
            remedy = "nothing is kept per sample; load with data_fingerprint = None, then set that of the new data"
        raise ValueError(
            f"{where}: {'state' if est.n is None else 'rows'} of the data with fingerprint {saved!r}, "
            f"est.data_fingerprint is {est.data_fingerprint!r}: an index may refer to another sample. If the "
            f"data set was extended: {remedy}"
        )


def _check_places(path: Path, found: list[File], table: RowTable | None, old: bool) -> None:
    """Refuse files of ranks that cannot be, or (without ``old``) with bytes for other columns."""
    row_bytes = 0 if table is None else table.layout.row_bytes + 16  # of a range
    for file in found:
        if not 0 <= file.first < file.stride == found[0].stride:
            ranks = f"is of rank {file.first} of {file.stride}, the first of {found[0].stride} ranks"
            raise ValueError(f"{path} is damaged: {file.name} {ranks}")
        if not old and file.bytes > 8 + _HEADER + file.rows * row_bytes:
            raise ValueError(f"{path} is damaged: {file.name} has {file.bytes} bytes for {file.rows} rows")


def _check_spans(path: Path, file: File, n: int) -> None:
    """Refuse a file whose row numbers do not ascend, are outside the table, or are not as many as its rows."""
    spans, count = _spans(path, file), max(0, -(-(n - file.first) // file.stride))
    start, stop, end = spans[:, 0], spans[:, 1], torch.cat([spans.new_zeros(1), spans[:-1, 1]])
    bad = ~((end <= start) & (start < stop) & (stop <= count))
    for low, high, after in torch.stack([start, stop, end], dim=1)[bad][:1].tolist():
        raise ValueError(
            f"{path} has rows {low} to {high} after row {after}, of rank {file.first} of {file.stride}, which has "
            f"{count}; this estimator has n={n}"
        )
    _same(path, "number of rows", int((stop - start).sum()), file.rows)


def _check_size(path: Path, file: File) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing from the checkpoint; load another one")
    _same(path, "size", path.stat().st_size, file.bytes)


def _same(path: Path, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise ValueError(
            f"{path} is damaged: its {what} is {found}, the manifest says {wanted}; load another checkpoint"
        )


def _check_rows(path: Path, file: File, est: Estimator, old: bool) -> None:
    """Refuse a file with another size or checksum than in the manifest, or with other (``old``: fewer) columns."""
    _check_size(path, file)
    _same(path, "checksum", files.checksum(path), file.checksum)
    table = est._table
    if table is None:
        return
    forms = {name: (*form.shape, form.dtype) for name, form in _forms(path).items()}
    needed = {c.name: (file.rows, c.width, c.dtype) for c in table.layout.columns}
    if not old:
        needed[SPANS] = (*forms.get(SPANS, ())[:1], 2, torch.int64)
    for name in needed if old else {**needed, **forms}:
        if forms.get(name) != needed.get(name):
            raise ValueError(
                f"{path}: column {name!r} is {forms.get(name)}, this estimator needs {needed.get(name)}; load another "
                f"checkpoint"
            )
    opened = _open(path)
    with _HOST:
        _check_spans(path, file, table.n)
        with _prefix_errors(path):
            columns = {name: opened.get_slice(name) for name in needed}
            columns = states.split_rows(est, {name: x[:] for name, x in columns.items()}) if old else columns
            table.check_values(columns, file.rows)


def _forms(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file as meta tensors, without reading their values."""
    opened = _open(path, "np")  # not "pt", which maps the whole file privately and may exceed the available memory
    forms = {}
    for name in list(opened.keys()):
        part = opened.get_slice(name)
        dtype = _DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ValueError(f"{path}: {name} is of {part.get_dtype()}, which no state is; load another checkpoint")
        forms[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    return forms


def _read_state(est: Estimator, path: Path, file: File, prefix: str) -> dict[str, Tensor]:
    """Return state that is not rows, with the checks of ``load_state_dict``; sizes are checked before."""
    _check_size(path, file)
    forms = {name: form for name, form in _forms(path).items() if name.startswith(prefix)}
    with _prefix_errors(path):
        est.check_form({name.removeprefix(prefix): form for name, form in forms.items()})
    _same(path, "checksum", files.checksum(path), file.checksum)
    with _prefix_errors(path), _HOST:
        opened = _open(path)
        state = {name.removeprefix(prefix): opened.get_tensor(name) for name in forms}
        est.check_state(state)
    return state
