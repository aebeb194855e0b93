"""Data, plain reference loops, and injected overflows for the tests of trainers."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compopt
from tests.training import WINDOW, Encoders, N, micro_batches, rows, weights

UPDATES = 4
SKIPPED = (1,)
KEYS = ("x1", "x2", "index")


class Items(torch.utils.data.Dataset):
    """Samples of consecutive micro-batches as dictionaries; read in order, they form the batches of the plain loop."""

    def __init__(self, updates=UPDATES, window=WINDOW, dtype=torch.float64):
        data = micro_batches(updates * window, dtype=dtype)
        self.items = [dict(zip(KEYS, item, strict=True)) for batch in data for item in zip(*batch, strict=True)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, at):
        return self.items[at]


def estimator(dtype=torch.float64, **options):
    """Return the estimator of all runs here."""
    return compopt.ISogCLREstimator(N, rho=0.5, dtype=dtype, **options)


def update(optimizer, est, skipped):
    """End a window without a trainer."""
    if skipped:
        est.discard()
    else:
        optimizer.step()
        est.step()
    optimizer.zero_grad()


def plain_loop(updates=UPDATES, dtype=torch.float64, precision=None, shard=False, skipped=()):
    """Train in plain torch, with DDP for several ranks; -> weights and rows afterwards."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    bare = Encoders(dtype)
    model, est = DistributedDataParallel(bare) if world > 1 else bare, estimator(dtype, shard=shard)
    optimizer = torch.optim.AdamW(bare.groups(), lr=1e-2)
    for step, (x1, x2, index) in enumerate(micro_batches(updates * WINDOW, rank, world, dtype)):
        last = step % WINDOW == WINDOW - 1
        with model.no_sync() if world > 1 and not last else contextlib.nullcontext():
            with torch.autocast("cpu", precision, enabled=precision is not None):
                features = model(x1, x2)
            (est(*(z.to(dtype) for z in features), index) / WINDOW).backward()
        if last:
            update(optimizer, est, skipped=step // WINDOW in skipped)
    return weights(bare), rows(est)


def same(found, expected):
    """Return whether weights and rows are bit-identical."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def spoil(module):
    """Make one gradient overflow, in the shard of this rank."""
    gradient = next(module.parameters()).grad
    (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = torch.inf


@contextlib.contextmanager
def fresh_accelerate():
    """Reset the singletons in which accelerate keeps its state, on exit."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        yield
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
