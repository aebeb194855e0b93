"""Losses of every package as functions of features and data-set positions, at one temperature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import packages

INDIVIDUAL = {"rho": 1.0, "eta": 0.01, "tau_min": 0.01, "tau_max": 0.5}  # LibAUC's tau_max, 0.05, is below our tau
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (z1 (B, d), z2 (B, d), index (B,)) -> 0-d


def clip(tau: float, **distributed: Any) -> Loss:
    """Return open_clip's ``ClipLoss``: cross-entropy in both directions."""
    loss = packages.open_clip().ClipLoss(**distributed)
    scale = torch.tensor(1 / tau)
    return lambda z1, z2, index: loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), scale)


def siglip(tau: float, bias: float = -10.0, **distributed: Any) -> Loss:
    """Return open_clip's ``SigLipLoss``: a logistic loss per pair."""
    loss = packages.open_clip().SigLipLoss(**distributed)
    scale, offset = torch.tensor(1 / tau), torch.tensor(bias)
    return lambda z1, z2, index: loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), scale, offset)


def gcl_bimodal(n: int, tau: float, gamma: float = 0.9, individual: bool = False, **options: Any) -> Loss:
    """Return LibAUC's ``GCLoss_v2``: SogCLR, or iSogCLR with ``individual`` temperatures."""
    loss = gcl_bimodal_object(n, tau, gamma, individual, **options)
    return lambda z1, z2, index: loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), index)[0]


def gcl_bimodal_object(n: int, tau: float, gamma: float = 0.9, individual: bool = False, **options: Any) -> Any:
    """Return LibAUC's ``GCLoss_v2`` as an object, with its state."""
    learned = {"temperature_scheme": "individual_learnable", **INDIVIDUAL} if individual else {}
    return packages.gcl_bimodal(n, tau=tau, gamma=gamma, **{**learned, **options})


def gcl_unimodal(n: int, tau: float, gamma: float = 0.9, individual: bool = False, **options: Any) -> Loss:
    """Return LibAUC's ``GCLoss_v1``: the same for two views of one modality."""
    learned = {"enable_isogclr": True, **INDIVIDUAL} if individual else {}
    return packages.quiet(packages.libauc().GCLoss_v1, N=n, tau=tau, gamma=gamma, **{**learned, **options})


def nt_xent(tau: float, distributed: bool = False) -> Loss:
    """Return pytorch-metric-learning's ``NTXentLoss`` over both views."""
    loss = packages.metric_learning().NTXentLoss(temperature=tau)
    if distributed:
        from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

        loss = DistributedLossWrapper(loss)

    def call(z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        return loss(torch.cat([z1, z2]), index.repeat(2))

    return call


def cached_ranking(tau: float, mini_batch_size: int = 512, gather: bool = False) -> Loss:
    """Return sentence-transformers' ``CachedMultipleNegativesRankingLoss`` in both directions: CLIP's loss in chunks.

    The call includes its backward pass, as in its own training loop; ``backward()`` only returns the gradients.
    """
    loss = packages.sentence_losses().CachedMultipleNegativesRankingLoss(
        torch.nn.Sequential(torch.nn.Identity()),
        scale=1 / tau,
        mini_batch_size=mini_batch_size,
        gather_across_devices=gather,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )

    def call(z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        a, b = (z.detach().requires_grad_() for z in (z1, z2))
        value = loss.calculate_loss([[a], [b]], with_backward=True)
        return _Cached.apply(value, z1, z2, a.grad, b.grad)

    return call


class _Cached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, z1: Tensor, z2: Tensor, g1: Tensor, g2: Tensor) -> Tensor:
        ctx.save_for_backward(g1, g2)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *(g.mul_(grad) for g in ctx.saved_tensors), None, None


def sup_con(tau: float) -> Loss:
    """Return pytorch-metric-learning's ``SupConLoss``: with one positive per anchor it is NT-Xent, as a matrix."""
    loss = packages.metric_learning().SupConLoss(temperature=tau)
    return lambda z1, z2, index: loss(torch.cat([z1, z2]), index.repeat(2))


def cross_batch_memory(tau: float, dim: int, size: int) -> Loss:
    """Return pytorch-metric-learning's ``CrossBatchMemory``: the newest ``size`` features are the candidates of z1.

    The memory is full from the start, and only z1 gets a gradient.
    """
    losses = packages.metric_learning()
    loss = losses.CrossBatchMemory(losses.NTXentLoss(temperature=tau), dim, memory_size=size)
    loss.add_to_memory(F.normalize(torch.randn(size, dim), dim=1), torch.arange(-size, 0), size)

    def call(z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        enqueue = torch.zeros(2 * len(z1), dtype=torch.bool)
        enqueue[len(z1) :] = True
        return loss(torch.cat([z1, z2]), index.repeat(2), enqueue_mask=enqueue)

    return call
