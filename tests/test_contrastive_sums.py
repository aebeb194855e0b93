"""functional.contrastive_sums in plain torch, and the rule that selects the backend (kernels: tests/triton)."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from compopt import functional
from compopt.kernel.triton import choice
from compopt.kernel.triton.sweep import ranked
from tests.helpers import near

B, D, TAU = 9, 4, 0.05
KEYS = torch.tensor([0, 1, 1, 2, 3, 4, 5, 5, 5])


def features(count=B, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    z = F.normalize(torch.randn(2, count, D, generator=generator, dtype=torch.float64), dim=2).to(dtype)
    return [side.requires_grad_() for side in z.unbind()]


def by_hand(z1, z2, tau, negative):
    """Compute both directions from the whole matrix."""
    s = z1 @ z2.T
    scaled = [s / tau[:, :1], s.T / tau[:, 1:]]
    return torch.stack([x.masked_fill(~negative, -math.inf).logsumexp(1) for x in scaled], dim=1)


TAUS = {"number": 0.1, "0-d": torch.tensor(0.1), "one each": 0.1 + torch.rand(B), "two each": 0.1 + torch.rand(B, 2)}


@pytest.mark.parametrize("wave", [None, 4])
@pytest.mark.parametrize("keys", [None, KEYS, (KEYS, torch.arange(B) % 4)], ids=["none", "one", "two"])
@pytest.mark.parametrize("tau", TAUS)
def test_contrastive_sums_is_a_logsumexp(tau, keys, wave):
    """Value and gradients, including the temperature's, equal those of autograd on the whole matrix."""
    given = [torch.arange(B)] if keys is None else list(keys) if isinstance(keys, tuple) else [keys]
    negative = torch.stack([key[:, None] != key for key in given]).all(0)
    results = []
    for whole in (True, False):
        z1, z2 = features(dtype=torch.float64)
        t = TAUS[tau]
        t = t.double().requires_grad_() if isinstance(t, torch.Tensor) else t
        if whole:
            each = torch.as_tensor(t, dtype=torch.float64)
            each = each[:, None] if each.dim() == 1 else each
            found = by_hand(z1, z2, each.expand(B, 2), negative)
        else:
            found = functional.contrastive_sums(z1, z2, t, keys, wave=wave)
        (found * torch.arange(2.0 * B).view(B, 2)).sum().backward()
        results.append([found, z1.grad, z2.grad] + ([t.grad] if isinstance(t, torch.Tensor) else []))
    for ours, theirs in zip(results[1], results[0], strict=True):
        near(ours, theirs, 1e-12)


