"""Batches that leave every block size behind: what loops over six samples cannot see."""

import math

import pytest
import torch

import compopt
from tests.database import BY_NAME, MODES
from tests.helpers import features, generator, make, near, run
from tests.reference import dense_global_gradient, dense_global_loss

B, DIM = 389, 24  # a prime: no block divides it


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("chunk_size", [None, 100, 388])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reference", ["none", "positive"])
def test_the_whole_data_set_is_dense_autograd(reference, mode, chunk_size, dtype, rtol):
    """With gamma = 1 and all samples in the batch, value and gradient are those of the global objective."""
    options = {"reference": reference, "mode": mode, "chunk_size": chunk_size, "dtype": dtype}
    est = compopt.SogCLREstimator(B, gamma=1.0, tau=0.05, **options)
    z1, z2 = features(B, DIM, 0, dtype=dtype)
    loss, g1, g2 = run(est, z1, z2, torch.randperm(B, generator=generator(0)))
    wide = z1.double(), z2.double()
    near(loss, dense_global_loss(*wide, 0.05, mode), rtol)
    for got, want in zip((g1, g2), dense_global_gradient(*wide, 0.05, mode), strict=True):
        near(got, want, rtol)


@pytest.mark.parametrize("chunk_size", [7, 100, 388])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["infonce", "sogclr", "isogclr"])
def test_block_sizes_do_not_matter(name, mode, chunk_size):
    """With repeats, and a temperature that differs between the anchors."""
    n, info = 2000, BY_NAME[name]
    whole, blocks = (make(info, mode, n, chunk_size=size)[0] for size in (None, chunk_size))
    for t in range(3):
        index = torch.randint(0, n, (B,), generator=generator(t))
        index[-30:] = index[:30]
        for got, want in zip(*(run(est, *features(B, DIM, t), index) for est in (blocks, whole)), strict=True):
            near(got, want)
        blocks.step(), whole.step()
    if info.has_rows:
        rows = [est.read(torch.arange(n)) for est in (blocks, whole)]
        for column, want in rows[1].items():
            near(rows[0][column].double(), want.double(), what=column)


@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_infonce_is_cross_entropy(threads, chunk_size):
    """CLIP's loss and both gradients at B = 389, float32, on one and two threads."""
    torch.set_num_threads(threads)
    try:
        z1, z2 = features(B, DIM, 20, dtype=torch.float32)
        est = compopt.InfoNCEEstimator(tau=0.07, multiply_tau=False, chunk_size=chunk_size)
        loss, g1, g2 = run(est, z1, z2, torch.arange(B))
    finally:
        torch.set_num_threads(1)
    a, b = z1.double().requires_grad_(), z2.double().requires_grad_()
    normalize, cross_entropy = torch.nn.functional.normalize, torch.nn.functional.cross_entropy
    logits = normalize(a) @ normalize(b).T / 0.07
    want = (cross_entropy(logits, torch.arange(B)) + cross_entropy(logits.T, torch.arange(B))) / 2
    want.backward()
    near(loss, want - math.log(B - 1), 1e-5, atol=1e-5)
    near(g1, a.grad, 2e-5)
    near(g2, b.grad, 2e-5)
