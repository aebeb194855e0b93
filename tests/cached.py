"""Models, call variants and frameworks for the tests of the gradient cache, and the expected gradients."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import compopt
from tests.trainers import fresh_accelerate

N, D, LR = 60, 6, 64.0  # a large learning rate: gradients are computed from the change of the weights in a step


ESTIMATORS = {
    "clip": lambda **o: compopt.InfoNCEEstimator(0.3, learn_tau=True, multiply_tau=False, **o),
    "sogclr": lambda **o: compopt.SogCLREstimator(N, tau=0.3, **o),
    "isogclr": lambda **o: compopt.ISogCLREstimator(N, rho=0.5, **o),
    "fastclip-v3": lambda **o: compopt.FastCLIPEstimator(N, "v3", rho=0.5, **o),
    "neuclip": lambda **o: compopt.NeuCLIPEstimator(D, prototypes=16, lr=0.1, updates=2, **o),
    "emc2": lambda **o: compopt.EMC2Estimator(N, tau=0.3, **o),
    "memory": lambda **o: compopt.MemoryEstimator(D, 40, **o),
    "policy": lambda **o: compopt.DCLEstimator(0.3, pairs=compopt.PairPolicy(false_negatives=0.1, hardness=2.0), **o),
}


POLICY = compopt.PairPolicy(false_negatives=0.0, guided=True, within=True)


def guided(x1, x2, x3, i):
    return {
        "model": "model",
        "batch": (x1, x2),
        "encode": two,
        "pairs": POLICY.bind(guide=(x1, x1 + 0.1), within=i % 2),
    }


class Encoders(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = tower(5, dtype), tower(4, dtype)
        self.scale = nn.Parameter(torch.tensor([3.0], dtype=dtype))  # FSDP2 does not support 0-d parameters

    def forward(self, x1, x2, x3=None):
        z1, z2 = self.first(x1), self.second(x2) + 0 * self.scale.squeeze()  # DDP requires that every parameter is used
        return (z1, z2, 1 / self.scale.squeeze()) if x3 is None else (z1, z2, self.second(x3))


def tower(width, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(width)
        return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, D)).to(dtype)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(layer.in_features)
            self.down = nn.Linear(layer.in_features, 2, bias=False).to(layer.weight)
            self.up = nn.Linear(2, layer.out_features, bias=False).to(layer.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Checkpointed(nn.Sequential):
    """Layers with activation checkpointing: the backward pass computes them again."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def with_adapters(tower):
    return nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in tower))


CHANGES = {"adapters": with_adapters, "checkpointed": lambda tower: Checkpointed(*tower)}


def changed(model, feature):
    """Return the model, with other towers if the feature is a property of the model."""
    if feature in CHANGES:
        model.first, model.second = map(CHANGES[feature], (model.first, model.second))
    return model


def two(model, part):
    return model(*part)[:2]


def named(model, part):
    return model(part["x1"], torch.stack(part["nested"][0]))[:2]


def with_tau(model, part):
    return model(*part)


# The arguments of a call for each call variant; `model` is "model" or names of towers.
FEATURES = {
    "pair": lambda x1, x2, x3, i: {"model": "model", "batch": (x1, x2), "encode": two},
    "mapping": lambda x1, x2, x3, i: {"model": "model", "batch": {"x1": x1, "nested": ([*x2], "a")}, "encode": named},
    "tau": lambda x1, x2, x3, i: {"model": "model", "batch": (x1, x2), "encode": with_tau},
    "labels": lambda x1, x2, x3, i: {
        "model": "model", "batch": (x1, x2), "encode": two, "labels": i % 7, "index2": i // 2,
    },
    "extra": lambda x1, x2, x3, i: {"model": "model", "batch": (x1, x2, x3), "negatives": (None, (i + 1) % N)},
    "towers": lambda x1, x2, x3, i: {"model": ("first", "second"), "batch": (x1, x2), "micro_batch_size": (5, 2)},
    "negatives": lambda x1, x2, x3, i: {"model": ("first", "second", "second"), "batch": (x1, x2, x3.repeat(2, 1))},
    "frozen": lambda x1, x2, x3, i: {"model": ("first", "second"), "batch": (x1, x2)},
    "guided": guided,
    **{name: lambda x1, x2, x3, i: {"model": "model", "batch": (x1, x2), "encode": two} for name in CHANGES},
}  # fmt: skip


def data(rank, shares, dtype):
    """Return the inputs of one rank; its samples follow those of the lower ranks."""
    g = torch.Generator().manual_seed(1)
    at = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    inputs = (torch.randn(sum(shares), k, generator=g, dtype=torch.float64).to(dtype)[at] for k in (5, 4, 4))
    return *inputs, torch.randperm(N, generator=g)[: sum(shares)][at]


