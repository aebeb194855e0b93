"""What a manifest may say: checked before anything is made of it, since anybody may have written it."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from compopt.remote import Folder, RemotePath

# Bytes of a manifest: some for configuration and groups, some for what lists rows, and never more than the last.
_ROOM, _ROOM_PER_BYTE, _MOST = 8 << 20, 16, 1 << 29
_DIGITS = 19  # of 2^63
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_SAVE_ID = re.compile(r"[0-9a-f]{8}")
_KINDS = {"t": int, "save_id": str, "chunk_rows": int, "config": dict, "sample_groups": list, "files": list}
_FILE_KINDS = {"name": str, "bytes": int, "crc32": int, "save_id": str, "first": int, "stride": int, "spans": list}


def load(path: Folder) -> dict[str, Any]:
    """The content of a manifest, if its text can be one.

    Raises:
        ValueError: it is longer than what the files beside it could need, nested, or no JSON object.
    """
    size, most = path.stat().st_size, room(path.parent)
    if size > most:
        raise ValueError(f"it has {size} bytes, the files beside it need {most} at most")
    text = path.read_bytes()
    try:
        content = json.loads(text, parse_int=_integer)
        laid_out = json.dumps(content, indent=1).encode() == text or json.dumps(content).encode() == text
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, no object")
    if not laid_out:  # 1E-14 for 1e-14, a key that is there twice: the checksum is of the content and does not see it
        raise ValueError("its text is not as it was written")
    return content


def room(directory: Folder) -> int:
    """How long a manifest may be: a span of rows takes some bytes in it, and more in a file of rows."""
    return min(_MOST, _ROOM + _ROOM_PER_BYTE * sum(sizes(directory).values()))


def sizes(directory: Folder) -> dict[str, int]:
    """The bytes of each file of rows or state."""
    if isinstance(directory, RemotePath):
        return {name: size for name, size in directory.sizes().items() if _NAME.fullmatch(name)}
    with os.scandir(directory) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if _NAME.fullmatch(entry.name)}


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS + 1:
        raise ValueError(f"a number has {len(digits)} digits: {reprlib.repr(digits)}")
    return int(digits)


def check(content: Mapping[str, Any]) -> None:
    """Refuse values of another kind than a manifest has, with the value.

    Sizes are compared with those of the estimator later: here nothing is known of it.
    """
    for key, kind in _KINDS.items():
        if key in content:
            _is(key, content[key], kind)
    _is("n of config", content.get("config", {}).get("n", []), list)
    _is("data_fingerprint", content.get("data_fingerprint") or "", str)
    _matches("save_id", content.get("save_id", "00000000"), _SAVE_ID)
    _is_between("t", content.get("t", 0), 0, 1 << 63)
    for group in content.get("sample_groups", ()):
        _is("a sample group", group, dict)
    names: set[str] = set()
    for file in content.get("files", ()):
        _is("an entry of files", file, dict)
        _check_file(file)
        if file["name"] in names:
            raise ValueError(f"{file['name']} is there twice")
        names.add(file["name"])


def _check_file(file: Mapping[str, Any]) -> None:
    for key, kind in _FILE_KINDS.items():
        if key not in file:
            raise ValueError(f"a file has no {key}")
        _is(f"{key} of a file", file[key], kind)
    _matches("name of a file", file["name"], _NAME)
    _matches(f"save_id of {file['name']}", file["save_id"], _SAVE_ID)
    _is_between(f"bytes of {file['name']}", file["bytes"], 0, 1 << 63)
    _is_between(f"crc32 of {file['name']}", file["crc32"], 0, 1 << 32)
    for span in file["spans"]:
        if not (isinstance(span, list | tuple) and len(span) == 2 and all(type(end) is int for end in span)):
            raise ValueError(f"a span of {file['name']} is {reprlib.repr(span)}, not two integers")


def _is(what: str, value: Any, kind: type) -> None:
    if type(value) is not kind:  # a bool is an int to isinstance
        raise ValueError(f"{what} is {reprlib.repr(value)}, not of type {kind.__name__}")


def _is_between(what: str, value: int, low: int, high: int) -> None:
    if not low <= value < high:
        raise ValueError(f"{what} is {value}, not from {low} to {high - 1}")


def _matches(what: str, value: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(value):
        raise ValueError(f"{what} is {reprlib.repr(value)}, not of the form {pattern.pattern}")
