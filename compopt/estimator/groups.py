"""Sample groups: like ``param_groups``, one dict of hyper-parameters per data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from numbers import Integral, Real
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from compopt import checks

Groups = list[dict[str, Any]]
#: A number of samples, or one mapping per data set: ``[{"n": 3_000_000, "gamma": 0.9}, {"n": 12_000_000}]``.
GroupSpec = int | Sequence[Mapping[str, Any]]


class HasHyperParameters(Protocol):
    """Component with hyper-parameters."""

    own_defaults: dict[str, Any]
    own_groups: Groups

    def fill(self, group: dict[str, Any], mode: str) -> None:
        """Replace ``None`` by the default of the mode, in place."""

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse a bad hyper-parameter of one group."""


def sizes(n: Any) -> Groups:
    """Return groups with nothing but their sizes, of ``n`` or of a list of groups."""
    return [{"n": group["n"]} for group in parse(n)]


def parse(n: Any) -> Groups:
    """Check the shape of ``n`` (sizes included) and copy it."""
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


def plain(group: dict[str, Any]) -> None:
    """Make all values of a group Python's own, in place, see :func:`plain_value`."""
    for key, value in group.items():
        group[key] = plain_value(key, value)


def plain_value(key: str, value: Any) -> Any:
    """Return a hyper-parameter as a value of Python, which JSON and ``torch.load(weights_only=True)`` keep.

    Scalars of NumPy and torch become numbers, pairs become tuples that nobody else can edit. What is no hyper-parameter
    stays as it is, for the parts to refuse.

    Raises:
        TypeError: an array or a tensor that is neither a number nor a pair, or that autograd follows.
    """
    if value is None or type(value) in (float, int, bool, str):
        return value
    if isinstance(value, np.ndarray | Tensor):
        if tuple(value.shape) not in ((), (2,)):
            raise TypeError(f"{key} must be a number, got {type(value).__name__} of shape {tuple(value.shape)}")
        if isinstance(value, Tensor) and (value.requires_grad or value.is_meta):
            raise TypeError(f"{key} must be a number, got {value!r}; give its value, as value.item() does")
        return plain_value(key, value.tolist())
    if isinstance(value, list | tuple):
        return tuple(plain_value(key, item) for item in value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _types(groups: Groups) -> list[list[type]]:
    """Types of all values: 3.0 equals 3, but is no number of updates."""
    return [[*map(type, group.values())] for group in groups]


class Hyper:
    """Hyper-parameters as one component sees them for the rows of one call.

    ``hyper("gamma")`` is a Python number if all groups agree, else a tensor with one value per row, ``(B, R)``;
    ``hyper("betas", 0)`` the same of a pair's first entry. ``R`` is 1, or 2 where the second modality has rows of its
    own. A name that the component does not have is a ``KeyError``.

    Args:
        groups: the estimator's sample groups.
        names: the component's keys -> keys in the groups.
        membership: group of each row, ``(B, R)`` int64, or ``None`` when there is one group.
        dtype: of the tensors.
    """

    def __init__(self, groups: Groups, names: Mapping[str, str], membership: Tensor | None, dtype: torch.dtype) -> None:
        self._groups, self._names, self._membership, self._dtype = groups, names, membership, dtype

    def __call__(self, key: str, item: int | None = None) -> Any:
        if self._membership is None:  # one group, as a rule
            value = self._groups[0][self._names[key]]
            return value if item is None else value[item]
        values = [value if item is None else value[item] for value in self._values(key)]
        return self._spread(values)

    def of_first_group(self) -> Hyper:
        """Return the hyper-parameters of the first group only."""
        return Hyper(self._groups[:1], self._names, None, self._dtype)

    def choose(self, key: str, table: Mapping[Any, float]) -> Any:
        """Return a named option as a number, or one per row, ``(B, R)``.

        Args:
            key: the hyper-parameter.
            table: its values -> numbers.
        """
        if self._membership is None:
            return table[self._groups[0][self._names[key]]]
        return self._spread([table[value] for value in self._values(key)])

    def _values(self, key: str) -> Iterator[Any]:
        return (group[self._names[key]] for group in self._groups)

    def _spread(self, values: list[Any]) -> Any:
        assert self._membership is not None
        if all(value == values[0] for value in values):
            return values[0]
        # Tables are tiny and change rarely; building them on the row's device needs no synchronisation.
        spread = torch.zeros_like(self._membership, dtype=self._dtype)
        for number, value in enumerate(values):
            spread.masked_fill_(self._membership == number, value)
        return spread


def membership(groups: Groups, rows: Tensor) -> Tensor | None:
    """Group of each row of the concatenation of all groups; ``None`` for a single group."""
    if len(groups) < 2:
        return None
    number = torch.zeros_like(rows)
    end = 0
    for group in groups[:-1]:
        end += group["n"]
        number += rows >= end
    return number


class PartGroup(MutableMapping[str, Any]):
    """View of one group: ``n`` and the hyper-parameters of one component, by that component's names.

    Args:
        group: with the hyper-parameters of all components.
        names: the component's keys -> keys in the group.
    """

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
    """Groups of one estimator: the components' hyper-parameters side by side, checked whenever they change.

    A key that two components share is prefixed with the component's role (``temperature.lr``).

    Args:
        components: by role.
        mode: of the estimator.
        given: one mapping per group, which overrides the components' values (presets).

    Attributes:
        groups: the list that users read and edit.
        defaults: what fills a group that leaves a key out.
        names: role -> the component's keys -> keys in the groups.
    """

    def __init__(
        self, components: Mapping[str, HasHyperParameters], mode: str, given: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._components, self._mode = components, mode
        keys = [key for part in components.values() for key in part.own_defaults]
        self.names = {
            role: {key: f"{role}.{key}" if keys.count(key) > 1 else key for key in part.own_defaults}
            for role, part in components.items()
        }
        self.defaults: dict[str, Any] = {
            self.names[role][key]: value
            for role, part in components.items()
            for key, value in part.own_defaults.items()
        }
        self.groups = self._merge(given)
        self._snapshot: Groups = []
        self.check()

    def _merge(self, given: Sequence[Mapping[str, Any]] | None) -> Groups:
        """One list from the components' own; those that have groups must agree on the sizes."""
        sizes = {role: [g["n"] for g in part.own_groups] for role, part in self._components.items()}
        sizes = {role: size for role, size in sizes.items() if size}
        for role, size in sizes.items():
            first, reference = next(iter(sizes.items()))
            if size != reference:
                raise ValueError(f"n differs: {first} has {reference}, {role} has {size}; give both the same n")
        merged: Groups = [{"n": n} for n in next(iter(sizes.values()))] if sizes else [{}]
        for number, group in enumerate(merged):
            for role, part in self._components.items():
                own = part.own_groups[number] if part.own_groups else part.own_defaults
                group.update({self.names[role][key]: own[key] for key in part.own_defaults})
            if given is not None:
                checks.known_keys(f"sample group {number}", given[number], {"n", *self.defaults})
                group.update(given[number])
            plain(group)
            self._fill(group)  # only now: what the mode fills must see everything that was given
        return merged

    @property
    def n(self) -> int | None:
        """Samples in all groups, as they were made: edits of ``n`` are refused; ``None`` without rows."""
        groups = self._snapshot or self.groups
        return sum(group["n"] for group in groups) if "n" in groups[0] else None

    def _own(self, role: str, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of one component, under its own names."""
        return {key: group[name] for key, name in self.names[role].items()}

    def _fill(self, group: dict[str, Any]) -> None:
        for role, part in self._components.items():
            own = self._own(role, group)
            part.fill(own, self._mode)
            group.update({self.names[role][key]: value for key, value in own.items()})

    def check(self) -> None:
        """Refuse bad edits; costs one comparison when nothing changed."""
        if self._unchanged():
            return
        if self._snapshot and len(self._snapshot) != len(self.groups):
            raise ValueError(
                f"there are {len(self.groups)} sample groups instead of {len(self._snapshot)}; add them with "
                f"add_sample_group"
            )
        for number, group in enumerate(self.groups):
            what = f"sample group {number}"
            checks.known_keys(what, group, self._known())
            lost = next((key for key in self.defaults if key not in group), None)
            if lost is not None:
                raise ValueError(f"{what} has lost its hyper-parameter {lost!r}; put it back")
            plain(group)
            known = self._snapshot[number].get("n") if self._snapshot else group.get("n")
            if group.get("n") != known or type(group.get("n")) is not type(known):
                raise ValueError(
                    f"n of {what} is fixed at {known}, got {group.get('n')!r}; append rows with add_sample_group"
                )
            for role, part in self._components.items():
                part.check(self._own(role, group))
            self._fill(group)  # None may have been put in
        self._snapshot = [dict(group) for group in self.groups]

    def _known(self) -> set[str]:
        """Keys that a group may have; without rows there is no ``n``."""
        return {*self.defaults} if self.n is None else {"n", *self.defaults}

    def _unchanged(self) -> bool:
        try:
            return self.groups == self._snapshot and _types(self.groups) == _types(self._snapshot)
        except (ValueError, RuntimeError):  # an array was put in: comparing it gives no single truth value
            return False

    @property
    def checked(self) -> Groups:
        """Groups as of the last :meth:`check`; another list after every change."""
        return self._snapshot

    def saved(self) -> Groups:
        """Return a copy for checkpoints, of plain values; there may have been edits since :meth:`check`."""
        groups = [dict(group) for group in self.groups]
        for group in groups:
            plain(group)
        return groups

    def replace(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over saved values, all or none; the list and its dicts stay the same objects."""
        whole = isinstance(groups, Sequence) and all(isinstance(group, Mapping) for group in groups)
        if not whole or len(groups) != len(self.groups):
            raise ValueError(f"sample_groups must be {len(self.groups)} mappings, the checkpoint has {groups!r}")
        for number, (own, group) in enumerate(zip(self.groups, groups, strict=True)):
            if set(own) != set(group):
                raise ValueError(
                    f"sample group {number} must have {sorted(own)}, the checkpoint has {sorted(group)}; build "
                    f"the estimator as the one that was saved"
                )
        previous = [dict(group) for group in self.groups]
        try:
            self._assign(groups)
            self.check()
        except Exception:
            self._assign(previous)
            raise

    def _assign(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for group, values in zip(self.groups, groups, strict=True):
            group.clear()
            group.update(values)

    def add(self, group: Mapping[str, Any]) -> None:
        """Append one group, completed by the defaults."""
        if self.n is None:
            raise ValueError("this estimator keeps no rows and has no n; there is nothing to add")
        self.check()
        (new,) = parse([group])
        checks.known_keys(f"sample group {len(self.groups)}", new, {"n", *self.defaults})
        new = {**self.defaults, **new}
        plain(new)
        self._fill(new)
        for role, part in self._components.items():
            part.check(self._own(role, new))
        self.groups.append(new)
        self._snapshot = [*self._snapshot, dict(new)]

    def drop_last(self) -> None:
        """Undo :meth:`add`."""
        del self.groups[-1]
        self._snapshot = self._snapshot[:-1]

    def defaults_of(self, role: str) -> dict[str, Any]:
        """Return the defaults of one component's hyper-parameters, by its own names."""
        return {key: self.defaults[name] for key, name in self.names[role].items()}

    def of_part(self, role: str) -> Groups:
        """Return the groups by one component's own names; edits are written through."""
        return cast(Groups, [PartGroup(group, self.names[role]) for group in self.groups])

    def hyper(self, role: str, rows: Tensor, dtype: torch.dtype) -> Hyper:
        """Return the hyper-parameters of one component for these rows, ``(B, R)``."""
        return Hyper(self.groups, self.names[role], membership(self.groups, rows), dtype)
