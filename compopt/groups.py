"""Sample groups: like ``param_groups``, one dict of hyper-parameters per data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compopt import checks

Groups = list[dict[str, Any]]
#: A number of samples, or one mapping per data set: ``[{"n": 3_000_000, "gamma": 0.9}, {"n": 12_000_000}]``.
GroupSpec = int | Sequence[Mapping[str, Any]]


def sizes(n: Any) -> Groups:
    """``n`` or a list of groups -> the groups with nothing but their sizes."""
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
            raise ValueError(f"sample group {position} has no 'n', its number of samples: {dict(group)!r}")
        groups.append({**group, "n": checks.count(f"n of sample group {position}", group["n"])})
    return groups


class Hyper:
    """Hyper-parameters as one component sees them for the rows of one call.

    ``hyper("gamma")`` is a Python number if all groups agree, else a tensor with one value per row.

    Args:
        groups: the estimator's sample groups.
        names: the component's keys -> keys in the groups.
        membership: group of each row, ``(B, R)`` int64, or ``None`` when there is one group.
        dtype: of the tensors.
    """

    def __init__(
        self, groups: Groups, names: Mapping[str, str], membership: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._groups, self._names, self._membership, self._dtype = groups, names, membership, dtype

    def __call__(self, key: str, item: int | None = None) -> Any:
        values = [value if item is None else value[item] for value in self._values(key)]
        return self._spread(values)

    def of_first_group(self) -> Hyper:
        """The same keys, read from the first group only."""
        return Hyper(self._groups[:1], self._names, None, self._dtype)

    def choose(self, key: str, table: Mapping[str, float]) -> Any:
        """A named option as a number per row."""
        return self._spread([table[value] for value in self._values(key)])

    def _values(self, key: str) -> Iterator[Any]:
        return (group[self._names[key]] for group in self._groups)

    def _spread(self, values: list[Any]) -> Any:
        if self._membership is None or all(value == values[0] for value in values):
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
