"""Checkpoints of earlier versions of the library can be loaded; `fixtures/make.py` describes how they were made."""

import json
import shutil

import pytest
import torch

import compopt
from compopt.checkpoint import manifest
from tests.fixtures.make import ESTIMATORS, HERE, N, known, train
from tests.helpers import assert_same_bits, snapshot

FORMATS = {"0.3.0": (1, 4), "0.4.0": (2, 5)}  # format versions of state_dict and of directories
REDEFINED = {("memory", "effective_negatives")}  # now counts the memory's as well
EXPECTED = {version: json.loads((HERE / version / "expected.json").read_text()) for version in FORMATS}
CASES = [(version, name) for version, names in EXPECTED.items() for name in names]


def assert_expected(est, version, name):
    """Compare rows and steps bit for bit, losses and metrics approximately: later versions may round differently."""
    found, expected = known(est), EXPECTED[version][name]
    if (version, name) == ("0.3.0", "scores"):  # whose rows are those of a keeper now
        expected = {key: expected[key] for key in ("t", "loss", "metrics")}
    for key, value in expected.items():
        if key == "metrics":
            value = {metric: number for metric, number in value.items() if (name, metric) not in REDEFINED}
            found[key] = {metric: found[key][metric] for metric in value}
        if key in ("loss", "metrics"):
            assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
        else:
            assert torch.equal(torch.tensor(found[key]), torch.tensor(value)), key


@pytest.mark.filterwarnings("ignore:the checkpoint has scores")
@pytest.mark.parametrize(("version", "name"), CASES)
def test_state_dict(version, name):
    est = ESTIMATORS[name]()
    state = torch.load(HERE / version / f"{name}.pt", weights_only=True)
    assert state["version"] == FORMATS[version][0]
    est.load_state_dict(state)
    assert_expected(est, version, name)


@pytest.mark.filterwarnings("ignore:the checkpoint has scores")
@pytest.mark.parametrize(("version", "name"), CASES)
def test_directory(version, name):
    est = ESTIMATORS[name]()
    loaded = compopt.load(est, HERE / version / name)
    assert json.loads((loaded / "manifest.json").read_text())["version"] == FORMATS[version][1]
    assert_expected(est, version, name)


@pytest.mark.filterwarnings("ignore:the checkpoint has scores")
@pytest.mark.parametrize("attached", [True, False])
def test_scores_that_an_estimator_kept(attached):
    state, path = (HERE / "0.3.0" / name for name in ("scores.pt", "scores"))
    state = torch.load(state, weights_only=True)
    keepers = [compopt.ScoreKeeper(N) for _ in range(1 + attached)]
    keepers[0].load_state_dict(state)
    if attached:
        est = ESTIMATORS["scores"]()
        keepers[1].attach(est)
        compopt.load(keepers[1], path)
    for keeper in keepers:
        found = keeper.read(torch.arange(N))
        for name, column in state["rows"].items():
            value = column if name != "count" else column.amax(1)
            assert torch.equal(found[name], value.to(found[name].dtype)), name
        assert keeper.t == state["t"] == 3


def test_an_estimator_leaves_scores_out_and_names_their_keeper():
    for load in (
        lambda est: est.load_state_dict(torch.load(HERE / "0.3.0" / "scores.pt", weights_only=True)),
        lambda est: compopt.load(est, HERE / "0.3.0" / "scores"),
    ):
        with pytest.warns(UserWarning, match=r"has scores, .*: attach a compopt.ScoreKeeper\(n\)"):
            load(ESTIMATORS["scores"]())


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
@pytest.mark.parametrize("before, after", [("linear", "log"), ("log", "linear")])
def test_a_learned_temperature_converts(before, after, optimizer, tmp_path):
    """Load by state_dict, directory and component: tau is kept; moments convert with dF/dlog(tau) = tau dF/dtau."""

    def build(form):
        average = compopt.MovingAverageEstimator(N, reference="positive")
        start = {"rho": 0.5, "lr": 1e-3, "tau_init": 0.1, "optimizer": optimizer}
        dual = compopt.TemperatureDual(None, mode="global", parametrization=form, **start)
        return compopt.ContrastiveEstimator(average, dual)

    source = build(before)
    train(source)
    path, old = compopt.save(source, tmp_path), source.temperature.state
    loads = (
        lambda est: est.load_state_dict(source.state_dict()),
        lambda est: compopt.load(est, path),
        lambda est: est.temperature.load_state_dict(source.temperature.state_dict()),
    )
    for load in loads:
        est = build(after)
        load(est)
        new = est.temperature.state
        unit = old["tau"] if after == "log" else 1 / old["tau"]
        assert new.keys() == build(after).temperature.state.keys()
        assert new["tau"] == old["tau"] != 0.1 and new["updates"] == old["updates"] == 3
        for name in set(new) - {"tau", "updates"}:
            other = name.removeprefix("log_") if after == "log" else f"log_{name}"
            assert old[other] != 0 and torch.allclose(
                new[name], old[other] * unit ** (2 if "sq" in name else 1), rtol=1e-14
            )
        train(est)
        assert est.temperature.tau != old["tau"]


def test_a_checkpoint_of_a_removed_method_is_refused_with_its_name():
    """``ResidualEstimator`` wrote it with 0.3.0."""
    est = ESTIMATORS["neuclip"]()
    before = snapshot(est, N)
    state = torch.load(HERE / "0.3.0" / "residual.pt", weights_only=True)
    for load in (lambda: est.load_state_dict(state), lambda: compopt.load(est, HERE / "0.3.0" / "residual")):
        with pytest.raises(ValueError, match="the checkpoint has 'ResidualNormalizer'"):
            load()
    assert_same_bits(before, snapshot(est, N))


def test_this_version_has_its_checkpoints():
    assert compopt.__version__ in FORMATS and EXPECTED[compopt.__version__].keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("version", [3, 6])
def test_another_format_is_refused_with_its_number(version, tmp_path):
    path = compopt.save(ESTIMATORS["sogclr"](), tmp_path)
    content = json.loads((path / "manifest.json").read_text()) | {"version": version}
    (path / "manifest.json").write_text(json.dumps(content | {"crc32": manifest.body_crc(content)}))
    with pytest.raises(ValueError, match=f"has format version {version}, this library reads 5"):
        compopt.load(ESTIMATORS["sogclr"](), path)


@pytest.mark.parametrize(
    "spans, match",
    [([[-1, 6]], "rows -1 to 6 after row 0"), ([[4, 7], [0, 4]], "rows 0 to 4 after row 7"), ([[0, 6]], "column")],
)
def test_row_numbers_in_an_earlier_manifest_are_checked(spans, match, tmp_path):
    path = shutil.copytree(HERE / "0.3.0" / "sogclr", tmp_path / "c")
    file = next(path.rglob("manifest.json"))
    content = json.loads(file.read_text())
    content["files"][0]["spans"] = spans
    file.write_text(json.dumps(content | {"crc32": manifest.body_crc(content)}))
    with pytest.raises(ValueError, match=match):
        compopt.load(ESTIMATORS["sogclr"](), path)
