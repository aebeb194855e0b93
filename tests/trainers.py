"""Data, plain reference loops, and injected overflows for the tests of trainers."""

from __future__ import annotations

import contextlib

import pytest
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


@contextlib.contextmanager
def placed(strategy, **config):
    """Yield the options with which the Trainer of transformers uses a strategy on CPUs; accelerate is set up for it.

    ``strategy``: "ddp", "fsdp2", or "zero1" to "zero3"; ``config`` goes into the configuration of FSDP or DeepSpeed.
    """
    from accelerate import PartialState
    from transformers import training_args

    if strategy == "ddp":
        yield {"use_cpu": True}
        return
    PartialState._reset_state()
    shared = {"use_cpu": False, "accelerator_config": {"use_configured_state": True}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
        if strategy == "fsdp2":
            patch.setenv("ACCELERATE_USE_FSDP", "true")
            PartialState(cpu=True)
            yield {**shared, "fsdp": "full_shard", "fsdp_config": {"version": 2, **config}}
            return
        for key, value in {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}.items():
            patch.setenv(key, value)
        PartialState(backend="gloo")
        defaults = {
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "steps_per_print": 10**9,
            "zero_optimization": {"stage": int(strategy[-1])},
        }  # fmt: skip
        yield {**shared, "deepspeed": {**defaults, **config}}


# for the Trainer's own optimizer "sgd", without clipping
PLAIN_SGD = {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
