"""Compare the gradient on 2 and 4 ranks with that on one, and the traffic of a step, for ours and other packages.

    python -m benchmarks.peers.ranks    # writes benchmarks/results/peers_ranks.md (a minute)

Each of K ranks has B / K samples, as in data-parallel training. The feature gradients are divided by K, as DDP averages
gradients of weights, and compared with the gradient of the whole batch in one process with the package's own
single-process loss. All losses make ``--visits`` visits to the same samples, the last of which is compared. Collectives
are counted where torch dispatches them, in forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from benchmarks.machine import on_ranks
from benchmarks.peers import losses, packages
from benchmarks.peers.gradients import GAMMA, TAU, N, estimator_call, features, relative, rescaled
from benchmarks.report import environment, finish, table

Build = Callable[[int, int], losses.Loss]  # (rank, ranks) -> the loss, built as its documentation says


class Traffic(TorchDispatchMode):
    """Dispatch mode that records the bytes that one rank sends in a ring, one entry per collective that sends."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (sent := self._bytes_sent(func.__name__.split(".")[0], args)) is not None:
            self.sent.append(sent)
        return func(*args, **(kwargs or {}))

    def _bytes_sent(self, name: str, args: Any) -> float | None:
        share = (self.ranks - 1) / self.ranks
        if name.startswith("allreduce"):
            return 2 * share * _bytes(args[0])
        if "allgather" in name:
            return share * _bytes(args[0])  # args[0]: the gathered tensors
        if name.startswith("alltoall") or "reduce_scatter" in name:
            return share * _bytes(args[1])
        if name.startswith("scatter"):  # gloo makes a reduce-scatter of one scatter by every rank
            return share * _bytes(args[1]) or None
        if name == "send":
            return _bytes(args[0])
        if name.startswith(("recv", "barrier", "monitored_barrier")):
            return None
        raise NotImplementedError(f"bytes that {name} sends")


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(entry) for entry in value) if isinstance(value, list | tuple) else 0


def _estimator(make: Callable[[], compopt.ContrastiveEstimator]) -> Build:
    def build(rank: int, ranks: int) -> losses.Loss:
        est = make()
        return lambda z1, z2, index: estimator_call(est, z1, z2, index)

    return build


def open_clip(name: str, **options: Any) -> Build:
    return lambda rank, ranks: getattr(losses, name)(TAU, rank=rank, world_size=ranks, **(options if ranks > 1 else {}))


def libauc(name: str, **options: Any) -> Build:
    def build(rank: int, ranks: int) -> losses.Loss:
        place = {"rank": rank, "world_size": ranks} if name == "gcl_bimodal" else {}
        return getattr(losses, name)(N, TAU, GAMMA, distributed=ranks > 1, **place, **options)

    return build


CONTENDERS: dict[str, Build] = {
    "compopt InfoNCE": _estimator(lambda: compopt.InfoNCEEstimator(TAU)),
    "compopt SogCLR": _estimator(lambda: compopt.SogCLREstimator(N, GAMMA, tau=TAU)),
    "compopt SogCLR, unimodal": _estimator(lambda: compopt.SogCLREstimator(N, GAMMA, tau=TAU, mode="unimodal")),
    "compopt SogCLR, shard=True": _estimator(lambda: compopt.SogCLREstimator(N, GAMMA, tau=TAU, shard=True)),
    "compopt iSogCLR": _estimator(
        lambda: compopt.ISogCLREstimator(N, GAMMA, rho=1.0, tau_init=TAU, tau_min=0.01, tau_max=0.5)
    ),
    "open_clip ClipLoss": open_clip("clip"),
    "open_clip ClipLoss, local_loss": open_clip("clip", local_loss=True),
    "open_clip ClipLoss, local_loss, gather_with_grad": open_clip("clip", local_loss=True, gather_with_grad=True),
    "open_clip SigLipLoss": open_clip("siglip"),
    "LibAUC GCLoss_v2": libauc("gcl_bimodal"),
    "LibAUC GCLoss_v2, individual": libauc("gcl_bimodal", individual=True),
    "LibAUC GCLoss_v1": libauc("gcl_unimodal"),
    "sentence-transformers Cached...Loss": lambda rank, ranks: losses.cached_ranking(TAU, gather=ranks > 1),
    "metric-learning NTXentLoss": lambda rank, ranks: losses.nt_xent(TAU, distributed=ranks > 1),
}


