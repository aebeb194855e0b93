"""A few trials of benchmarks/fuzz.py; the full run is a benchmark."""

import json

import pytest
import torch

import compopt
from benchmarks import fuzz, fuzz_calls, fuzz_damage, report

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
FILES = {"manifest", "rows", "state"}


def test_damage_is_noticed(tmp_path):
    results = fuzz_damage.damage(tmp_path, seed=1, flips=60, others=160)
    assert fuzz.failures(results) == 0
    assert results["counts"].keys() == fuzz.NAMES.keys()
    assert set().union(*results["counts"].values()) == FILES
    assert "| all |  | 220 | 220 | 220 | 220 |" in fuzz.damage_page(results)


def test_trials_are_those_of_the_seed(tmp_path):
    one, two, three = (
        fuzz_damage.damage(tmp_path / str(number), seed, flips=10, others=40)["counts"]
        for number, seed in enumerate((1, 1, 2))
    )
    assert one == two != three


def silent(load, est, path):
    try:
        return load(est, path)
    except ValueError:
        return path


def unnamed(load, est, path):
    try:
        return load(est, path)
    except ValueError:
        raise ValueError("something is wrong") from None


def failing(load, est, path):
    try:
        return load(est, path)
    except ValueError as error:
        raise KeyError(str(error)) from None


def careless(load, est, path):
    """Change one bit of the estimator."""
    try:
        return load(est, path)
    except ValueError:
        state = est.state_dict()
        state["rows"]["count"].view(-1)[-1].bitwise_xor_(torch.tensor(1, dtype=torch.int32))
        est.load_state_dict(state)
        raise


@pytest.mark.parametrize(
    "loading, wrong",
    [
        (silent, "not noticed"),
        (unnamed, "file not named"),
        (failing, "another error"),
        (careless, "estimator changed"),
    ],
)
def test_what_goes_wrong_is_told(tmp_path, monkeypatch, loading, wrong):
    load = compopt.load
    monkeypatch.setattr(compopt, "load", lambda est, path: loading(load, est, path))
    results = fuzz_damage.damage(tmp_path, 0, flips=12, others=0)
    by_file = results["counts"]["flip"]
    assert fuzz.failures(results) == 12 and all(count[wrong] == count["trials"] for count in by_file.values())


def test_the_program_ends_with_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "fuzz.json").write_text(json.dumps({"results": {"calls": 1}}))
    (tmp_path / "fuzz.md").write_text("# Fuzzing\n\n## Random calls\n\nas before\n")
    fuzz.main(["damage", "--flips", "3", "--others", "0"])
    results, page = json.loads((tmp_path / "fuzz.json").read_text())["results"], (tmp_path / "fuzz.md").read_text()
    assert results["damage"]["seed"] == 0 and results["calls"] == 1 and page.endswith("## Random calls\n\nas before\n")
    assert capsys.readouterr().out.strip() in page
    load = compopt.load
    monkeypatch.setattr(compopt, "load", lambda est, path: silent(load, est, path))
    with pytest.raises(SystemExit, match="trials went wrong"):
        fuzz.main(["damage", "--flips", "4", "--others", "0", "--quick"])


# calls -------------------------------------------------------------------------------------------


def test_calls_are_refused_or_right():
    results = fuzz_calls.calls(seed=1, count=250)
    assert results["findings"] == [] and results["trials"] == 250
    counts = results["counts"].values()
    assert min(sum(count.get(key, 0) for count in counts) for key in ("refused", "agreed", "nan")) > 2
    assert "| all | " in fuzz.calls_page(results)


def found(seed, count):
    """Everything that went wrong, by kind."""
    return {what for _, _, what, _ in fuzz_calls.calls(seed, count)["findings"]}


CALL = compopt.ContrastiveEstimator.__call__


def in_range(est, z1, z2, index=None, *args, **kwargs):
    """Take any position, as a check that is skipped would."""
    if isinstance(index, torch.Tensor) and est.n is not None and not index.is_floating_point():
        index = index.remainder(est.n)
    return CALL(est, z1, z2, index, *args, **kwargs)


def larger(est, *args, **kwargs):
    return CALL(est, *args, **kwargs) * 1.01


def forgetful(est, *args, **kwargs):
    """Drop what is pending where a call is refused."""
    try:
        return CALL(est, *args, **kwargs)
    except (ValueError, TypeError):
        est.discard()
        raise


@pytest.mark.parametrize(
    "call, count, wrong",
    [(in_range, 150, "not refused"), (larger, 20, "other numbers"), (forgetful, 100, "state changed")],
)
def test_wrong_calls_are_told(monkeypatch, call, count, wrong):
    monkeypatch.setattr(compopt.ContrastiveEstimator, "__call__", call)
    assert wrong in found(0, count)


def test_the_program_repeats_a_trial(monkeypatch, capsys):
    fuzz.main(["calls", "--trial", "3"])
    assert "1 trials" in capsys.readouterr().out
    monkeypatch.setattr(compopt.ContrastiveEstimator, "__call__", larger)
    with pytest.raises(SystemExit, match="trials went wrong"):
        fuzz.main(["calls", "--count", "20", "--quick"])
    assert "--trial" in capsys.readouterr().out
