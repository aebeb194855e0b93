"""Checkpoint directories: their names, their manifests, and which of them are complete.

::

    directory/                              one run; what users pass to save() and load()
        checkpoint-00000007-t1200-9f3c1a22/ one save: number, commits, random id
            rows-00000-00000-9f3c1a22.safetensors   some chunks of one rank's rows, a tensor per column
            rows-00000-00003-51d07e90.safetensors   others, unchanged since an earlier save: a hard link to its file
            state.safetensors               state that is not rows
            manifest.json                   written last: without it the directory does not count

Where two files have the same chunk, the later one in the manifest counts. A chunk that is in none has only zeros:
none of its rows was ever visited.

On a remote store the files are objects. There are no links: one that is unchanged is a copy of the earlier one, which
the store makes. A put is all or nothing: the manifest needs no rename.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from compopt.checkpoint import durable, strict
from compopt.remote import Folder, RemotePath

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
STATE = "state.safetensors"
LOOKS = 8  # for a complete checkpoint, beside a run that saves
_NAME = re.compile(r"checkpoint-(\d{8})-t(\d+)-([0-9a-f]{8})")


@dataclass(frozen=True)
class File:
    """One file of a checkpoint.

    Attributes:
        save_id: of the save that wrote it.
        first, stride: a row file is of the rank that holds the rows ``first, first + stride, ...``.
        spans: which of these it has: ``[start, stop)`` in their order, ascending, each beginning with a chunk.
    """

    name: str
    bytes: int
    crc32: int
    save_id: str
    first: int = 0
    stride: int = 1
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> File:
        """From an entry of a manifest."""
        return cls(**{**entry, "spans": tuple((start, stop) for start, stop in entry["spans"])})


@dataclass(frozen=True)
class Checkpoint:
    """One directory of one save."""

    path: Folder
    number: int
    t: int
    save_id: str

    @property
    def complete(self) -> bool:
        """Its manifest was written."""
        return (self.path / MANIFEST).is_file()


def parse(path: Folder) -> Checkpoint | None:
    """The checkpoint that a directory name says, or ``None``."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else Checkpoint(path, int(match[1]), int(match[2]), match[3])


def checkpoints(directory: Folder) -> list[Checkpoint]:
    """All checkpoints of a run, complete or not, oldest first; links to those of other runs do not count."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = [parse(path) for path in paths if path.is_dir() and not path.is_symlink()]
    return sorted((c for c in found if c is not None), key=lambda c: c.number)


def prepare(directory: Folder) -> None:
    """Make the directory of a run.

    Raises:
        ValueError: it is itself a checkpoint.
    """
    if parse(directory.resolve()) is not None or (directory / MANIFEST).exists():
        raise ValueError(f"{directory} is itself a checkpoint; save into the directory of the run")
    durable.make_directory(directory)


def fresh(directory: Folder, t: int) -> Checkpoint:
    """Create the directory of a new save."""
    number = max((c.number for c in checkpoints(directory)), default=0) + 1
    save_id = secrets.token_hex(4)
    path = directory / f"checkpoint-{number:08d}-t{t}-{save_id}"
    with durable.named(path):
        path.mkdir()
    return Checkpoint(path, number, t, save_id)


def refuse_another_method(directory: Folder, config: Mapping[str, Any]) -> None:
    """Two estimators that save into one directory would remove each other's checkpoints.

    Raises:
        ValueError: ``directory`` holds checkpoints of another method.
    """
    complete = [c for c in checkpoints(directory) if c.complete]
    found = config
    try:
        if complete:
            content = strict.load(complete[-1].path / MANIFEST)
            strict.check(content)
            found = content["config"]
    except (ValueError, KeyError):  # a damaged one says nothing
        return
    common = min(len(found.get("n", [])), len(config["n"]))  # groups may have been added since, or not yet
    found, config = ({**c, "n": list(c.get("n", []))[:common]} for c in (found, config))
    for key in ("mode", "method", "options", "n"):
        if found.get(key, config[key]) != config[key]:  # early versions did not keep the options
            raise ValueError(
                f"{complete[-1].path.parent} holds checkpoints of another estimator: {key} is {found.get(key)!r} there "
                f"and {config[key]!r} here; use another directory"
            )


def remove(checkpoint: Checkpoint) -> None:
    """An unfinished one, as far as possible."""
    if isinstance(checkpoint.path, RemotePath):
        with suppress(OSError):
            checkpoint.path.remove()
        return
    shutil.rmtree(checkpoint.path, ignore_errors=True)


@contextmanager
def _damage(path: Folder) -> Iterator[None]:
    """What goes wrong in taking a manifest apart means that it is damaged."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); load another checkpoint") from None


def _named(directory: Folder) -> Checkpoint | None:
    """The checkpoint that a directory is, under its own name, through a link, or renamed; ``None`` if it is none."""
    real = directory.resolve()
    own = parse(real)
    if own is not None or not (real / MANIFEST).is_file():
        return own if own is not None and own.path.is_dir() else None
    with _damage(real / MANIFEST):
        content = strict.load(real / MANIFEST)
        strict.check(content)
        return Checkpoint(real, 0, content["t"], content["save_id"])


