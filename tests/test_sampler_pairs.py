"""The equations behind the choice of batches, and the clustering, against their definitions and brute force."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from compopt.samplers import spectral
from compopt.samplers.ordered import batch_losses, highest
from compopt.samplers.spectral import edge_weights, normalized_affinity
from tests.helpers import features, generator, near


def unit(m, d, seed, spread=0.8):
    return tuple(normalize(z, dim=1) for z in features(m, d, seed, spread))


def naive_weight(z1, z2, a, b, tau, batch_size):
    """Return the weight of a pair as in DESIGN 3.7, in Python floats."""

    def c(k, j):
        s = [[float(x @ y) for y in z2] for x in z1]
        terms = (s[k][j] - s[k][k], s[j][k] - s[k][k])
        return sum(math.log(1 + (batch_size - 1) * math.exp(h / tau)) for h in terms)

    return c(a, b) + c(b, a)


def naive_loss(z1, z2, batch, tau, labels=None):
    """Return the mean InfoNCE of both directions, in nats."""
    total = 0.0
    for x, y in ((z1, z2), (z2, z1)):
        for k in batch:
            others = [j for j in batch if j == k or labels is None or labels[j] != labels[k]]
            total += math.log(sum(math.exp(float(x[k] @ y[j] - x[k] @ y[k]) / tau) for j in others))
    return total / (2 * len(batch))


@pytest.mark.parametrize("batch_size, tau", [(2, 1.0), (5, 0.1), (32, 0.05)])
def test_weights_are_their_definition(batch_size, tau):
    z1, z2 = unit(7, 4, seed=1)
    w = edge_weights(z1, z2, tau, batch_size)
    want = [[0.0 if a == b else naive_weight(z1, z2, a, b, tau, batch_size) for b in range(7)] for a in range(7)]
    near(w, want, rtol=1e-12)
    assert torch.equal(w, w.T)


def test_losses_are_their_definition():
    z1, z2 = unit(12, 4, seed=3)
    batches = torch.randperm(12, generator=generator(0)).view(3, 4)
    labels = torch.arange(12) % 5
    got = batch_losses(z1[batches], z2[batches], 0.2)
    near(got, [naive_loss(z1, z2, batch.tolist(), 0.2) for batch in batches], rtol=1e-12)
    got = batch_losses(z1[batches], z2[batches], 0.2, labels[batches])
    near(got, [naive_loss(z1, z2, batch.tolist(), 0.2, labels) for batch in batches], rtol=1e-12)


def test_the_affinity_of_small_temperatures_is_finite():
    """exp(w) overflows float32, and even float64, here."""
    z1, z2 = (z.float() for z in unit(30, 4, seed=6, spread=2.0))
    w = edge_weights(z1, z2, 0.003, 8)
    assert torch.exp(w.double()).isinf().any()
    affinity = normalized_affinity(w)
    assert affinity.isfinite().all() and float(affinity.max()) <= 1 + 1e-5
    assert float(torch.linalg.eigvalsh(affinity.double()).max()) == pytest.approx(1.0, abs=1e-4)


# clusters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[4] * 5, [6, 6, 6, 1], [2, 3, 4, 5], [1, 9], [20]])
@pytest.mark.parametrize("kind", ["random", "lopsided", "equal"])
def test_sizes_are_exact(sizes, kind):
    m = sum(sizes)
    z1, z2 = unit(m, 5, seed=7)
    if kind == "lopsided":  # all but three in one cluster
        z1[3:], z2[3:] = normalize(z1[:1] + 0.05 * z1[3:], dim=1), normalize(z2[:1] + 0.05 * z2[3:], dim=1)
    if kind == "equal":
        z1[:], z2[:] = z1[0], z1[0]
    clusters = spectral.spectral_clusters(edge_weights(z1, z2, 0.1, 4), sizes, seed=0)
    assert clusters.dtype == torch.int64
    assert torch.bincount(clusters, minlength=len(sizes)).tolist() == sizes


@pytest.mark.parametrize("seed", range(5))
def test_planted_clusters_are_found(seed):
    g = generator(seed)
    centres, hidden = torch.eye(6, dtype=torch.float64)[:3], torch.randperm(9, generator=g) % 3
    near_centres = (centres[hidden] + 0.15 * torch.randn(9, 6, generator=g, dtype=torch.float64) for _ in range(2))
    z1, z2 = (normalize(z, dim=1) for z in near_centres)
    clusters = spectral.spectral_clusters(edge_weights(z1, z2, 0.2, 3), [3, 3, 3], seed=0)
    assert len((3 * clusters + hidden).unique()) == 3


# ordered ------------------------------------------------------------------------------------------


def test_a_batch_is_kept_once_unless_there_are_too_few():
    batches = torch.tensor([[0, 1], [1, 0], [2, 3], [1, 0], [0, 2]])
    losses = torch.tensor([9.0, 9.0, 1.0, 9.0, 5.0])
    assert highest(batches, losses, 3).tolist() == [0, 2, 4]
    assert len(set(highest(batches, losses, 4).tolist())) == 4
    assert set(highest(batches, losses, 4).tolist()) > {0, 2, 4}


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(spectral, "find_spec", lambda name: None if name == "sklearn" else name)
    with pytest.raises(ImportError, match=r"scikit-learn.*\.\[samplers\]"):
        spectral.SpectralBatchSampler(8, 2)
