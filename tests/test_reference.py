"""The reference implementations against numbers worked out by hand."""

import math

import pytest
import torch

from tests.helpers import near
from tests.reference import BatchReference, DualReference, FixedReference, MovingAverageReference, Reference

TAU = 0.5
DUAL = {"rho": 0.4, "lr": 0.1, "tau_init": TAU, "tau_min": 0.05, "tau_max": 1.0, "max_grad": 5.0}
GROUP = [{"n": 4, "tau": TAU, "gamma": 0.3, **DUAL}]


def two_pairs():
    """Angles 0 and 90 degrees against 0 and 60: s = [[1, 1/2], [0, sqrt(3)/2]]; lengths are not 1."""
    z1 = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    z2 = torch.tensor([[1.0, 0.0], [0.5 * 4, math.sqrt(3) / 2 * 4]], dtype=torch.float64)
    return z1, z2, torch.tensor([3, 1])


R = math.sqrt(3) / 2


def test_softmax_denominator_by_hand():
    ref = Reference(GROUP, BatchReference(True), FixedReference(), multiply_tau=False)
    loss, _, _ = ref.forward(*two_pairs())
    h = [0.5 - 1, 0 - R, 0 - 1, 0.5 - R]
    near(loss, sum(math.log(1 + math.exp(x / TAU)) for x in h) / 4)
    near(ref.weights[0][0], 1 / (1 + math.exp(1)))


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
