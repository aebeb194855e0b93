"""Read, deposit, commit: permitted and forbidden effects of each call."""

import inspect
import math

import pytest
import torch

import compopt
from tests.database import BY_NAME, DATABASE, MODES, STATEFUL, WITH_ROWS
from tests.helpers import assert_same_bits, batches, bits, features, make, near, run, snapshot, warmed

N = 13


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_training_forward_deposits_and_only_step_writes(info, mode):
    est = warmed(info, mode, N, 50)
    before = snapshot(est, N)
    z1, z2, index = batches(N, 1, seed=51)[0]
    assert est.training and est.pending == 0
    run(est, z1, z2, index)
    if info.has_state:
        assert est.pending == 1
    run(est, z1, z2, index)
    if info.has_state:
        assert est.pending == 2
    assert_same_bits(before, snapshot(est, N))
    est.step()
    assert est.pending == 0
    if info.has_state:
        with pytest.raises(AssertionError):
            assert_same_bits(before, snapshot(est, N))


@pytest.mark.covering()
@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_evaluation_leaves_no_trace(info, mode, how):
    est, twin = warmed(info, mode, N, 50), warmed(info, mode, N, 50)
    before = snapshot(est, N)
    z1, z2, index = batches(N, 1, seed=52)[0]
    want = run(twin, z1, z2, index)
    if how == "eval":
        est.eval()
        assert not est.training
        loss = est(z1, z2, index)
        est.train()
        assert est.training
    else:
        with getattr(torch, how)():
            loss = est(z1, z2, index)
    assert loss.dim() == 0 and torch.isfinite(loss)
    assert est.pending == 0
    est.step()
    assert_same_bits(before, snapshot(est, N))
    for a, b in zip(run(est, z1, z2, index), want, strict=True):
        assert bits(a) == bits(b), "an evaluation changed a later training step"
    near(loss, want[0], 1e-12)  # the value is that of a training forward


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_discard_forgets_the_deposits(info, mode):
    est, twin = warmed(info, mode, N, 50), warmed(info, mode, N, 50)
    z1, z2, index = batches(N, 1, seed=54)[0]
    run(est, z1, z2, index)
    run(est, z1, z2, index)
    est.discard()
    assert est.pending == 0
    est.step()
    assert_same_bits(snapshot(twin, N), snapshot(est, N))
    for z1, z2, index in batches(N, 3, seed=55):
        a, b = run(est, z1, z2, index), run(twin, z1, z2, index)
        assert all(bits(x) == bits(y) for x, y in zip(a, b, strict=True))
        est.step()
        twin.step()
    assert_same_bits(snapshot(twin, N), snapshot(est, N))


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_metrics_are_detached_scalars(info, mode):
    est, ref = make(info, mode, N, gamma=0.6)
    z1, z2, index = batches(N, 1, seed=57)[0]
    run(est, z1, z2, index)
    ref.forward(z1, z2, index)
    assert isinstance(est.metrics, dict) and est.metrics
    for name, value in est.metrics.items():
        assert isinstance(name, str)
        assert isinstance(value, torch.Tensor) and value.dim() == 0, name
        assert not value.requires_grad and torch.isfinite(value), (name, value)
    values = [float(v) for v in est.metrics.values()]

    def shown(want):
        return any(abs(v - want) < 1e-5 * max(1, abs(want)) for v in values)

    assert shown(sum(ref.alphas) / len(ref.alphas)), est.metrics
    effective = [sum(w) ** 2 / sum(x * x for x in w) for w in ref.weights]  # both directions, or the first alone
    assert any(shown(sum(part) / len(part)) for part in (effective, effective[: len(index)])), est.metrics


def test_repr_shows_what_was_chosen():
    shown = repr(compopt.recommended(dim=48, n=1000, batch_size=16))
    for line in ("mode: bimodal", "directions: both", "dim: 48", "length: 128", "tau: 0.07"):
        assert f"    {line}\n" in shown, shown
    assert "directions: forward\n" in repr(compopt.SogCLREstimator(9, directions="forward"))
    assert "mode: unimodal\n" in repr(compopt.DCLEstimator(mode="unimodal"))
    network = repr(compopt.NeuCLIPEstimator(dim=8, prototypes=32))
    assert "dim: 8\n" in network and "prototypes: 32\n" in network
    assert "normalize: False\n" in repr(compopt.SogCLREstimator(9, normalize=False))


