"""The twins themselves, against numbers worked out by hand and against dense autograd."""

import math

import pytest
import torch

from tests.helpers import features, near
from tests.reference import (
    BatchReference,
    DualReference,
    FixedReference,
    MovingAverageReference,
    Reference,
    dense_global_gradient,
    dense_global_loss,
)

TAU = 0.5
DUAL = {"rho": 0.4, "lr": 0.1, "tau_init": TAU, "tau_min": 0.05, "tau_max": 1.0, "max_grad": 5.0}
GROUP = [{"n": 4, "tau": TAU, "gamma": 0.3, **DUAL}]


def two_pairs():
    """Angles 0 and 90 degrees against 0 and 60: s = [[1, 1/2], [0, sqrt(3)/2]]; lengths are not 1."""
    z1 = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    z2 = torch.tensor([[1.0, 0.0], [0.5 * 4, math.sqrt(3) / 2 * 4]], dtype=torch.float64)
    return z1, z2, torch.tensor([3, 1])


R = math.sqrt(3) / 2


def test_unimodal_candidates_by_hand():
    ref = Reference(GROUP, BatchReference(), FixedReference(), mode="unimodal")
    ref.forward(*two_pairs())
    # view 1 of sample 0: negatives are view 2 (s = 1/2) and view 1 (s = 0) of sample 1, positive 1
    near(ref.alphas[0], math.log((math.exp(-0.5 / TAU) + math.exp(-1 / TAU)) / 2))
    # view 2 of sample 1: view 1 of sample 0 (s = 1/2), view 2 of sample 0 (s = 1/2), positive sqrt(3)/2
    near(ref.alphas[3], (0.5 - R) / TAU)


@pytest.mark.parametrize("reference", ["none", "positive"])
def test_moving_average_by_hand(reference):
    ref = Reference(GROUP, MovingAverageReference(reference), FixedReference())
    z1, z2, index = two_pairs()
    ref.forward(z1, z2, index)
    ref.step()
    first = math.exp(0.5 / TAU) if reference == "none" else math.exp(-0.5 / TAU)
    near(ref.read(3)["log_u"][0], math.log(first))
    ref.forward(z2, z1, index)  # modalities swapped: image 0 now sees s = 0
    second = 1.0 if reference == "none" else math.exp(-1 / TAU)
    u = 0.7 * first + 0.3 * second
    near(ref.alphas[0], math.log(u) - (1 / TAU if reference == "none" else 0))  # positive is still 1
    near(ref.weights[0][0], second / u)
    ref.step()
    near(ref.read(3)["log_u"][0], math.log(u))
    assert ref.visits(3, 0) == 2 and ref.visits(0, 0) == 0


def test_dual_by_hand():
    ref = Reference(GROUP, BatchReference(True), DualReference("momentum", beta=0.25))
    ref.forward(*two_pairs())
    alpha, w, h = math.log(1 + math.exp(-1)), 1 / (1 + math.e), -0.5
    gradient = alpha + 0.4 - w * h / TAU
    ref.step()
    near(ref.read(3)["tau_exp_avg"][0], 0.25 * gradient)
    near(ref.read(3)["tau"][0], TAU - 0.1 * 0.25 * gradient)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("reference", ["none", "positive"])
def test_gamma_1_and_all_samples_is_the_global_objective(mode, reference):
    n = 7
    z1, z2 = features(n, 4, seed=3)
    ref = Reference([{"n": n, "tau": 0.2, "gamma": 1.0}], MovingAverageReference(reference), FixedReference(), mode)
    loss, g1, g2 = ref.forward(z1, z2, torch.arange(n))
    near(loss, dense_global_loss(z1, z2, 0.2, mode))
    for got, want in zip((g1, g2), dense_global_gradient(z1, z2, 0.2, mode), strict=True):
        near(got, want)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_batch_is_the_per_view_objective_and_tau_gradient(mode):
    n = 6
    z1, z2 = features(n, 4, seed=4)
    ref = Reference([{"n": n, "tau": 0.2}], BatchReference(), FixedReference(), mode)
    loss, g1, _ = ref.forward(z1, z2, torch.arange(n))
    near(loss, dense_global_loss(z1, z2, 0.2, mode, "separate"))
    near(g1, dense_global_gradient(z1, z2, 0.2, mode, "separate")[0])
    tau = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    dense_global_loss(z1, z2, tau, mode, "separate").backward()
    near(ref.tau_grad, tau.grad)


def test_infonce_is_cross_entropy():
    n = 6
    z1, z2 = features(n, 4, seed=5)
    ref = Reference([{"n": n, "tau": 0.2}], BatchReference(True), FixedReference(), multiply_tau=False)
    loss, g1, _ = ref.forward(z1, z2, torch.arange(n))
    z1 = z1.requires_grad_()
    normalize = torch.nn.functional.normalize
    logits = normalize(z1) @ normalize(z2).T / 0.2
    ce = torch.nn.functional.cross_entropy
    target = torch.arange(n)
    both = (ce(logits, target) + ce(logits.T, target)) / 2
    near(loss, both - math.log(n - 1))  # DESIGN divides by |N_i|: a constant
    near(g1, torch.autograd.grad(both, z1)[0])
