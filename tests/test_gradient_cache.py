"""compopt.gradient_cache gives the gradients of the whole batch, in every framework."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compopt
from tests.cached import (
    ESTIMATORS,
    FEATURES,
    SHARES,
    D,
    Encoders,
    N,
    Noisy,
    assert_close,
    assert_like_one_process,
    assert_like_two_windows,
    data,
    linear_towers,
    most_held,
    on_ranks,
    outcome,
    run_windows,
    two,
    undivided,
    whole,
    with_tau,
)
from tests.pool import the_pool

# one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_every_way_to_call(feature):
    assert_like_one_process([outcome("Plain", "sogclr", feature, 1)], ("sogclr", feature), 1e-10)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_estimator(kind):
    assert_like_one_process([outcome("Plain", kind, "pair", 1)], (kind, "pair"), 1e-10)


# ranks -----------------------------------------------------------------------------------------------------------

# one; one for each of 5 sharded modules; one in each of 4 micro-batches
REDUCTIONS = {"DDP": 1, "Accelerate": 1, "FSDP2": 5}
REDUCTIONS |= {"ZeRO0": 1, "ZeRO1": 1, "ZeRO2": 4, "ZeRO3": 4}


SOME_FEATURES = "pair", "tau", "labels", "negatives", "frozen", "adapters", "checkpointed"


def cases():
    """Return combinations of frameworks and features, of estimators, and of ranks."""
    found = [(framework, "sogclr", feature, 2) for framework in ("DDP", "FSDP2") for feature in FEATURES]
    found += [("Accelerate", "sogclr", feature, 2) for feature in SOME_FEATURES]
    found += [(framework, kind, "pair", 2) for framework in ("DDP", "FSDP2") for kind in ESTIMATORS if kind != "sogclr"]
    found += [("DDP", "sogclr", feature, 3) for feature in FEATURES]
    found += [("FSDP2", "sogclr", feature, 3) for feature in ("pair", "negatives")]
    return [*found, ("Accelerate", "isogclr", "negatives", 3)]


DAILY = [("DDP", "clip", "pair", 2)]


@pytest.mark.distributed
@pytest.mark.covering(all=True)
@pytest.mark.parametrize(
    "case", [pytest.param(c, id="-".join(map(str, c)), marks=[] if c in DAILY else pytest.mark.full) for c in cases()]
)
def test_frameworks_of_torch(case):
    """Ranks with unequal numbers of micro-batches equal one process, with as many reductions as for one batch."""
    framework, kind, feature, ranks = case
    results = the_pool(ranks, timeout=120).run(on_ranks, ranks, *case)
    assert_like_one_process(results, (kind, feature), 1e-10)
    if feature in ("pair", "tau") and kind in ("sogclr", "clip"):
        assert {reduced for *_, reduced in results} == {REDUCTIONS[framework]}


def deepspeed_cases():
    found = [(stage, "sogclr", feature, 2) for stage in ("ZeRO2", "ZeRO3") for feature in SOME_FEATURES]
    found += [(stage, "sogclr", feature, 2) for stage in ("ZeRO0", "ZeRO1") for feature in SOME_FEATURES[:2]]
    found += [("ZeRO3", kind, "pair", 2) for kind in ESTIMATORS if kind != "sogclr"]
    return [*found, ("ZeRO3", "isogclr", "negatives", 3)]


@pytest.mark.launch
@pytest.mark.distributed
@pytest.mark.covering(all=True)
@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize("case", deepspeed_cases(), ids=lambda case: "-".join(map(str, case)))
def test_deepspeed(case):
    """Under ZeRO 0 the model uses single precision, which is up to 5e-6 off double precision for a whole batch."""
    framework, kind, feature, ranks = case
    pool = the_pool(ranks, timeout=120)
    results = pool.run(on_ranks, ranks, *case)
    assert_like_one_process(results, (kind, feature), 1e-5 if framework == "ZeRO0" else 1e-6)
    for found, expected in zip(results, pool.run(on_ranks, ranks, *case, undivided), strict=True):
        assert_close(found, expected, 1e-6)
    if feature == "pair" and kind == "sogclr" and framework in REDUCTIONS:
        assert {reduced for *_, reduced in results} == {REDUCTIONS[framework]}


@pytest.mark.parametrize(
    "framework",
    [
        "DDP",
        pytest.param("FSDP2", marks=pytest.mark.full),
        *(pytest.param(f"ZeRO{k}", marks=[pytest.mark.launch, pytest.mark.full]) for k in range(1, 4)),
    ],
)
@pytest.mark.distributed
def test_several_calls_for_one_update(framework, request):
    if framework.startswith("ZeRO"):
        request.getfixturevalue("deepspeed_compiled")
    for gradients, deposits in the_pool(2, timeout=120).run(run_windows, 2, framework):
        assert deposits == 2
        assert_like_two_windows(framework, gradients)


# features of models ----------------------------------------------------------------------------------------------


def one_graph(est, tower, x, size):
    """Run one backward pass through all micro-batches, which are encoded one after another."""
    z1, z2 = (torch.cat([tower(part) for part in x.split(size)]) for _ in range(2))
    loss = est(z1, z2, torch.arange(len(x)))
    loss.backward()
    return loss.detach(), [p.grad for p in tower.parameters()]


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_both_passes_draw_the_same_random_numbers(checkpointed):
    x, (loss, expected) = torch.randn(11, 5).double(), (None, None)
    torch.manual_seed(1)
    loss, expected = one_graph(compopt.DCLEstimator(), Noisy(), x, 4)
    after = torch.rand(1)
    tower = Noisy(checkpointed)
    found = compopt.gradient_cache(compopt.DCLEstimator(), (tower, tower), (x, x), micro_batch_size=4)
    assert torch.equal(torch.rand(1), after) and torch.equal(found, loss)
    for p, gradient in zip(tower.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=1e-14)


def test_batch_normalisation_is_refused_or_updated_once():
    x, call = torch.randn(12, 5).double(), {"micro_batch_size": 4}
    expected, tower = (Noisy(norm=nn.BatchNorm1d(8).double()) for _ in range(2))
    one_graph(compopt.DCLEstimator(), expected, x, 4)
    with pytest.raises(ValueError, match="BatchNorm1d in training mode.*update_once"):
        compopt.gradient_cache(compopt.DCLEstimator(), (tower, tower), (x, x), **call)
    compopt.gradient_cache(compopt.DCLEstimator(), (tower, tower), (x, x), batch_norm="update_once", **call)
    buffers = dict(expected.named_buffers())
    assert buffers.keys() == dict(tower.named_buffers()).keys() and len(buffers) == 3
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in tower.named_buffers())
    compopt.gradient_cache(compopt.DCLEstimator(), (tower.eval(), tower), (x, x), **call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Weights that the first pass casts without a graph get gradients in the second, also from a scaled loss."""
    *inputs, index = data(0, SHARES[1], torch.float32)
    cached, expected = Encoders(torch.float32), Encoders(torch.float32)
    with torch.autocast("cpu", dtype):
        whole(compopt.DCLEstimator(), expected, inputs[:2], index, encode=two)
        call = {"encode": two, "micro_batch_size": 3, "backward": lambda loss: (loss * 2**16).backward()}
        compopt.gradient_cache(compopt.DCLEstimator(), cached, tuple(inputs[:2]), index, **call)
    for p, q in zip(cached.parameters(), expected.parameters(), strict=True):
        assert (p.grad / 2**16 - q.grad).norm() <= 0.02 * q.grad.norm()