def test_the_loss_of_clip():
    z1, z2 = features(dtype=torch.float64)
    s = (z1 * z2).sum(1, keepdim=True) / 0.1
    loss = (torch.logaddexp(functional.contrastive_sums(z1, z2, 0.1), s) - s).mean()
    logits, target = z1 @ z2.T / 0.1, torch.arange(B)
    near(loss, (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2, 1e-12)


def test_only_what_wants_a_gradient_gets_one():
    z1, z2 = features(dtype=torch.float64)
    tau = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    functional.contrastive_sums(z1.detach(), z2, tau).sum().backward()
    assert z1.grad is None and z2.grad.abs().sum() > 0 and tau.grad < 0
    assert not functional.contrastive_sums(z1.detach(), z2.detach(), 0.1).requires_grad


def test_an_anchor_without_negatives():
    z1, z2 = features()
    sums = functional.contrastive_sums(z1, z2, torch.tensor(0.1, requires_grad=True), torch.zeros(B, dtype=torch.long))
    assert torch.equal(sums.detach(), torch.full((B, 2), -math.inf))
    sums.exp().sum().backward()
    assert not z1.grad.any() and not z2.grad.any()


def test_half_precision_is_computed_in_float32():
    z1, z2 = features(dtype=torch.bfloat16)
    sums = functional.contrastive_sums(z1, z2, 0.1)
    assert sums.dtype == torch.float32
    sums.sum().backward()
    assert z1.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near(functional.contrastive_sums(z1.float(), z2.float(), 0.1), sums, 1e-6)


def test_ranked_keys_are_equal_where_the_keys_are():
    keys = torch.tensor([[7, -(2**62), 7, 3, 3, 3, 9, 7, -(2**62)], [1, 1, 1, 1, 1, 1, 1, 0, 2**62]])
    found = ranked(keys)
    assert found.dtype == torch.int32 and found.min(1).values.tolist() == [0, 0]
    assert torch.equal(found[:, :, None] == found[:, None], keys[:, :, None] == keys[:, None])


def test_features_that_change_before_the_backward_pass_are_refused():
    z1, z2 = features()
    changed = z1 * 1
    sums = functional.contrastive_sums(changed, z2, TAU)
    changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sums.sum().backward()


@pytest.mark.launch
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


def test_a_backward_pass_under_autocast_has_the_same_gradient():
    found = []
    for enabled in (False, True):
        z1, z2 = features()
        sums = functional.contrastive_sums(z1, z2, TAU)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            sums.sum().backward()
        found.append(torch.stack([z1.grad, z2.grad]))
    assert torch.equal(*found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_spoils_its_own_pairs_alone(bad):
    """Sums and temperature gradients of anchors of its group, which have no pair with the row, are unaffected."""
    z1, z2 = (z.detach() for z in features())
    z2[0] = bad
    tau = torch.full((B, 2), TAU, requires_grad=True)
    group = torch.tensor([0, 0, 0, *range(1, B - 2)])
    sums = functional.contrastive_sums(z1, z2, tau, group)
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


@pytest.mark.parametrize("wave", [1, 4, 100])
def test_waves_change_rounding_alone(wave):
    found = []
    for rows, dtype in ((None, torch.float64), (wave, torch.float32)):
        z1, z2 = features(dtype=dtype)
        sums = functional.contrastive_sums(z1, z2, TAU, torch.arange(B) // 2, wave=rows)
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


@pytest.mark.parametrize(
    "given, kind, words",
    [
        (
            {"z2": torch.zeros(B, D + 1)},
            ValueError,
            r"z1 and z2 must be features \(B, d\) of one shape and dtype, got .9, 4.",
        ),
        ({"tau": 0.0}, ValueError, "tau must be greater than 0, got 0.0"),
        ({"tau": torch.ones(3)}, ValueError, r"tau must be a number, 0-d, .* for B = 9, got .3,."),
        (
            {"keys": torch.zeros(3, dtype=torch.long)},
            ValueError,
            r"keys must be integers of shape \(9,\), got torch.int64 .3,.",
        ),
        ({"keys": torch.zeros(B)}, ValueError, "keys must be integers"),
        ({"keys": ()}, ValueError, "keys has no entry"),
        ({"backend": "cuda"}, ValueError, "backend must be one of .*, got 'cuda'"),
        ({"precision": "fp8"}, ValueError, "precision must be one of .*, got 'fp8'"),
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


# -- the rule ------------------------------------------------------------------------------------------------------


def reason(monkeypatch, backend="triton", installed=True, switch=None, interpret="1", has=None, dtype=torch.float32):
    monkeypatch.setattr(choice, "_installed", lambda: installed)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.delenv(choice.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(choice.SWITCH, switch)
    return choice.reason_for_torch(backend, torch.zeros(2, 2, dtype=dtype), has)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, None),
        ({"switch": "1"}, None),
        ({"backend": "torch"}, "the backend is torch"),
        ({"backend": "auto"}, "the backend is torch"),
        ({"switch": "0"}, "COMPOPT_TRITON is 0"),
        ({"installed": False}, "Triton is not installed"),
        ({"interpret": "0"}, "the features are on cpu"),
        ({"dtype": torch.float64}, "the features are float64"),
        ({"has": "negatives="}, "the call has negatives="),
    ],
)
def test_the_rule_names_its_reason(given, expected, monkeypatch, caplog):
    with caplog.at_level(logging.DEBUG, "compopt.kernel.triton.choice"):
        assert reason(monkeypatch, **given) == expected
    said = "the kernels in Triton" if expected is None else f"plain torch, since {expected}"
    assert caplog.messages == [f"pairs: {said}"]


def test_bfloat16_is_asked_for_and_of_large_temperatures():
    assert choice.precision_of(0.07) == "tf32"
    torch.set_float32_matmul_precision("medium")
    try:
        found = [choice.precision_of(tau) for tau in (0.07, 0.02, 0.01, torch.tensor(0.07))]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found == ["bf16", "bf16", "tf32", "tf32"]


def test_backend_of_an_estimator():
    assert compopt.DCLEstimator().backend == "auto" and compopt.DCLEstimator(backend="triton").backend == "triton"
    assert compopt.recommended(4, backend="torch").backend == "torch"
    with pytest.raises(ValueError, match="backend must be .*'auto'.*, got 'cuda'"):
        compopt.DCLEstimator(backend="cuda")


def test_without_a_gpu_the_backend_changes_no_bit():
    """The backend falls back to torch, since neither Triton nor its interpreter can be used here."""
    grads = []
    for backend in ("torch", "triton"):
        z1, z2 = features()
        compopt.SogCLREstimator(B, backend=backend)(z1, z2, torch.arange(B)).backward()
        grads.append(torch.cat([z1.grad, z2.grad]))
    assert torch.equal(*grads)


# info_nce_loss -----------------------------------------------------------------------------------------------------


def cross_entropy(query, positive, negatives=None, *, temperature, reduction):
    """Compute the loss from the matrix of logits."""
    q, positive, *rest = (F.normalize(x, dim=-1) for x in (query, positive, negatives) if x is not None)
    if not rest:
        return F.cross_entropy(q @ positive.T / temperature, torch.arange(len(q)), reduction=reduction)
    others = torch.einsum("bd,...md->bm", q, rest[0]) if rest[0].dim() == 2 else torch.einsum("bd,bmd->bm", q, rest[0])
    logits = torch.cat([(q * positive).sum(1, keepdim=True), others], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [None, (5, D), (B, 3, D)], ids=["batch", "shared", "each"])
def test_info_nce_loss_is_a_cross_entropy(shape, reduction):
    torch.manual_seed(0)
    given = [torch.randn(B, D, dtype=torch.float64), torch.randn(B, D, dtype=torch.float64)]
    given += [] if shape is None else [torch.randn(shape, dtype=torch.float64)]
    tau = torch.tensor(0.07, dtype=torch.float64)
    leaves, found = [x.requires_grad_() for x in (*given, tau)], []
    weight = torch.rand(B, dtype=torch.float64) if reduction == "none" else 1.0
    for loss in (functional.info_nce_loss, cross_entropy):
        value = loss(*leaves[:-1], temperature=leaves[-1], reduction=reduction)
        found.append([value, *torch.autograd.grad((value * weight).sum(), leaves)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_info_nce_loss_is_the_estimator_in_one_direction():
    z1, z2 = features()
    found = []
    estimator = compopt.InfoNCEEstimator(0.1, directions="forward", multiply_tau=False)
    for loss in (functional.info_nce_loss, estimator):
        found.append(torch.autograd.grad(loss(z1, z2), (z1, z2)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_info_nce_loss_makes_no_matrix_of_all_pairs():
    count = 3000
    z1, z2 = features(count)
    with Largest() as largest:
        functional.info_nce_loss(z1, z2).backward()
    assert largest.entries < count * count / 2


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ([(8, 4), (7, 4)], {}, "one shape"),
        ([(0, 4), (0, 4)], {}, "with rows"),
        ([(8, 4), (8, 4), (5, 3)], {}, r"must be \(M, 4\) or \(8, M, 4\)"),
        ([(8, 4), (8, 4), (4,)], {}, r"must be \(M, 4\)"),
        ([(8, 4), (8, 4), (0, 4)], {}, "M >= 1"),
        ([(8, 4), (8, 4), (7, 2, 4)], {}, r"must be \(M, 4\)"),
        ([(8, 4), (8, 4)], {"reduction": "max"}, "reduction must be"),
        ([(8, 4), (8, 4)], {"temperature": 0.0}, "greater than 0"),
    ],
)
def test_errors_of_info_nce_loss(shapes, options, words):
    with pytest.raises(ValueError, match=words):
        functional.info_nce_loss(*map(torch.randn, shapes), **options)
    with pytest.raises(ValueError, match="one floating dtype"):
        functional.info_nce_loss(torch.randn(8, 4), torch.randn(8, 4).double())
