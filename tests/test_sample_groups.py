"""Sample groups: several data sets in one estimator, hyper-parameters changed in place, groups added during a run."""

import pytest
import torch

import compopt
from tests.database import BY_NAME, MODES, dual_options
from tests.helpers import batches, group_key
from tests.reference import DualReference, FixedReference, MovingAverageReference, Reference
from tests.test_agreement import follow

N1, N2 = 5, 8


def sogclr_pair(mode):
    """Two data sets that differ in gamma; the defaults fill the rest."""
    groups = [{"n": N1, "gamma": 0.9}, {"n": N2}]
    est = compopt.SogCLREstimator(groups, gamma=0.35, tau=0.1, mode=mode, dtype=torch.float64)
    twin = [{"n": N1, "gamma": 0.9, "tau": 0.1}, {"n": N2, "gamma": 0.35, "tau": 0.1}]
    return est, Reference(twin, MovingAverageReference("none"), FixedReference(), mode)


def isogclr_pair(mode):
    """Two data sets that differ in every hyper-parameter of the dual."""
    first, second = dual_options(0.1), {**dual_options(0.3), "rho": 0.9, "lr": 0.02, "max_grad": 0.7}
    groups = [{"n": N1, "gamma": 0.8, **first}, {"n": N2, **second}]
    est = compopt.ISogCLREstimator(groups, gamma=0.5, beta=0.9, mode=mode, dtype=torch.float64)
    twin = [{"n": N1, "gamma": 0.8, **first}, {"n": N2, "gamma": 0.5, **second}]
    return est, Reference(twin, MovingAverageReference("positive"), DualReference(), mode)


PAIRS = {"sogclr": sogclr_pair, "isogclr": isogclr_pair}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAIRS)
def test_two_groups_with_different_hyper_parameters(name, mode):
    est, ref = PAIRS[name](mode)
    assert [g["n"] for g in est.sample_groups] == [N1, N2]
    follow(BY_NAME[name], est, ref, N1 + N2, batches(N1 + N2, 20, seed=1))


CHANGES = [
    ("sogclr", {"gamma": 0.2}),
    ("sogclr", {"tau": 0.2}),
    ("isogclr", {"gamma": 0.2, "rho": 1.5, "lr": 0.03, "tau_max": 0.305}),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, changes", CHANGES)
def test_hyper_parameters_changed_in_place_take_effect(name, changes, mode):
    est, ref = PAIRS[name](mode)
    info, own = BY_NAME[name], est.sample_groups[1]
    follow(info, est, ref, N1 + N2, batches(N1 + N2, 4, seed=3))
    for key, value in changes.items():
        own[group_key(own, key)] = ref.groups[1][key] = value
    follow(info, est, ref, N1 + N2, batches(N1 + N2, 6, seed=4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAIRS)
def test_a_group_added_during_a_run(name, mode):
    est, ref = PAIRS[name](mode)
    info = BY_NAME[name]
    follow(info, est, ref, N1 + N2, batches(N1 + N2, 6, seed=7))
    before = est.read(torch.arange(N1 + N2))
    more = {"n": 6, "gamma": 0.15}
    if name == "isogclr":
        more |= {**dual_options(0.2), "rho": 0.1}
    est.add_sample_group(dict(more))
    ref.groups.append({"tau": 0.1, **more})
    after = est.read(torch.arange(N1 + N2))
    for key in before:
        assert torch.equal(before[key].nan_to_num(), after[key].nan_to_num()), key
    assert est.read(torch.arange(N1 + N2, N1 + N2 + 6))["count"].tolist() == [0] * 6
    follow(info, est, ref, N1 + N2 + 6, batches(N1 + N2 + 6, 12, seed=8))


def test_dicts_and_pairs_of_the_user_are_not_shared():
    betas = [0.9, 0.999]
    groups = [{"n": 9, "gamma": 0.5, "betas": betas}]
    a, b = (compopt.ISogCLREstimator(groups, optimizer="adam") for _ in range(2))
    a.sample_groups[0]["gamma"], betas[0] = 0.25, 7.0
    assert b.sample_groups[0]["gamma"] == groups[0]["gamma"] == 0.5
    assert a.sample_groups[0]["betas"] == (0.9, 0.999)
    a.sample_groups[0]["betas"] = [7.0, 0.9]
    with pytest.raises(ValueError, match="betas"):
        a(*torch.randn(2, 4, 3), torch.arange(4))


def test_what_a_group_leaves_out_is_filled_once_all_else_is_known():
    """Bounds given in a group affect the defaults in the same way as bounds given as arguments."""
    as_argument = compopt.ISogCLREstimator(20, tau_min=0.05)
    in_group = compopt.ISogCLREstimator([{"n": 20, "tau_min": 0.05}])
    assert in_group.sample_groups == as_argument.sample_groups
    assert in_group.sample_groups[0]["tau_init"] == 0.05
    wider = compopt.ISogCLREstimator([{"n": 20, "tau_min": 0.001}, {"n": 3, "tau_min": 0.0005}], tau_init=0.002)
    assert [group["tau_init"] for group in wider.sample_groups] == [0.002, 0.002]
    tau = compopt.FastCLIPEstimator([{"n": 20, "tau_init": 0.2}]).temperature.tau
    assert tau == 0.2, "a global temperature starts where the first group says"


@pytest.mark.parametrize("spoil", [lambda groups: groups * 2, lambda groups: [None], lambda groups: [{"n": 20}]])
def test_refused_groups_change_nothing(spoil):
    est, state = compopt.SogCLREstimator(20, gamma=0.9), compopt.SogCLREstimator(20, gamma=0.3).state_dict()
    state["sample_groups"] = spoil(state["sample_groups"])
    with pytest.raises(ValueError, match=r"sample.groups? .*the checkpoint has"):
        est.load_state_dict(state)
    assert est.sample_groups[0]["gamma"] == 0.9 and est.sample_groups[0]["n"] == 20