def test_graphs_hold_the_activations_of_one_micro_batch():
    micro_batch = most_held("Plain", 4, whole)
    assert most_held("Plain", 16, compopt.gradient_cache, 4) <= 1.02 * micro_batch
    assert most_held("Plain", 16, whole) > 3.9 * micro_batch


# other arguments -------------------------------------------------------------------------------------------------


def test_a_frozen_tower_is_encoded_once_and_others_twice():
    *inputs, index = data(0, SHARES[1], torch.float64)
    model, calls = Encoders(torch.float64), {"first": 0, "second": 0}
    for name in calls:
        getattr(model, name).register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    model.first.requires_grad_(False)
    towers = (model.first, model.second.forward)  # a method: hooks of the tower do not run, only those of its layers
    compopt.gradient_cache(compopt.DCLEstimator(), towers, tuple(inputs[:2]), index, micro_batch_size=4)
    assert calls == {"first": 4, "second": 0} and model.second[0].weight.grad is not None


def test_temperatures_that_are_tensors_and_features_that_are_given():
    x1, x2, x3, index = data(0, SHARES[1], torch.float64)
    results = []
    for run, size in ((whole, {}), (compopt.gradient_cache, {"micro_batch_size": 5})):
        model, scale = Encoders(torch.float64), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        call = {"encode": two, "tau": 1 / scale, "negatives": model.second(x3)}
        run(compopt.DCLEstimator(), model, (x1, x2), index, **call, **size)
        results.append([scale.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("leaf", [True, False])
def test_a_tensor_in_place_of_the_temperature_gets_its_gradient(leaf):
    x1, x2, _, index = data(0, SHARES[1], torch.float64)
    results, model = [], Encoders(torch.float64)
    for run, size in ((whole, {}), (compopt.gradient_cache, {"micro_batch_size": 5}), (None, {})):
        scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        est = compopt.InfoNCEEstimator(tau=scale if leaf else scale * 1, multiply_tau=False)
        if run is not None:
            run(est, model, (x1, x2), index, encode=two, **size)
        elif leaf:
            est.feature_gradients(*(z.detach() for z in two(model, (x1, x2))), index)
        else:
            with pytest.raises(ValueError, match="tau= requires a gradient"):
                est.feature_gradients(*(z.detach() for z in two(model, (x1, x2))), index)
            break
        results.append(scale.grad)
    for gradient in results[1:]:
        torch.testing.assert_close(gradient, results[0])


def test_features_of_a_sampler_that_require_a_gradient_are_refused():
    x1, x2, _, index = data(0, SHARES[1], torch.float64)
    model, est = Encoders(torch.float64), compopt.EMC2Estimator(N, tau=0.3, proposals="dataset", dtype=torch.float64)
    est.normalizer.encode = encode = lambda at: two(model, (x1[at % len(x1)], x2[at % len(x2)]))
    call = (est, model, (x1, x2), index)
    with pytest.raises(ValueError, match="encode returned features that require a gradient.*bank"):
        compopt.gradient_cache(*call, encode=two, micro_batch_size=5)
    assert est.normalizer.encode is encode and est.pending == 0
    est.normalizer.encode = torch.no_grad()(encode)
    assert compopt.gradient_cache(*call, encode=two, micro_batch_size=5).isfinite() and est.pending == 1


def test_without_gradients_it_returns_the_loss():
    *inputs, index = data(0, SHARES[1], torch.float64)
    est, model = compopt.SogCLREstimator(N), Encoders(torch.float64)
    with torch.no_grad():
        loss = compopt.gradient_cache(est, model, tuple(inputs[:2]), index, encode=two, micro_batch_size=3)
    assert loss.isfinite() and est.pending == 0 and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be a positive integer, got 0"),
        ({"micro_batch_size": lambda x: [3, 4]}, TypeError, "must be a positive integer, got <function"),
        ({"micro_batch_size": (3, 4)}, TypeError, r"must be a positive integer, got \(3, 4\)"),
        ({"micro_batch_size": (3, 4, 5), "model": (None, None)}, TypeError, "one size or 2, one for each tower"),
        ({"batch_norm": "keep"}, ValueError, "batch_norm must be one of 'refuse', 'update_once', got 'keep'"),
        ({"reduce": 1}, TypeError, "reduce must be True or False"),
        ({"batch": (torch.ones(4, 5), torch.ones(3, 4))}, ValueError, "one entry per sample"),
        ({"model": [nn.Linear(5, D)] * 3}, TypeError, "3 towers.*as many inputs"),
        ({"encode": lambda model, part: "z"}, TypeError, "tensor or a tuple of them, got str; give encode="),
        ({"encode": None}, ValueError, "0-d tensor; give encode="),
        ({"encode": with_tau, "tau": 0.1}, ValueError, "tau is returned by model and passed as tau="),
        ({"encode": lambda model, part: model(*part)[2:]}, ValueError, "z1, z2 and perhaps negatives and tau, got 1"),
        (
            {"encode": lambda model, part: part[0].split(2, 1)[:2], "model": None},
            ValueError,
            "nothing requires a gradient",
        ),
        ({"model": Encoders(torch.float64).requires_grad_(False)}, ValueError, "nothing requires a gradient"),
    ],
)
def test_mistakes_are_named(change, error, message):
    *inputs, index = data(0, SHARES[1], torch.float64)
    call = {"model": Encoders(torch.float64), "batch": tuple(inputs[:2]), "encode": two, "micro_batch_size": 3}
    with pytest.raises(error, match=message):
        compopt.gradient_cache(compopt.DCLEstimator(), index=index, **{**call, **change})


