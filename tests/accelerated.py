"""Small configurations of every estimator, which tests run on an accelerator and on the CPU."""

from __future__ import annotations

import torch

import compopt
from tests.helpers import call

N, B, D = 200, 24, 16
KINDS = {
    "bimodal": {"mode": "bimodal"},
    "unimodal": {"mode": "unimodal"},
    "forward": {"mode": "bimodal", "directions": "forward"},
}
STATELESS = {
    "infonce": lambda **o: compopt.InfoNCEEstimator(0.07, **o),
    "clip": lambda **o: compopt.InfoNCEEstimator(0.07, learn_tau=True, multiply_tau=False, **o),
    "dcl": lambda **o: compopt.DCLEstimator(0.07, **o),
    "siglip": lambda **o: compopt.SigLIPEstimator(0.2, -2.0, **o),
    "memory": lambda **o: compopt.MemoryEstimator(D, 40, **o),
    "neuclip": lambda **o: compopt.NeuCLIPEstimator(D, prototypes=48, lr=0.1, updates=3, restart_every=3, **o),
}
WITH_ROWS = {
    "sogclr": lambda **o: compopt.SogCLREstimator(N, gamma=0.7, **o),
    "sogclr-positive": lambda **o: compopt.SogCLREstimator(N, gamma=0.7, reference="positive", **o),
    "isogclr": lambda **o: compopt.ISogCLREstimator(N, rho=1.0, **o),
    "fastclip-v0": lambda **o: compopt.FastCLIPEstimator(N, "v0", **o),
    "fastclip-v1": lambda **o: compopt.FastCLIPEstimator(N, "v1", **o),
    "fastclip-v2": lambda **o: compopt.FastCLIPEstimator(N, "v2", rho=1.0, **o),
    "fastclip-v3": lambda **o: compopt.FastCLIPEstimator(N, "v3", rho=1.0, **o),
    "emc2": lambda **o: compopt.EMC2Estimator(N, tau=0.3, **o),
    "groups": lambda **o: compopt.SogCLREstimator([{"n": 80, "gamma": 0.5}, {"n": N - 80}], **o),
}
BUILD = {**STATELESS, **WITH_ROWS}


def batch(seed, device="cpu", size=B):
    """Return features on a device and an index on the CPU, as data loaders return it."""
    generator = torch.Generator().manual_seed(seed)
    z1, z2 = torch.randn(2, size, D, generator=generator)
    index = torch.randperm(N, generator=generator)[:size]
    return z1.to(device).requires_grad_(), z2.to(device).requires_grad_(), index


def one_step(est, z1, z2, index, **parts):
    """Run forward, backward and step; return loss and gradients on their own device."""
    loss = call(est, z1, z2, index, **parts)
    loss.backward()
    est.step()
    return loss.detach(), z1.grad, z2.grad


def train(est, device="cpu", seeds=range(5), **options):
    """Train for some steps; return losses and gradients on the CPU."""
    results = [one_step(est, *batch(seed, device), **options) for seed in seeds]
    return [[x.cpu() for x in result] for result in results]


def same(actual, expected, rtol=1e-4, atol=1e-5):
    """Assert that two nested lists of tensors are close; the first may be on a device."""
    for results, wanted in zip(actual, expected, strict=True):
        for a, b in zip(results, wanted, strict=True):
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=rtol, atol=atol)


def same_rows(one, other):
    """Assert that both estimators have committed the same rows."""
    everything = torch.arange(N)
    columns = other.read(everything)
    for name, value in one.read(everything).items():
        torch.testing.assert_close(value.cpu(), columns[name].cpu(), rtol=1e-4, atol=1e-4)
