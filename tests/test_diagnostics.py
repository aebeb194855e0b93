"""Diagnostics against dense float64 results: exact objectives of a whole data set, computed in chunks."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from compopt import diagnostics
from tests.database import MODES
from tests.helpers import batches, features, generator, near, run
from tests.reference import dense_global_gradient, dense_global_loss, dense_log_normalizers

N = 23
CASES = [("bimodal", {}), ("unimodal", {"views": "averaged"}), ("unimodal", {"views": "separate"})]


def test_view_differences_against_loops():
    z1, z2 = features(N, 5, seed=1)
    a, b = (torch.nn.functional.normalize(z, dim=1) for z in (z1, z2))
    want = [
        torch.stack([((a[i] - b[i]) @ z) ** 2 for j in range(N) if j != i for z in (a[j], b[j])]).mean()
        for i in range(N)
    ]
    near(diagnostics.view_differences(z1, z2), torch.stack(want))


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-10), (torch.float32, 2e-4)])
@pytest.mark.parametrize("tau, chunk_size", [(0.005, 512), (0.1, 1), (1.0, 4)])
@pytest.mark.parametrize("mode, views", CASES)
def test_against_dense(mode, views, tau, chunk_size, dtype, rtol):
    z1, z2 = features(N, 5, seed=1, dtype=dtype)
    options = {"mode": mode, "chunk_size": chunk_size, **views}
    want = dense_log_normalizers(z1, z2, tau, mode, **views)
    got = diagnostics.log_normalizers(z1, z2, tau, **options)
    assert got.shape == want.shape
    near(got, want, rtol)
    near(diagnostics.global_loss(z1, z2, tau, **options), dense_global_loss(z1, z2, tau, mode, **views), rtol)
    gradient = diagnostics.global_gradient(z1, z2, tau, **options)
    for g, w in zip(gradient, dense_global_gradient(z1, z2, tau, mode, **views), strict=True):
        near(g, w, rtol)


def test_no_n_by_n_matrix():
    """Test 1000 samples in chunks of 8."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            largest = max(largest, result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    z1, z2 = features(1000, 4, seed=3, dtype=torch.float32)
    with Watch():
        diagnostics.log_normalizers(z1, z2, 0.1, chunk_size=8)
        diagnostics.global_gradient(z1, z2, 0.1, chunk_size=8)
    assert largest <= 8 * 1000 * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reference", ["none", "positive"])
def test_normalizer_error_is_the_mean_squared_error_over_seen_rows(mode, reference):
    tau = 0.2
    z1, z2 = features(N, 5, seed=4)
    est = compopt.SogCLREstimator(N, gamma=0.7, tau=tau, reference=reference, mode=mode, dtype=torch.float64)
    for a, b, index in batches(17, 3, batch=6, dim=5, seed=5):  # old features, only rows below 17
        run(est, a, b, index)
        est.step()
    log_u = est.read(torch.arange(N))["log_u"]
    seen = est.read(torch.arange(N))["count"] > 0
    assert 0 < seen.sum() < N
    alpha = log_u.clone()
    if reference == "none":
        positive = torch.cosine_similarity(z1, z2, dim=1)
        alpha = log_u - positive[:, None] / tau
    exact = dense_log_normalizers(z1, z2, tau, mode)
    want = ((alpha - exact)[seen] ** 2).mean()
    near(diagnostics.normalizer_error(est, z1, z2), want)


def test_individual_temperatures_are_used():
    """Rows with individual tau are compared at that tau."""
    z1, z2 = features(N, 5, seed=8)
    est = compopt.ISogCLREstimator(N, gamma=1.0, rho=1.0, lr=0.05, tau_init=0.3, dtype=torch.float64)
    for _ in range(2):
        run(est, z1, z2, torch.arange(N))
        est.step()
    columns = est.read(torch.arange(N))
    assert columns["tau"].std() > 1e-4
    exact = torch.empty(N, 2, dtype=torch.float64)
    for i in range(N):
        for d in range(2):
            exact[i, d] = dense_log_normalizers(z1, z2, float(columns["tau"][i, d]))[i, d]
    near(diagnostics.normalizer_error(est, z1, z2), ((columns["log_u"] - exact) ** 2).mean())