# refused calls, and state after errors ----------------------------------------------------------------------------


def cached(towers, batch, **options):
    est = compopt.DCLEstimator(0.3)
    return compopt.gradient_cache(est, towers, batch, torch.arange(16), micro_batch_size=4, **options)


def test_normalisation_without_running_statistics_is_refused():
    first, second = linear_towers()
    normalised = nn.Sequential(first, nn.BatchNorm1d(D, track_running_stats=False).double()).eval()
    with pytest.raises(ValueError, match="BatchNorm1d"):
        cached((normalised, second), (torch.randn(16, 5).double(), torch.randn(16, 4).double()))


@pytest.mark.parametrize("earlier", [0, 1])
def test_an_error_in_the_second_pass_leaves_no_deposit(earlier):
    *inputs, index = data(0, SHARES[1], torch.float64)
    est, model, passes = compopt.SogCLREstimator(N), Encoders(torch.float64), []

    def encode(model, part):
        passes.append(len(part[0]))
        if len(passes) == fails:
            raise torch.OutOfMemoryError
        return two(model, part)

    def call():
        passes.clear()
        return compopt.gradient_cache(est, model, tuple(inputs[:2]), index, encode=encode, micro_batch_size=4)

    fails = 0
    usual = call()
    est.discard()
    for _ in range(earlier):
        call()
    fails = 6  # of eight passes
    with pytest.raises(torch.OutOfMemoryError):
        call()
    assert est.pending == 0
    fails = 0
    assert torch.equal(call(), usual) and est.pending == 1


