"""A few trials of benchmarks/fuzz.py; the full run is a benchmark."""

import json

import pytest
import torch

import compopt
from benchmarks import fuzz, fuzz_calls, fuzz_damage, saved
from compopt.checkpoint import loading
from compopt.estimator import reader
from compopt.kernel.statistics import PairStatistics

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
FILES = {"manifest", "rows", "state"}


def test_damage_is_noticed(tmp_path):
    results = fuzz_damage.damage(tmp_path, seed=1, flips=100, others=300)
    assert fuzz.failures(results) == 0
    assert results["counts"].keys() == fuzz.NAMES.keys()
    assert all(by_file.keys() == FILES for by_file in results["counts"].values())
    trials = [count["trials"] for by_file in results["counts"].values() for count in by_file.values()]
    assert sum(trials) == 400
    assert "| all |  | 400 | 400 | 400 | 400 |" in fuzz.damage_page(results)


def test_trials_are_those_of_the_seed(tmp_path):
    one, two, three = (
        fuzz_damage.damage(tmp_path / str(number), seed, flips=10, others=60)["counts"]
        for number, seed in enumerate((1, 1, 2))
    )
    assert one == two != three


def wrong(results):
    """Kinds of failures, by what was damaged."""
    counts = [(file, count) for by_file in results["counts"].values() for file, count in by_file.items()]
    return {(file, kind) for file, count in counts for kind, number in count["wrong"].items() if number}


def test_damage_that_is_not_noticed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_check_sum", lambda path, file: None)
    results = fuzz_damage.damage(tmp_path, seed=0, flips=60, others=0)
    assert ("rows", "not noticed") in wrong(results)
    assert fuzz.failures(results) < 60  # those of the manifest still are
    assert "| all |  | 60 | 60 |" not in fuzz.damage_page(results)


def test_an_error_that_names_nothing_is_told(tmp_path, monkeypatch):
    load = compopt.load

    def unnamed(est, path):
        try:
            return load(est, path)
        except ValueError:
            raise ValueError("something is wrong") from None

    monkeypatch.setattr(compopt, "load", unnamed)
    assert wrong(fuzz_damage.damage(tmp_path, 0, flips=14, others=0)) == {(file, "file not named") for file in FILES}


def test_another_error_is_told(tmp_path, monkeypatch):
    load = compopt.load

    def failing(est, path):
        try:
            return load(est, path)
        except ValueError as error:
            raise KeyError(str(error)) from None

    monkeypatch.setattr(compopt, "load", failing)
    assert {kind for _, kind in wrong(fuzz_damage.damage(tmp_path, 0, flips=6, others=0))} == {"another error"}


def test_a_change_of_one_bit_of_the_estimator_is_told(tmp_path, monkeypatch):
    load = compopt.load

    def careless(est, path):
        try:
            return load(est, path)
        except ValueError:
            state = est.state_dict()
            state["rows"]["count"].view(-1)[-1].bitwise_xor_(torch.tensor(1, dtype=torch.int32))
            est.load_state_dict(state)
            raise

    monkeypatch.setattr(compopt, "load", careless)
    results = fuzz_damage.damage(tmp_path, 0, flips=6, others=0)
    assert fuzz.failures(results) == 6 and {kind for _, kind in wrong(results)} == {"estimator changed"}


def test_the_program_ends_with_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    (tmp_path / "fuzz.json").write_text(json.dumps({"results": {"another kind": 1}}))
    fuzz.main(["damage", "--flips", "3", "--others", "0"])
    results = json.loads((tmp_path / "fuzz.json").read_text())["results"]
    assert results["damage"]["seed"] == 0 and results["another kind"] == 1
    assert capsys.readouterr().out.strip() in (tmp_path / "fuzz.md").read_text()
    monkeypatch.setattr(loading, "_check_sum", lambda path, file: None)
    with pytest.raises(SystemExit, match="trials went wrong"):
        fuzz.main(["damage", "--flips", "40", "--others", "0", "--quick"])


# calls -------------------------------------------------------------------------------------------


def test_calls_are_refused_or_right():
    results = fuzz_calls.calls(seed=1, count=200)
    assert results["findings"] == [] and results["trials"] == 200
    counts = results["counts"].values()
    assert min(sum(count[key] for count in counts) for key in ("refused", "agreed", "nan")) > 5
    assert "| all | " in fuzz.calls_page(results)


def found(seed, count):
    """What went wrong, by kind."""
    return {what for _, _, what, _ in fuzz_calls.calls(seed, count)["findings"]}


def test_a_check_that_is_skipped_is_told(monkeypatch):
    monkeypatch.setattr(reader, "check_range", lambda name, value, n: None)
    assert found(0, 300) & {"not refused", "unclear error", "program failed"}


def test_other_numbers_are_told(monkeypatch):
    real = PairStatistics.real
    monkeypatch.setattr(PairStatistics, "real", lambda self, terms: real(self, terms * 1.01))
    assert "other numbers" in found(0, 30)


def test_a_refusal_that_deposits_is_told(monkeypatch):
    call = compopt.ContrastiveEstimator.__call__

    def careless(est, *args, **kwargs):
        try:
            return call(est, *args, **kwargs)
        except (ValueError, TypeError):
            est.discard()
            raise

    monkeypatch.setattr(compopt.ContrastiveEstimator, "__call__", careless)
    assert "state changed" in found(0, 150)


def test_the_program_repeats_a_trial(monkeypatch, capsys):
    fuzz.main(["calls", "--trial", "3"])
    assert "1 trials" in capsys.readouterr().out
    monkeypatch.setattr(reader, "check_range", lambda name, value, n: None)
    with pytest.raises(SystemExit, match="trials went wrong"):
        fuzz.main(["calls", "--count", "300", "--quick"])
    assert "--trial" in capsys.readouterr().out
