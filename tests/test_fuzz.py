"""A few trials of benchmarks/fuzz.py; the full run is a benchmark."""

import pytest

import compopt
from benchmarks import fuzz, fuzz_calls, fuzz_damage, fuzz_loads

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
FILES = {"manifest", "rows", "state"}


def test_damage_is_noticed(tmp_path):
    results = fuzz_damage.damage(tmp_path, seed=1, flips=30, others=80)
    assert fuzz.failures(results) == 0
    assert results["counts"].keys() == fuzz.NAMES.keys()
    assert set().union(*results["counts"].values()) == FILES
    assert "| all |  | 110 | 110 | 110 | 110 |" in fuzz.damage_page(results)


# calls -------------------------------------------------------------------------------------------


def test_calls_are_refused_or_right():
    results = fuzz_calls.calls(seed=1, count=150)
    assert results["findings"] == [] and results["trials"] == 150
    counts = results["counts"].values()
    assert min(sum(count.get(key, 0) for count in counts) for key in ("refused", "agreed", "nan")) > 1
    assert "| all | " in fuzz.calls_page(results)


# loads -------------------------------------------------------------------------------------------


def test_damaged_states_are_refused_before_a_change_or_loaded_whole():
    """Every class with a ``load_state_dict`` takes part; a new one fails here if its arguments are not known."""
    kinds = fuzz_loads.owners()
    assert {compopt.MomentumEncoder, compopt.samplers.ScoredSampler, compopt.schedules.CosineGamma} < set(kinds)
    results = fuzz_loads.loads(seed=1, count=8 * len(kinds))
    assert results["findings"] == []
    assert results["counts"].keys() == {kind.__name__ for kind in kinds}
    assert min(count["refused"] for count in results["counts"].values()) > 0
    assert sum(count.get("loaded", 0) for count in results["counts"].values()) > len(kinds)
    assert f"| all | {results['trials']} | " in fuzz.loads_page(results)
