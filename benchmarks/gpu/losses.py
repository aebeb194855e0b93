"""Measure losses with both feature gradients, against the unavoidable matrix products and open_clip's ClipLoss."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from benchmarks.gpu.machine import Action, Machine, with_peaks

TAU = 0.07
PRODUCTS, CLIP, COMPILED = "three products", "ClipLoss", "ClipLoss, compiled"
COMPILED_SIZES = (64, 4096, 16384)  # compiling takes seconds each
Precision = tuple[str, torch.dtype]  # precision of float32 products, and dtype of the features
PRECISIONS: dict[str, Precision] = {
    "float32": ("highest", torch.float32),
    "TF32": ("high", torch.float32),
    "bf16": ("high", torch.bfloat16),
}
Loss = Callable[[Tensor, Tensor], Tensor]


@contextlib.contextmanager
def precision(products: str) -> Iterator[None]:
    """Set the precision of float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Size:
    """Number of samples in a batch, dimension of their features, anchors per block (0: all)."""

    B: int
    d: int
    chunk: int = 0


def by_precision(
    machine: Machine,
    what: str,
    sizes: Sequence[Size],
    precisions: Mapping[str, Precision],
    contenders: Callable[[Size, torch.dtype], dict[str, Action]],
    seconds: float,
    rounds: int,
) -> list[dict[str, Any]]:
    """Measure time and peak memory of contenders at every size, in every precision."""
    results = []
    for size, (name, (products, dtype)) in itertools.product(sizes, precisions.items()):
        case = f"{what}, B = {size.B:,}, d = {size.d}, {name}"
        if machine.time_is_up(case):
            continue
        with precision(products):
            runs = contenders(size, dtype)
            each = seconds / (len(sizes) * len(precisions))
            found = with_peaks(machine, runs, each, 3 if machine.small else rounds, case)
            del runs
        machine.forget()
        results.append({**asdict(size), "precision": name, "rows": found})
    return results


def relative_errors(
    machine: Machine, precisions: Mapping[str, Precision], losses: Mapping[str, Loss]
) -> list[dict[str, Any]]:
    """Return relative errors of both feature gradients of a batch, against cross-entropy in float64 on the CPU."""
    B, d = (64, 32) if machine.small else (1024, 512)
    results = []
    for name, (products, dtype) in precisions.items():
        z1, z2, _ = features(machine.device, B, d, dtype)
        exact = gradient(cross_entropy_both_ways, z1.cpu().double(), z2.cpu().double())
        with precision(products):
            rows = {key: float((gradient(loss, z1, z2) - exact).norm() / exact.norm()) for key, loss in losses.items()}
        results.append({"precision": name, "B": B, "d": d, "rows": rows})
    return results


def clip_loss() -> tuple[str, Loss]:
    """Return a description and CLIP's loss: open_clip's, or an equivalent function if it is not installed."""
    try:
        from open_clip.loss import ClipLoss

        theirs = ClipLoss()
        return "that of open_clip", lambda z1, z2: theirs(F.normalize(z1, dim=1), F.normalize(z2, dim=1), 1 / TAU)
    except ImportError:
        return "an equivalent function, because open_clip is not installed", cross_entropy_both_ways


