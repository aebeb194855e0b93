"""Attributes that are set when an estimator is built, and never again."""

from __future__ import annotations

from typing import Any

# What to do instead of setting a property.
REMEDIES = {
    "mode": "its state depends on it; build another estimator with mode={value!r}",
    "dtype": "its state depends on it; build another estimator with dtype={value!r}",
    "n": "append the rows of another data set with est.add_sample_group, or build another estimator",
    "sample_groups": "change the values in it, est.sample_groups[0][key] = value, or append a data set with "
    "est.add_sample_group",
    "device": "move the state with est.to({value!r})",
    "training": "call est.train() or est.eval()",
    "t": "it counts the commits; go back to an earlier one with load_state_dict or compopt.load",
}


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
                f"depends on it; build another estimator with {self._name}={_shown(value)}"
            )
        est.__dict__[self._name] = value


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str | bool) else type(value).__name__
