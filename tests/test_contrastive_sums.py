"""functional.contrastive_sums: autocast, modified or invalid features, memory, precision settings of PyTorch."""

import weakref
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from compopt import functional
from compopt.kernel.triton import choice, sweep
from tests.helpers import near

B, D, TAU = 9, 4, 0.05
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or not choice.interpreted(),
    reason="Triton's interpreter is not there, or not asked for",
)
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]


def features(count=B, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    z = F.normalize(torch.randn(2, count, D, generator=generator, dtype=torch.float64), dim=2).to(dtype)
    return [side.requires_grad_() for side in z.unbind()]


def test_features_that_change_before_the_backward_pass_are_refused():
    z1, z2 = features()
    changed = z1 * 1
    sums = functional.contrastive_sums(changed, z2, TAU)
    changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sums.sum().backward()


def test_a_second_derivative_is_refused_whatever_the_first_is_of():
    """A plain sum is refused too: its gradient would not require grad, and a penalty would be ignored silently."""
    z1, z2 = features()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(functional.contrastive_sums(z1, z2, TAU).sum(), z1, create_graph=True)


def test_a_compiled_graph_is_whole_and_has_the_same_bits():
    found = []
    compiled = torch.compile(functional.contrastive_sums, fullgraph=True, backend="aot_eager")
    for function in (functional.contrastive_sums, compiled):
        z1, z2 = features()
        tau = torch.full((B, 2), TAU, requires_grad=True)
        sums = function(z1, z2, tau, torch.tensor([0, *range(B - 1)]))
        sums.sum().backward()
        found.append(torch.cat([side.flatten() for side in (sums.detach(), z1.grad, z2.grad, tau.grad)]))
    assert torch.equal(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_pass_under_autocast_has_the_same_gradient(backend):
    found = []
    for enabled in (False, True):
        z1, z2 = features()
        sums = functional.contrastive_sums(z1, z2, TAU, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            sums.sum().backward()
        found.append(torch.stack([z1.grad, z2.grad]))
    assert torch.equal(*found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_row_spoils_its_own_pairs_alone(backend, bad):
    """Sums and temperature gradients of anchors of its group, which have no pair with the row, are unaffected."""
    z1, z2 = (z.detach() for z in features())
    z2[0] = bad
    tau = torch.full((B, 2), TAU, requires_grad=True)
    group = torch.tensor([0, 0, 0, *range(1, B - 2)])
    sums = functional.contrastive_sums(z1, z2, tau, group, backend=backend)
    sums.sum().backward()
    finite = torch.stack([group == 0, torch.arange(B) > 0], dim=1)
    assert torch.equal(sums.isfinite(), finite)
    assert torch.equal(tau.grad.isfinite(), finite)


def test_temperatures_in_half_precision_are_exact():
    z1, z2 = features()
    tau = torch.tensor(0.07, dtype=torch.bfloat16)
    near(functional.contrastive_sums(z1, z2, tau), functional.contrastive_sums(z1, z2, float(tau)), 1e-6)


class Largest(TorchDispatchMode):
    """Record the number of entries of the largest tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.entries = max(self.entries, found.numel())
        return found


def test_no_matrix_of_all_pairs_is_made():
    z1, z2 = features(2048)
    with Largest() as largest:
        functional.contrastive_sums(z1, z2, TAU).sum().backward()
    assert largest.entries <= 2048**2 // 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_a_wave_are_merged_before_the_next_but_one(backend, monkeypatch):
    """Otherwise the parts of all waves, one per tile and anchor, would take the memory of a full matrix."""
    one_wave, parts, alive = getattr(sweep, f"{backend}_sums"), [], []

    def spy(o):
        alive.append(sum(part() is not None for part in parts))
        found = one_wave(o)
        parts.extend(weakref.ref(side.total) for side in found)
        return found

    monkeypatch.setattr(sweep, f"{backend}_sums", spy)
    z1, z2 = features()
    functional.contrastive_sums(z1, z2, TAU, backend=backend, wave=1)
    assert len(alive) == B and max(alive) <= 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wave", [1, 4, 100])
def test_waves_change_rounding_alone(backend, wave):
    found = []
    for rows, dtype in ((None, torch.float64), (wave, torch.float32)):
        z1, z2 = features(dtype=dtype)
        backend = "torch" if dtype == torch.float64 else backend
        sums = functional.contrastive_sums(z1, z2, TAU, torch.arange(B) // 2, backend=backend, wave=rows)
        (sums * torch.arange(2.0 * B, dtype=dtype).view(B, 2)).sum().backward()
        found.append([sums, z1.grad, z2.grad])
    for ours, exact in zip(found[1], found[0], strict=True):
        near(ours, exact, 1e-5)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="a PyTorch with one interface")
def test_precision_may_be_set_by_the_newer_interface():
    """PyTorch then raises when the older setting is read."""
    matmul = torch.backends.cuda.matmul
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        assert choice.precision_of(0.07) == "tf32"
        with choice.tf32_allowed():
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_products_in_tf32_leave_the_setting_as_it_was(before):
    torch.set_float32_matmul_precision(before)
    try:
        with choice.tf32_allowed():
            assert torch.get_float32_matmul_precision() != "highest"
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "given, kind, words",
    [
        ({"z1": torch.zeros(0, D), "z2": torch.zeros(0, D)}, ValueError, "must have rows, .*, got 0 rows"),
        ({"z1": torch.ones(3, D).int(), "z2": torch.ones(3, D).int()}, ValueError, "floating dtype, .* torch.int32"),
        ({"wave": 0}, ValueError, "wave must be a number of rows, at least 1, or None, got 0"),
        ({"wave": 2.5}, ValueError, "wave must be .*, got 2.5"),
        ({"keys": [0, 1]}, TypeError, "keys must be a tensor of integers, .*, got 0"),
    ],
)
def test_errors(given, kind, words):
    z1, z2 = features()
    with pytest.raises(kind, match=words):
        functional.contrastive_sums(**{"z1": z1, "z2": z2, "tau": TAU, **given})