def whole(est, model, batch, index, encode=None, backward=None, micro_batch_size=None, **call):
    """Run one forward and one backward pass through the whole batch."""
    if isinstance(model, tuple):
        outputs = [own(part) for own, part in zip(model, batch, strict=True)]
    else:
        outputs = model(*batch) if encode is None else encode(model, batch)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if outputs[-1].dim() == 0:
        call["tau"] = outputs.pop()
    if len(outputs) == 3:
        positions = call["negatives"][1] if "negatives" in call else None
        call["negatives"] = outputs.pop() if positions is None else (outputs.pop(), positions)
    loss = est(outputs[0], outputs[1] if outputs[1:] else None, index, **call)
    loss.backward()
    return loss.detach()


# frameworks: how each wraps a module, back-propagates and takes a step --------------------------------------------


class Plain:
    """No framework."""

    dtype, backward, scale = torch.float64, None, 1.0

    def __init__(self):
        self.optimizers = []

    def wrap(self, module):
        """Return the module that the trainer calls."""
        wrapped = self.distribute(module)
        self.optimizers.append(torch.optim.SGD(module.parameters(), lr=LR))
        return wrapped

    def distribute(self, module):
        return module

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self, module):
        return [p.detach().clone() for p in module.parameters()]

    @contextmanager
    def accumulate(self, model, last):
        """Accumulate over the two calls of an update; yield this call's reduce=."""
        yield last


class DDP(Plain):
    def distribute(self, module):
        return DistributedDataParallel(module)


class FSDP2(Plain):
    def distribute(self, module):
        from torch.distributed.fsdp import fully_shard

        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(module)

    def weights(self, module):
        return [
            p.full_tensor().detach().clone() if hasattr(p, "full_tensor") else p.clone() for p in module.parameters()
        ]


class Accelerate(Plain):
    def __init__(self):
        from accelerate import Accelerator

        super().__init__()
        self.accelerator = Accelerator(cpu=True)
        self.backward = self.accelerator.backward

    def distribute(self, module):
        return self.accelerator.prepare(module)


# by default ZeRO 3 keeps parameters as small as these on all ranks
RELEASED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


class ZeRO1(Plain):
    """DeepSpeed with one engine per wrapped module. It reduces gradients and takes its steps in single precision."""

    def __init__(self):
        super().__init__()
        os.environ["DS_ACCELERATOR"] = "cpu"
        self.config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": int(type(self).__name__[-1]), **RELEASED},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # not the default
            "steps_per_print": 10**9,
        }

    def wrap(self, module):
        import deepspeed

        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        self.optimizers.append(deepspeed.initialize(model=module, optimizer=optimizer, config=self.config)[0])
        return self.optimizers[-1]

    @contextmanager
    def accumulate(self, model, last):
        yield True  # the engine counts the calls

    def weights(self, module):
        import deepspeed

        parameters = list(module.parameters())
        gathered = deepspeed.zero.GatheredParameters(parameters) if hasattr(parameters[0], "ds_id") else nullcontext()
        with gathered:
            return [p.detach().clone() for p in parameters]


class ZeRO0(ZeRO1):
    """ZeRO 0, whose reduction does not support double precision on a CPU: the model uses single precision too."""

    dtype = torch.float32


class ZeRO2(ZeRO1):
    pass


class ZeRO3(ZeRO1):
    """ZeRO 3 for models in double precision, which DeepSpeed rejects on CPUs that support float16, and only there."""

    def wrap(self, module):
        from deepspeed.accelerator import get_accelerator

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
            return super().wrap(module)


FRAMEWORKS = {each.__name__: each for each in [
    Plain, DDP, FSDP2, Accelerate, ZeRO0, ZeRO1, ZeRO2, ZeRO3,
]}  # fmt: skip


SHARES = {1: (16,), 2: (11, 5), 3: (9, 5, 2)}


def outcome(framework, kind, feature, ranks, run=compopt.gradient_cache, calls=1):
    """Return the loss, gradients of all parameters, committed rows, and the number of gradient reductions."""
    made, rank = FRAMEWORKS[framework](), dist.get_rank() if ranks > 1 else 0
    model = changed(Encoders(made.dtype), feature)
    *inputs, index = data(rank, SHARES[ranks], made.dtype)
    call = {"micro_batch_size": 3, **FEATURES[feature](*inputs, index)}
    names = call.pop("model")
    model.first.requires_grad_(feature != "frozen")
    parts = {"model": model} if names == "model" else {"first": model.first, "second": model.second}
    trained = {name: part for name, part in parts.items() if next(part.parameters()).requires_grad}
    owns = {**parts, **{name: made.wrap(part) for name, part in trained.items()}}
    before = [made.weights(part) for part in trained.values()]
    options = {"guided": {"pairs": POLICY}}.get(feature, {})
    est = ESTIMATORS[kind](dtype=torch.float64, **options)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        given = owns["model"] if names == "model" else tuple(owns[name] for name in names)
        loss = run(est, given, index=index, backward=made.backward, **call)
    reduced = sum(e.count for e in profile.key_averages() if e.key == "gloo:all_reduce")
    learned = [p.grad / made.scale for p in est.parameters()]
    made.step()
    after = [made.weights(part) for part in trained.values()]
    gradients = [(w - v) / LR for own, new in zip(before, after, strict=True) for w, v in zip(own, new, strict=True)]
    est.step()
    return loss, [*gradients, *learned], est.read(torch.arange(N)) if est.n else {}, reduced


