"""Checks of the tensors and numbers of a checkpoint, which refuse values that no run can have written."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

INT64_MAX = (1 << 63) - 1  # largest integer of 64 bits


def bound(name: str) -> str:
    """Return the bound of a column or entry besides being finite: temperatures, counts, variances, sums of squares."""
    if name == "tau":
        return "> 0"
    return ">= 0" if name in ("count", "updates") or name.endswith(("_sq", "_var")) else ""


def outside(value: Tensor, bound: str = "", n: int | None = None) -> Tensor | None:
    """Return a mask of the values that are not finite or not in the bound; ``None``: there are none.

    With ``n`` the values must be positions of samples, ``0 .. n - 1``.
    """

    def inside(x: Tensor) -> Tensor:
        good = x.isfinite()
        if bound:
            good = good & (x > 0 if bound == "> 0" else x >= 0)
        return good if n is None else good & (x >= 0) & (x < n)

    if not value.numel():
        return None
    if not value.is_complex() and all(bool(inside(end)) for end in torch.aminmax(value)):
        return None  # fast path for large tables: one pass, and no mask
    return ~inside(value)


def described(dtype: torch.dtype, bound: str = "", n: int | None = None) -> str:
    """Return a description of the values that :func:`outside` accepts, such as ``finite and > 0``."""
    finite = "finite" if dtype.is_floating_point or dtype.is_complex else ""
    return " and ".join(filter(None, (finite, bound, "" if n is None else f">= 0 and <= {n - 1}")))


def dense(what: str, value: Any, like: Tensor | None = None) -> None:
    """Refuse a value that is not a tensor (``TypeError``), or that has no values to copy (``ValueError``).

    A subclass that wraps other tensors (DTensor) is refused unless ``like`` has the same type.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be a tensor, got {str(value)[:80]!r} of type {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        kind = "a nested one" if value.is_nested else f"{value.dtype} of layout {value.layout}"
        raise ValueError(f"{what} must be a dense tensor, got {kind}; make it dense before loading")
    if value.is_meta:
        raise ValueError(f"{what} is on the meta device and holds no values; pass map_location='cpu' to torch.load")
    wraps = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if wraps and type(value) is not type(like):
        raise ValueError(f"{what} must be a plain tensor, got {type(value).__name__}; give what it holds")


def mapping(what: str, value: Any) -> Mapping[str, Any]:
    """Return a mapping; refuse any other value with a ``TypeError``."""
    if not isinstance(value, Mapping):
        found = f"{str(value)[:80]!r} of type {type(value).__name__}"
        raise TypeError(f"{what} of the checkpoint must be a dict, got {found}")
    return value


def equal(expected: Any, given: Any) -> bool:
    """Return whether two plain values are equal; tensors and arrays of a damaged state equal nothing."""
    try:
        return bool(expected == given)
    except (RuntimeError, ValueError):
        return False


def entries(what: str, state: Any, names: Iterable[str]) -> None:
    """Refuse a state that is not a mapping, or that lacks one of the entries ``names``."""
    mapping(what, state)
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}; pass what state_dict() returned")


def form(owner: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor], cast: bool = False) -> None:
    """Refuse tensors with other names, shapes or dtypes than ``expected``; tensors may be on the meta device.

    With ``cast`` any precision of floating-point and complex numbers is accepted, since the owner converts them.
    """
    if set(state) != set(expected):
        missing, unknown = sorted(set(expected) - set(state)), sorted(map(str, set(state) - set(expected)))
        raise ValueError(f"the state of {owner} must have the entries {missing} and none of {unknown}")
    for name, needed in expected.items():
        differs, given = f"{name} of {owner} differs: the checkpoint has", state[name]
        if given.shape != needed.shape:
            raise ValueError(f"{differs} shape {tuple(given.shape)}, expected {tuple(needed.shape)}")
        alike = any(kind(given) and kind(needed) for kind in (torch.is_floating_point, torch.is_complex))
        if given.dtype != needed.dtype and not (cast and alike):
            raise ValueError(f"{differs} {given.dtype}, expected {needed.dtype}; it is not converted")


def tensors(owner: str, state: Any, expected: Mapping[str, Tensor], cast: bool = False) -> None:
    """Refuse a state of ``owner`` that is not a mapping of dense tensors as ``expected``."""
    mapping(f"state of {owner}", state)
    for name, value in state.items():
        dense(f"{name} of {owner}", value, like=expected.get(name))
    form(owner, state, expected, cast)


def bounded(owner: str, state: Mapping[str, Tensor], bounds: Mapping[str, str], n: int | None = None) -> None:
    """Refuse entries of a state of ``owner`` that are not finite or not in their bounds, see :func:`outside`."""
    for name, bound in bounds.items():
        value = state[name]
        wrong = outside(value, bound, n)
        if wrong is not None and wrong.any():
            allowed = described(value.dtype, bound, n)
            raise ValueError(f"{name} of {owner} must be {allowed}, got {value[wrong][0].item()}")


def integer(what: str, value: Any, least: int, most: int) -> int:
    """Return an integer in ``least .. most``; floats are refused, even integral ones."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{what} of the checkpoint must be an integer, got {value!r} of type {type(value).__name__}")
    if not least <= found <= most:
        raise ValueError(f"{what} of the checkpoint must be from {least} to {most}, got {found}")
    return found
