"""Names, manifests and completeness of checkpoint directories.

::

    directory/                                one run; the argument of save() and load()
        checkpoint-00000007-t1200-9f3c1a22/   one save: number, commits, random id
            normalizer/                       one folder per object; none for an object that is saved alone
                rows-00000of00004-00012.safetensors   visited rows among 0, 4, 8, ...: their numbers, and the columns
                state.safetensors             state that is not rows
            temperature/
                state.safetensors
            manifest.json                     written last: a directory without it is incomplete

Rows that are in no file are zeros: they were never visited. Version 4, of 0.3, has the rows of all objects in the same
files, without folders, and their numbers in the manifest.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compopt import files

FORMAT_VERSION, OLD_VERSION = 5, 4
MANIFEST = "manifest.json"
STATE = "state.safetensors"
PIECE_ROWS = 1 << 18  # largest number of rows in a file; a save needs memory for several copies of them
SPANS = ".rows"  # name of the tensor of row numbers in a file of rows; no column can have it
KEPT = "earlier checkpoints are as they were"  # appended to errors of a save
_MOST = 1 << 25  # largest size of a manifest in bytes
_DIRECTORY = re.compile(r"checkpoint-(\d{8})-t(\d+)-([0-9a-f]{8})")
# Schemas of a file entry and of a manifest: types, patterns of strings, lists with one schema for all entries.
_FILE: dict[str, Any] = {
    "name": re.compile(r"([A-Za-z0-9_-]{1,99}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors"),
    "bytes": int,
    "checksum": re.compile(r"[0-9a-f]{64}"),
    "first": int,
    "stride": int,
    "rows": int,
}
_OLD_FILE = {**_FILE, "spans": [[int]]}
del _OLD_FILE["rows"]
_CONTENT: dict[str, Any] = {
    "t": int,
    "save_id": re.compile(r"[0-9a-f]{8}"),
    "config": dict,
    "files": [dict],
}
_OBJECT: dict[str, Any] = {"t": int, "config": dict, "sample_groups": [dict]}


@dataclass(frozen=True)
class File:
    """Manifest entry of one file of a checkpoint.

    Attributes:
        name: name in the directory of the checkpoint, with the folder of the object.
        bytes: size of the file.
        checksum: SHA-256 in 64 hexadecimal digits.
        first, stride: the writer of a row file held the rows ``first, first + stride, ...``.
        rows: number of rows in the file.
        spans: in version 4, local rows of the writer in the file, as ascending ranges ``[start, stop)``.
    """

    name: str
    bytes: int
    checksum: str
    first: int = 0
    stride: int = 1
    rows: int = 0
    spans: tuple[tuple[int, int], ...] = ()


def spans_of(rows: Tensor) -> Tensor:
    """Return ascending row numbers ``(R,)`` as ranges ``[start, stop)``, ``(S, 2)``."""
    cut = rows.diff() != 1
    return torch.stack([torch.cat([rows[:1], rows[1:][cut]]), torch.cat([rows[:-1][cut], rows[-1:]]) + 1], dim=1)


def rows_of(spans: Tensor) -> Tensor:
    """Return the row numbers in ranges, the inverse of :func:`spans_of`."""
    lengths = spans[:, 1] - spans[:, 0]
    before = lengths.cumsum(0) - lengths
    rows = torch.repeat_interleave(spans[:, 0] - before, lengths)
    return rows.add_(torch.arange(len(rows), device="cpu"))


# -- directories ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """Directory of one save, with the facts in its name: number, commits ``t``, and random id.

    ``part`` is the name of one of its objects, if only that is to be loaded.
    """

    path: Path
    number: int
    t: int
    save_id: str
    part: str = ""

    @property
    def complete(self) -> bool:
        return (self.path / MANIFEST).is_file()


def checkpoint_at(path: Path) -> Checkpoint | None:
    """Return the checkpoint with this directory name; ``None`` if the name is not that of a checkpoint."""
    match = _DIRECTORY.fullmatch(path.name)
    return None if match is None else Checkpoint(path, int(match[1]), int(match[2]), match[3])


def checkpoints(directory: Path) -> list[Checkpoint]:
    """Return all checkpoints of a run, complete or not, oldest first; symbolic links are ignored."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = (checkpoint_at(path) for path in paths if path.is_dir() and not path.is_symlink())
    return sorted(filter(None, found), key=lambda c: c.number)