def undivided(est, model, **call):
    """Run the gradient cache with one micro-batch."""
    return compopt.gradient_cache(est, model, **{**call, "micro_batch_size": N})


def on_ranks(group, *case):
    with fresh_accelerate():
        return outcome(*case)


def assert_close(found, expected, tolerance):
    """Assert that losses, gradients and rows are close."""
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=tolerance, atol=tolerance)
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-14
    for name, column in expected[2].items():
        torch.testing.assert_close(found[2][name], column, rtol=1e-5, atol=1e-5)


def assert_like_one_process(results, case, tolerance):
    """Assert that all results are close to those of one process without a cache."""
    expected = outcome("Plain", *case, 1, run=whole)
    for found in results:
        assert_close(found, expected, tolerance)


class Held:
    """Count the bytes of activations that autograd graphs hold: current and peak."""

    def __init__(self, model):
        self.now = self.most = 0
        self.weights = {p.data_ptr() for p in model.parameters()}

    def pack(self, x):
        return Saved(self, x)


class Saved:
    def __init__(self, held, tensor):
        self.held, self.tensor = held, tensor
        self.bytes = 0 if tensor.data_ptr() in held.weights else tensor.nbytes
        held.now += self.bytes
        held.most = max(held.most, held.now)

    def __del__(self):
        self.held.now -= self.bytes


def most_held(framework, batch, run, size=None):
    """Return the peak bytes of activations that autograd graphs hold, on one process or on this rank."""
    made, rank = FRAMEWORKS[framework](), dist.get_rank() if dist.is_initialized() else 0
    module = Encoders(made.dtype)
    model, held = made.wrap(module), Held(module)
    x1, x2, *_ = data(0, (batch,), made.dtype)
    call = {"encode": two, "backward": made.backward, "micro_batch_size": size}
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda saved: saved.tensor):
        run(compopt.DCLEstimator(), model, (x1, x2), index=torch.arange(batch) + rank * batch, **call)
    return held.most


@fresh_accelerate()
def run_windows(group, framework):
    """Run two calls for one update, the second of which reduces."""
    made, est = FRAMEWORKS[framework](), compopt.SogCLREstimator(N, tau=0.3)
    if framework.startswith("ZeRO"):
        made.config["gradient_accumulation_steps"] = 2
    module = Encoders(made.dtype)
    model, before = made.wrap(module), made.weights(module)
    for last in (False, True):
        *inputs, index = data(dist.get_rank(), SHARES[2], made.dtype)
        call = {"encode": two, "micro_batch_size": 3, "backward": made.backward}
        with made.accumulate(model, last) as reduce:
            compopt.gradient_cache(est, model, (inputs[0] + last, inputs[1]), index, reduce=reduce, **call)
        if framework.startswith("ZeRO") or last:
            made.step()
    deposits = est.pending
    return [(w - v) / LR for w, v in zip(before, made.weights(module), strict=True)], deposits


def two_windows():
    """Return the gradients of one process that encodes both batches at once."""
    model, est = Encoders(torch.float64), compopt.SogCLREstimator(N, tau=0.3)
    *inputs, index = data(0, SHARES[1], torch.float64)
    for last in (False, True):
        whole(est, model, (inputs[0] + last, inputs[1]), index, encode=two)
    return [p.grad for p in model.parameters()]


def tolerance_of(framework):
    """Return the largest relative error of gradients against those of the whole batch in double precision."""
    return {"ZeRO0": 2e-6}.get(framework, 1e-6 if "ZeRO" in framework else 1e-10)


def assert_like_two_windows(framework, gradients):
    share = 1 if framework in ("DDP", "FSDP2") else 2  # accelerate and DeepSpeed divide by the number of calls
    for a, b in zip(gradients, two_windows(), strict=True):
        assert (a * share - b).norm() <= tolerance_of(framework) * b.norm() + 1e-14


class Noisy(nn.Module):
    """A tower with dropout, and optionally with checkpointed or batch-normalised layers."""

    def __init__(self, checkpointed=None, norm=None):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(5, 8), norm or nn.Identity(), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, D))
        self.layers.double()
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed is None:
            return self.layers(x)
        return checkpoint(self.layers, x.requires_grad_(), use_reentrant=self.checkpointed)


def linear_towers():
    first, second = nn.Linear(5, D), nn.Linear(4, D)
    return first.double(), second.double()