PARTS = {
    "normalizer": [
        compopt.BatchNormalizer,
        lambda: compopt.MovingAverageEstimator(9),
        lambda: compopt.NeuralNormalizer(4, 8),
        lambda: compopt.MemoryNormalizer(4, 8, momentum=True),
        lambda: compopt.SigmoidNormalizer(learn=True),
        lambda: compopt.MCMCNegativeSampler(9, proposals="dataset"),
    ],
    "temperature": [
        lambda: compopt.FixedTemperature(0.1, learn=True),
        lambda: compopt.TemperatureDual(9),
        lambda: compopt.TemperatureDual(None, mode="global", parametrization="log"),
    ],
}


def test_repr_names_the_parts_and_arguments_of_their_constructors():
    """Values of a part have names of arguments of its constructor, or of that of the network inside it."""
    for role, builds in PARTS.items():
        for build in builds:
            part = build()
            parts = {"normalizer": compopt.BatchNormalizer(), "temperature": compopt.FixedTemperature()} | {role: part}
            est = compopt.ContrastiveEstimator(**parts)  # parts have a weak reference to it
            shown = repr(est)
            assert all(f"    {name}: {type(each).__name__}\n" in shown for name, each in parts.items()), shown
            taken = inspect.signature(type(part)).parameters | inspect.signature(compopt.NeuralNormalizer).parameters
            assert part.described().keys() | part.sample_groups[0].keys() <= {*taken, "tau"}, shown
    exported = {
        c
        for c in vars(compopt).values()
        if inspect.isclass(c) and issubclass(c, compopt.Normalizer | compopt.Temperature)
    }
    assert {type(build()) for builds in PARTS.values() for build in builds} == exported - {
        compopt.Normalizer,
        compopt.Temperature,
    }


def test_every_exported_class_has_a_repr():
    for cls in (value for name in compopt.__all__ if inspect.isclass(value := getattr(compopt, name))):
        assert cls.__repr__ is not object.__repr__, cls
    assert repr(compopt.MomentumEncoder(torch.nn.Linear(2, 3), 0.9)) == "MomentumEncoder(Linear, decay=0.9)"


def test_a_global_temperature_that_is_read_is_a_copy():
    for dual in (compopt.TemperatureDual(None, mode="global", tau_init=0.2), compopt.FastCLIPEstimator(9).temperature):
        want = float(dual.tau)
        dual.tau.fill_(7.0), dual.value().fill_(7.0)
        assert float(dual.tau) == want == float(dual.value())


def test_repr_shows_a_learned_temperature():
    est = compopt.InfoNCEEstimator(0.1, learn_tau=True)
    assert "tau: 0.1 (learned)" in repr(est)
    with torch.no_grad():
        next(est.parameters()).fill_(math.log(20))
    assert "tau: 0.05 (learned)" in repr(est)
    assert "tau: 0.07 (a tensor)" in repr(compopt.InfoNCEEstimator(torch.tensor(0.07)))
    assert "tau: learned, one per sample" in repr(compopt.ISogCLREstimator(9))
    dual = compopt.FastCLIPEstimator(100)
    assert f"tau: {dual.temperature.state['tau'].item():.6g} (learned)" in repr(dual)
    assert "parametrization: log" in repr(dual)
    assert "parametrization" not in repr(compopt.FastCLIPEstimator(100, parametrization="linear"))


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", WITH_ROWS, ids=str)
def test_read_returns_copies_of_committed_values(info, mode):
    est = warmed(info, mode, N, 50)
    columns = est.read(torch.arange(N))
    width = 2 if mode == "bimodal" else 1
    assert columns["count"].shape == (N,) and not columns["count"].is_floating_point()
    for name in info.columns:
        assert columns[name].shape == (N, width)
        assert columns[name].dtype == (torch.int64 if name == "chain" else torch.float64)
        columns[name].fill_(123)
    columns["count"].fill_(77)
    again = est.read(torch.tensor([3, 3, 0]))
    assert not any((again[name] == 123.0).any() for name in info.columns)
    assert again["count"].shape == (3,) and (again["count"] < 77).all()


def test_features_without_grad_still_deposit():
    """Training mode determines deposits, not requires_grad (cached features)."""
    est = compopt.SogCLREstimator(N, tau=0.1)
    z1, z2 = features(4, 4, seed=0, dtype=torch.float32)
    est(z1, z2, torch.arange(4))
    assert est.pending == 1


def test_one_tower_frozen():
    """Only one side requires grad (locked-image tuning)."""
    z1, z2, index = batches(N, 1, seed=61)[0]
    want = run(make(BY_NAME["sogclr"], "bimodal", N)[0], z1, z2, index)
    est, _ = make(BY_NAME["sogclr"], "bimodal", N)
    z2.requires_grad_()
    est(z1, z2, index).backward()
    assert z1.grad is None
    near(z2.grad, want[2], 1e-14)
