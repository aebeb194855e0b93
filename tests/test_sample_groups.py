"""Sample groups: several data sets in one estimator, hyper-parameters changed in place, groups added during a run."""

import math

import pytest
import torch

import compopt
from tests.database import BY_NAME, MODES, dual_options
from tests.helpers import batches, compare_state, features, group_key, near, run
from tests.reference import DualReference, FixedReference, MovingAverageReference, Reference
from tests.test_agreement import compare_forward, follow

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


def test_a_group_added_while_deposits_wait():
    """Pending rows are neither lost nor shifted."""
    est, ref = sogclr_pair("bimodal")
    z1, z2, index = batches(N1 + N2, 1, seed=9)[0]
    compare_forward(BY_NAME["sogclr"], est, ref, z1, z2, index)
    est.add_sample_group({"n": 4})
    ref.groups.append({"n": 4, "gamma": 0.35, "tau": 0.1})
    est.step()
    ref.step()
    compare_state(est, ref, N1 + N2 + 4, BY_NAME["sogclr"])


def test_dicts_and_pairs_of_the_user_are_not_shared():
    betas = [0.9, 0.999]
    groups = [{"n": 9, "gamma": 0.5, "betas": betas}]
    a, b = (compopt.ISogCLREstimator(groups, optimizer="adam") for _ in range(2))
    a.sample_groups[0]["gamma"], betas[0] = 0.25, 7.0
    assert b.sample_groups[0]["gamma"] == groups[0]["gamma"] == 0.5
    assert a.sample_groups[0]["betas"] == (0.9, 0.999)
    with pytest.raises(ValueError, match="betas"):
        a.sample_groups[0]["betas"] = [7.0, 0.9]


@pytest.mark.parametrize("mode", MODES)
def test_groups_with_their_own_eps_and_gamma_1(mode):
    """Mix eps = 0 with eps > 0, and gamma = 1 with gamma < 1: the logarithms of 0 do no harm."""
    groups = [{"n": N1, "eps": 0.2, "gamma": 1.0}, {"n": N2, "eps": 0.0, "gamma": 0.4}]
    est = compopt.SogCLREstimator(groups, tau=0.1, mode=mode, reference="positive", dtype=torch.float64)

    class OwnEps(MovingAverageReference):
        def updated(self, ref, row, column, g):
            self.eps = ref.hyper(row, "eps")
            return super().updated(ref, row, column, g)

    ref = Reference([{"tau": 0.1, **g} for g in groups], OwnEps("positive"), FixedReference(), mode)
    follow(BY_NAME["sogclr"], est, ref, N1 + N2, batches(N1 + N2, 8, seed=11))


@pytest.mark.parametrize("name", PAIRS)
def test_the_two_modalities_in_different_groups(name):
    """index is in the first data set and index2 in the second: each direction uses its own row's group."""
    est, ref = PAIRS[name]("bimodal")
    for t in range(5):
        index = torch.randperm(N1)[:4]
        z1, z2, _ = batches(N1 + N2, 1, batch=4, seed=20 + t)[0]
        compare_forward(BY_NAME[name], est, ref, z1, z2, index, index2=index + N1)
        est.step()
        ref.step()


@pytest.mark.parametrize("mode", MODES)
def test_each_group_with_its_own_reference(mode):
    """log u averages over s in one data set, and over h in the other."""
    groups = [{"n": N1, "reference": "none"}, {"n": N2, "reference": "positive"}]
    est = compopt.SogCLREstimator(groups, gamma=0.5, tau=0.1, mode=mode, dtype=torch.float64)
    pure = {
        name: compopt.SogCLREstimator(N1 + N2, gamma=0.5, tau=0.1, reference=name, mode=mode, dtype=torch.float64)
        for name in ("none", "positive")
    }
    for z1, z2, index in batches(N1 + N2, 6, seed=12):
        for each in (est, *pure.values()):
            run(each, z1, z2, index)
            each.step()
    got, none, positive = (e.read(torch.arange(N1 + N2))["log_u"] for e in (est, pure["none"], pure["positive"]))
    near(got[:N1], none[:N1])
    near(got[N1:], positive[N1:])


def test_a_group_that_does_not_fit_in_memory_changes_nothing():
    est = compopt.SogCLREstimator(20)
    with pytest.raises((MemoryError, RuntimeError, ValueError)):
        est.add_sample_group({"n": 10**15})
    assert est.n == 20 and len(est.sample_groups) == 1
    z1, z2 = torch.randn(2, 4, 3)
    est(z1, z2, torch.arange(4))
    est.add_sample_group({"n": 2})
    assert est.n == 22


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


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_inference_mode_leaves_rows_that_can_be_written(offload):
    with torch.inference_mode():
        est = compopt.SogCLREstimator(12, offload=offload)
    run(est, *batches(12, 1, seed=9)[0])
    est.step()
    with torch.inference_mode():
        est.add_sample_group({"n": 4})
    z1, z2, _ = batches(12, 1, seed=9)[0]
    run(est, z1, z2, torch.arange(10, 16))
    est.step()
    assert est.read(torch.arange(10, 16))["count"].gt(0).all()


@pytest.mark.parametrize("spoil", [lambda groups: groups * 2, lambda groups: [None], lambda groups: [{"n": 20}]])
def test_refused_groups_change_nothing(spoil):
    est, state = compopt.SogCLREstimator(20, gamma=0.9), compopt.SogCLREstimator(20, gamma=0.3).state_dict()
    own = state["parts"]["normalizer"]
    own["sample_groups"] = spoil(own["sample_groups"])
    with pytest.raises(ValueError, match=r"sample.groups? .*the checkpoint has"):
        est.load_state_dict(state)
    assert est.sample_groups[0]["gamma"] == 0.9 and est.sample_groups[0]["n"] == 20


def test_the_positive_is_in_the_denominator_of_one_group():
    """Anchors of the first group have the weights of InfoNCE, those of the second the weights of DCL."""
    z1, z2 = features(8, 6, seed=4)
    index, tau = torch.arange(8), 0.2
    groups = [{"n": 4, "include_positive": True}, {"n": 4, "include_positive": False}]
    est = compopt.ContrastiveEstimator(
        compopt.BatchNormalizer(), compopt.FixedTemperature(tau), sample_groups=groups, multiply_tau=False
    )
    sims = torch.nn.functional.normalize(z1, dim=1) @ torch.nn.functional.normalize(z2, dim=1).T / tau
    expected = []
    for s in (sims, sims.T):
        others = s.masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
        alpha = torch.where(index < 4, s.logsumexp(1), others.logsumexp(1))
        expected.append(alpha - math.log(7) - s.diagonal())
    value = est(z1, z2, index)
    torch.testing.assert_close(value, torch.stack(expected).mean(1).sum() / 2, rtol=1e-12, atol=1e-12)
