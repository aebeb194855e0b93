"""The selection of daily cases covers what it promises, with few cases."""

from itertools import combinations, product

from tests.covering import cover, sample

AXES = {"entry": "abcdefghijkl", "mode": "bu", "ranks": "1234", "dtype": "sd"}
CASES = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def met(chosen, *axes):
    """Return the combinations of values of these axes."""
    return {tuple(CASES[k][axis] for axis in axes) for k in chosen}


def test_every_pair_is_met():
    chosen = cover(CASES)
    for a, b in combinations(AXES, 2):
        assert met(chosen, a, b) == set(product(AXES[a], AXES[b]))
    assert len(chosen) <= 60  # of 192; at least 48 are needed


def test_every_value_is_met_and_the_pairs_rotate():
    chosen = cover(CASES, pairs=[])
    assert all(met(chosen, axis) == {(value,) for value in AXES[axis]} for axis in AXES)
    assert len(chosen) == 12
    assert len(met(chosen, "mode", "ranks")) == 8
    assert len(met(cover(CASES, [("entry", "mode")]), "entry", "mode")) == 24


def test_cases_that_are_missing_are_not_wanted():
    """Test a product in which some cases do not exist, as for a twin that does not support small temperatures."""
    some = [case for case in CASES if case["entry"] != "a" or case["mode"] == "u"]
    assert {some[k]["mode"] for k in cover(some, [("entry", "mode")]) if some[k]["entry"] == "a"} == {"u"}


def test_the_sample_has_the_pairs_that_the_daily_cases_leave_out():
    daily = cover(CASES, pairs=[])
    more = sample(CASES, daily, most=100)
    assert len(more) == len({*more, *daily}) - len(daily)
    for a, b in combinations(AXES, 2):
        assert met([*daily, *more], a, b) == set(product(AXES[a], AXES[b]))
    few = sample(CASES, daily, most=24)
    assert len(few) == 24 and few == more[:24]
    assert len(met(few, "entry")) > 6 and len(met(few, "mode", "ranks", "dtype")) > 8  # spread over the product


def test_after_all_pairs_come_triples():
    daily = cover(CASES)
    more = sample(CASES, daily, most=12)
    new = met(more, "entry", "mode", "ranks") - met(daily, "entry", "mode", "ranks")
    assert len(more) == 12 and len(new) >= 6
    everything = [*daily, *sample(CASES, daily, most=len(CASES))]
    assert met(everything, "entry", "mode", "ranks") == set(product(*list(AXES.values())[:3]))
