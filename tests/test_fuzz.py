"""A few trials of benchmarks/fuzz.py; the full run is a benchmark."""

import pytest
import torch

import compopt
from benchmarks import fuzz, fuzz_calls, fuzz_damage, fuzz_loads
from tests.helpers import rows_of

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
FILES = {"manifest", "rows", "state"}


def test_damage_is_noticed(tmp_path):
    results = fuzz_damage.damage(tmp_path, seed=1, flips=30, others=80)
    assert fuzz.failures(results) == 0
    assert results["counts"].keys() == fuzz.NAMES.keys()
    assert set().union(*results["counts"].values()) == FILES
    assert "| all |  | 110 | 110 | 110 | 110 |" in fuzz.damage_page(results)


def silent(load, est, path):
    try:
        return load(est, path)
    except ValueError:
        return path


def careless(load, est, path):
    """Load, but change one bit of the estimator if the load is refused."""
    try:
        return load(est, path)
    except ValueError:
        state = est.state_dict()
        rows_of(state)["count"].view(-1)[-1].bitwise_xor_(torch.tensor(1, dtype=torch.int32))
        est.load_state_dict(state)
        raise


@pytest.mark.parametrize("loading, wrong", [(silent, "not noticed"), (careless, "estimator changed")])
def test_what_goes_wrong_is_told(tmp_path, monkeypatch, loading, wrong):
    load = compopt.load
    monkeypatch.setattr(compopt, "load", lambda est, path: loading(load, est, path))
    results = fuzz_damage.damage(tmp_path, 0, flips=12, others=0)
    by_file = results["counts"]["flip"]
    assert fuzz.failures(results) == 12 and all(count[wrong] == count["trials"] for count in by_file.values())


# calls -------------------------------------------------------------------------------------------


def test_calls_are_refused_or_right():
    results = fuzz_calls.calls(seed=1, count=150)
    assert results["findings"] == [] and results["trials"] == 150
    counts = results["counts"].values()
    assert min(sum(count.get(key, 0) for count in counts) for key in ("refused", "agreed", "nan")) > 1
    assert "| all | " in fuzz.calls_page(results)


CALL = compopt.ContrastiveEstimator.__call__


def larger(est, *args, **kwargs):
    return CALL(est, *args, **kwargs) * 1.01


def test_wrong_calls_are_told(monkeypatch, capsys):
    monkeypatch.setattr(compopt.ContrastiveEstimator, "__call__", larger)
    assert {what for _, _, what, _ in fuzz_calls.calls(0, 20)["findings"]} == {"other numbers"}
    with pytest.raises(SystemExit, match="trials failed"):
        fuzz.main(["calls", "--count", "20", "--quick"])
    assert "--trial" in capsys.readouterr().out


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


def half(load, schedule, state):
    """Change something before the check."""
    schedule.t = 7
    load(schedule, state)


def careless_type(load, schedule, state):
    try:
        load(schedule, state)
    except (TypeError, ValueError) as error:
        raise AttributeError from error


def blind(load, schedule, state):
    schedule.fn = None


@pytest.mark.parametrize("loading, wrong", [(half, "changed"), (careless_type, "another error"), (blind, "not usable")])
def test_wrong_loads_are_told(monkeypatch, capsys, loading, wrong):
    kind, load = compopt.schedules.Schedule, compopt.schedules.Schedule.load_state_dict
    monkeypatch.setattr(fuzz_loads, "owners", lambda: [kind])
    monkeypatch.setattr(kind, "load_state_dict", lambda schedule, state: loading(load, schedule, state))
    assert wrong in {what for _, _, what, _ in fuzz_loads.loads(0, 8)["findings"]}
    with pytest.raises(SystemExit, match="trials failed"):
        fuzz.main(["loads", "--count", "8", "--quick"])
    assert "loads --seed 0 --trial" in capsys.readouterr().out
