"""Refusals that name the argument, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, Literal

from torch import Tensor

Mode = Literal["bimodal", "unimodal"]
Directions = Literal["both", "forward"]
Offload = Literal["cpu", "disk"]
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, 3.4e38  # what is computed in float32 must be a number there


def number(name: str, value: Any) -> float:
    """A finite real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    size: Any = abs(value)  # an integer may be too large for math.isfinite
    if not size <= FLOAT32_MAX:
        known = isinstance(value, float) and not math.isfinite(value)
        raise ValueError(f"{name} must be finite{'' if known else ' in float32'}, got {value!r}")
    if isinstance(value, Integral) and int(value).bit_length() > 63:
        raise ValueError(f"{name} must be an integer of 64 bits or a float, got {value!r}; pass {float(value)!r}")
    return float(value)


def positive(name: str, value: Any) -> None:
    """Greater than 0."""
    if number(name, value) <= 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}")
    if value < FLOAT32_MIN:
        raise ValueError(f"{name} must be greater than 0 in float32, got {value!r}")


def non_negative(name: str, value: Any) -> None:
    """0 or greater."""
    if number(name, value) < 0:
        raise ValueError(f"{name} must be 0 or greater, got {value!r}")


def unit_interval(name: str, value: Any, hint: str = "") -> None:
    """In (0, 1]."""
    if not 0 < number(name, value) <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}{hint}")


def decay(name: str, value: Any) -> None:
    """In [0, 1)."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def burn_in(name: str, value: Any) -> None:
    """A count of at least 0, or a fraction in [0, 1)."""
    if number(name, value) < 0 or (value >= 1 and value != int(value)) or (isinstance(value, float) and value >= 1):
        raise ValueError(f"{name} must be a count of at least 0 or a fraction in [0, 1), got {value!r}")


def one_of(name: str, value: Any, options: Collection[str]) -> None:
    """One of a few words."""
    if not isinstance(value, str) or value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")


def flag(name: str, value: Any) -> None:
    """True or False, not 0 or 1."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def count(name: str, value: Any) -> int:
    """A positive integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
        raise TypeError(f"{name} must be a positive integer, got {value!r} of type {type(value).__name__}")
    if int(value) <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def whole(name: str, value: Any) -> int:
    """A non-negative integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
        raise TypeError(f"{name} must be a non-negative integer, got {value!r} of type {type(value).__name__}")
    if int(value) < 0:
        raise ValueError(f"{name} must be a non-negative integer, got {value!r}")
    return int(value)


def known_keys(what: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Nothing is swallowed: an unknown key is refused with the list of the known ones."""
    for key in given:
        if key not in known:
            raise ValueError(f"{what} has no hyper-parameter {key!r}; known are {', '.join(sorted(known))}")
