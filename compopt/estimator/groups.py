"""Sample groups: like ``param_groups``, one dict of hyper-parameters per data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor

from compopt import checks

Groups = list[dict[str, Any]]
#: A number of samples, or one mapping per data set: ``[{"n": 3_000_000, "gamma": 0.9}, {"n": 12_000_000}]``.
GroupSpec = int | Sequence[Mapping[str, Any]]
Changes = Sequence[tuple[dict[str, Any], dict[str, Any]]]  # groups of parts, and their checked values


def sizes(n: Any) -> Groups:
    """Return groups with only ``n``, from a number of samples or from a list of groups."""
    return [{"n": group["n"]} for group in as_groups(n)]


def as_groups(n: Any) -> Groups:
    """Return a checked copy of ``n``, a number of samples or a list of groups, as a list of groups."""
    if not isinstance(n, Sequence) or isinstance(n, str):
        return [{"n": checks.positive_int("n", n)}]
    if not n:
        raise ValueError("n is an empty list of sample groups; give at least one, such as [{'n': 1000}]")
    groups = []
    for position, group in enumerate(n):
        if not isinstance(group, Mapping):
            raise TypeError(f"sample group {position} must be a dict such as {{'n': 1000}}, got {group!r}")
        if "n" not in group:
            raise ValueError(f"sample group {position} has no 'n'; give its number of samples: {dict(group)!r}")
        groups.append({**group, "n": checks.positive_int(f"n of sample group {position}", group["n"])})
    return groups


def count(groups: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of samples in all groups; ``None`` for groups without sizes."""
    if len(groups) == 1:  # the usual case, executed in every call
        n: int | None = groups[0].get("n")
        return n
    return sum(group["n"] for group in groups) if "n" in groups[0] else None


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with plain Python values, see :func:`plain_value`."""
    return {key: plain_value(key, value) for key, value in group.items()}


def plain_value(key: str, value: Any) -> Any:
    """Return a hyper-parameter as a plain Python value, which JSON and ``torch.load(weights_only=True)`` preserve.

    Values of other types are returned unchanged, and the parts refuse them. An array or tensor that is neither a number
    nor a pair is a ``TypeError``.
    """
    if value is None or type(value) in (float, int, bool, str):
        return value
    if isinstance(value, np.ndarray | np.bool_ | Tensor):
        if tuple(value.shape) not in ((), (2,)):
            raise TypeError(f"{key} must be a number, got {type(value).__name__} of shape {tuple(value.shape)}")
        if isinstance(value, Tensor) and (value.requires_grad or value.is_meta):
            raise TypeError(f"{key} must be a number, got {value!r}; give its value, as value.item() does")
        return plain_value(key, value.tolist())
    if isinstance(value, list | tuple):
        return tuple(plain_value(key, item) for item in value)
    if isinstance(value, str):
        return str.__str__(value)  # a string enumeration may override __str__ to return its name
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def write(changes: Changes) -> None:
    """Set values that are already checked."""
    for group, values in changes:
        dict.update(group, values)


class SampleGroup(dict[str, Any]):
    """Sample group of one object: a dict whose assignments are checked.

    A value that the object refuses raises, and the group stays as it was. ``None`` sets the default. Several keys that
    depend on each other, such as bounds, are set together by :meth:`update`. Keys can be neither added nor removed,
    ``n`` is fixed, and the keys in ``of_rows`` of the object are fixed after its first call.

    Args:
        values: checked values.
        complete: method of the object that checks values and sets those that are ``None``; only a weak reference to it
            is kept.
    """

    def __init__(self, values: Mapping[str, Any], complete: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__(values)
        self._complete = WeakMethod(complete)

    def completed(self, new: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values after a change, or raise; change nothing."""
        checks.known_keys("the sample group", new, self)
        new = plain(new)
        if "n" in new and (type(new["n"]) is not int or new["n"] != self["n"]):
            raise ValueError(
                f"n of a sample group is fixed at {self['n']}, got {new['n']!r}; append rows with add_sample_group"
            )
        complete = self._complete()
        return {**self, **new} if complete is None else complete({**self, **new})

    def edited(self, new: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values after a change by the user, as :meth:`completed`; refuse one that the rows contradict."""
        found = self.completed(new)
        owner: Any = getattr(self._complete(), "__self__", None)
        for key in () if owner is None else owner.of_rows:
            if found[key] != self[key] and (owner.t or owner.pending):
                raise ValueError(
                    f"{key} is fixed at {self[key]!r} after the first call, since the rows have values for it, got "
                    f"{found[key]!r}; build another estimator"
                )
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def changes(self, new: Mapping[str, Any]) -> Changes:
        """Return what :func:`write` writes for a change by the user, or raise; change nothing."""
        return [(self, self.edited(new))]

    def update(self, *args: Any, **values: Any) -> None:
        """Set several values together, or none if one of them is refused."""
        write(self.changes(dict(*args, **values)))

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which exists."""
        checks.known_keys("the sample group", {key: default}, self)
        return self[key]

    def __ior__(self, other: Any) -> SampleGroup:  # type: ignore[override, misc]
        self.update(other)
        return self

    def _refuse(self, *args: Any) -> NoReturn:
        raise TypeError(f"a hyper-parameter cannot be removed from its sample group{f': {args[0]!r}' if args else ''}")

    __delitem__ = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # the object that owns it makes a group of the copy


class GroupView(MutableMapping[str, Any]):
    """Sample group of a container: a view of the groups of its parts, which writes through.

    Args:
        places: by key, the group of a part and the key there.
    """

    def __init__(self, places: Mapping[str, tuple[SampleGroup, str]]) -> None:
        self._places = places

    def __getitem__(self, key: str) -> Any:
        group, own = self._places[key]
        return group[own]

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def changes(self, new: Mapping[str, Any]) -> Changes:
        """Return what :func:`write` writes for a change by the user, or raise; change nothing."""
        checks.known_keys("the sample group", new, self)
        of_parts: dict[int, tuple[SampleGroup, dict[str, Any]]] = {}
        for key, value in new.items():
            group, own = self._places[key]
            of_parts.setdefault(id(group), (group, {}))[1][own] = value
        return [(group, group.edited(changed)) for group, changed in of_parts.values()]

    def update(self, *args: Any, **values: Any) -> None:
        """Set several values together, or none if one of them is refused."""
        write(self.changes(dict(*args, **values)))

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"a hyper-parameter cannot be removed from its sample group: {key!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __ior__(self, other: Any) -> GroupView:  # type: ignore[misc]
        self.update(other)
        return self

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self) | dict(other)

    def copy(self) -> dict[str, Any]:
        """Return a dict of the values."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Hyper:
    """Hyper-parameters of one object for the rows of one call.

    Example:
        >>> import torch, compopt
        >>> hyper = compopt.estimator.Hyper([{"n": 10, "gamma": 0.9}], torch.arange(4)[:, None], torch.float32)
        >>> hyper("gamma")
        0.9

    ``hyper("gamma")`` returns a Python number if all groups have the same value, and otherwise a tensor with one value
    per row, ``(B, R)``. ``hyper("betas", 0)`` does the same for the first entry of a pair. ``R`` is 1, or 2 if the
    second modality has rows of its own. An unknown name is a ``KeyError``.

    Args:
        groups: the sample groups of the object.
        rows: row numbers of the samples, ``(B, R)``, which determine the group of each sample.
        dtype: dtype of the tensors.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], rows: Tensor, dtype: torch.dtype) -> None:
        self._groups, self._rows, self._dtype = groups, rows, dtype

    def __call__(self, key: str, item: int | None = None) -> Any:
        if key not in self._groups[0]:
            raise KeyError(f"{key!r} is no hyper-parameter of this object, which has {', '.join(self._groups[0])}")
        if len(self._groups) == 1:  # fast path: the usual case, executed in every call
            value = self._groups[0][key]
            return value if item is None else value[item]
        values = [group[key] for group in self._groups]
        return self._spread(values if item is None else [value[item] for value in values])

    def of_first_group(self) -> Hyper:
        """Return the hyper-parameters of the first group only."""
        return Hyper(self._groups[:1], self._rows, self._dtype)

    def choose(self, key: str, table: Mapping[Any, float]) -> Any:
        """Return the number that stands for a named option: one, or one per row, ``(B, R)``.

        Args:
            key: the hyper-parameter.
            table: mapping from values of the hyper-parameter to numbers.
        """
        if len(self._groups) == 1:
            return table[self._groups[0][key]]
        return self._spread([table[group[key]] for group in self._groups])

    def _spread(self, values: list[Any]) -> Any:
        if all(value == values[0] for value in values):
            return values[0]
        # Each row gets the value of the last group that begins at or before it. Comparisons with host numbers need no
        # synchronisation with the device.
        spread = torch.full_like(self._rows, values[0], dtype=self._dtype)
        first = 0
        for group, value in zip(self._groups, values[1:], strict=False):
            first += group["n"]
            spread.masked_fill_(self._rows >= first, value)
        return spread
