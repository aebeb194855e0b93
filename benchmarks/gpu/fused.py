"""The fused kernel beside the torch path and beside other packages' losses, and its gradients against float64.

Its table decides what ``backend="auto"`` means (compopt/tiles/choice.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from benchmarks.gpu.losses import CLIP, COMPILED, TAU, backward, clip_loss, cross_entropy_both_ways, estimator, gradient
from benchmarks.gpu.machine import Action, Machine, with_peaks
from compopt.functional import contrastive_sums
from compopt.tiles.choice import reason_for_torch

# float32 features; what torch.set_float32_matmul_precision asks for in each row
PRECISIONS = {"TF32": "high", "bf16": "medium"}
DENSE = 32768  # above, not even one matrix and its gradient fit
CHUNKED = 65536  # from here on the torch path takes blocks
LOSSES: dict[str, dict[str, Any]] = {
    "InfoNCE": {},  # one exponential for both directions
    "CLIP (learned tau)": {"learn_tau": True, "multiply_tau": False},  # one for each, and moments
}


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRECISIONS[name])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def by_sums(z1: Tensor, z2: Tensor) -> Tensor:
    """CLIP's loss by :func:`compopt.functional.contrastive_sums`."""
    a, b = (F.normalize(z, dim=1) for z in (z1, z2))
    positive = (a * b).sum(1, keepdim=True) / TAU
    sums = contrastive_sums(a, b, TAU, backend="triton")
    return (torch.logaddexp(sums, positive) - positive).mean()


def peers() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """CLIP's loss of other packages with kernels of their own, where they are installed."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    with contextlib.suppress(ImportError):
        from memeff import MemoryEfficientCLIPLoss

        found["memeff"] = MemoryEfficientCLIPLoss(temperature=TAU, stable=False)
    with contextlib.suppress(ImportError):
        from inf_cl import cal_flash_loss

        def inf_cl(z1: Tensor, z2: Tensor) -> Tensor:
            a, b = (F.normalize(z, dim=1) for z in (z1, z2))
            return (cal_flash_loss(a, b, scale=1 / TAU).mean() + cal_flash_loss(b, a, scale=1 / TAU).mean()) / 2

        found["Inf-CL"] = inf_cl
    return found


def contenders(machine: Machine, B: int, d: int) -> dict[str, Action]:
    generator = torch.Generator().manual_seed(B)
    z1, z2 = (z.requires_grad_() for z in torch.randn(2, B, d, generator=generator).to(machine.device).unbind())
    index = torch.randperm(4 * B, generator=generator)[:B]
    chunks = {"torch": 4096 if B >= CHUNKED else None, "triton": None}
    made = {}
    for name, options in LOSSES.items():
        for backend, chunk in chunks.items():
            est = compopt.InfoNCEEstimator(TAU, chunk_size=chunk, backend=backend, **options)
            made[f"{name}, {backend}"] = estimator(est, z1, z2, index)
    made["contrastive_sums"] = backward(by_sums, z1, z2)
    if B <= DENSE:
        made[CLIP] = backward(clip_loss()[1], z1, z2)
        torch._dynamo.reset()
        made[COMPILED] = backward(torch.compile(cross_entropy_both_ways, dynamic=False), z1, z2)
    return made | {name: backward(loss, z1, z2) for name, loss in peers().items()}


def measure(machine: Machine, seconds: float) -> dict[str, Any]:
    """Seconds and peak memory by size and precision, and errors; nothing where the kernel does not run."""
    if machine.pretends:  # for which Triton has no compiler
        return {}
    reason = reason_for_torch("triton", torch.zeros(1, 1, device=machine.device))
    if reason is not None:
        machine.left_out.append(f"fused kernel: {reason}")
        return {}
    sizes = [(96, 32)] if machine.small else [(B, 512) for B in (1024, 4096, 16384, 65536, 131072)]
    sizes += [] if machine.small else [(16384, 768), (16384, 1024)]
    results = []
    for B, d in sizes:
        for name in PRECISIONS:
            what = f"fused kernel, B = {B:,}, d = {d}, {name}"
            if machine.time_is_up(what):
                continue
            with precision(name):
                runs = contenders(machine, B, d)
                found = with_peaks(machine, runs, seconds / (2 * len(sizes)), 3 if machine.small else 20, what)
                del runs
            machine.forget()
            results.append({"B": B, "d": d, "precision": name, "rows": found})
    return {"times": results, "errors": errors(machine)}


def errors(machine: Machine) -> list[dict[str, Any]]:
    """Relative error of both feature gradients of one batch, against cross-entropy in float64 on the CPU."""
    B, d = (64, 32) if machine.small else (1024, 512)
    z1, z2 = torch.randn(2, B, d, generator=torch.Generator().manual_seed(B)).to(machine.device).unbind()
    exact = gradient(cross_entropy_both_ways, z1.cpu().double(), z2.cpu().double())
    results = []
    for name in PRECISIONS:
        losses = {"contrastive_sums": by_sums} | peers()
        for backend in ("torch", "triton"):
            est = compopt.InfoNCEEstimator(TAU, multiply_tau=False, backend=backend)
            losses[f"InfoNCE, {backend}"] = lambda a, b, est=est: est(a, b)
        with precision(name):
            rows = {key: float((gradient(loss, z1, z2) - exact).norm() / exact.norm()) for key, loss in losses.items()}
        results.append({"precision": name, "B": B, "d": d, "rows": rows})
    return results
