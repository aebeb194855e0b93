"""The gradient on 2 and 4 ranks against that on one, and what a step communicates: ours and the other packages'.

    python -m benchmarks.history.peers.ranks    # writes results/peers_ranks.md, .json and .png (a minute)

K ranks with B / K samples each, as data-parallel training has them: their feature gradients are averaged as DDP
averages weights' (divided by K) and compared with the gradient that one process gets from the whole batch with the
package's own single-process loss. Losses with state make ``--visits`` visits to the same samples first. Collectives are
counted where torch dispatches them, in forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import compopt
from benchmarks.history.peers import losses, packages
from benchmarks.history.peers.gradients import GAMMA, TAU, N, features, relative, rescaled
from benchmarks.history.traffic import Traffic, on_ranks
from benchmarks.saved import HISTORY, save
from recipes import plots
from recipes.report import environment, heading, table

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
    "compopt SogCLR, shard=True": lambda rank, ranks: _estimator(
        compopt.SogCLREstimator(N, GAMMA, tau=TAU, shard=True)
    ),
    "compopt iSogCLR": lambda rank, ranks: _estimator(
        compopt.ISogCLREstimator(N, GAMMA, rho=1.0, tau_init=TAU, tau_min=0.01, tau_max=0.5)
    ),
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


def run(name: str, rank: int, ranks: int, batch: int, dim: int, visits: int) -> dict[str, Any]:
    """Carry out this rank's part of a few visits; gradient and traffic of the last."""
    loss = CONTENDERS[name](rank, ranks)
    own = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
    for visit in range(visits):
        z1, z2, index = features(batch, dim, visit)
        a, b = (z[own].clone().requires_grad_() for z in (z1, z2))
        with Traffic(ranks) as traffic:
            loss(a, b, index[own]).backward()
    gradient = (torch.cat([a.grad, b.grad], 1) / ranks).numpy()  # a tensor would die with the process that sends it
    return {"gradient": gradient, "bytes": traffic.bytes, "calls": len(traffic.sent)}


def every(rank: int, ranks: int, *args: int) -> dict[str, Any]:
    """Run all contenders on this rank; where a package fails, its error is the result."""
    found = {}
    for name in CONTENDERS:
        try:
            found[name] = run(name, rank, ranks, *args)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        dist.barrier()
    return found


def compare(batch: int, dim: int, visits: int) -> list[dict[str, Any]]:
    """Relative error of the gradient on several ranks, and traffic per sample of the batch."""
    args = (batch, dim, visits)
    alone = {name: run(name, 0, 1, *args)["gradient"] for name in CONTENDERS}
    results = []
    for ranks in (2, 4):
        by_rank = on_ranks(ranks, every, *args)
        for name in CONTENDERS:
            errors = [each[name]["error"] for each in by_rank if "error" in each[name]]
            result: dict[str, Any] = {"name": name, "ranks": ranks}
            if errors:
                result["failed"] = errors[0]
            else:
                gradient = np.concatenate([each[name]["gradient"] for each in by_rank])
                result["error"] = relative(gradient, alone[name])
                result["scale"], result["rescaled"] = rescaled(gradient, alone[name])
                result["bytes_per_sample"] = max(each[name]["bytes"] for each in by_rank) / batch
                result["calls"] = max(each[name]["calls"] for each in by_rank)
            results.append(result)
    return results


def lines(results: list[dict[str, Any]]) -> str:
    """Errors and traffic, a row per contender."""
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
                    f"{result['bytes_per_sample']:,.0f}",
                    str(result["calls"]),
                ]
        cells.append(row)
    head = [""]
    for ranks in (2, 4):
        head += [f"error, {ranks} ranks", "rescaled", "bytes / sample", "collectives"]
    return table(head, cells)


def draw(results: list[dict[str, Any]]) -> None:
    """Error of the gradient, after the best factor, and traffic."""
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(11, 5, 1, 2)
        for offset, ranks in ((-0.2, 2), (0.2, 4)):
            own = [r for r in results if r["ranks"] == ranks and "error" in r][::-1]
            places = [number - offset for number in range(len(own))]
            for axis, values in zip(
                axes[0], ([r["rescaled"] for r in own], [r["bytes_per_sample"] for r in own]), strict=True
            ):
                axis.barh(places, values, 0.4, label=f"{ranks} ranks", color=plots.COLOURS[3 if ranks == 2 else 4])
            axes[0][0].set_yticks(range(len(own)), [r["name"] for r in own], fontsize=8)
        axes[0][0].set(xscale="log", title="gradient: relative error, rescaled")
        axes[0][1].set(title="bytes that a rank sends, per sample")
        axes[0][1].set_yticks([])
        axes[0][1].legend()
        plots.save_figure(figure, HISTORY / "peers_ranks.png")


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
        "(a feature pair of d = 128 is 1,024); gloo's scatters of a reduce-scatter count at their roots.",
        "",
    ]
    text = "\n".join([*heading("The gradient on several ranks", env), *note, lines(results)])
    print(text)
    save("peers_ranks", text, env, results, HISTORY)
    draw(results)


if __name__ == "__main__":
    main()