def complete(directory: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first."""
    return [c for c in checkpoints(directory) if c.complete]


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all checkpoints of a run share: mode, method, options, and sizes of the sample groups."""
    config, parts = about["config"], about.get("parts", {})
    of_parts = {name: part["config"] for name, part in parts.items()}
    options = {name: own["options"] for name, own in of_parts.items() if own["options"]}
    sizes = [own["n"] for own in (config, *of_parts.values()) if own.get("n") not in (None, [None])]
    return {
        "mode": config.get("mode"),
        "method": config.get("method"),
        "options": {**config.get("options", {}), **options},
        "n": sizes[0] if sizes else [],
    }


def prepare(directory: Path, about: Mapping[str, Any]) -> None:
    """Create the directory of a run; refuse a checkpoint, and a directory with checkpoints of another configuration."""
    if checkpoint_at(directory.resolve()) is not None or (directory / MANIFEST).exists():
        raise ValueError(f"{directory} is itself a checkpoint; save into the directory of the run")
    with files.explained_errors(directory, KEPT):
        files.make_directory(directory)
    try:
        found, config = _facts(read(complete(directory)[-1])[0]), _facts(about)
    except (IndexError, ValueError):  # no checkpoint, or a damaged one
        return
    common = min(len(found["n"]), len(config["n"]))  # either side may have additional sample groups
    for key in ("mode", "method", "options", "n"):
        there, here = found[key] or config[key], config[key]
        if key == "n":
            there, here = list(there)[:common], here[:common]
        if there != here:
            raise ValueError(
                f"{directory} holds checkpoints of another estimator: {key} is {there!r} there and {here!r} here; use "
                f"another directory"
            )


def new(directory: Path, t: int, folders: Sequence[str]) -> Checkpoint:
    """Create the directory of a new save, and the folders of its objects."""
    number = max((c.number for c in checkpoints(directory)), default=0) + 1
    save_id = secrets.token_hex(4)
    path = directory / f"checkpoint-{number:08d}-t{t}-{save_id}"
    with files.explained_errors(path, KEPT):
        path.mkdir()
        for folder in folders:
            (path / folder).mkdir()
    return Checkpoint(path, number, t, save_id)


def outdated(directory: Path, keep: int) -> list[Checkpoint]:
    """Invalidate all but the ``keep`` newest complete checkpoints; return these and older unfinished ones."""
    found = checkpoints(directory)
    done = [c for c in found if c.complete]
    for old in done[:-keep]:
        (old.path / MANIFEST).unlink()  # first, so that a partially removed checkpoint never looks complete,
        files.sync_directory(old.path)  # not even after a power loss
    return [c for c in found if c.number < done[-1].number and not c.complete]


def choose(directory: Path, t: int | None) -> Checkpoint:
    """Return the newest complete checkpoint (with ``t`` commits, if given); ``directory`` may itself be one.

    ``directory / name`` is the object of that name in it.
    """
    real = directory.resolve()
    if real.is_dir() and not (real / MANIFEST).exists() and (real.parent / MANIFEST).is_file():
        return replace(choose(real.parent, t), part=real.name)  # the folder of one object
    own = checkpoint_at(real) if real.is_dir() else None
    if own is None and (real / MANIFEST).is_file():  # a copy of a checkpoint under another directory name
        with _damage_errors(real / MANIFEST):
            content = _load(real / MANIFEST)
            own = Checkpoint(real, 0, content["t"], content["save_id"])
    if own is not None:
        if not own.complete:
            raise FileNotFoundError(f"{directory} has no {MANIFEST}: its save was not finished; load another one")
        return own
    if found := _with_commits(directory, t):
        return found[-1]
    of_run = [] if directory.exists() else _with_commits(directory.parent, t)
    if of_run and (of_run[-1].path / directory.name).is_dir():  # the folder of one object in the newest checkpoint
        return replace(of_run[-1], part=directory.name)
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        raise FileNotFoundError(f"{directory} {problem}; pass the directory that was given to save()")
    what = "no complete checkpoint" if t is None else f"no complete checkpoint with t={t}"
    raise FileNotFoundError(f"{directory} holds {what}; there are t = {[c.t for c in complete(directory)]}")


def _with_commits(directory: Path, t: int | None) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, those with ``t`` commits if it is given, oldest first."""
    found = complete(directory) or complete(directory)  # retry: a concurrent save may have removed all listed ones
    return [c for c in found if t is None or c.t == t]


# -- manifests -----------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, own: list[File], content: Mapping[str, Any]) -> None:
    """Write the manifest atomically."""
    path = checkpoint.path / MANIFEST
    body = {"version": FORMAT_VERSION, "save_id": checkpoint.save_id, "t": checkpoint.t, **content}
    body["files"] = [{key: value for key, value in asdict(file).items() if key in _FILE} for file in own]
    text = json.dumps({**body, "crc32": body_crc(body)}, indent=1).encode()
    if len(text) > _MOST:
        raise ValueError(f"{path} would have {len(text)} bytes, {_MOST} are read: too many sample groups")
    partial = path.with_name(f"{MANIFEST}.partial")
    with files.explained_errors(path, KEPT):
        for folder in {checkpoint.path, *(checkpoint.path / Path(file.name).parent for file in own)}:
            files.sync_directory(folder)  # the names of the files must be durable before the manifest
        files.write_file(partial, text)
        os.replace(partial, path)
        files.sync_directory(checkpoint.path)
        files.sync_directory(checkpoint.path.parent)


def body_crc(body: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its entry ``crc32``, independent of the layout of the text."""
    return zlib.crc32(json.dumps({k: v for k, v in body.items() if k != "crc32"}, sort_keys=True).encode())


def read(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[File]]:
    """Return the checked content and file entries of a manifest; its content is not trusted."""
    path = checkpoint.path / MANIFEST
    with _damage_errors(path):
        content = _load(path)
        crc, version = body_crc(content), content["version"]
    if type(version) is not int or version not in (OLD_VERSION, FORMAT_VERSION):
        raise ValueError(
            f"{path} has format version {version!r}, this library reads {FORMAT_VERSION}; update compopt, "
            f"or use the version that wrote it"
        )
    with _damage_errors(path):
        _check("it", content, _CONTENT)
        _check("files of it", content["files"], [_OLD_FILE if version == OLD_VERSION else _FILE])
        objects = content.get("parts") or {"it": content}
        _check("parts", objects, dict)
        for name, each in objects.items():
            _check(name, each, _OBJECT)
            _check(f"n of {name}", each["config"].get("n", []), list)
        _check("data_fingerprint", content.get("data_fingerprint") or "", str)
        found = [_file(entry, version == OLD_VERSION) for entry in content["files"]]
        names = [file.name for file in found]
        lacking = {f"{part}/{STATE}" for part in content.get("parts", {})} or {STATE}
        if not lacking <= set(names) or len(set(names)) < len(names):
            raise ValueError(f"it lacks {STATE}, or a file is there twice: {reprlib.repr(names)}")
        if content.get("crc32") != crc:
            raise ValueError("its checksum is wrong")
    if content["save_id"] != checkpoint.save_id or content["t"] != checkpoint.t:
        raise ValueError(f"{path} belongs to save {content['save_id']} (t={content['t']}), not to its directory")
    return content, found


def _file(entry: Mapping[str, Any], old: bool) -> File:
    if not old:
        return File(**entry, spans=())  # which only version 4 has: raises for an entry of that name
    spans = tuple((start, stop) for start, stop in entry["spans"])
    return File(**{**entry, "rows": sum(stop - start for start, stop in spans), "spans": spans})


@contextmanager
def _damage_errors(path: Path) -> Iterator[None]:
    """Convert errors of parsing a manifest to a ValueError that contains its path."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); load another checkpoint") from None


def _load(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > _MOST:
        raise ValueError(f"it has {size} bytes, {_MOST} at most are read")
    text = path.read_bytes()
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, no object")
    if text not in (json.dumps(content, indent=1).encode(), json.dumps(content).encode()):
        raise ValueError("the file was modified")
    return content


def _check(what: str, value: Any, wanted: Any) -> None:
    """Check a value of a manifest against its schema ``wanted``, before the value is used."""
    kind = str if isinstance(wanted, re.Pattern) else wanted if isinstance(wanted, type) else type(wanted)
    given = type(value)
    if given is not kind:  # not isinstance, for which a bool is an int
        raise ValueError(f"{what} is {reprlib.repr(value)}, not of type {kind.__name__}")
    if isinstance(wanted, re.Pattern) and not wanted.fullmatch(value):
        raise ValueError(f"{what} is {reprlib.repr(value)}, not of the form {wanted.pattern}")
    if kind is int and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{what} is {value}, no integer of 64 bits")
    if isinstance(wanted, list):
        for entry in value:
            _check(f"an entry of {what}", entry, wanted[0])
    if isinstance(wanted, dict):
        for key, sub in wanted.items():
            if key not in value:
                raise ValueError(f"{what} lacks {key}")
            _check(f"{key} of {what}", value[key], sub)
