"""A small contrastive training that gives the same results on one process and on several, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compopt

N, DIM, MICRO, WINDOW = 40, 6, 8, 2
needs_fsdp2 = pytest.mark.skipif(torch.__version__ < (2, 6), reason="fully_shard needs torch 2.6")


class Encoders(nn.Module):
    """Two encoders behind one forward, as DistributedDataParallel requires."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(DIM, DIM, dtype=dtype), nn.Linear(DIM, DIM, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64))

    def forward(self, x1, x2):
        return self.first(x1), self.second(x2)

    def groups(self):
        """Return two parameter groups, with and without weight decay."""
        return [{"params": [self.first.weight, self.second.weight], "weight_decay": 0.01},
                {"params": [self.first.bias, self.second.bias], "weight_decay": 0.0}]  # fmt: skip


def micro_batches(count, rank=0, ranks=1, dtype=torch.float64, seed=3):
    """Return `count` micro-batches of the global size MICRO; a rank gets its slice of each."""
    g = torch.Generator().manual_seed(seed)
    part = slice(rank * MICRO // ranks, (rank + 1) * MICRO // ranks)
    result = []
    for _ in range(count):
        x = torch.randn(2, MICRO, DIM, generator=g, dtype=torch.float64).to(dtype)
        result.append((x[0][part], x[1][part], torch.randperm(N, generator=g)[:MICRO][part]))
    return result


def weights(module):
    """Return all parameters in one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def rows(est):
    """Return all rows in one float64 matrix."""
    columns = est.read(torch.arange(N))
    return torch.cat([columns[name].double().reshape(N, -1) for name in sorted(columns)], dim=1)


def reference(updates, skipped=(), dtype=torch.float64, window=WINDOW, lr=1e-2):
    """Train in one process with AdamW; skipped windows change nothing. -> (weights, rows) after each window."""
    model, est = Encoders(dtype), compopt.ISogCLREstimator(N, rho=0.5, dtype=dtype)
    optimizer = torch.optim.AdamW(model.groups(), lr=lr)
    data, trace = micro_batches(updates * window, dtype=dtype), []
    for update in range(updates):
        for x1, x2, index in data[update * window : (update + 1) * window]:
            (est(*model(x1, x2), index) / window).backward()
        if update not in skipped:
            optimizer.step()
            est.step()
        else:
            est.discard()
        optimizer.zero_grad()
        trace.append((weights(model), rows(est)))
    return trace
