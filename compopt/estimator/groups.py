"""Sample groups: like ``param_groups``, one dict of hyper-parameters per data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from compopt import checks

Groups = list[dict[str, Any]]
#: A number of samples, or one mapping per data set: ``[{"n": 3_000_000, "gamma": 0.9}, {"n": 12_000_000}]``.
GroupSpec = int | Sequence[Mapping[str, Any]]


def sizes(n: Any) -> Groups:
    """Return groups with only ``n``, from a number of samples or from a list of groups."""
    return [{"n": group["n"]} for group in as_groups(n)]


def as_groups(n: Any) -> Groups:
    """Return a checked copy of ``n``, a number of samples or a list of groups, as a list of groups."""
    if not isinstance(n, Sequence) or isinstance(n, str):
        return [{"n": checks.count("n", n)}]
    if not n:
        raise ValueError("n is an empty list of sample groups; give at least one, such as [{'n': 1000}]")
    groups = []
    for position, group in enumerate(n):
        if not isinstance(group, Mapping):
            raise TypeError(f"sample group {position} must be a dict such as {{'n': 1000}}, got {group!r}")
        if "n" not in group:
            raise ValueError(f"sample group {position} has no 'n'; give its number of samples: {dict(group)!r}")
        groups.append({**group, "n": checks.count(f"n of sample group {position}", group["n"])})
    return groups


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


class Names(dict[str, str]):
    """Mapping from a component's keys to keys in the groups; ``kind`` is the name of its class."""

    def __init__(self, kind: str, names: Mapping[str, str]) -> None:
        super().__init__(names)
        self._kind = kind

    def __missing__(self, key: str) -> str:
        raise KeyError(f"{key!r} is no hyper-parameter of {self._kind}, which has {', '.join(self) or 'none'}")


class Hyper:
    """Hyper-parameters of one component for the rows of one call.

    ``hyper("gamma")`` returns a Python number if all groups have the same value, and otherwise a tensor with one value
    per row, ``(B, R)``. ``hyper("betas", 0)`` does the same for the first entry of a pair. ``R`` is 1, or 2 if the
    second modality has rows of its own. An unknown name is a ``KeyError``.

    Args:
        groups: the estimator's sample groups.
        names: mapping from the component's keys to keys in the groups.
        rows: row numbers of the samples, ``(B, R)``, which determine the group of each sample.
        dtype: dtype of the tensors.
    """

    def __init__(self, groups: Groups, names: Mapping[str, str], rows: Tensor, dtype: torch.dtype) -> None:
        self._groups, self._names, self._rows, self._dtype = groups, names, rows, dtype

    def __call__(self, key: str, item: int | None = None) -> Any:
        if len(self._groups) == 1:  # fast path: the usual case, executed in every call
            value = self._groups[0][self._names[key]]
            return value if item is None else value[item]
        values = [group[self._names[key]] for group in self._groups]
        return self._spread(values if item is None else [value[item] for value in values])

    def of_first_group(self) -> Hyper:
        """Return the hyper-parameters of the first group only."""
        return Hyper(self._groups[:1], self._names, self._rows, self._dtype)

    def choose(self, key: str, table: Mapping[Any, float]) -> Any:
        """Return the number that stands for a named option: one, or one per row, ``(B, R)``.

        Args:
            key: the hyper-parameter.
            table: mapping from values of the hyper-parameter to numbers.
        """
        return self._spread([table[group[self._names[key]]] for group in self._groups])

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


class PartGroup(MutableMapping[str, Any]):
    """View of one group with ``n`` and one component's hyper-parameters; ``names`` maps its keys to the group's."""

    def __init__(self, group: dict[str, Any], names: Mapping[str, str]) -> None:
        self._group = group
        self._names = {**({"n": "n"} if "n" in group else {}), **names}

    def __getitem__(self, key: str) -> Any:
        return self._group[self._names[key]]

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._names:
            raise KeyError(f"{key!r} is no hyper-parameter of this part; it has {', '.join(self._names)}")
        self._group[self._names[key]] = value

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"a hyper-parameter cannot be removed from its group: {key!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))


