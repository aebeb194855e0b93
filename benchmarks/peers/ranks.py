"""The gradient on 2 and 4 ranks against that on one, and what a step communicates: ours and the other packages'.

    python -m benchmarks.peers.ranks    # writes results/peers_ranks.md and .json (a minute)

K ranks with B / K samples each, as data-parallel training has them: their feature gradients are averaged as DDP
averages weights' (divided by K) and compared with the gradient that one process gets from the whole batch with the
package's own single-process loss. Losses with state make ``--visits`` visits to the same samples first. Collectives are
counted where torch dispatches them, in forward and backward.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from benchmarks.machine import environment, heading, save, table
from benchmarks.peers import losses, packages
from benchmarks.peers.gradients import GAMMA, TAU, N, features, relative, rescaled

Build = Callable[[int, int], losses.Loss]  # (rank, ranks) -> the loss as its documentation says to build it


def _estimator(est: compopt.ContrastiveEstimator) -> losses.Loss:
    def call(z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        loss = est(z1, z2, index)
        est.step()
        return loss

    return call


def _open_clip(name: str, **options: Any) -> Build:
    def build(rank: int, ranks: int) -> losses.Loss:
        return getattr(losses, name)(TAU, rank=rank, world_size=ranks, **(options if ranks > 1 else {}))

    return build


def _libauc(name: str, **options: Any) -> Build:
    def build(rank: int, ranks: int) -> losses.Loss:
        many = {"distributed": ranks > 1}
        if name == "gcl_bimodal":
            many.update(rank=rank, world_size=ranks)
        return getattr(losses, name)(N, TAU, GAMMA, **many, **options)

    return build


CONTENDERS: dict[str, Build] = {
    "compopt InfoNCE": lambda rank, ranks: _estimator(compopt.InfoNCEEstimator(TAU)),
    "compopt SogCLR": lambda rank, ranks: _estimator(compopt.SogCLREstimator(N, GAMMA, tau=TAU)),
    "compopt SogCLR, unimodal": lambda rank, ranks: _estimator(
        compopt.SogCLREstimator(N, GAMMA, tau=TAU, mode="unimodal")
    ),
    "compopt iSogCLR": lambda rank, ranks: _estimator(compopt.ISogCLREstimator(N, GAMMA, rho=1.0, tau_init=TAU)),
    "open_clip ClipLoss": _open_clip("clip"),
    "open_clip ClipLoss, local_loss": _open_clip("clip", local_loss=True),
    "open_clip ClipLoss, local_loss, gather_with_grad": _open_clip("clip", local_loss=True, gather_with_grad=True),
    "open_clip SigLipLoss": _open_clip("siglip"),
    "LibAUC GCLoss_v2": _libauc("gcl_bimodal"),
    "LibAUC GCLoss_v2, individual": _libauc("gcl_bimodal", individual=True),
    "LibAUC GCLoss_v1": _libauc("gcl_unimodal"),
    "sentence-transformers Cached...Loss": lambda rank, ranks: losses.cached_ranking(TAU, gather=ranks > 1),
    "metric-learning NTXentLoss": lambda rank, ranks: losses.nt_xent(TAU, distributed=ranks > 1),
}


class Traffic(TorchDispatchMode):
    """Bytes that one rank sends in a ring, by collective, and how many there are."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.bytes, self.calls = ranks, 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls += 1
            self.bytes += self._sent(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> float:
        share = (self.ranks - 1) / self.ranks
        if name.startswith("allreduce"):
            return 2 * share * _bytes(args[0])
        if "allgather" in name:
            return share * _bytes(args[0])  # what is gathered
        if "reduce_scatter" in name:
            return share * _bytes(args[1])
        return 0.0 if name.startswith("recv") or name == "barrier" else _bytes(args[0])


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(entry) for entry in value) if isinstance(value, list | tuple) else 0


def run(name: str, rank: int, ranks: int, batch: int, dim: int, visits: int) -> dict[str, Any]:
    """This rank's part of a few visits; gradient and traffic of the last."""
    loss = CONTENDERS[name](rank, ranks)
    own = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
    for visit in range(visits):
        z1, z2, index = features(batch, dim, visit)
        a, b = (z[own].clone().requires_grad_() for z in (z1, z2))
        with Traffic(ranks) as traffic:
            loss(a, b, index[own]).backward()
    gradient = (torch.cat([a.grad, b.grad], 1) / ranks).numpy()  # a tensor would die with the process that sends it
    return {"gradient": gradient, "bytes": traffic.bytes, "calls": traffic.calls}


def _rank(rank: int, ranks: int, port: int, args: tuple, queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = {}
    for name in CONTENDERS:
        try:
            found[name] = run(name, rank, ranks, *args)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        dist.barrier()
    queue.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, args: tuple) -> list[dict[str, Any]]:
    """Every contender on so many ranks; results by rank."""
    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, ranks, port, args, queue)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = dict(queue.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(ranks)]


def compare(batch: int, dim: int, visits: int) -> list[dict[str, Any]]:
    """Relative error of the gradient on several ranks, and traffic per sample of the batch."""
    args = (batch, dim, visits)
    alone = {name: run(name, 0, 1, *args)["gradient"] for name in CONTENDERS}
    results = []
    for ranks in (2, 4):
        by_rank = on_ranks(ranks, args)
        for name in CONTENDERS:
            errors = [each[name]["error"] for each in by_rank if "error" in each[name]]
            result: dict[str, Any] = {"name": name, "ranks": ranks}
            if errors:
                result["failed"] = errors[0]
            else:
                gradient = np.concatenate([each[name]["gradient"] for each in by_rank])
                result["error"] = relative(gradient, alone[name])
                result["scale"], result["rescaled"] = rescaled(gradient, alone[name])
                result["bytes"] = max(each[name]["bytes"] for each in by_rank)
                result["calls"] = max(each[name]["calls"] for each in by_rank)
            results.append(result)
    return results


def lines(results: list[dict[str, Any]], batch: int) -> list[str]:
    """The table."""
    cells = []
    for name in CONTENDERS:
        row = [name]
        for result in (r for r in results if r["name"] == name):
            if "failed" in result:
                row += [result["failed"], "", "", ""]
            else:
                row += [
                    f"{result['error']:.1e}",
                    f"{result['rescaled']:.1e}",
                    f"{result['bytes'] / batch:,.0f}",
                    str(result["calls"]),
                ]
        cells.append(row)
    head = [""]
    for ranks in (2, 4):
        head += [f"error, {ranks} ranks", "rescaled", "bytes / sample", "collectives"]
    return table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--visits", type=int, default=3)
    args = parser.parse_args()
    env = {**environment(), **packages.versions()}
    results = compare(args.batch_size, args.dim, args.visits)
    note = [
        f"B = {args.batch_size} over all ranks, d = {args.dim}, float32, {args.visits} visits to the same samples, the",
        "last one compared. Error: relative, of the averaged feature gradients of all ranks against one process.",
        "Rescaled: the error that is left when the gradient is multiplied by the best number, which an optimizer that",
        "divides by its own scale would not notice. Bytes: what a rank sends in a ring, per sample of the global batch",
        "(a feature pair of d = 128 is 1,024).",
        "",
    ]
    text = "\n".join([*heading("The gradient on several ranks", env), *note, *lines(results, args.batch_size)])
    print(text)
    save("peers_ranks", text, env, results)


if __name__ == "__main__":
    main()
