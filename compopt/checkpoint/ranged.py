"""Tensors of a safetensors file on a remote store, which is read piece by piece, as ``safe_open`` reads a local one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compopt.remote import RemotePath

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_RECENT = {"U16": "uint16", "U32": "uint32", "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
DTYPES |= {name: getattr(torch, dtype) for name, dtype in _RECENT.items() if hasattr(torch, dtype)}


class RangedFile:
    """A file of which the header was read.

    What safetensors refuses in a header is refused here: every byte belongs to one tensor, and none is beyond the file.

    Args:
        path: of the file.
        longest: bytes that a header may have.
        ahead: rows that are read at once of a tensor of which few are wanted; the next ones may be among them.
        content: of the file, where that is here already; nothing is read then.

    Raises:
        ValueError: its header is not one, or describes other bytes than the file has.
    """

    def __init__(self, path: RemotePath, longest: int, ahead: int, content: bytes | None = None) -> None:
        self._path, self.ahead, self._content = path, ahead, content
        size = path.stat().st_size if content is None else len(content)
        length = int.from_bytes(self._range(0, min(8, size)), "little")
        if length > min(longest, size - 8):
            raise ValueError(f"it has a header of {length} bytes")
        self._begin = 8 + length
        header = _parse(self._range(8, self._begin))
        self._metadata = header.pop("__metadata__", None)
        self._slices = {name: RangedSlice(self, _Place.parse(name, entry)) for name, entry in header.items()}
        end = 0
        for place in sorted((part.place for part in self._slices.values()), key=lambda p: (p.start, p.stop)):
            if place.start != end:
                raise ValueError(f"bytes {end} to {place.start} are of no tensor, or of two")
            end = place.stop
        if self._begin + end != size:
            raise ValueError(f"its tensors have {end} bytes of {size - self._begin}")

    def keys(self) -> list[str]:
        """The names of its tensors."""
        return list(self._slices)

    def metadata(self) -> dict[str, str] | None:
        """What was written beside the tensors."""
        return self._metadata

    def get_slice(self, name: str) -> RangedSlice:
        """A tensor that is not read yet."""
        return self._slices[name]

    def get_tensor(self, name: str) -> Tensor:
        """A tensor as a whole."""
        place = self._slices[name].place
        return self.read(place, 0, place.stop - place.start).reshape(place.shape)

    def _range(self, start: int, stop: int) -> bytes:
        return self._path.read_range(start, stop) if self._content is None else self._content[start:stop]

    def read(self, place: _Place, start: int, stop: int) -> Tensor:
        """Some bytes of a tensor, as its numbers."""
        if start == stop:
            return torch.empty(0, dtype=place.dtype)
        first = self._begin + place.start
        content = bytearray(self._range(first + start, first + stop))
        if len(content) != stop - start:
            raise ValueError(f"{self._path} became shorter while it was read; load another checkpoint")
        return torch.frombuffer(content, dtype=place.dtype)


@dataclass(frozen=True)
class _Place:
    """What a header says of a tensor: its bytes are ``[start, stop)`` of those after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def parse(cls, name: str, entry: Any) -> _Place:
        """From a header's entry; raises ``ValueError`` if it contradicts itself."""
        try:
            dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            fits = all(type(x) is int and 0 <= x < 1 << 63 for x in (*shape, start, stop))
            fits = fits and stop - start == math.prod(shape) * dtype.itemsize
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(f"its header contradicts itself in {name!r}")
        return cls(dtype, shape, start, stop)


class RangedSlice:
    """A tensor that is not read yet, by its rows."""

    def __init__(self, file: RangedFile, place: _Place) -> None:
        self._file, self.place = file, place
        self._known, self._first = torch.empty(0, *place.shape[1:], dtype=place.dtype), 0

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self.place.shape)

    def get_dtype(self) -> str:
        """Its number format, as the header names it."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.place.dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.place.shape[0])
        if not self._first <= start <= stop <= self._first + len(self._known):
            part = self._read(
                start, min(max(stop, start + self._file.ahead), self.place.shape[0]) if stop > start else stop
            )
            if len(part) > self._file.ahead:
                return part[: stop - start]
            self._known, self._first = part, start
        return self._known[start - self._first : stop - self._first]

    def _read(self, start: int, stop: int) -> Tensor:
        shape = self.place.shape[1:]
        row = math.prod(shape) * self.place.dtype.itemsize
        return self._file.read(self.place, start * row, stop * row).reshape(
            -1 if math.prod(shape) else stop - start, *shape
        )


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, no object")
    if not isinstance(header.get("__metadata__", {}), dict):
        raise ValueError("its metadata is no object")
    return header
