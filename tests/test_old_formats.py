"""Checkpoints of earlier versions of the library keep loading; `fixtures/make.py` says how they were made."""

import json

import pytest
import torch

import compopt
from tests.fixtures.make import ESTIMATORS, HERE, known

FORMATS = {"0.1.0": 2, "0.2.0": 3}  # of directories
REDEFINED = {("memory", "effective_negatives")}  # counts the memory's since
EXPECTED = {version: json.loads((HERE / version / "expected.json").read_text()) for version in FORMATS}
CASES = [(version, name) for version, names in EXPECTED.items() for name in names]


def assert_expected(est, version, name):
    """To the bit what rows and steps are; a loss may be rounded otherwise by a later version."""
    found, expected = known(est), EXPECTED[version][name]
    for key, value in expected.items():
        if key == "metrics":
            value = {metric: number for metric, number in value.items() if (name, metric) not in REDEFINED}
            found[key] = {metric: found[key][metric] for metric in value}
        if key in ("loss", "metrics"):
            assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
        else:
            assert torch.equal(torch.tensor(found[key]), torch.tensor(value)), key


@pytest.mark.parametrize(("version", "name"), CASES)
def test_state_dict(version, name):
    est = ESTIMATORS[name]()
    state = torch.load(HERE / version / f"{name}.pt", weights_only=True)
    assert state["version"] == 1
    est.load_state_dict(state)
    assert_expected(est, version, name)


@pytest.mark.parametrize(("version", "name"), CASES)
def test_directory(version, name):
    est = ESTIMATORS[name]()
    loaded = compopt.load(est, HERE / version / name)
    assert json.loads((loaded / "manifest.json").read_text())["version"] == FORMATS[version]
    assert_expected(est, version, name)


def test_this_version_has_its_checkpoints():
    assert compopt.__version__ in FORMATS and EXPECTED[compopt.__version__].keys() == ESTIMATORS.keys()
