"""Batches larger than every block size against dense autograd, for errors that loops over six samples cannot show."""

import math

import pytest
import torch

import compopt
from tests.database import MODES, dual_options
from tests.helpers import features, generator, near, run

N, B, DIM = 2000, 389, 24  # a prime: not divisible by any block size


def batch(seed, dtype=torch.float64):
    """Return features and an index with some dozens of repeats."""
    index = torch.randint(0, N, (B,), generator=generator(seed))
    index[-30:] = index[:30]
    return *features(B, DIM, seed, dtype=dtype), index


class Dense:
    """Moving average and (optionally) a momentum dual with full matrices and autograd."""

    def __init__(self, mode, gamma, tau, reference, dual=None):
        self.mode, self.gamma, self.reference, self.dual = mode, gamma, reference, dual
        width = 2 if mode == "bimodal" else 1
        self.u = torch.zeros(N, width, dtype=torch.float64)
        self.count = torch.zeros(N, dtype=torch.long)
        self.tau = torch.full((N, width), tau, dtype=torch.float64)
        self.m = torch.zeros(N, width, dtype=torch.float64)

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
        tau = self.tau[index].expand(B, 2)
        unseen = (self.count[index] == 0)[:, None]

        def inner(d):
            x = scores[d] if self.reference == "none" else scores[d] - positive[:, None]
            return (torch.exp(x / tau[:, d, None]) * negative).sum(1) / size

        g = torch.stack([inner(0), inner(1)], 1).detach()
        if self.mode == "unimodal":
            g = g.mean(1, keepdim=True)
        u = torch.where(unseen, g, (1 - self.gamma) * self.u[index] + self.gamma * g)
        alpha = u.log().expand(B, 2) - (positive.detach()[:, None] / tau if self.reference == "none" else 0.0)
        surrogate, gradients = 0.0, []
        rho = self.dual["rho"] if self.dual else 0.0
        for d in range(2):
            h = scores[d] - positive[:, None]
            w = (torch.exp(h / tau[:, d, None] - alpha[:, d, None]) * negative / size[:, None]).detach()
            # the positive belongs to the outer function ("none"), or to every pair
            linear = (w * scores[d]).sum(1) - positive if self.reference == "none" else (w * h).sum(1)
            surrogate = surrogate + linear.sum()
            gradients.append(alpha[:, d] + rho - linear.detach() / tau[:, d])
        loss = (tau * (alpha + rho)).mean()
        g1, g2 = torch.autograd.grad(surrogate / (2 * B), (z1, z2))
        self.commit(index, u, torch.stack(gradients, 1), g)
        return loss, g1, g2

    def commit(self, index, u, gradients, like):
        """Commit the means over the occurrences of each sample."""
        occurrences = torch.bincount(index, minlength=N)[:, None]
        seen = occurrences[:, 0] > 0

        def mean(x):
            return (torch.zeros(N, x.shape[1], dtype=x.dtype).index_add_(0, index, x) / occurrences)[seen]

        if self.dual:
            gradients = gradients.mean(1, keepdim=True) if self.mode == "unimodal" else gradients
            gradients = gradients.clamp(-self.dual["max_grad"], self.dual["max_grad"])
            m = 0.1 * self.m[index] + 0.9 * gradients
            tau = (self.tau[index] - self.dual["lr"] * m).clamp(self.dual["tau_min"], self.dual["tau_max"])
            self.m[seen], self.tau[seen] = mean(m), mean(tau)
        self.u[seen] = mean(u)
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


@pytest.mark.parametrize("mode", MODES)
def test_individual_temperatures(mode):
    options = dual_options(0.1)
    est = compopt.ISogCLREstimator(N, gamma=0.7, beta=0.9, **options, mode=mode, dtype=torch.float64)
    dense = Dense(mode, 0.7, 0.1, "positive", options)
    columns, seen = follow(est, dense, torch.float64, 1e-10)
    near(columns["tau"][seen], dense.tau[seen])
    near(columns["tau_exp_avg"][seen], dense.m[seen])


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
