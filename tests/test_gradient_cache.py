"""compopt.gradient_cache: the gradients of the whole batch at once, in every framework."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compopt
from tests.pool import the_pool
from tests.trainers import fresh_accelerate

N, D = 60, 6
ESTIMATORS = {
    "infonce": lambda **o: compopt.InfoNCEEstimator(0.3, **o),
    "clip": lambda **o: compopt.InfoNCEEstimator(0.3, learn_tau=True, multiply_tau=False, **o),
    "sogclr": lambda **o: compopt.SogCLREstimator(N, tau=0.3, **o),
    "isogclr": lambda **o: compopt.ISogCLREstimator(N, rho=0.5, **o),
    "fastclip-v0": lambda **o: compopt.FastCLIPEstimator(N, "v0", **o),
    "fastclip-v3": lambda **o: compopt.FastCLIPEstimator(N, "v3", rho=0.5, **o),
    "neuclip": lambda **o: compopt.NeuCLIPEstimator(D, prototypes=16, lr=0.1, updates=2, **o),
    "emc2": lambda **o: compopt.EMC2Estimator(N, tau=0.3, **o),
    "memory": lambda **o: compopt.MemoryEstimator(D, 40, **o),
}


class Encoders(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = tower(5, dtype), tower(4, dtype)
        self.scale = nn.Parameter(torch.tensor([3.0], dtype=dtype))  # FSDP2 refuses 0-d ones

    def forward(self, x1, x2, x3=None):
        z1, z2 = self.first(x1), self.second(x2) + 0 * self.scale  # DDP wants every parameter to be used
        return (z1, z2, 1 / self.scale.squeeze()) if x3 is None else (z1, z2, self.second(x3))


def tower(width, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(width)
        return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, D)).to(dtype)


def two(model, part):
    return model(**part)[:2] if isinstance(part, dict) else model(*part)[:2]


def with_tau(model, part):
    return model(*part)


def stacked(model, part):
    return torch.stack(two(model, part))


# The arguments of a call for each way to call; `model` is "model" or names of towers.
FEATURES = {
    "pair": lambda x1, x2, x3, i: {"model": "model", "batch": (x1, x2), "encode": two},
    "mapping": lambda x1, x2, x3, i: {"model": "model", "batch": {"x1": x1, "x2": [*x2]}, "encode": two_of_lists},
    "tau": lambda x1, x2, x3, i: {"model": "model", "batch": (x1, x2), "encode": with_tau},
    "labels": lambda x1, x2, x3, i: {
        "model": "model", "batch": (x1, x2), "encode": two, "labels": i % 7, "index2": i // 2,
    },
    "views": lambda x1, x2, x3, i: {"model": "model", "batch": (x1, x2), "encode": stacked},
    "extra": lambda x1, x2, x3, i: {"model": "model", "batch": (x1, x2, x3), "extra_index": (i + 1) % N},
    "towers": lambda x1, x2, x3, i: {"model": ("first", "second"), "batch": (x1, x2), "micro_batch_size": (5, 2)},
    "negatives": lambda x1, x2, x3, i: {"model": ("first", "second", "second"), "batch": (x1, x2, x3[3:])},
    "frozen": lambda x1, x2, x3, i: {"model": ("first", "second"), "batch": (x1, x2)},
}  # fmt: skip


def two_of_lists(model, part):
    return model(x1=part["x1"], x2=torch.stack(list(part["x2"])))[:2]


def data(rank, shares, dtype):
    """Inputs of one rank, whose samples follow those of the ranks before it."""
    g = torch.Generator().manual_seed(1)
    at = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    inputs = (torch.randn(sum(shares), k, generator=g, dtype=torch.float64).to(dtype)[at] for k in (5, 4, 4))
    return *inputs, torch.randperm(N, generator=g)[: sum(shares)][at]


def whole(est, model, batch, index, encode=None, backward=None, micro_batch_size=None, **call):
    """One forward and one backward through everything."""
    encode = encode or (lambda model, part: model(*part) if isinstance(part, tuple) else model(part))
    if isinstance(model, tuple):
        outputs = [own(part) for own, part in zip(model, batch, strict=True)]
    else:
        outputs = encode(model, batch)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if outputs[-1].dim() == 0:
        call["tau"] = outputs.pop()
    if len(outputs) == 3:
        call["extra"] = outputs.pop()
    loss = est(outputs[0], outputs[1] if outputs[1:] else None, index, **call)
    (backward or torch.Tensor.backward)(loss)
    return loss.detach()


# frameworks: a module, and what wraps it, back-propagates, and shows gradients -----------------------------------------


class Plain:
    """No framework."""

    dtype, backward = torch.float64, None

    def wrap(self, module):
        return module

    def gradients(self, module):
        return [p.grad for p in module.parameters()]


class DDP(Plain):
    def wrap(self, module):
        return DistributedDataParallel(module)


class StaticDDP(Plain):
    def wrap(self, module):
        return DistributedDataParallel(module, static_graph=True)


class FSDP2(Plain):
    def wrap(self, module):
        from torch.distributed.fsdp import fully_shard

        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(module)

    def gradients(self, module):
        return [p.grad if p.grad is None else p.grad.full_tensor() for p in module.parameters()]


class Accelerate(Plain):
    def __init__(self):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.backward = self.accelerator.backward

    def wrap(self, module):
        return self.accelerator.prepare(module)


class Scaler(DDP):
    """Unscaled at the end, as before clipping."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def gradients(self, module):
        return [p.grad / 1024 for p in module.parameters()]


