"""Directories of checkpoints: names, manifests, and which of them are complete.

::

    directory/                                one run; what users pass to save() and load()
        checkpoint-00000007-t1200-9f3c1a22/   one save: number, commits, random id
            rows-00000of00004-00012.safetensors   piece 12 of the rows 0, 4, 8, ..., one tensor per column
            state.safetensors                 state that is not rows
            manifest.json                     written last: a directory without it does not count

A row that is in no file has only zeros: it was never visited.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compopt import files

FORMAT_VERSION = 4
MANIFEST = "manifest.json"
STATE = "state.safetensors"
PIECE_ROWS = 1 << 18  # rows of a file at most; several copies of so many are in memory
CHUNK_ROWS = 1 << 13  # rows that are left out of a file where all of them are zero
KEPT = "earlier checkpoints are as they were"  # said with errors of a save
_MOST = 1 << 25  # bytes of a manifest
_DIRECTORY = re.compile(r"checkpoint-(\d{8})-t(\d+)-([0-9a-f]{8})")
# The kinds of what is in a manifest, and of each file in it: types, patterns of strings, lists of one kind.
_FILE: dict[str, Any] = {
    "name": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors"),
    "bytes": int,
    "checksum": re.compile(r"[0-9a-f]{64}|[0-9a-f]{8}"),
    "first": int,
    "stride": int,
    "spans": [[int]],
}
_CONTENT: dict[str, Any] = {
    "t": int,
    "save_id": re.compile(r"[0-9a-f]{8}"),
    "config": dict,
    "sample_groups": [dict],
    "files": [_FILE],
}


@dataclass(frozen=True)
class File:
    """One file of a checkpoint.

    Attributes:
        checksum: SHA-256 in 64 hexadecimal digits; CRC-32 in 8 in a checkpoint of version 2 or 3.
        first, stride: a row file is of the rank that holds the rows ``first, first + stride, ...``.
        spans: local rows of that rank that are in the file, ``[start, stop)``, ascending. Where two files of version 3
            have the same row, the later one in the manifest counts.
    """

    name: str
    bytes: int
    checksum: str
    first: int = 0
    stride: int = 1
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.spans)


def nonzero_spans(block: Tensor) -> list[tuple[int, int]]:
    """Return the spans of a block of rows on the host that are left when chunks of zeros are taken away."""
    spans: list[tuple[int, int]] = []
    for start in range(0, len(block), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, len(block))
        if block[start:stop].view(torch.int64).any():
            if spans and spans[-1][1] == start:
                start, _ = spans.pop()
            spans.append((start, stop))
    return spans


# -- directories ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """Directory of one save."""

    path: Path
    number: int
    t: int
    save_id: str

    @property
    def complete(self) -> bool:
        return (self.path / MANIFEST).is_file()


def checkpoint_at(path: Path) -> Checkpoint | None:
    """Return the checkpoint that a directory's name denotes, if it denotes one."""
    match = _DIRECTORY.fullmatch(path.name)
    return None if match is None else Checkpoint(path, int(match[1]), int(match[2]), match[3])


def checkpoints(directory: Path) -> list[Checkpoint]:
    """Return all checkpoints of a run, complete or not, oldest first; links to those of other runs do not count."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = (checkpoint_at(path) for path in paths if path.is_dir() and not path.is_symlink())
    return sorted(filter(None, found), key=lambda c: c.number)


def complete(directory: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first."""
    return [c for c in checkpoints(directory) if c.complete]


def prepare(directory: Path, config: Mapping[str, Any]) -> None:
    """Make the directory of a run; refuse one that is a checkpoint, or has those of another configuration."""
    if checkpoint_at(directory.resolve()) is not None or (directory / MANIFEST).exists():
        raise ValueError(f"{directory} is itself a checkpoint; save into the directory of the run")
    with files.named(directory, KEPT):
        files.make_directory(directory)
    try:
        found = read(complete(directory)[-1])[0]["config"]
    except (IndexError, ValueError):  # nothing there, or a damaged one, which says nothing
        return
    common = min(len(found.get("n", [])), len(config["n"]))  # groups may have been added since, or not yet
    for key in ("mode", "method", "options", "n"):  # early versions did not keep the options
        there, here = found.get(key, config[key]), config[key]
        if key == "n":
            there, here = list(there)[:common], here[:common]
        if there != here:
            raise ValueError(
                f"{directory} holds checkpoints of another estimator: {key} is {there!r} there and {here!r} here; use "
                f"another directory"
            )


def new(directory: Path, t: int) -> Checkpoint:
    """Create the directory of a new save."""
    number = max((c.number for c in checkpoints(directory)), default=0) + 1
    save_id = secrets.token_hex(4)
    path = directory / f"checkpoint-{number:08d}-t{t}-{save_id}"
    with files.named(path, KEPT):
        path.mkdir()
    return Checkpoint(path, number, t, save_id)


