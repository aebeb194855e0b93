"""Checkpoints of earlier versions of the library keep loading; `fixtures/make.py` says how they were made."""

import json
from pathlib import Path

import pytest
import torch

import compopt
from tests.fixtures.make import ESTIMATORS, N

HERE = Path(__file__).parent / "fixtures"


def assert_expected(est, name):
    expected = json.loads((HERE / "expected.json").read_text())[name]
    assert est.t == expected.pop("t")
    columns = est.read(torch.arange(N))
    assert columns.keys() == expected.keys()
    for key, value in columns.items():
        assert torch.equal(value, torch.tensor(expected[key], dtype=value.dtype)), key


@pytest.mark.parametrize("name", ESTIMATORS)
def test_state_dict_version_1(name):
    est = ESTIMATORS[name]()
    state = torch.load(HERE / f"{name}-state-v1.pt", weights_only=True)
    assert state["version"] == 1
    est.load_state_dict(state)
    assert_expected(est, name)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_directory_version_2(name):
    est = ESTIMATORS[name]()
    loaded = compopt.load(est, HERE / f"{name}-v2")
    assert json.loads((loaded / "manifest.json").read_text())["version"] == 2
    assert_expected(est, name)
