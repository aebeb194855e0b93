"""Compare the fused kernel with the torch path and with other packages' losses, and its gradients with float64.

The choice that ``backend="auto"`` makes (compopt/kernel/triton/choice.py) is based on its table.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from benchmarks.gpu.losses import (
    CLIP,
    COMPILED,
    TAU,
    Loss,
    Precision,
    Size,
    backward,
    by_precision,
    clip_loss,
    cross_entropy_both_ways,
    estimator,
    features,
    relative_errors,
)
from benchmarks.gpu.machine import Action, Machine
from compopt.functional import contrastive_sums
from compopt.kernel.triton.choice import reason_for_torch

PRECISIONS: dict[str, Precision] = {"TF32": ("high", torch.float32), "bf16": ("medium", torch.float32)}
DENSE = 32768  # largest batch of which a matrix and its gradient fit into memory
CHUNKED = 65536  # smallest batch for which the torch path uses blocks
LOSSES: dict[str, dict[str, Any]] = {
    "InfoNCE": {},  # one exponential for both directions
    "CLIP (learned tau)": {"learn_tau": True, "multiply_tau": False},  # one for each, and moments
}


def by_sums(z1: Tensor, z2: Tensor) -> Tensor:
    """Compute CLIP's loss by :func:`compopt.functional.contrastive_sums`."""
    a, b = (F.normalize(z, dim=1) for z in (z1, z2))
    positive = (a * b).sum(1, keepdim=True) / TAU
    sums = contrastive_sums(a, b, TAU, backend="triton")
    return (torch.logaddexp(sums, positive) - positive).mean()


def peers() -> dict[str, Loss]:
    """Return CLIP's loss of other packages with their own kernels, if they are installed."""
    found: dict[str, Loss] = {}
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


def contenders(machine: Machine, size: Size, dtype: torch.dtype) -> dict[str, Action]:
    """Return one call of each loss; only the torch path is chunked."""
    z1, z2, index = features(machine.device, size.B, size.d, dtype)
    chunks = {"torch": size.chunk or None, "triton": None}
    made = {}
    for name, options in LOSSES.items():
        for backend, chunk in chunks.items():
            est = compopt.InfoNCEEstimator(TAU, chunk_size=chunk, backend=backend, **options)
            made[f"{name}, {backend}"] = estimator(est, z1, z2, index)
    made["contrastive_sums"] = backward(by_sums, z1, z2)
    if size.B <= DENSE:
        made[CLIP] = backward(clip_loss()[1], z1, z2)
        torch._dynamo.reset()
        made[COMPILED] = backward(torch.compile(cross_entropy_both_ways, dynamic=False), z1, z2)
    return made | {name: backward(loss, z1, z2) for name, loss in peers().items()}


def measure(machine: Machine, seconds: float) -> dict[str, Any]:
    """Measure seconds and peak memory by size and precision, and errors; empty if the kernel does not run here."""
    if machine.pretends:  # Triton has no compiler for it
        return {}
    reason = reason_for_torch("triton", torch.zeros(1, 1, device=machine.device))
    if reason is not None:
        machine.left_out.append(f"fused kernel: {reason}")
        return {}
    sizes = [(96, 32)] if machine.small else [(B, 512) for B in (1024, 4096, 16384, 65536, 131072)]
    sizes += [] if machine.small else [(16384, 768), (16384, 1024)]
    chosen = [Size(B, d, 4096 if B >= CHUNKED else 0) for B, d in sizes]
    times = by_precision(machine, "fused kernel", chosen, PRECISIONS, partial(contenders, machine), seconds, 20)
    return {"times": times, "errors": errors(machine)}


def errors(machine: Machine) -> list[dict[str, Any]]:
    """Return relative errors of the gradients, see :func:`relative_errors`."""
    losses = {"contrastive_sums": by_sums} | peers()
    for backend in ("torch", "triton"):
        est = compopt.InfoNCEEstimator(TAU, multiply_tau=False, backend=backend)
        losses[f"InfoNCE, {backend}"] = lambda a, b, est=est: est(a, b)
    return relative_errors(machine, PRECISIONS, losses)
