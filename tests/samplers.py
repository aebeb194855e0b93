"""Small samplers, their features, and a loop that observes its batches."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from compopt.samplers import OrderedBatchSampler, SpectralBatchSampler
from tests.helpers import features, generator

N, B = 50, 8
DIM = 5


def spectral(n=N, batch_size=B, **options):
    return SpectralBatchSampler(n, batch_size, **{"group": 3, **options})


def ordered(n=N, batch_size=B, **options):
    return OrderedBatchSampler(n, batch_size, **{"candidates": 30, "keep": 5, **options})


KINDS = [spectral, ordered]
both = pytest.mark.parametrize("make", KINDS, ids=["spectral", "ordered"])


def table(n=N, seed=0, dtype=torch.float32):
    return features(n, DIM, seed, dtype=dtype)


def filled(make, n=N, **options):
    sampler = make(n, **options)
    sampler.observe(torch.arange(n), *table(n))
    return sampler


def moving(step, index):
    """Return features that differ by a small step-dependent change, as during training."""
    z1, z2 = table()
    g = generator(10_000 + step)
    return tuple(z[index] + 0.1 * torch.randn(len(index), DIM, generator=g) for z in (z1, z2))


def train(sampler, steps, trace=None, clock=0):
    """Run a loop over epochs that observes every batch."""
    trace = [] if trace is None else trace
    while steps:
        for batch in sampler:
            trace.append(batch)
            sampler.observe(torch.tensor(batch), *moving(len(trace) + clock, batch))
            steps -= 1
            if not steps:
                return trace
    return trace


def loader(sampler, workers):
    data = TensorDataset(torch.arange(N))
    return DataLoader(
        data, batch_sampler=sampler, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