class DeepSpeed(Plain):
    """An engine for every wrapped module."""

    dtype, stage, steps = torch.float32, 0, 1

    def __init__(self):
        os.environ["DS_ACCELERATOR"] = "cpu"

    def wrap(self, module):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.steps,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        self.engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
        if self.stage == 0:  # its all-reduce comes before the step
            pass
        return self.engine

    def gradients(self, module):
        from deepspeed.utils import safe_get_full_grad

        return [safe_get_full_grad(p) for p in module.parameters()]


class Zero1(DeepSpeed):
    stage = 1


class Zero2(DeepSpeed):
    stage = 2


class Zero3(DeepSpeed):
    stage = 3


FRAMEWORKS = {each.__name__.lower(): each for each in (
    Plain, DDP, StaticDDP, FSDP2, Accelerate, Scaler, DeepSpeed, Zero1, Zero2, Zero3,
)}  # fmt: skip
SHARES = {1: (11,), 2: (11, 4), 3: (9, 5, 2)}


def outcome(run, framework, kind, feature, ranks):
    """Loss, gradients of parameters, deposits and the number of reductions of a whole batch or a cached one."""
    made = FRAMEWORKS[framework]()
    model = Encoders(made.dtype)
    rank = dist.get_rank() if dist.is_initialized() else 0
    *inputs, index = data(rank, SHARES[ranks], made.dtype)
    call = FEATURES[feature](*inputs, index)
    if feature == "frozen":
        model.first.requires_grad_(False)
    trained = [model] if call["model"] == "model" else [model.second] if feature == "frozen" else [model.first, model.second]
    wrapped = {id(module): made.wrap(module) for module in trained}
    names = call.pop("model")
    at = {"model": model, "first": model.first, "second": model.second}
    owns = tuple(wrapped.get(id(at[name]), at[name]) for name in ([names] if names == "model" else names))
    est = ESTIMATORS[kind](**({"mode": "unimodal"} if feature == "views" else {}))
    call = {"micro_batch_size": 3, **call}
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        loss = run(est, owns[0] if names == "model" else owns, index=index, backward=made.backward, **call)
    gradients = [g for module in trained for g in made.gradients(module)]
    gradients += [p.grad for p in est.parameters()]
    if made.backward is not None and framework == "scaler":
        gradients[-1:] = [p.grad / 1024 for p in est.parameters()] or gradients[-1:]
    pending = est.pending
    est.step()
    state = est.read(torch.arange(N)) if est.n else {}
    return loss, gradients, pending, state, {e.key: e.count for e in profile.key_averages() if e.key.startswith('gloo:') and 'reduce' in e.key}


def both(group, *case):
    with fresh_accelerate():
        expected = outcome(whole, *case)
    with fresh_accelerate():
        return expected, outcome(compopt.gradient_cache, *case)
