"""Presets are compositions: each equals its twin built from DESIGN section 3."""

import math
import warnings

import pytest
import torch

import compopt
from tests.database import BY_NAME, MODES
from tests.helpers import batches, group_key, near, run
from tests.reference import DualReference, FixedReference, GlobalDualReference, MovingAverageReference, Reference
from tests.test_agreement import follow

# Batches of six cannot reach rho = 6; that warning has its own test.
pytestmark = pytest.mark.filterwarnings("ignore")
N = 13
DEFAULTS = {
    "bimodal": {"tau_init": 0.01, "tau_min": 0.005, "tau_max": 0.5, "rho": 6.0, "max_grad": 5.0},
    "unimodal": {"tau_init": 0.7, "tau_min": 0.05, "tau_max": 1.0, "rho": 0.3, "max_grad": 3.0},
}


@pytest.mark.parametrize("mode", MODES)
def test_isogclr_defaults_by_mode(mode):
    """gamma 0.9, lr 1e-2, momentum 0.9, reference "positive"; the rest by mode."""
    est = compopt.ISogCLREstimator(N, mode=mode, dtype=torch.float64)
    group = {"n": N, "gamma": 0.9, "lr": 1e-2, **DEFAULTS[mode]}
    ref = Reference([group], MovingAverageReference("positive"), DualReference("momentum", 0.9), mode)
    follow(BY_NAME["isogclr"], est, ref, N, batches(N, 8, seed=1))


def fastclip(version):
    """The estimator, float64, with a gamma that shows, and the hyper-parameters that the preset set."""
    est = compopt.FastCLIPEstimator(N, version=version, dtype=torch.float64)
    group = est.sample_groups[0]
    group[group_key(group, "gamma")] = 0.6
    names = ("tau",) if version == "v1" else ("rho", "lr", "tau_init", "tau_min", "tau_max", "max_grad")
    return est, {"n": N, "gamma": 0.6, **{name: group[group_key(group, name)] for name in names}}


@pytest.mark.parametrize(
    "version, info, twin",
    [
        ("v1", "sogclr-positive", lambda group: FixedReference()),
        ("v2", "isogclr-adam", lambda group: DualReference("adam")),
        ("v3", "global-dual", lambda group: GlobalDualReference(group["tau_init"], "adam")),
    ],
)
def test_fastclip_is_its_twin(version, info, twin):
    """A constant temperature; individual ones; one that is learned."""
    est, group = fastclip(version)
    ref = Reference([group], MovingAverageReference("positive", 1e-14), twin(group))
    follow(BY_NAME[info], est, ref, N, batches(N, 6, seed=3))
    assert ("tau" in est.read(torch.arange(2))) == (version == "v2")
    if version == "v3":
        assert est.temperature.tau.dim() == 0 and float(est.temperature.tau) != group["tau_init"]


def test_fastclip_v0_learns_a_global_tau_and_does_not_multiply():
    """Value mean alpha; tau moves; the features' gradient is that of weights w / tau."""
    est, group = fastclip("v0")
    tau = group["tau_init"]
    beside = FixedReference()
    average = MovingAverageReference("positive", 1e-14)
    ref = Reference([{"n": N, "gamma": 0.6, "tau": tau}], average, beside, multiply_tau=False)
    z1, z2, index = batches(N, 1, seed=4)[0]
    for got, want in zip(run(est, z1, z2, index), ref.forward(z1, z2, index), strict=True):
        near(got, want)
    est.step()
    assert (float(est.temperature.tau) < tau) == (ref.tau_grad > 0) and float(est.temperature.tau) != tau
    with pytest.raises(ValueError, match="v7"):
        compopt.FastCLIPEstimator(N, version="v7")


def test_clip_is_infonce_with_a_learned_tau_not_multiplied():
    """F.cross_entropy both ways, up to the constant log(B - 1)."""
    est = compopt.InfoNCEEstimator(tau=0.07, learn_tau=True, multiply_tau=False)
    z1, z2, _ = batches(N, 1, seed=5)[0]
    scale = list(est.parameters())[0].detach().double().exp().requires_grad_()
    z1.requires_grad_()
    normalize = torch.nn.functional.normalize
    logits = scale * normalize(z1) @ normalize(z2).T
    target = torch.arange(len(z1))
    cross_entropy = torch.nn.functional.cross_entropy
    want = (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2
    want.backward()
    loss, g1, _ = run(est, z1, z2, target)
    near(loss, want - math.log(len(z1) - 1), 1e-6)
    near(g1, z1.grad, 1e-5)
    near(list(est.parameters())[0].grad, scale.grad * scale, 1e-5)


def test_rho_beyond_reach_is_warned_about_once():
    """rho >= log|N_i|: G can never be negative enough; said once."""
    est = compopt.ISogCLREstimator(N, rho=6.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for z1, z2, index in batches(N, 4, seed=7, dtype=torch.float32):
            run(est, z1, z2, index)
            est.step()
    assert len([w for w in caught if "rho" in str(w.message)]) == 1
    reachable = compopt.ISogCLREstimator(N, rho=1.0)  # log 5 = 1.6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(reachable, *batches(N, 1, seed=7, dtype=torch.float32)[0])


def test_recommended():
    """The memory of 128 samples at 0.07, a quarter of a small data set, DCL in large batches."""
    est = compopt.recommended(8)
    assert isinstance(est, compopt.MemoryEstimator)
    assert est.normalizer.length == 128 and est.sample_groups[0]["tau"] == 0.07
    assert compopt.recommended(8, n=100, mode="unimodal").normalizer.length == 25
    assert isinstance(compopt.recommended(8, batch_size=1023), compopt.MemoryEstimator)
    assert isinstance(compopt.recommended(8, batch_size=16, directions="forward"), compopt.DCLEstimator)
    assert isinstance(compopt.recommended(8, batch_size=1024), compopt.DCLEstimator)
    with pytest.raises(ValueError, match="batch_size"):
        compopt.recommended(8, batch_size=0)
    with pytest.raises(ValueError, match="mode"):
        compopt.recommended(8, mode="both")