@pytest.mark.parametrize("mode", MODES)
def test_stateless_normalizers_are_judged_on_random_batches(mode):
    """The error is zero if the batch is the data set (bimodal), and larger for smaller batches."""
    z1, z2 = features(N, 5, seed=9)
    est = compopt.InfoNCEEstimator(tau=0.1, include_positive=False, mode=mode)
    torch.manual_seed(0)
    error = {b: float(diagnostics.normalizer_error(est, z1, z2, batch_size=b)) for b in (N, 12, 4)}
    if mode == "bimodal":
        assert error[N] < 1e-10
    assert error[N] <= error[12] < error[4]


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("stateful", [True, False])
def test_normalizer_error_of_sampled_anchors(mode, stateful):
    """anchors=n equals the default; the result for fewer anchors is close, with the data set as candidates."""
    n = 400
    torch.manual_seed(3)
    z1, z2 = torch.randn(2, n, 6, dtype=torch.float64)
    if stateful:
        est = compopt.SogCLREstimator(n, mode=mode, dtype=torch.float64)
        est.feature_gradients(z1, z2, torch.arange(n))
        est.step()
        z1 = z1 + 0.3 * torch.randn_like(z1)
    else:
        est = compopt.InfoNCEEstimator(0.1, include_positive=False, mode=mode)
    everything = compopt.diagnostics.normalizer_error(est, z1, z2, batch_size=20)
    as_many = compopt.diagnostics.normalizer_error(est, z1, z2, batch_size=20, anchors=n)
    some = compopt.diagnostics.normalizer_error(est, z1, z2, batch_size=20, anchors=200)
    torch.testing.assert_close(as_many, everything, rtol=1e-10, atol=0)
    assert abs(some / everything - 1) < 0.35


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("multiply_tau", [True, False])
def test_gradients_at_temperatures_per_sample(mode, multiply_tau):
    """If the batch is the data set, each anchor's term has its own temperature, and the gradient is exact."""
    dual = compopt.TemperatureDual(N, rho=1.0, tau_init=0.3, tau_min=0.05, tau_max=1.0)
    est = compopt.ContrastiveEstimator(
        compopt.BatchNormalizer(), dual, mode=mode, multiply_tau=multiply_tau, dtype=torch.float64
    )
    z1, z2 = features(N, 5, seed=11)
    for rows in torch.arange(N).chunk(2):  # temperatures become individual in both halves
        est.feature_gradients(z1[rows], z2[rows], rows)
        est.step()
    assert est.read(torch.arange(N))["tau"].unique().numel() > 5
    assert diagnostics.gradient_error(est, z1, z2, batch_size=N)["relative"] < 1e-9


@pytest.mark.parametrize("multiply_tau", [True, False])
@pytest.mark.parametrize("mode, views", CASES)
def test_gradients_at_temperatures_per_direction(mode, views, multiply_tau):
    """Compare with differences of the objective along random directions, which see every factor."""
    z1, z2 = features(N, 5, seed=1)
    tau = torch.rand(N, 2, generator=generator(2), dtype=z1.dtype) + 0.1
    options = {"mode": mode, "normalize": False, **views}

    def objective(z1, z2):
        found = diagnostics.log_normalizers(z1, z2, tau, **options)
        return (found * tau if multiply_tau else found).mean()

    gradients = diagnostics.global_gradient(z1, z2, tau, multiply_tau=multiply_tau, **options)
    for at, gradient in enumerate(gradients):
        step = torch.randn(z1.shape, generator=generator(3), dtype=z1.dtype)
        moved = [[z + sign * 1e-5 * step * (k == at) for k, z in enumerate((z1, z2))] for sign in (1, -1)]
        slope = (objective(*moved[0]) - objective(*moved[1])) / 2e-5
        near((gradient * step).sum(), slope, 1e-6)


