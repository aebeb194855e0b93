"""Hyper-parameters given as NumPy or torch values become Python values, so that every state is plain data."""

import json
import math

import numpy as np
import pytest
import torch

import compopt
from tests.helpers import batches, group_key, through_a_file

N = 23

NUMBERS = {
    "float64": np.float64(0.5),
    "float32": np.float32(0.5),
    "longdouble": np.longdouble(0.5),
    "array": np.array(0.5),
    "tensor": torch.tensor(0.5),
    "bfloat16": torch.tensor(0.5, dtype=torch.bfloat16),
}
PAIRS = {
    "float64": (np.float64(0.5), np.float64(0.75)),
    "list": [np.float32(0.5), 0.75],
    "array": np.array([0.5, 0.75]),
    "tensor": torch.tensor([0.5, 0.75]),
}


def groups_of(state, part="normalizer"):
    """Return the sample groups of a part in a state, or in a manifest; those of an object that is used alone."""
    return state.get("parts", {}).get(part, state)["sample_groups"]


def train(est, steps=2):
    for z1, z2, index in batches(N, steps, batch=6, dim=4):
        est(z1.requires_grad_(), z2.requires_grad_(), index).backward()
        est.step()


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_a_number_of_another_library_becomes_a_python_number(value, tmp_path):
    estimators = (compopt.SogCLREstimator(N), compopt.SogCLREstimator(N, gamma=value))
    for number, est in enumerate(estimators):
        est.sample_groups[0]["gamma"] = value
        before_the_call = groups_of(through_a_file(est.state_dict()))[0]["gamma"]
        train(est)
        assert type(est.sample_groups[0]["gamma"]) is float and type(before_the_call) is float
        assert groups_of(through_a_file(est.state_dict()))[0]["gamma"] == 0.5
        manifest = json.loads((compopt.save(est, tmp_path / str(number)) / "manifest.json").read_text())
        assert groups_of(manifest)[0]["gamma"] == 0.5


@pytest.mark.parametrize("value", PAIRS.values(), ids=PAIRS)
def test_a_pair_of_another_library_becomes_a_tuple_of_python_numbers(value, tmp_path):
    est = compopt.ISogCLREstimator(N, rho=0.1, optimizer="adam")
    key = group_key(est.sample_groups[0], "betas")
    est.sample_groups[0][key] = value
    train(est)
    betas = est.sample_groups[0][key]
    assert betas == (0.5, 0.75) and [type(beta) for beta in betas] == [float, float]
    assert groups_of(through_a_file(est.state_dict()), "temperature")[0]["betas"] == (0.5, 0.75)
    other = compopt.ISogCLREstimator(N, rho=0.1, optimizer="adam")
    compopt.save(est, tmp_path)
    compopt.load(other, tmp_path)
    assert other.sample_groups == est.sample_groups


def test_integers_and_sizes_stay_integers():
    numbers = {"prototypes": np.int32(8), "updates": np.int64(2), "lr": np.float32(0.5)}
    est = compopt.NeuCLIPEstimator(4, n=np.int64(N), learn_tau=False, **numbers)
    group = est.sample_groups[0]
    assert [type(group[key]) for key in ("n", "updates", "lr")] == [int, int, float]
    est.add_sample_group({"n": np.int16(5)})
    train(est)
    est.sample_groups[0]["n"] = np.int64(N)  # equal: no edit of the size
    state = through_a_file(est.state_dict())
    sizes = state["parts"]["normalizer"]["config"]["n"]
    assert sizes == [N, 5] and type(sizes[0]) is int


@pytest.mark.parametrize(
    "key, value, error, words",
    [
        ("gamma", np.ones(3), TypeError, r"gamma .*ndarray of shape \(3,\)"),
        ("gamma", torch.ones(2, 2), TypeError, r"gamma .*Tensor of shape \(2, 2\)"),
        ("gamma", torch.tensor(0.5, requires_grad=True), TypeError, "gamma .*item"),
        ("gamma", np.bool_(True), TypeError, "gamma .*True"),
        ("gamma", np.float64(1.5), ValueError, r"gamma .*\b1.5\b"),
        ("gamma", np.ones(2), TypeError, "gamma"),
        ("updates", 2.0, TypeError, "updates .*2.0"),  # equal to the current value, but no integer
    ],
    ids=repr,
)
def test_what_is_no_number_is_refused_by_name(key, value, error, words):
    est = compopt.NeuCLIPEstimator(4, prototypes=8, updates=2) if key == "updates" else compopt.SogCLREstimator(N)
    before = dict(est.sample_groups[0])
    with pytest.raises(error, match=words):
        est.sample_groups[0][key] = value
    assert est.sample_groups[0] == before


def test_a_schedule_of_numpy_functions():
    est = compopt.SogCLREstimator([{"n": 10}, {"n": N - 10}])
    schedule = compopt.schedules.Schedule(est, "gamma", lambda t: 0.6 + 0.4 * np.cos(0.1 * t))
    schedule.step()
    assert [type(group["gamma"]) for group in est.sample_groups] == [float, float]
    assert est.sample_groups[0]["gamma"] == pytest.approx(0.6 + 0.4 * math.cos(0.1))
    train(est)
    through_a_file(est.state_dict())
