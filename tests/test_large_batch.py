"""Batches larger than every block size against dense autograd, for errors that loops over six samples cannot show."""

import math

import pytest
import torch

import compopt
from tests.database import MODES
from tests.helpers import features, generator, near, run

N, B, DIM = 2000, 389, 24  # a prime: not divisible by any block size


def batch(seed, dtype=torch.float64):
    """Return features and an index with some dozens of repeats."""
    index = torch.randint(0, N, (B,), generator=generator(seed))
    index[-30:] = index[:30]
    return *features(B, DIM, seed, dtype=dtype), index


class Dense:
    """Moving average with full matrices and autograd."""

    def __init__(self, mode, gamma, tau, reference):
        self.mode, self.gamma, self.tau, self.reference = mode, gamma, tau, reference
        width = 2 if mode == "bimodal" else 1
        self.u = torch.zeros(N, width, dtype=torch.float64)
        self.count = torch.zeros(N, dtype=torch.long)

    def step(self, z1, z2, index):
        """Run one forward and commit; return (loss, g1, g2)."""
        z1, z2 = (z.detach().double().requires_grad_() for z in (z1, z2))
        a, b = (z / z.norm(dim=1, keepdim=True) for z in (z1, z2))
        negative = index[:, None] != index[None, :]
        cross = a @ b.T
        positive = cross.diagonal()
        scores = [cross, cross.T]
        if self.mode == "unimodal":
            scores = [torch.cat([cross, a @ a.T], 1), torch.cat([cross.T, b @ b.T], 1)]
            negative = torch.cat([negative, negative], 1)
        size = negative.sum(1)
        unseen = (self.count[index] == 0)[:, None]

        def inner(d):
            x = scores[d] if self.reference == "none" else scores[d] - positive[:, None]
            return (torch.exp(x / self.tau) * negative).sum(1) / size

        g = torch.stack([inner(0), inner(1)], 1).detach()
        if self.mode == "unimodal":
            g = g.mean(1, keepdim=True)
        u = torch.where(unseen, g, (1 - self.gamma) * self.u[index] + self.gamma * g)
        alpha = u.log().expand(B, 2) - (positive.detach()[:, None] / self.tau if self.reference == "none" else 0.0)
        surrogate = 0.0
        for d in range(2):
            h = scores[d] - positive[:, None]
            w = (torch.exp(h / self.tau - alpha[:, d, None]) * negative / size[:, None]).detach()
            # the positive belongs to the outer function ("none"), or to every pair
            linear = (w * scores[d]).sum(1) - positive if self.reference == "none" else (w * h).sum(1)
            surrogate = surrogate + linear.sum()
        loss = (self.tau * alpha).mean()
        g1, g2 = torch.autograd.grad(surrogate / (2 * B), (z1, z2))
        self.commit(index, u)
        return loss, g1, g2

    def commit(self, index, u):
        """Commit the means over the occurrences of each sample."""
        occurrences = torch.bincount(index, minlength=N)[:, None]
        seen = occurrences[:, 0] > 0
        self.u[seen] = (torch.zeros_like(self.u).index_add_(0, index, u) / occurrences)[seen]
        self.count += seen


def follow(est, dense, dtype, rtol):
    """Compare loss and gradients for a few steps. -> rows, and a mask of the visited ones"""
    for t in range(3):
        z1, z2, index = batch(t, dtype)
        for got, want in zip(run(est, z1, z2, index), dense.step(z1, z2, index), strict=True):
            near(got, want, rtol)
        est.step()
    columns = est.read(torch.arange(N))
    assert torch.equal(columns["count"].long(), dense.count)
    return columns, dense.count > 0


@pytest.mark.covering()
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("chunk_size", [None, 100, 388])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reference", ["none", "positive"])
def test_moving_average(reference, mode, chunk_size, dtype, rtol):
    options = {"reference": reference, "mode": mode, "chunk_size": chunk_size, "dtype": dtype}
    est = compopt.SogCLREstimator(N, gamma=0.7, tau=0.05, **options)
    dense = Dense(mode, 0.7, 0.05, reference)
    columns, seen = follow(est, dense, dtype, rtol)
    near(columns["log_u"][seen], dense.u[seen].log(), rtol, atol=rtol)


@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_infonce_is_cross_entropy(threads, chunk_size):
    """Compare with CLIP's loss and both gradients at B = 389 in float32, on one and two threads."""
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