def test_autocast_changes_no_diagnostic():
    z, est = torch.randn(2, N, 5), compopt.InfoNCEEstimator(0.1)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            est(*z)
            found.append([
                diagnostics.log_normalizers(*z, 0.1),
                diagnostics.global_loss(*z, 0.1),
                *diagnostics.global_gradient(*z, 0.1),
                diagnostics.view_differences(*z),
                diagnostics.normalizer_error(est, *z, batch_size=N),
                *diagnostics.gradient_error(est, *z, batch_size=N).values(),
                est.metrics["effective_negatives"],
                compopt.functional.info_nce_loss(*z, torch.ones(N, 2, 5), temperature=0.01),
            ])  # fmt: skip
    for full, cast in zip(*found, strict=True):
        assert cast.dtype == torch.float32 and torch.equal(full, cast)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"z2": torch.randn(N - 1, 5)}, ValueError, "shape"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"est": compopt.MovingAverageEstimator(N)}, TypeError, "ContrastiveEstimator"),
        ({"chunk_size": 0}, ValueError, "chunk_size"),
    ],
)
@pytest.mark.parametrize("diagnostic", [diagnostics.normalizer_error, diagnostics.gradient_error])
def test_wrong_arguments_are_named(diagnostic, arguments, error, words):
    z1, z2 = torch.randn(2, N, 5)
    given = {"est": compopt.DCLEstimator(0.1), "z1": z1, "z2": z2, "batch_size": 8}
    with pytest.raises(error, match=words):
        diagnostic(**given | arguments)


def test_a_diagnostic_leaves_metrics_and_gradients_alone():
    dual, z = compopt.InfoNCEEstimator(tau=0.1, learn_tau=True), torch.randn(2, N, 5)
    (parameter,) = dual.parameters()
    diagnostics.gradient_error(dual, *z, batch_size=4)
    assert parameter.grad is None
    dual(*z).backward()
    gradient, metrics = parameter.grad.clone(), {name: value.item() for name, value in dual.metrics.items()}
    diagnostics.gradient_error(dual, *z, batch_size=4)
    assert torch.equal(parameter.grad, gradient)
    assert {name: value.item() for name, value in dual.metrics.items()} == metrics


def test_rows_that_only_another_part_has_visited_are_left_out():
    est, other = compopt.ISogCLREstimator(N), compopt.ISogCLREstimator(N)
    z1, z2, index = batches(N, 1)[0]
    run(other, z1, z2, index)
    other.step()
    est.temperature.load_state_dict(other.temperature.state_dict())
    assert diagnostics.normalizer_error(est, *features(N, z1.shape[1], 3)).isnan()


@pytest.mark.parametrize("make", [
    lambda: compopt.ContrastiveEstimator(compopt.MemoryNormalizer(4, 16), compopt.TemperatureDual(10, rho=0.5)),
    lambda: compopt.ContrastiveEstimator(compopt.NeuralNormalizer(4, 8), compopt.TemperatureDual(10, rho=0.5)),
])  # fmt: skip
def test_the_error_of_a_normalizer_beside_rows_of_other_parts(make):
    est, z = make(), torch.randn(2, 10, 4)
    est(*torch.randn(2, 6, 4, requires_grad=True).unbind(), torch.arange(6)).backward()
    est.step()
    assert compopt.diagnostics.normalizer_error(est, *z).isfinite()


def test_the_gradient_error_restores_the_mode_of_each_part():
    est = compopt.SogCLREstimator(N)
    est.normalizer.eval()
    diagnostics.gradient_error(est, *torch.randn(2, N, 5), batch_size=4)
    assert est.training and not est.normalizer.training


@pytest.mark.parametrize("count", [12, 25])
@pytest.mark.parametrize("diagnostic", ["normalizer_error", "gradient_error"])
def test_features_of_a_part_of_the_data_are_refused(diagnostic, count):
    """Rows of 20 samples would be compared with the exact value of another population."""
    est, (z1, z2) = compopt.SogCLREstimator(20), torch.randn(2, count, 4)
    options = {"batch_size": 4} if diagnostic == "gradient_error" else {}
    with pytest.raises(ValueError, match=rf"z1 and z2 have {count} samples, the estimator has rows for n=20"):
        getattr(compopt.diagnostics, diagnostic)(est, z1, z2, **options)