def cross_entropy_both_ways(z1: Tensor, z2: Tensor) -> Tensor:
    """Compute CLIP's loss."""
    logits = F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T / TAU
    target = torch.arange(len(z1), device=z1.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def features(device: torch.device, B: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return two feature matrices as leaves, and an index on the CPU."""
    generator = torch.Generator().manual_seed(B)
    z1, z2 = torch.randn(2, B, d, generator=generator).to(device, dtype)
    return z1.requires_grad_(), z2.requires_grad_(), torch.randperm(4 * B, generator=generator)[:B]


def products(z1: Tensor, z2: Tensor) -> Action:
    def run() -> None:
        with torch.no_grad():
            s = z1 @ z2.T
            torch.mm(s, z2), torch.mm(s.T, z1)

    return run


def backward(loss: Callable[..., Tensor], *given: Tensor) -> Action:
    def run() -> None:
        loss(*given).backward()
        for z in given:
            z.grad = None

    return run


def estimator(est: compopt.ContrastiveEstimator, z1: Tensor, z2: Tensor, index: Tensor) -> Action:
    def run() -> None:
        est(z1, z2, index).backward()
        est.step()
        z1.grad = z2.grad = None

    return run


def contenders(machine: Machine, size: Size, dtype: torch.dtype) -> dict[str, Action]:
    """Return one call of each loss."""
    z1, z2, index = features(machine.device, size.B, size.d, dtype)
    blocks, words = ({"chunk_size": size.chunk}, f", blocks of {size.chunk:,}") if size.chunk else ({}, "")
    loss = clip_loss()[1]
    made: dict[str, Action] = {}
    if 4 * size.B**2 * 4 < 40e9:  # otherwise a matrix and its gradient do not fit
        made[PRODUCTS], made[CLIP] = products(z1, z2), backward(loss, z1, z2)
    if not size.chunk and size.B in COMPILED_SIZES and not machine.pretends:
        torch._dynamo.reset()
        made[COMPILED] = backward(torch.compile(loss, dynamic=False), z1, z2)
    return made | {
        f"InfoNCE{words}": estimator(compopt.InfoNCEEstimator(TAU, **blocks), z1, z2, index),
        f"SogCLR{words}": estimator(compopt.SogCLREstimator(4 * size.B, tau=TAU, **blocks), z1, z2, index),
        f"iSogCLR{words}": estimator(
            compopt.ISogCLREstimator(4 * size.B, tau_init=TAU, rho=1.0, **blocks), z1, z2, index
        ),
    }


def measure(machine: Machine, seconds: float) -> list[dict[str, Any]]:
    """Measure time and peak memory, by precision and batch size."""
    sizes = [(64, 0), (96, 32)] if machine.small else [(1024, 0), (4096, 0), (16384, 0), (16384, 4096), (65536, 4096)]
    chosen = [Size(B, 32 if machine.small else 512, chunk) for B, chunk in sizes]
    return by_precision(machine, "loss", chosen, PRECISIONS, partial(contenders, machine), seconds, 30)


def largest(machine: Machine, seconds: float) -> list[dict[str, Any]]:
    """Measure one batch whose B x B matrix does not fit into memory: B = 131,072."""
    size = Size(256, 32, 64) if machine.small else Size(131072, 512, 4096)

    def two(size: Size, dtype: torch.dtype) -> dict[str, Action]:
        z1, z2, index = features(machine.device, size.B, size.d, dtype)
        return {
            "InfoNCE": estimator(compopt.InfoNCEEstimator(TAU, chunk_size=size.chunk), z1, z2, index),
            "SogCLR": estimator(compopt.SogCLREstimator(4 * size.B, tau=TAU, chunk_size=size.chunk), z1, z2, index),
        }

    precisions = {name: PRECISIONS[name] for name in ("TF32", "float32")}
    return by_precision(machine, "loss", [size], precisions, two, seconds, 3)


def errors(machine: Machine) -> list[dict[str, Any]]:
    """Return relative errors of the gradients, see :func:`relative_errors`."""
    ours = compopt.InfoNCEEstimator(TAU, multiply_tau=False)
    return relative_errors(machine, PRECISIONS, {CLIP: clip_loss()[1], "InfoNCE": lambda a, b: ours(a, b)})


def gradient(loss: Loss, z1: Tensor, z2: Tensor) -> Tensor:
    """Return both feature gradients in float64 on the CPU."""
    a, b = (z.detach().clone().requires_grad_() for z in (z1, z2))
    loss(a, b).backward()
    return torch.cat([z.grad.cpu().double() for z in (a, b) if z.grad is not None])
