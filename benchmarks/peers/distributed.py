"""Run ``compopt.testing.check_distributed`` on the losses of other packages, as released.

    python -m benchmarks.peers.distributed    # writes benchmarks/results/peers_distributed.md (minutes)

Each loss is built as its documentation says for several ranks. The reference is the package's own loss in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import compopt
from benchmarks.peers import losses, packages, ranks
from benchmarks.peers.gradients import TAU
from benchmarks.report import environment, finish, table
from compopt.testing import DistributedResult, check_distributed

SIZES, SAMPLES, TOLERANCE = (1, 2, 3), 12, 1e-5


def place() -> tuple[int, int]:
    """Return rank and number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_ranks(build: Callable[..., ranks.Build], *args: Any, **options: Any) -> losses.Loss:
    """Build a loss of the comparison on ranks on this one."""
    return build(*args, **options)(*place())


def lightly(name: str, **options: Any) -> losses.Loss:
    """Return a loss of lightly, which gathers the features of all ranks."""
    loss = getattr(packages.lightly(), name)(gather_distributed=place()[1] > 1, **options)
    return lambda z1, z2, index: loss(z1, z2)


def metric_learning() -> losses.Loss:
    return losses.nt_xent(TAU, distributed=place()[1] > 1)


def sentences(name: str) -> losses.Loss:
    """Return a ranking loss of sentence-transformers, which gathers across devices."""
    gather = place()[1] > 1
    if name.startswith("Cached"):
        return losses.cached_ranking(TAU, gather=gather)
    loss = getattr(packages.sentence_losses(), name)(None, scale=1 / TAU, gather_across_devices=gather)
    return lambda z1, z2, index: loss.compute_loss_from_embeddings([z1, z2], None)


def plainly(loss: losses.Loss, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    return loss(z1, z2, index)


def in_float32(loss: losses.Loss, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    return loss(z1.float(), z2.float(), index)  # LibAUC's rows are float32


# package, loss with its options -> how it is built
CASES: dict[tuple[str, str], Callable[[], Any]] = {
    ("open_clip_torch", "ClipLoss()"): partial(on_ranks, ranks.open_clip, "clip"),
    ("open_clip_torch", "ClipLoss(gather_with_grad=True)"): partial(
        on_ranks, ranks.open_clip, "clip", gather_with_grad=True
    ),
    ("open_clip_torch", "ClipLoss(local_loss=True)"): partial(on_ranks, ranks.open_clip, "clip", local_loss=True),
    ("open_clip_torch", "ClipLoss(local_loss=True, gather_with_grad=True)"): partial(
        on_ranks, ranks.open_clip, "clip", local_loss=True, gather_with_grad=True
    ),
    ("open_clip_torch", "SigLipLoss()"): partial(on_ranks, ranks.open_clip, "siglip"),
    ("libauc", "GCLoss_v2"): partial(on_ranks, ranks.libauc, "gcl_bimodal"),
    ("libauc", "GCLoss_v2, individual temperatures"): partial(on_ranks, ranks.libauc, "gcl_bimodal", individual=True),
    ("libauc", "GCLoss_v1"): partial(on_ranks, ranks.libauc, "gcl_unimodal"),
    ("lightly", "NTXentLoss(gather_distributed=True)"): partial(lightly, "NTXentLoss", temperature=TAU),
    ("lightly", "DCLLoss(gather_distributed=True)"): partial(lightly, "DCLLoss", temperature=TAU),
    ("lightly", "BarlowTwinsLoss(gather_distributed=True)"): partial(lightly, "BarlowTwinsLoss"),
    ("lightly", "VICRegLoss(gather_distributed=True)"): partial(lightly, "VICRegLoss"),
    ("pytorch-metric-learning", "DistributedLossWrapper(NTXentLoss)"): metric_learning,
    ("sentence-transformers", "MultipleNegativesRankingLoss(gather_across_devices=True)"): partial(
        sentences, "MultipleNegativesRankingLoss"
    ),
    ("sentence-transformers", "CachedMultipleNegativesRankingLoss(gather_across_devices=True)"): partial(
        sentences, "CachedMultipleNegativesRankingLoss"
    ),
    ("compopt", "InfoNCEEstimator"): compopt.InfoNCEEstimator,
    ("compopt", "SogCLREstimator"): partial(compopt.SogCLREstimator, SAMPLES),
    ("compopt", "SogCLREstimator(shard=True)"): partial(compopt.SogCLREstimator, SAMPLES, shard=True),
}
ABOUT = f"""`compopt.testing.check_distributed` with {SAMPLES} samples, gloo on CPUs, float64 features, tolerance
{TOLERANCE:g}. The message is that of the largest number of ranks; K is their number. Gradients are averaged over ranks,
as `DistributedDataParallel` does. A factor of the gradient acts as one of the learning rate; Adam hardly depends on it,
SGD and clipping do. A missing gradient is another direction."""


def checked(package: str, build: Callable[[], Any]) -> list[DistributedResult] | str:
    """Return the results, or the error of a loss that fails."""
    call = {"compopt": None, "libauc": in_float32}.get(package, plainly)
    try:
        return check_distributed(build, SIZES, call=call, samples=SAMPLES, tolerance=TOLERANCE)
    except Exception as error:
        return str(error).strip().splitlines()[-1]


def row(package: str, name: str, found: list[DistributedResult] | str) -> list[str]:
    if isinstance(found, str):
        return [f"{package} {version(package)}", f"`{name}`", f"fails: {found}", "", ""]
    last = found[-1]
    said = last.message or "as one process"
    return [f"{package} {version(package)}", f"`{name}`", said, f"{last.value:.0e}", f"{last.gradient:.0e}"]


def main() -> None:
    torch.set_num_threads(1)
    env, results, body = environment(), [], []
    for (package, name), build in CASES.items():
        found = checked(package, build)
        body.append(row(package, name, found))
        print(" | ".join(body[-1]), flush=True)
        results.append({"package": package, "loss": name, "version": version(package), "found": str(found)})
    head = ["package", "loss", "message", "error of the value", "error of the gradient"]
    parts = [ABOUT, table(head, body, "lllr")]
    finish("peers_distributed", "Losses of other packages on several ranks", env, parts, results)


if __name__ == "__main__":
    main()
