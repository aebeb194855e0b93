"""Attributes that are set when an estimator is built, and never again."""

from __future__ import annotations

from typing import Any

import torch


def fixed() -> Any:
    """An attribute of an estimator that decides what its rows mean: setting it a second time is refused.

    Raises:
        AttributeError: when it is set again; the message says what to do instead.
    """
    return _Fixed()


class _Fixed:
    """Without ``__get__``, so that reading the attribute costs what reading any other costs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, est: object, value: Any) -> None:
        if self._name in est.__dict__:
            raise AttributeError(
                f"{self._name} of {type(est).__name__} is fixed at {_shown(est.__dict__[self._name])}, since its state "
                f"depends on it: build another estimator with {self._name}={_shown(value)}"
            )
        est.__dict__[self._name] = value


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, str | bool | int | torch.dtype)
    return repr(value) if plain else type(value).__name__
