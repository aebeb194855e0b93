"""float32 against float64; bf16, fp16 and autocast: similarities in float32, gradients in float32 until scaled."""

import pytest
import torch

import compopt
from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import batches, features, make, near, run

N = 13


@pytest.mark.covering()
@pytest.mark.parametrize("tau, rtol", [(0.07, 3e-5), (0.011, 3e-4)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_float32_is_near_float64(info, mode, tau, rtol):
    """Both get the same float32 numbers, so only the arithmetic differs: about 1e-7 / tau per similarity.

    The correctness of float64 is tested in tests/test_agreement.py.
    """
    rtol *= 30 if info.network else 1  # its optimizer divides by the root of squared gradients
    single, double = (make(info, mode, N, dtype, tau, 0.6)[0] for dtype in (torch.float32, torch.float64))
    for z1, z2, index in batches(N, 6, seed=80, dtype=torch.float32):
        loss, g1, g2 = run(single, z1, z2, index)
        assert loss.dtype == g1.dtype == g2.dtype == torch.float32
        want = run(double, z1.double(), z2.double(), index)
        near(loss, want[0], rtol, atol=rtol)
        near(g1, want[1], rtol)
        near(g2, want[2], rtol)
        single.step(), double.step()


@pytest.mark.covering()
@pytest.mark.parametrize("dtype, rtol", [(torch.bfloat16, 2**-7), (torch.float16, 2**-9)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["infonce", "sogclr", "isogclr"])
def test_half_precision_features(name, mode, dtype, rtol):
    """The loss has float32 accuracy; the gradient is rounded once."""
    info = BY_NAME[name]
    est, _ = make(info, mode, N, dtype=torch.float32)
    _, ref = make(info, mode, N)
    for z1, z2, index in batches(N, 3, seed=81, dtype=dtype):
        loss, g1, g2 = run(est, z1, z2, index)
        assert g1.dtype == dtype and loss.dtype == torch.float32
        want = ref.forward(z1.double(), z2.double(), index)
        near(loss, want[0], 2e-5, atol=2e-5)
        near(g1, want[1], rtol)
        near(g2, want[2], rtol)
        est.step()
        ref.step()


def test_small_gradients_survive_a_loss_scale():
    """Gradients below the range of fp16 are multiplied by grad_output before they are rounded."""
    z1, z2 = features(8, 4, seed=1, dtype=torch.float16)
    z1, z2 = z1 * 40, z2 * 40  # long features: gradients of order 1e-4 / 40 / 8
    est = compopt.InfoNCEEstimator(tau=0.07)
    _, ref = make(BY_NAME["infonce"], "bimodal", N)
    want = ref.forward(z1.double(), z2.double(), torch.arange(8))
    tiny = torch.tensor(2.0**-12)  # so small that the unscaled product would underflow
    _, g1, _ = run(est, z1, z2, torch.arange(8), grad_output=tiny * 2.0**16)
    near(g1, want[1] * 2.0**4, 2**-8)
    z1 = z1.detach().requires_grad_()
    loss = est(z1, z2, torch.arange(8))
    (loss * 2.0**-20 * 2.0**24).backward()
    near(z1.grad, want[1] * 2.0**4, 2**-8)


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["infonce", "infonce-no-positive", "sogclr", "isogclr-adam", "clip-learned"])
def test_autocast_does_not_lower_the_estimators_precision(name, mode):
    """Inside an autocast region float32 features still give the float32 result."""
    info = BY_NAME[name]
    a, _ = make(info, mode, N, dtype=torch.float32)
    b, _ = make(info, mode, N, dtype=torch.float32)
    for z1, z2, index in batches(N, 3, seed=82, dtype=torch.float32):
        want = run(a, z1, z2, index)
        z1, z2 = z1.clone().requires_grad_(), z2.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = b(z1, z2, index)
        loss.backward()
        for x, y in zip((loss, z1.grad, z2.grad), want, strict=True):
            near(x, y, 1e-6)
        a.step()
        b.step()


@pytest.mark.parametrize("features_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast_dtype", [torch.float16, torch.bfloat16])
def test_features_of_any_half_precision_under_autocast_of_any(features_dtype, autocast_dtype):
    """Autocast cannot stack tensors of a half-precision dtype other than its own."""
    z1, z2, extra = (z.to(features_dtype).requires_grad_() for z in features(3 * 8, 4, seed=5)[0].split(8))
    est = compopt.SogCLREstimator(8, tau=0.1)
    want = est(z1, z2, torch.arange(8), negatives=extra)
    grads = torch.autograd.grad(want, (z1, z2, extra))
    with torch.autocast("cpu", autocast_dtype):
        loss = est(z1, z2, torch.arange(8), negatives=extra)
    assert torch.equal(loss, want)
    for got, grad in zip(torch.autograd.grad(loss, (z1, z2, extra)), grads, strict=True):
        assert torch.equal(got, grad)


def test_float32_rows_with_float64_features():
    """dtype= is the precision of the rows; the arithmetic uses the dtype of the features."""
    z1, z2, index = batches(N, 1, seed=83)[0]
    est = compopt.SogCLREstimator(N, tau=0.07)
    _, ref = make(BY_NAME["sogclr"], "bimodal", N)
    loss, g1, _ = run(est, z1, z2, index)
    want, w1, _ = ref.forward(z1, z2, index)
    assert g1.dtype == torch.float64
    near(loss, want, 1e-6)
    near(g1, w1, 1e-5)
    est.step()
    assert est.read(index)["log_u"].dtype == torch.float32


@pytest.mark.parametrize("enabled", [False, True])
def test_predictions_of_a_network_are_in_single_precision_under_autocast(enabled):
    single, exact = (
        compopt.NeuralNormalizer(8, prototypes=9, seed=1, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    z = torch.nn.functional.normalize(features(6, 8, seed=2)[0].float(), dim=1)
    for net in (single, exact):  # a new network predicts the same for all samples
        net.update(z, torch.linspace(-1, 1, 6), 0.1, z)
        net.step()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        near(single.predict(z, 0.1), exact.predict(z, 0.1), 1e-4)
