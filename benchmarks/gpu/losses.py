"""Loss and both feature gradients, beside the products that no method avoids and beside open_clip's ClipLoss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from benchmarks.gpu.machine import Action, Machine, with_peaks

TAU = 0.07
PRODUCTS, CLIP, COMPILED = "three products", "ClipLoss", "ClipLoss, compiled"
COMPILED_SIZES = (64, 4096, 16384)  # compiling takes seconds each
PRECISIONS = {"float32": ("highest", torch.float32), "TF32": ("high", torch.float32), "bf16": ("high", torch.bfloat16)}


@contextlib.contextmanager
def precision(name: str) -> Iterator[torch.dtype]:
    """Products of float32 in this precision; what features are given in."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRECISIONS[name][0])
    try:
        yield PRECISIONS[name][1]
    finally:
        torch.set_float32_matmul_precision(before)


def clip_loss() -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """open_clip's, or, where it is not installed, the same written out; with which of the two it is."""
    try:
        from open_clip.loss import ClipLoss

        theirs = ClipLoss()
        return "open_clip's", lambda z1, z2: theirs(F.normalize(z1, dim=1), F.normalize(z2, dim=1), 1 / TAU)
    except ImportError:
        return "written out: open_clip is not installed", cross_entropy_both_ways


def cross_entropy_both_ways(z1: Tensor, z2: Tensor) -> Tensor:
    """CLIP's loss."""
    logits = F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T / TAU
    target = torch.arange(len(z1), device=z1.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def features(device: torch.device, B: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two leaves and an index on the CPU."""
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


def contenders(machine: Machine, B: int, d: int, dtype: torch.dtype, chunk: int, compiled: bool) -> dict[str, Action]:
    """One call of each; in blocks of ``chunk`` anchors, if that is not 0."""
    z1, z2, index = features(machine.device, B, d, dtype)
    blocks, words = ({"chunk_size": chunk}, f", blocks of {chunk:,}") if chunk else ({}, "")
    loss = clip_loss()[1]
    made: dict[str, Action] = {}
    if 4 * B * B * 4 < 40e9:  # else not even one matrix and its gradient fit
        made[PRODUCTS], made[CLIP] = products(z1, z2), backward(loss, z1, z2)
    if compiled:
        torch._dynamo.reset()
        made[COMPILED] = backward(torch.compile(loss, dynamic=False), z1, z2)
    made |= {
        f"InfoNCE{words}": estimator(compopt.InfoNCEEstimator(TAU, **blocks), z1, z2, index),
        f"SogCLR{words}": estimator(compopt.SogCLREstimator(4 * B, tau=TAU, **blocks), z1, z2, index),
        f"iSogCLR{words}": estimator(compopt.ISogCLREstimator(4 * B, tau_init=TAU, rho=1.0, **blocks), z1, z2, index),
    }
    return made


def measure(machine: Machine, seconds: float) -> list[dict[str, Any]]:
    """Time and peak memory, by precision and batch size."""
    sizes = [(64, 0), (96, 32)] if machine.small else [(1024, 0), (4096, 0), (16384, 0), (16384, 4096), (65536, 4096)]
    d = 32 if machine.small else 512
    results = []
    for B, chunk in sizes:
        for name in PRECISIONS:
            what = f"loss, B = {B:,}, {name}"
            if machine.time_is_up(what):
                continue
            with precision(name) as dtype:
                runs = contenders(
                    machine, B, d, dtype, chunk, not chunk and B in COMPILED_SIZES and not machine.pretends
                )
                found = with_peaks(machine, runs, seconds / (3 * len(sizes)), 3 if machine.small else 30, what)
                del runs
            machine.forget()
            results.append({"B": B, "d": d, "precision": name, "chunk": chunk, "rows": found})
    return results


def largest(machine: Machine, seconds: float) -> list[dict[str, Any]]:
    """One batch that no B x B matrix fits into: B = 131,072."""
    B, d, chunk = (256, 32, 64) if machine.small else (131072, 512, 4096)
    results = []
    for name in ("TF32", "float32"):
        what = f"loss, B = {B:,}, {name}"
        if machine.time_is_up(what):
            continue
        with precision(name) as dtype:
            z1, z2, index = features(machine.device, B, d, dtype)
            runs = {
                "InfoNCE": estimator(compopt.InfoNCEEstimator(TAU, chunk_size=chunk), z1, z2, index),
                "SogCLR": estimator(compopt.SogCLREstimator(4 * B, tau=TAU, chunk_size=chunk), z1, z2, index),
            }
            found = with_peaks(machine, runs, seconds / 2, 3, what)
        results.append({"B": B, "d": d, "precision": name, "chunk": chunk, "rows": found})
    return results


def errors(machine: Machine) -> list[dict[str, Any]]:
    """Relative error of the gradients of one batch, against cross-entropy in float64 on the CPU."""
    B, d = (64, 32) if machine.small else (1024, 512)
    results = []
    for name in PRECISIONS:
        with precision(name) as dtype:
            z1, z2, index = features(machine.device, B, d, dtype)
            exact = gradient(cross_entropy_both_ways, z1.detach().cpu().double(), z2.detach().cpu().double())
            est = compopt.InfoNCEEstimator(TAU)
            theirs = gradient(clip_loss()[1], z1, z2)
            ours = gradient(lambda a, b, est=est, index=index: est(a, b, index), z1, z2) / TAU  # tau times theirs
            rows = {key: float((g - exact).norm() / exact.norm()) for key, g in ((CLIP, theirs), ("InfoNCE", ours))}
        results.append({"precision": name, "B": B, "d": d, "rows": rows})
    return results


def gradient(loss: Callable[[Tensor, Tensor], Tensor], z1: Tensor, z2: Tensor) -> Tensor:
    """Both feature gradients in float64 on the CPU."""
    a, b = (z.detach().clone().requires_grad_() for z in (z1, z2))
    loss(a, b).backward()
    return torch.cat([z.grad.cpu().double() for z in (a, b) if z.grad is not None])
