"""Selection of the cases of a product that run in `make test`, in `make test-rest`, and only in `make test-full`.

A test over 48 configurations, 2 modes, 4 numbers of ranks and 2 dtypes has 768 cases. Nearly every bug shows in one
value or in a pair of values, so `make test` runs a covering array of the product:

    every test with more than SMALL cases      each pair of values of any two axes at least once
    @pytest.mark.covering()                    each value of each axis at least once, with varying pairs
    @pytest.mark.covering("info mode", ...)    the same, and each pair of values of these two axes
    @pytest.mark.covering(all=True)            every case

The other cases get the mark `full`. `make test-rest` runs a sample of them: first cases with pairs of values that the
daily cases leave out, then with new triples, at most MORE times as many cases as run daily. The remaining cases get the
mark `every` too, and run only in `make test-full`. Both selections depend only on the cases, so that all workers agree.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from zlib import crc32

import pytest
import torch

from tests.database import EstimatorInfo

SMALL = 12  # tests with at most this many cases run all of them
MORE = 2  # cases of `make test-rest` for each daily one
PLAIN = (bool, int, float, str, torch.dtype, type(None), EstimatorInfo)


def axes_of(items: list[pytest.Function]) -> list[dict[str, str]]:
    """Return the value of every axis of every case as text; a value without a short text gets a number."""
    numbers: dict[tuple[str, int], int] = {}

    def text(axis: str, value: object) -> str:
        if isinstance(value, PLAIN):
            return f"{type(value).__name__} {value}"
        return f"number {numbers.setdefault((axis, id(value)), len(numbers))}"

    return [{axis: text(axis, value) for axis, value in item.callspec.params.items()} for item in items]


def met_by(case: dict[str, str], groups: list[tuple[str, ...]]) -> set[tuple]:
    """Return the values of one case, and its combinations of values for groups of axes."""
    return set(case.items()) | {(*axes, *(case[axis] for axis in axes)) for axes in groups}


def cover(cases: list[dict[str, str]], pairs: list[tuple[str, str]] | None = None) -> list[int]:
    """Return positions of cases that cover every value, and every pair of values of these axes (None: of any two).

    Greedy: the next case is the one that covers most of the missing values and pairs. Ties are resolved in favour of
    the case with the rarest values and pairs so far, then of the first.
    """
    every = list(combinations(sorted(cases[0]), 2))
    wanted = [met_by(case, every if pairs is None else pairs) for case in cases]
    seen_in = [met_by(case, every) for case in cases]
    missing: set[tuple] = set().union(*wanted)
    seen: dict[tuple, int] = defaultdict(int)
    chosen: list[int] = []
    while missing:
        gains = [len(met & missing) for met in wanted]
        most = max(gains)
        equal = [k for k, gain in enumerate(gains) if gain == most]
        best = min(equal, key=lambda k: sum(seen[met] for met in seen_in[k]))
        chosen.append(best)
        missing -= wanted[best]
        for met in seen_in[best]:
            seen[met] += 1
    return chosen


def sample(cases: list[dict[str, str]], chosen: list[int], most: int) -> list[int]:
    """Return positions of at most ``most`` further cases: first with uncovered pairs of values, then with triples.

    One pass over the cases in pseudo-random order for each size; a case that covers nothing new is skipped.
    """
    rest = set(range(len(cases))) - set(chosen)
    found: list[int] = []
    for size in (2, 3):
        groups = list(combinations(sorted(cases[0]), size))
        met = set().union(*(met_by(cases[k], groups) for k in (*chosen, *found)))
        for k in sorted(rest, key=lambda k: crc32(repr(cases[k]).encode())):
            if len(found) < most and not (new := met_by(cases[k], groups)) <= met:
                found.append(k)
                met |= new
        rest -= set(found)
    return found


def choice(items: list[pytest.Function], axes: list[dict[str, str]]) -> list[int]:
    """Return the positions of the daily cases of one test."""
    mark = items[0].get_closest_marker("covering")
    if mark is None and len(items) <= SMALL or mark and mark.kwargs.get("all"):
        return list(range(len(items)))
    pairs = None if mark is None else [tuple(sorted(pair.split())) for pair in mark.args]
    return cover(axes, pairs)


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Mark cases that do not run daily as `full`, and those that are in no sample either as `every`."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        axes = axes_of(cases)
        daily = choice(cases, axes)
        sampled = sample(axes, daily, MORE * len(daily))
        for k in set(range(len(cases))) - set(daily):
            cases[k].add_marker(pytest.mark.full)
            if k not in sampled:
                cases[k].add_marker(pytest.mark.every)