def choose(directory: Folder, t: int | None) -> Checkpoint:
    """The newest complete checkpoint (of ``t`` commits, if given); ``directory`` may itself be one.

    Raises:
        FileNotFoundError: there is none; the message lists those there are.
    """
    own = _named(directory)
    if own is not None:
        if not own.complete:
            raise FileNotFoundError(f"{directory} has no {MANIFEST}: its save was not finished; load another one")
        return own
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        raise FileNotFoundError(f"{directory} {problem}; pass the directory that was given to save()")
    complete = _complete(directory)
    wanted = [c for c in complete if t is None or c.t == t]
    if not wanted:
        what = "no complete checkpoint" if t is None else f"no complete checkpoint with t={t}"
        raise FileNotFoundError(f"{directory} holds {what}; there are t = {[c.t for c in complete]}")
    return wanted[-1]


def _complete(directory: Folder) -> list[Checkpoint]:
    """The complete checkpoints; looks again where a run that saves meanwhile has removed all that were listed."""
    for _ in range(LOOKS):
        found = checkpoints(directory)
        complete = [c for c in found if c.complete]
        if complete or checkpoints(directory) == found:
            break
    return complete


def prune(directory: Folder, keep: int) -> None:
    """Remove all but the newest complete ones, and what unfinished saves before them left."""
    found = checkpoints(directory)
    complete = [c for c in found if c.complete]
    for old in complete[:-keep]:
        (old.path / MANIFEST).unlink()  # first, so that a kill in between leaves nothing that looks complete
        durable.sync_directory(old.path)  # and no power loss does
    for checkpoint in found:
        if checkpoint.number < complete[-1].number and not checkpoint.complete:
            remove(checkpoint)


# -- the manifest -----------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, files: list[File], content: Mapping[str, Any]) -> None:
    """The manifest: it is there as a whole or not at all."""
    body = {
        "version": FORMAT_VERSION,
        "save_id": checkpoint.save_id,
        "t": checkpoint.t,
        **content,
        "files": [asdict(file) for file in files],
    }
    body["crc32"] = _body_crc(body)
    text = json.dumps(body, indent=1).encode()
    if len(text) > strict.room(checkpoint.path):  # not to be read again
        raise ValueError(f"{checkpoint.path / MANIFEST} would have {len(text)} bytes: too many sample groups")
    if isinstance(checkpoint.path, RemotePath):
        durable.write_file(checkpoint.path / MANIFEST, text)
        return
    partial = checkpoint.path / f"{MANIFEST}.partial"
    with durable.named(checkpoint.path / MANIFEST):
        durable.sync_directory(checkpoint.path)  # the files' names, before the manifest that vouches for them
        durable.write_file(partial, text)
        os.replace(partial, checkpoint.path / MANIFEST)
        durable.sync_directory(checkpoint.path)
        durable.sync_directory(checkpoint.path.parent)


def _body_crc(body: Mapping[str, Any]) -> int:
    """Checksum of everything else in the manifest, independent of how it is laid out."""
    return zlib.crc32(json.dumps({k: v for k, v in body.items() if k != "crc32"}, sort_keys=True).encode())


def read(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[File]]:
    """Content and files of a manifest.

    Raises:
        ValueError: it is damaged or of a newer version; the message names it.
    """
    path = checkpoint.path / MANIFEST
    with _damage(path):
        content = strict.load(path)
        version = content["version"]
    # first: another version may describe its files otherwise
    if type(version) is not int or version not in (2, FORMAT_VERSION):
        raise ValueError(f"{path} has format version {version!r}, this library reads {FORMAT_VERSION}; update compopt")
    with _damage(path):
        crc = _body_crc(content)
        if version == 2:
            _upgrade(content)
        strict.check(content)
        files = [File.parse(file) for file in content["files"]]
        missing = {"save_id", "t", "config", "sample_groups", "chunk_rows"} - content.keys()
    if missing or sum(file.name == STATE for file in files) != 1:
        lacks = ", ".join(sorted(missing)) or STATE
        raise ValueError(f"{path} is damaged: it lacks {lacks}; load another checkpoint")
    if content.get("crc32") != crc:
        raise ValueError(f"{path} is damaged: its own checksum does not fit; load another checkpoint")
    if content["save_id"] != checkpoint.save_id or content["t"] != checkpoint.t:
        raise ValueError(f"{path} belongs to save {content['save_id']} (t={content['t']}), not to its directory")
    return content, files


def _upgrade(content: dict[str, Any]) -> None:
    """Version 2 had all rows, in files of 2^20, each known by its first row."""
    content["chunk_rows"] = 1 << 20
    for file in content["files"]:
        count, start = file.pop("count"), file["first"] // file["stride"]
        file["first"] %= file["stride"]
        file |= {"save_id": content["save_id"], "spans": [(start, start + count)] if count else []}
