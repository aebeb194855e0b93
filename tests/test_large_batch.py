"""Batches with more rows than a block of the kernel, for errors that batches of six samples cannot show."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

import compopt
from compopt.kernel.block import CPU_BLOCK_ROWS
from tests.database import MODES
from tests.helpers import features, near, run

B, DIM = 601, 24  # a prime: not divisible by any block size
assert B > CPU_BLOCK_ROWS


def written_out(a, b, mode):
    """Return the cross-entropy of both directions, or of both views, without code of the library."""
    a, b = normalize(a), normalize(b)
    if mode == "bimodal":
        logits = a @ b.T / 0.07
        return (cross_entropy(logits, torch.arange(B)) + cross_entropy(logits.T, torch.arange(B))) / 2
    views = torch.cat([a, b])
    logits = (views @ views.T / 0.07).fill_diagonal_(-torch.inf)
    return cross_entropy(logits, torch.arange(2 * B).roll(B))


@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_infonce_is_cross_entropy(mode, threads, chunk_size):
    """Compare value and gradients in float32 with float64, on one and two threads."""
    torch.set_num_threads(threads)
    try:
        z1, z2 = features(B, DIM, 20, dtype=torch.float32)
        est = compopt.InfoNCEEstimator(tau=0.07, mode=mode, multiply_tau=False, chunk_size=chunk_size)
        loss, g1, g2 = run(est, z1, z2, torch.arange(B))
    finally:
        torch.set_num_threads(1)
    a, b = z1.double().requires_grad_(), z2.double().requires_grad_()
    want = written_out(a, b, mode)
    want.backward()
    near(loss, want - math.log((B - 1) * (1 if mode == "bimodal" else 2)), 1e-5, atol=1e-5)
    near(g1, a.grad, 3e-5)
    near(g2, b.grad, 3e-5)