def outdated(directory: Path, keep: int) -> list[Checkpoint]:
    """Unmark all but the newest complete checkpoints; return these and the remains of unfinished saves before them."""
    found = checkpoints(directory)
    done = [c for c in found if c.complete]
    for old in done[:-keep]:
        (old.path / MANIFEST).unlink()  # first, so that a kill in between leaves nothing that looks complete,
        files.sync_directory(old.path)  # and no power loss does
    return [c for c in found if c.number < done[-1].number and not c.complete]


def choose(directory: Path, t: int | None) -> Checkpoint:
    """Return the newest complete checkpoint (of ``t`` commits, if given); ``directory`` may itself be one."""
    real = directory.resolve()
    own = checkpoint_at(real) if real.is_dir() else None
    if own is None and (real / MANIFEST).is_file():  # a copy under another name
        with _damage(real / MANIFEST):
            content = _load(real / MANIFEST)
            own = Checkpoint(real, 0, content["t"], content["save_id"])
    if own is not None:
        if not own.complete:
            raise FileNotFoundError(f"{directory} has no {MANIFEST}: its save was not finished; load another one")
        return own
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        raise FileNotFoundError(f"{directory} {problem}; pass the directory that was given to save()")
    found = complete(directory) or complete(directory)  # a run that saves meanwhile may have removed all that it listed
    wanted = [c for c in found if t is None or c.t == t]
    if not wanted:
        what = "no complete checkpoint" if t is None else f"no complete checkpoint with t={t}"
        raise FileNotFoundError(f"{directory} holds {what}; there are t = {[c.t for c in found]}")
    return wanted[-1]


# -- manifests -----------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, own: list[File], content: Mapping[str, Any]) -> None:
    """Write the manifest, all of it or nothing."""
    path = checkpoint.path / MANIFEST
    body = {"version": FORMAT_VERSION, "save_id": checkpoint.save_id, "t": checkpoint.t, **content}
    body["files"] = [asdict(file) for file in own]
    text = json.dumps({**body, "crc32": body_crc(body)}, indent=1).encode()
    if len(text) > _MOST:
        raise ValueError(f"{path} would have {len(text)} bytes, {_MOST} are read: too many sample groups")
    partial = path.with_name(f"{MANIFEST}.partial")
    with files.named(path, KEPT):
        files.sync_directory(checkpoint.path)  # the names of the files, before the manifest that vouches for them
        files.write_file(partial, text)
        os.replace(partial, path)
        files.sync_directory(checkpoint.path)
        files.sync_directory(checkpoint.path.parent)


def body_crc(body: Mapping[str, Any]) -> int:
    """Return the CRC-32 of everything in a manifest but itself, independent of the layout of the text."""
    return zlib.crc32(json.dumps({k: v for k, v in body.items() if k != "crc32"}, sort_keys=True).encode())


def read(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[File]]:
    """Return the content and the files of a manifest, which anybody may have written."""
    path = checkpoint.path / MANIFEST
    with _damage(path):
        content = _load(path)
        crc, version = body_crc(content), content["version"]
    if type(version) is not int or not 2 <= version <= FORMAT_VERSION:
        raise ValueError(f"{path} has format version {version!r}, this library reads {FORMAT_VERSION}; update compopt")
    with _damage(path):
        if version < FORMAT_VERSION:
            _upgrade(content)
        _check("it", content, _CONTENT)
        _check("n", content["config"].get("n", []), list)
        _check("data_fingerprint", content.get("data_fingerprint") or "", str)
        found = [File(**{**file, "spans": tuple((a, b) for a, b in file["spans"])}) for file in content["files"]]
        names = [file.name for file in found]
        if STATE not in names or len(set(names)) < len(names):
            raise ValueError(f"it lacks {STATE}, or a file is there twice: {reprlib.repr(names)}")
        if content.get("crc32") != crc:
            raise ValueError("its own checksum does not fit")
    if content["save_id"] != checkpoint.save_id or content["t"] != checkpoint.t:
        raise ValueError(f"{path} belongs to save {content['save_id']} (t={content['t']}), not to its directory")
    return content, found


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong in taking a manifest apart into an error that names it."""
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
        raise ValueError("its text is not as it was written")
    return content


def _upgrade(content: dict[str, Any]) -> None:
    """Convert a manifest of version 2 or 3.

    Version 3 has CRC-32 checksums and the save of each file. Version 2 has all rows, in files that are known by the
    number of their first row and of their rows.
    """
    for file in content["files"]:
        file["checksum"] = f"{file.pop('crc32'):08x}"
        file.pop("save_id", None)
        if content["version"] == 2:
            count, start = file.pop("count"), file["first"] // file["stride"]
            file |= {"first": file["first"] % file["stride"], "spans": [[start, start + count]] if count else []}


def _check(what: str, value: Any, wanted: Any) -> None:
    """Refuse a value of another kind than a manifest has, before anything is made of it."""
    kind = str if isinstance(wanted, re.Pattern) else wanted if isinstance(wanted, type) else type(wanted)
    given = type(value)
    if given is not kind:  # a bool is an int to isinstance
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