def visit_all(rank: int, ranks: int, name: str, batch: int, dim: int, visits: int) -> dict[str, Any]:
    """Make a few visits with this rank's samples; return gradient and traffic of the last."""
    loss = CONTENDERS[name](rank, ranks)
    own = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
    for visit in range(visits):
        z1, z2, index = features(batch, dim, visit)
        a, b = (z[own].clone().requires_grad_() for z in (z1, z2))
        with Traffic(ranks) as traffic:
            loss(a, b, index[own]).backward()
    gradient = (torch.cat([a.grad, b.grad], 1) / ranks).numpy()  # a tensor would end with the process that sends it
    return {"gradient": gradient, "bytes": sum(traffic.sent), "calls": len(traffic.sent)}


def every(rank: int, ranks: int, *args: int) -> dict[str, Any]:
    """Return the results of all contenders on this rank, or their errors."""
    found = {}
    for name in CONTENDERS:
        try:
            found[name] = visit_all(rank, ranks, name, *args)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        dist.barrier()
    return found


def compare(*args: int) -> list[dict[str, Any]]:
    """Return the relative error of the gradient on several ranks, and the traffic per sample of the batch."""
    alone = {name: visit_all(0, 1, name, *args)["gradient"] for name in CONTENDERS}
    results = []
    for ranks in (2, 4):
        by_rank = on_ranks(ranks, every, *args)
        for name in CONTENDERS:
            parts = [each[name] for each in by_rank]
            result: dict[str, Any] = {"name": name, "ranks": ranks}
            if errors := [part["error"] for part in parts if "error" in part]:
                results.append({**result, "failed": errors[0]})
                continue
            gradient = np.concatenate([part["gradient"] for part in parts])
            result["error"] = relative(gradient, alone[name])
            result["scale"], result["rescaled"] = rescaled(gradient, alone[name])
            result["bytes_per_sample"] = max(part["bytes"] for part in parts) / args[0]
            result["calls"] = max(part["calls"] for part in parts)
            results.append(result)
    return results


def cells(result: dict[str, Any]) -> list[str]:
    if "failed" in result:
        return [result["failed"], "", "", ""]
    errors = [f"{result[key]:.1e}" for key in ("error", "rescaled")]
    return [*errors, f"{result['bytes_per_sample']:,.0f}", str(result["calls"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--visits", type=int, default=3)
    args = parser.parse_args()
    env = {**environment(), **packages.versions()}
    results = compare(args.batch_size, args.dim, args.visits)
    body = [[name, *(cell for r in results if r["name"] == name for cell in cells(r))] for name in CONTENDERS]
    head = [""]
    for ranks in (2, 4):
        head += [f"error, {ranks} ranks", "rescaled", "bytes / sample", "collectives"]
    about = (
        f"B = {args.batch_size} over all ranks, d = {args.dim}, float32, {args.visits} visits to the same samples, of "
        "which the last is compared. *Error*: relative error of the feature gradients, averaged over the ranks, "
        "compared with one process. *Rescaled*: error after multiplication of the gradient by the best factor, which "
        "does not affect an optimizer that normalises gradients, such as Adam. *Bytes*: bytes that a rank sends in a "
        "ring, per sample of the global batch (a pair of features with d = 128 has 1,024 bytes); the scatters by "
        "which gloo implements a reduce-scatter are counted at their source."
    )
    finish("peers_ranks", "Gradients on several ranks", env, [about, table(head, body)], results)


if __name__ == "__main__":
    main()