def test_a_list_of_columns_is_no_batch():
    first, second = linear_towers()
    model = nn.ModuleList([first, second])
    with pytest.raises(ValueError, match=r"a list of 2 tensors of 16 samples.*tuple\(batch\)"):
        cached(model, [torch.randn(16, 5).double(), torch.randn(16, 4).double()])


def test_a_prompt_beside_a_frozen_tower_learns():
    first, second = linear_towers()
    first.requires_grad_(False)
    prompt = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    x1, x2 = torch.randn(16, 5).double(), torch.randn(16, 4).double()

    def encode(tower, part):
        return tower(part + prompt) if tower is first else tower(part)

    cached((first, second), (x1, x2), encode=encode)
    found, prompt.grad = prompt.grad, None
    compopt.DCLEstimator(0.3)(first(x1 + prompt), second(x2), torch.arange(16)).backward()
    torch.testing.assert_close(found, prompt.grad)


def test_outputs_that_are_refused():
    first, second = linear_towers()
    x1, x2 = torch.randn(16, 5).double(), torch.randn(16, 4).double()
    with pytest.raises(ValueError, match="squeeze"):
        cached(first, (x1, x2), encode=lambda model, part: (first(part[0]), second(part[1]), torch.ones(1)))
    with pytest.raises(TypeError, match="NoneType"):
        cached(first, (x1, x2), encode=lambda model, part: (first(part[0]), second(part[1]), None))
    with pytest.raises(TypeError, match="est must be"):
        compopt.gradient_cache(first, second, (x1, x2), micro_batch_size=4)


class Limited(nn.Module):
    """Tower that raises at a given call, as a model does that is out of memory or meets a bad input."""

    def __init__(self, layer, last):
        super().__init__()
        self.layer, self.left = layer, last

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise KeyError("the model failed")
        return self.layer(x)


def one_refuses(group, case, wrapped):
    """Return the error of this rank, and the loss of the next call; only rank 0 has a mistake in the first call."""
    est, mistaken = compopt.SogCLREstimator(16, process_group=group), dist.get_rank() == 0
    first, second = linear_towers()
    first = Limited(first, {"first pass": 0, "later pass": 1}.get(case, 99) if mistaken else 99)
    towers = [DistributedDataParallel(tower, process_group=group) if wrapped else tower for tower in (first, second)]
    batch, index = (torch.randn(8, 5).double(), torch.randn(8, 4).double()), torch.arange(8) + 8 * dist.get_rank()
    options = {"micro_batch_size": 4}
    if mistaken:
        options["micro_batch_size"] = 0 if case == "sizes" else 4
        options["batch_norm"] = "no such" if case == "option" else "refuse"
        options["encode"] = (lambda tower, part: "no features") if case == "outputs" else None
    try:
        compopt.gradient_cache(est, towers, batch, index, **options)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        first.left = 99
        loss = compopt.gradient_cache(est, towers, batch, index, micro_batch_size=4)
        est.step()
        return type(error).__name__, str(error)[:40], loss.isfinite().item()


@pytest.mark.distributed
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "case, error",
    [
        ("sizes", "ValueError"),
        ("option", "ValueError"),
        ("first pass", "KeyError"),
        ("later pass", "KeyError"),
        ("outputs", "TypeError"),
    ],
)
def test_ranks_do_not_wait_for_one_that_refuses_its_inputs(case, error, wrapped):
    (own, _, again), (other, message, other_again) = the_pool().run(one_refuses, 2, case, wrapped)
    assert (own, other, again, other_again) == (error, "RuntimeError", True, True)
    assert message.startswith("rank 0 refused its arguments") or (wrapped and "rank 0 is in" in message)