class SampleGroups:
    """Sample groups of one estimator with the hyper-parameters of all components, checked after every change.

    A key that two components share is prefixed with the component's role (``temperature.lr``). Presets pass ``given``,
    one mapping per group, which overrides the components' values.

    Attributes:
        groups: the list that users read and edit.
        checked: copy of ``groups`` as of the last :meth:`check`; a new list after every change.
        defaults: values of the keys that a group leaves out.
        names: by role, mapping from the component's keys to keys in the groups.
    """

    def __init__(self, components: Mapping[str, Any], mode: str, given: Groups | None = None) -> None:
        self._components, self._mode = components, mode
        keys = [key for part in components.values() for key in part.own_defaults]
        self.names = {
            role: Names(
                type(part).__name__,
                {key: f"{role}.{key}" if keys.count(key) > 1 else key for key in part.own_defaults},
            )
            for role, part in components.items()
        }
        self.defaults = self._joined({role: part.own_defaults for role, part in components.items()})
        self.groups = self._merge(given)
        self.checked: Groups = []
        self._seen = ""
        self.check()

    def _merge(self, given: Groups | None) -> Groups:
        own = {role: part.own_groups for role, part in self._components.items() if part.own_groups}
        alone = ("", [group["n"] for group in given or ()])  # parts without rows have the sizes that are given
        first, reference = next(((role, [g["n"] for g in groups]) for role, groups in own.items()), alone)
        for role, groups in own.items():
            size = [g["n"] for g in groups]
            if size != reference:
                raise ValueError(f"n differs: {first} has {reference}, {role} has {size}; give both the same n")
        merged: Groups = [{"n": n} for n in reference] or [{}]
        for number, group in enumerate(merged):
            parts = self._components.items()
            group.update(self._joined({r: own[r][number] if r in own else part.own_defaults for r, part in parts}))
            if given is not None:
                checks.known_keys(f"sample group {number}", given[number], {"n", *self.defaults})
                group.update(given[number])
            group.update(plain(group))
            self._fill(group)  # last: the defaults of the mode may depend on the given values
        return merged

    def _joined(self, own: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {name: own[role][key] for role, names in self.names.items() for key, name in names.items()}

    @property
    def n(self) -> int | None:
        """Number of samples in all groups; ``None`` without rows."""
        groups = self.checked or self.groups
        return sum(group["n"] for group in groups) if "n" in groups[0] else None

    def own(self, role: str, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of one component from a group, or from the defaults, by the component's names."""
        return {key: group[name] for key, name in self.names[role].items()}

    def _fill(self, group: dict[str, Any]) -> None:
        """Replace ``None`` by the default of the mode, which may depend on the other values."""
        own = {role: self.own(role, group) for role in self.names}
        for role, part in self._components.items():
            part.fill(own[role], self._mode)
        group.update(self._joined(own))

    def check(self) -> None:
        """Refuse bad edits; without edits the cost is one comparison."""
        if repr(self.groups) == self._seen:  # repr distinguishes 3.0 from 3, and an array from a number
            return
        if self.checked and len(self.checked) != len(self.groups):
            raise ValueError(
                f"there are {len(self.groups)} sample groups instead of {len(self.checked)}; add them with "
                f"add_sample_group"
            )
        for number, group in enumerate(self.groups):
            what = f"sample group {number}"
            checks.known_keys(what, group, {*self.defaults} if self.n is None else {"n", *self.defaults})
            lost = next((key for key in self.defaults if key not in group), None)
            if lost is not None:
                raise ValueError(f"{what} has lost its hyper-parameter {lost!r}; put it back")
            group.update(plain(group))
            known = self.checked[number].get("n") if self.checked else group.get("n")
            if group.get("n") != known or type(group.get("n")) is not type(known):
                raise ValueError(
                    f"n of {what} is fixed at {known}, got {group.get('n')!r}; append rows with add_sample_group"
                )
            for role, part in self._components.items():
                part.check(self.own(role, group))
            self._fill(group)  # the user may have set a value to None
        self._note()

    def _note(self) -> None:
        self.checked, self._seen = [dict(group) for group in self.groups], repr(self.groups)

    def saved(self) -> Groups:
        """Return a copy of the groups with plain values, including edits since the last :meth:`check`."""
        return [plain(group) for group in self.groups]

    def checked_as(self, groups: Sequence[Mapping[str, Any]]) -> Groups:
        """Return saved groups as :meth:`replace` would set them, or raise; change nothing."""
        whole = isinstance(groups, Sequence) and all(isinstance(group, Mapping) for group in groups)
        if not whole or len(groups) != len(self.groups):
            raise ValueError(f"sample_groups must be {len(self.groups)} mappings, the checkpoint has {groups!r}")
        for number, (own, group) in enumerate(zip(self.groups, groups, strict=True)):
            if set(own) != set(group):
                raise ValueError(
                    f"sample group {number} must have {sorted(own)}, the checkpoint has {sorted(group)}; build "
                    f"the estimator as the one that was saved"
                )
        trial = copy(self)
        trial.groups = [dict(group) for group in groups]
        trial.check()
        return trial.groups

    def replace(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all values by saved ones, or raise and change none; the list and its dicts stay the same objects."""
        for own, group in zip(self.groups, self.checked_as(groups), strict=True):
            own.clear()
            own.update(group)
        self._note()

    def completed(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checked group for :meth:`append`, with defaults for missing keys."""
        if self.n is None:
            raise ValueError("this estimator keeps no rows and has no n; there is nothing to add")
        self.check()
        (given,) = as_groups([group])
        checks.known_keys(f"sample group {len(self.groups)}", given, {"n", *self.defaults})
        new = plain({**self.defaults, **given})
        self._fill(new)
        for role, part in self._components.items():
            part.check(self.own(role, new))
        return new

    def append(self, group: dict[str, Any]) -> None:
        """Append a completed group."""
        self.groups.append(group)
        self._note()

    def of_part(self, role: str) -> Groups:
        """Return views of the groups with one component's names; edits are written through."""
        return cast(Groups, [PartGroup(group, self.names[role]) for group in self.groups])

    def hyper(self, role: str, rows: Tensor, dtype: torch.dtype) -> Hyper:
        """Return the hyper-parameters of one component for these rows, ``(B, R)``."""
        return Hyper(self.groups, self.names[role], rows, dtype)
