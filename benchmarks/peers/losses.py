"""Every package's loss as a function of features and data-set positions, at one temperature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import packages

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (z1 (B, d), z2 (B, d), index (B,)) -> 0-d


def clip(tau: float, **distributed: Any) -> Loss:
    """open_clip's ``ClipLoss``: cross-entropy both ways."""
    loss = packages.open_clip().ClipLoss(**distributed)
    scale = torch.tensor(1 / tau)
    return lambda z1, z2, index: loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), scale)


def siglip(tau: float, bias: float = -10.0, **distributed: Any) -> Loss:
    """open_clip's ``SigLipLoss``: a logistic loss per pair."""
    loss = packages.open_clip().SigLipLoss(**distributed)
    scale, offset = torch.tensor(1 / tau), torch.tensor(bias)
    return lambda z1, z2, index: loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), scale, offset)


def gcl_bimodal(n: int, tau: float, gamma: float = 0.9, individual: bool = False, **distributed: Any) -> Loss:
    """LibAUC's ``GCLoss_v2``: SogCLR, or iSogCLR with ``individual`` temperatures."""
    scheme = "individual_learnable" if individual else "global_constant"
    loss = packages.gcl_bimodal(n, tau=tau, gamma=gamma, temperature_scheme=scheme, **distributed)
    return lambda z1, z2, index: loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), index)[0]


def gcl_unimodal(n: int, tau: float, gamma: float = 0.9, individual: bool = False, **distributed: Any) -> Loss:
    """LibAUC's ``GCLoss_v1``: the same for two views of one modality."""
    options = {"N": n, "tau": tau, "gamma": gamma, "enable_isogclr": individual, **distributed}
    loss = packages.quiet(packages.libauc().GCLoss_v1, **options)
    return lambda z1, z2, index: loss(z1, z2, index)


def nt_xent(tau: float, distributed: bool = False) -> Loss:
    """pytorch-metric-learning's ``NTXentLoss`` over both views."""
    loss = packages.metric_learning().NTXentLoss(temperature=tau)
    if distributed:
        from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

        loss = DistributedLossWrapper(loss)

    def call(z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        return loss(torch.cat([z1, z2]), index.repeat(2))

    return call


def cross_batch_memory(tau: float, dim: int, size: int) -> Loss:
    """pytorch-metric-learning's ``CrossBatchMemory``: the newest ``size`` features are candidates too."""
    losses = packages.metric_learning()
    loss = losses.CrossBatchMemory(losses.NTXentLoss(temperature=tau), dim, memory_size=size)

    def call(z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        enqueue = torch.zeros(2 * len(z1), dtype=torch.bool)
        enqueue[len(z1) :] = True
        return loss(torch.cat([z1, z2]), index.repeat(2), enqueue_mask=enqueue)

    return call
