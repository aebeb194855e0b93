"""Checks of hyper-parameters and options; error messages contain the argument, the value and a remedy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, Literal

from torch import Tensor

Mode = Literal["bimodal", "unimodal"]
Directions = Literal["both", "forward"]
DIRECTIONS = {"both": 2, "forward": 1}  # number of directions with anchors, by the value of directions=
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, 3.4e38  # bounds of values that are used in float32 arithmetic


def number(name: str, value: Any) -> float:
    """Return a finite real number as a float; refuse any other value."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    size: Any = abs(value)  # not math.isfinite, which fails for very large integers
    if not size <= FLOAT32_MAX:
        known = isinstance(value, float) and not math.isfinite(value)
        raise ValueError(f"{name} must be finite{'' if known else ' in float32'}, got {value!r}")
    if isinstance(value, Integral) and int(value).bit_length() > 63:
        raise ValueError(f"{name} must be an integer of 64 bits or a float, got {value!r}; pass {float(value)!r}")
    return float(value)


def positive(name: str, value: Any) -> None:
    """Refuse numbers that are not greater than 0, also after conversion to float32."""
    if number(name, value) < FLOAT32_MIN:
        raise ValueError(f"{name} must be greater than 0{'' if value <= 0 else ' in float32'}, got {value!r}")


def non_negative(name: str, value: Any) -> None:
    """Refuse numbers below 0."""
    if number(name, value) < 0:
        raise ValueError(f"{name} must be 0 or greater, got {value!r}")


def unit_interval(name: str, value: Any, hint: str = "") -> None:
    """Refuse numbers outside (0, 1]."""
    if not 0 < number(name, value) <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}{hint}")


def decay(name: str, value: Any) -> None:
    """Refuse numbers outside [0, 1)."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def fraction(name: str, value: Any) -> None:
    """Refuse numbers outside [0, 1]."""
    if not 0 <= number(name, value) <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")


def burn_in(name: str, value: Any) -> None:
    """Refuse values that are neither a count of at least 0 nor a fraction in [0, 1)."""
    if number(name, value) < 0 or (value >= 1 and (isinstance(value, float) or value != int(value))):
        raise ValueError(f"{name} must be a count of at least 0 or a fraction in [0, 1), got {value!r}")


def one_of(name: str, value: Any, options: Collection[str]) -> None:
    """Refuse values other than the strings in ``options``."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")


def flag(name: str, value: Any) -> None:
    """Refuse values other than True and False, including 0 and 1."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def positive_int(name: str, value: Any) -> int:
    """Return a positive integer as an ``int``; refuse any other value."""
    return _integer(name, value, "positive", 1)


def non_negative_int(name: str, value: Any) -> int:
    """Return a non-negative integer as an ``int``; refuse any other value."""
    return _integer(name, value, "non-negative", 0)


def seed(value: Any) -> int:
    """Return a seed, an integer from 0 to 2^63 - 1."""
    if non_negative_int("seed", value) >= 1 << 63:
        raise ValueError(f"seed must be below 2^63, got {value}")
    return int(value)


def _integer(name: str, value: Any, kind: str, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
        raise TypeError(f"{name} must be a {kind} integer, got {value!r} of type {type(value).__name__}")
    if int(value) < least:
        raise ValueError(f"{name} must be a {kind} integer, got {value!r}")
    return int(value)


def known_keys(what: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse unknown keys; the message lists the known ones."""
    for key in given:
        if key not in known:
            raise ValueError(f"{what} has no hyper-parameter {key!r}; known are {', '.join(sorted(known))}")


def loss_options(mode: str, directions: str, normalize: bool, multiply_tau: bool) -> None:
    """Refuse unknown options of an estimator, and options that exclude each other."""
    one_of("mode", mode, ("bimodal", "unimodal"))
    one_of("directions", directions, DIRECTIONS)
    if directions == "forward" and mode == "unimodal":
        raise ValueError('directions="forward" is for two modalities; in mode="unimodal" both views are anchors')
    flag("normalize", normalize)
    flag("multiply_tau", multiply_tau)
