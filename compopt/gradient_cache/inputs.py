"""Inputs of a batch, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from compopt import checks

Sizes = int | Callable[[Any], Sequence[int]]


def _cut(inputs: Any, at: slice) -> Any:
    """Return the samples of a micro-batch."""
    if isinstance(inputs, Mapping):
        return {key: _cut(value, at) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        made = (_cut(value, at) for value in inputs)
        return type(inputs)(*made) if hasattr(inputs, "_fields") else tuple(made)
    return inputs[at] if _is_column(inputs) else inputs


def _is_column(inputs: Any) -> bool:
    """Return True for what has an entry per sample."""
    return isinstance(inputs, list) or (isinstance(inputs, Tensor) and inputs.dim() > 0)


def _columns(inputs: Any) -> Iterator[Tensor | list[Any]]:
    """Yield the tensors and lists that have an entry per sample, at any depth."""
    if isinstance(inputs, (Mapping, tuple)):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _columns(value)
    elif _is_column(inputs):
        yield inputs


def lengths(inputs: Any) -> set[int]:
    """Return the numbers of samples that tensors and lists have."""
    return {len(column) for column in _columns(inputs)}


def split(inputs: Any, size: Sizes) -> list[Any]:
    """Cut inputs into micro-batches."""
    found = lengths(inputs)
    if len(found) != 1:
        raise ValueError(f"inputs must have one entry per sample in every tensor and list, got lengths {found or 0}")
    (length,) = found
    if callable(size) and length > 0:
        sizes = [checks.count("micro_batch_size", one) for one in size(inputs)]
        if sum(sizes) != length:
            raise ValueError(f"micro_batch_size must return sizes that sum up to {length} samples, got {sizes}")
    else:
        sizes = equal_sizes(length, 1 if callable(size) else checks.count("micro_batch_size", size))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [_cut(inputs, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def equal_sizes(length: int, size: int) -> list[int]:
    """Return sizes of micro-batches, of which the last may be smaller; one of 0 for no samples."""
    return [min(size, length - start) for start in range(0, length, size)] or [0]


def amount(inputs: Any) -> int:
    """Return the number of elements of tensors and lists."""
    return sum(column.numel() if isinstance(column, Tensor) else len(column) for column in _columns(inputs))
