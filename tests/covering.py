"""Choice of the cases of a product that run: every day, in `make test-rest`, and only in `make test-full`.

A test over 48 configurations, 2 modes, 4 numbers of ranks and 2 dtypes has 768 cases. Nearly every mistake shows in
one value or in a pair of them, so `make test` runs a covering array of the product:

    every test with more than SMALL cases      each pair of values of any two axes, as often as needed: once
    @pytest.mark.covering()                    each value of each axis once; the pairs rotate
    @pytest.mark.covering("info mode", ...)    the same, and each pair of these two axes
    @pytest.mark.covering(all=True)            every case

The other cases get the mark `full`. `make test-rest` runs a sample of them, which has the pairs of values that the
daily cases leave out, then triples: at most MORE times as many cases as run daily. What remains has the mark `every`
too, and runs in `make test-full` alone. Both choices depend on the cases alone, so that every worker makes the same.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from zlib import crc32

import pytest
import torch

from tests.database import EstimatorInfo

SMALL = 12  # a test with no more cases is not worth a choice
MORE = 2  # cases of `make test-rest` for each daily one
PLAIN = (bool, int, float, str, torch.dtype, type(None), EstimatorInfo)


def axes_of(items: list[pytest.Function]) -> list[dict[str, str]]:
    """The value of every axis of every case, as text; what has no short text gets a number."""
    numbers: dict[tuple[str, int], int] = {}

    def text(axis: str, value: object) -> str:
        if isinstance(value, PLAIN):
            return f"{type(value).__name__} {value}"
        return f"number {numbers.setdefault((axis, id(value)), len(numbers))}"

    return [{axis: text(axis, value) for axis, value in item.callspec.params.items()} for item in items]


def met_by(case: dict[str, str], groups: list[tuple[str, ...]]) -> set[tuple]:
    """Return what one case covers: its values, and its values in groups of axes."""
    return set(case.items()) | {(*axes, *(case[axis] for axis in axes)) for axes in groups}


def cover(cases: list[dict[str, str]], pairs: list[tuple[str, str]] | None = None) -> list[int]:
    """Places of the cases that cover every value, and every pair of values of these axes (None: of any two).

    Greedy: the next case is the one that meets most of what is missing. Among equals it is the one with the
    rarest values and pairs so far, then the first.
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
    """Places of at most ``most`` further cases: those with pairs of values that nobody has met, then with triples.

    One pass over the cases in an order without a pattern, for each size; a case that brings nothing new waits.
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
    """Places of the daily cases of one test."""
    mark = items[0].get_closest_marker("covering")
    if mark is None and len(items) <= SMALL or mark and mark.kwargs.get("all"):
        return list(range(len(items)))
    pairs = None if mark is None else [tuple(sorted(pair.split())) for pair in mark.args]
    return cover(axes, pairs)


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Give `full` to every case that does not run daily, and `every` to those that are in no sample either."""
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
