"""backend="triton" against plain torch in float64: presets, modes, labels, ranks, and what falls back."""

import logging
import os
from functools import partial

import pytest
import torch

import compopt
from compopt import PairPolicy
from compopt import functional as F
from compopt.kernel.triton.block import TritonBlock
from tests.database import DATABASE, MODES
from tests.helpers import batches, make, near
from tests.pool import the_pool
from tests.triton.operands import DEVICE

N, B, D = 60, 14, 6
RTOL = 2e-2 if DEVICE.type == "cuda" else 2e-5  # TF32 is exact in the interpreter
TAU = 0.1


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def call(est, dtype, extra=None, copy=None, **keys):
    """Return loss and all gradients of one call, in float64 on the CPU, and the metrics."""
    device = DEVICE if dtype == torch.float32 else torch.device("cpu")
    z = normal(2, B, D, seed=1).to(device, dtype).requires_grad_()
    index = torch.randperm(N, generator=generator(2))[:B]
    given = {name: value if name == "labels" else value.to(device) for name, value in keys.items()}
    if copy is not None:
        given["keys"] = copy.to(device, dtype).unbind()
    if extra is not None:
        given["negatives"] = extra.to(device, dtype, copy=True).requires_grad_()
    loss = est(*z, index, **given)
    loss.backward()
    leaves = [z, *([given["negatives"]] if extra is not None else []), *est.parameters()]
    found = [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return [value.cpu().double() for value in found], {k: float(v) for k, v in est.metrics.items()}


def assert_equal_calls(build, rtol=RTOL, **given):
    """Compare calls of one estimator with each backend."""
    exact, exact_metrics = call(build(backend="torch"), torch.float64, **given)
    found, metrics = call(build(backend="triton"), torch.float32, **given)
    for number, (f, e) in enumerate(zip(found, exact, strict=True)):
        near(f, e, rtol, what=f"value {number}")
    for name in ("log_normalizer", "info_nce", "effective_negatives"):
        assert metrics[name] == pytest.approx(exact_metrics[name], rel=100 * rtol, abs=rtol, nan_ok=True), name


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Count the sweeps of the kernel, to detect tests that fall back to torch."""
    seen = []
    sweep = TritonBlock._sweep
    monkeypatch.setattr(TritonBlock, "_sweep", lambda self: (seen.append(self), sweep(self))[1])
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [i for i in DATABASE if not i.draws and not i.has_policy], ids=str)
def test_every_estimator_of_the_database(info, mode, taken):
    """Two commits: the second call reads the rows of the first."""
    runs = {}
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        est, _ = make(info, mode, N, dtype, tau=TAU, backend=backend)
        device = DEVICE if backend == "triton" else torch.device("cpu")
        trace = runs.setdefault(backend, [])
        for z1, z2, index in batches(N, 2, dtype=torch.float64):
            leaves = [z.to(device, dtype).requires_grad_() for z in (z1, z2)]
            loss = est(*leaves, index)
            loss.backward()
            est.step()
            trace += [loss.detach().cpu().double(), *(leaf.grad.cpu().double() for leaf in leaves)]
    assert len(taken) >= (2 if est.normalizer.sums else 0)
    for number, (f, e) in enumerate(zip(runs["triton"], runs["torch"], strict=True)):
        near(f, e, 50 * RTOL, atol=50 * RTOL * max(1e-3, float(e.abs().max())), what=f"{info}, {mode}, value {number}")


LABELS = torch.arange(B) // 3
FORWARD, UNIMODAL = {"directions": "forward"}, {"mode": "unimodal"}
CALLS = {
    "one direction": (FORWARD, {}),
    "unimodal": (UNIMODAL, {}),
    "labels": ({}, {"labels": LABELS}),
    "labels, one direction": (FORWARD, {"labels": LABELS}),
    "labels, unimodal": (UNIMODAL, {"labels": LABELS}),
    "captions": ({}, {"index2": torch.arange(B) % 5, "labels": LABELS}),
    "chunks": ({"chunk_size": 5}, {"labels": LABELS}),
    "not normalised": ({"normalize": False}, {}),
}


@pytest.mark.parametrize("learn", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("case", CALLS)
def test_calls(case, learn, taken):
    options, given = CALLS[case]
    assert_equal_calls(lambda **more: compopt.DCLEstimator(TAU, learn_tau=learn, **options, **more), **given)
    assert len(taken) == 1


FALLEN_BACK = {
    "negatives=": (partial(compopt.DCLEstimator, TAU), {"extra": normal(5, D, seed=3)}),
    "pairs=": (partial(compopt.DCLEstimator, TAU, pairs=PairPolicy(hardness=2.0)), {}),
    "keys=": (partial(compopt.MemoryEstimator, D), {"copy": normal(2, B, D, seed=8)}),
}


@pytest.mark.parametrize("argument", FALLEN_BACK)
def test_what_the_kernel_does_not_take_falls_back(argument, taken, caplog):
    build, given = FALLEN_BACK[argument]
    with caplog.at_level(logging.DEBUG, "compopt.kernel.triton.choice"):
        assert_equal_calls(build, **given)
    assert not taken
    assert f"pairs: plain torch, since the call has {argument}" in caplog.messages


def test_medium_precision_is_bfloat16_where_tau_allows_it(taken):
    torch.set_float32_matmul_precision("medium")
    try:
        for tau in (0.1, 0.01):
            call(compopt.DCLEstimator(tau, backend="triton"), torch.float32)
        assert [block._precision for block in taken] == ["bf16", "tf32"]
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "tau",
    [0.1, torch.tensor(0.2), torch.linspace(0.1, 1.1, B), torch.linspace(0.1, 1.1, 2 * B).view(B, 2)],
    ids=["number", "0-d", "anchors", "directions"],
)
@pytest.mark.parametrize("keys", [None, LABELS, (LABELS, torch.arange(B) % 5)], ids=["own", "labels", "two"])
def test_contrastive_sums(tau, keys):
    """Compare value and gradients, including the temperature's."""
    results = {}
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        device = DEVICE if backend == "triton" else torch.device("cpu")
        z = [normal(B, D, seed=seed).to(device, dtype).requires_grad_() for seed in (4, 5)]
        t = tau.to(device, dtype, copy=True).requires_grad_() if isinstance(tau, torch.Tensor) else tau
        precision = "ieee" if backend == "triton" else None
        found = F.contrastive_sums(*z, t, keys, backend=backend, precision=precision, wave=8)
        (found * normal(B, 2, seed=6).to(device, dtype)).sum().backward()
        leaves = z + ([t] if isinstance(t, torch.Tensor) else [])
        results[backend] = [found.detach(), *(leaf.grad for leaf in leaves)]
    for number, (f, e) in enumerate(zip(results["triton"], results["torch"], strict=True)):
        near(f.cpu(), e, 1e-5, what=f"value {number}")


# -- several ranks ------------------------------------------------------------------------------------------------


def on_rank(group, case):
    """Return gradients of this rank's part of the batch, of which the second is larger, and the rows."""
    os.environ["TRITON_INTERPRET"] = "1"
    rank = torch.distributed.get_rank(group)
    swept = []
    products = TritonBlock.products
    TritonBlock.products = lambda *args: (swept.append(1), products(*args))[1]
    try:
        found = gradients(case, slice(0, 5) if rank == 0 else slice(5, B), group, 2, backend="triton")
    finally:
        TritonBlock.products = products
    assert len(swept) == 2  # a block of each direction or view
    return found


def gradients(case, own, group=None, ranks=1, **options):
    options = {**RANKED[case][0], **options}
    est = compopt.ISogCLREstimator(N, rho=0.5, tau_init=TAU, process_group=group, **options)
    z1, z2 = (normal(B, D, seed=seed)[own].float().requires_grad_() for seed in (1, 2))
    given = {name: value[own] for name, value in RANKED[case][1].items()}
    est(z1, z2, torch.arange(B)[own], **given).backward()
    est.step()
    found = torch.stack([z1.grad, z2.grad]).double() / ranks  # multiplied by the ranks, for wrappers that average
    return found, est.read(torch.arange(B))["log_u"].double()


RANKED = {
    "plain": ({}, {}),
    "unimodal": (UNIMODAL, {"labels": LABELS}),
    "one direction": (FORWARD, {"labels": LABELS}),
    "labels": ({}, {"labels": LABELS}),
}


@pytest.mark.distributed
@pytest.mark.skipif(DEVICE.type == "cuda", reason="ranks of the pool are on the CPU")
@pytest.mark.parametrize("case", RANKED)
def test_two_ranks_equal_one(case):
    found = the_pool(2, timeout=120).run(on_rank, 2, case)
    (expected, rows) = gradients(case, slice(None), backend="torch")
    near(torch.cat([gradient for gradient, _ in found], dim=1), expected, 1e-4)
    for _, log_u in found:
        near(log_u, rows, 1e-4)
