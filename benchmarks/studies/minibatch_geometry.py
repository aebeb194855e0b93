"""Geometry that small batches find: the synthetic study of Cho et al., Mini-Batch Optimization of Contrastive Loss.

The 2n unit vectors ``u_i``, ``v_i`` are optimised themselves, at tau = 1. The optimum of the full batch is the simplex
equiangular tight frame for ``d >= n - 1`` (Lemma 1) and the cross-polytope for ``d = n / 2`` (Theorem 3). All C(n, B)
batches together have the same optimum (Theorem 4), a strict subset has not where some pair never shares a batch
(Theorem 5), and which batches one takes decides how soon one is near (Figure 4e)::

    python -m benchmarks.studies.minibatch_geometry                       # a few minutes on one core
    python -m benchmarks.studies.minibatch_geometry --samples 8           # half a minute

Distances are Frobenius norms between the Gram matrix ``u_i . v_j`` and the optimum's; which of two samples are
antipodes in a cross-polytope is read off the solution.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.report import environment, finish, table
from compopt.samplers import OrderedBatchSampler, SpectralBatchSampler
from compopt.samplers.pairs import batch_losses

Result = dict[str, Any]
STEPS, LR = 500, 0.5  # those of the paper's Figure 4e


# -- optima ----------------------------------------------------------------------------------------------------------


def optimum(gram: Tensor, dim: int) -> Tensor:
    """The optimal Gram matrix (n, n); a cross-polytope's with the antipodes that ``gram`` is nearest to."""
    n = len(gram)
    if dim >= n - 1:
        return (n * torch.eye(n, dtype=gram.dtype) - 1) / (n - 1)
    if 2 * dim != n:
        raise ValueError(f"dim must be at least n - 1 or equal to n / 2, got dim={dim} for n={n}")
    target = torch.eye(n, dtype=gram.dtype)
    for a, b in antipodes(gram):
        target[a, b] = target[b, a] = -1
    return target


def antipodes(gram: Tensor) -> list[tuple[int, int]]:
    """Pairs of samples, the most opposite first; near a cross-polytope no other pairs are nearer."""
    both, left, pairs = (gram + gram.T).flatten(), set(range(len(gram))), []
    for place in both.argsort(stable=True).tolist():
        a, b = divmod(place, len(gram))
        if a != b and a in left and b in left:
            left -= {a, b}
            pairs.append((a, b))
    return pairs


def distance(z: Tensor) -> float:
    """The distance of the vectors ``z`` (2, n, d) from the optimum."""
    gram = z[0] @ z[1].T
    return float((gram - optimum(gram, z.shape[2])).norm())


def start(n: int, dim: int, seed: int) -> Tensor:
    """Random unit vectors, ``(2, n, d)`` float64."""
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(2, n, dim, generator=generator, dtype=torch.float64), dim=2)


# -- fixed sets of batches: Theorems 1 to 5 ----------------------------------------------------------------------------


def all_batches(n: int, size: int) -> Tensor:
    """All C(n, B) batches, ``(k, B)``."""
    return torch.tensor(list(itertools.combinations(range(n), size)))


def affine_blocks() -> Tensor:
    """The 14 planes of AG(3, 2): blocks of four of eight points, each pair in three of them, ``(14, 4)``."""
    blocks = [batch for batch in itertools.combinations(range(8), 4) if batch[0] ^ batch[1] ^ batch[2] ^ batch[3] == 0]
    return torch.tensor(blocks)


def batch_sets(n: int, size: int) -> dict[str, Tensor]:
    """The sets of batches that are compared, by name."""
    every = all_batches(n, size)
    together = (every == 0).any(1) & (every == 1).any(1)
    sets = {
        "full batch": torch.arange(n)[None],
        "all batches": every,
        "all but those with one pair": every[~together],
        "a partition": torch.arange(n).view(-1, size),
    }
    if size > 2:
        sets["all but one batch"] = every[1:]
    if (n, size) == (8, 4):
        sets["14 blocks of AG(3, 2)"] = affine_blocks()
    return sets


def minimise(batches: Tensor, n: int, dim: int, seed: int, steps: int = 3000) -> Tensor:
    """Minimise the mean loss of the batches from a random start by L-BFGS; the vectors, ``(2, n, d)``."""
    x = start(n, dim, seed).requires_grad_()
    options: dict[str, Any] = {"tolerance_grad": 1e-10, "tolerance_change": 1e-15, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([x], max_iter=steps, history_size=30, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        z = normalize(x, dim=2)
        loss = batch_losses(z[0][batches], z[1][batches], tau=1.0).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return normalize(x.detach(), dim=2)


def theorems(n: int, size: int, dim: int, seeds: Sequence[int]) -> list[Result]:
    """Distances from the optimum for every set of batches."""
    results = []
    for name, batches in batch_sets(n, size).items():
        found = [minimise(batches, n, dim, seed) for seed in seeds]
        results.append(
            {
                **{"n": n, "batch_size": size, "dim": dim, "batches": name, "count": len(batches)},
                "distance": [distance(z) for z in found],
            }
        )
    return results


# -- one batch at a time: Figure 4e --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Setting that the curves of one panel share."""

    n: int
    batch_size: int
    dim: int
    steps: int = STEPS
    lr: float = LR
    seed: int = 0


def batch_sampler(method: str, setting: Setting) -> Any:
    """Random partitions; partitions by spectral clustering; or the hardest of ten times as many random batches."""
    common: dict[str, Any] = {"tau": 1.0, "seed": setting.seed}
    at_once: dict[str, Any] = {"dtype": torch.float32}  # each from the vectors of its moment
    if method == "OSGD":
        keep = setting.n // setting.batch_size
        return OrderedBatchSampler(setting.n, setting.batch_size, 10 * keep, keep, **common, **at_once)
    return SpectralBatchSampler(setting.n, setting.batch_size, **common, **(at_once if method == "spectral" else {}))


METHODS = ("random", "OSGD", "spectral")


def descend(method: str, setting: Setting) -> list[float]:
    """Distances from the optimum before every step of projected gradient descent, and after the last."""
    z, sampler = start(setting.n, setting.dim, setting.seed), batch_sampler(method, setting)
    everyone, trace = torch.arange(setting.n), [distance(z)]
    while True:
        if method != "random":
            sampler.observe(everyone, *z)
        for batch in sampler:
            z.requires_grad_()
            own = z[:, batch][:, None]
            loss = 2 * batch_losses(own[0], own[1], tau=1.0).sum()  # the paper's adds the two directions
            (gradient,) = torch.autograd.grad(loss, z)
            z = normalize(z.detach() - setting.lr * gradient, dim=2)
            trace.append(distance(z))
            if len(trace) > setting.steps:
                return trace


def curves(setting: Setting, seeds: Sequence[int]) -> list[Result]:
    """Every method's distances, by seed."""
    results = []
    for method in METHODS:
        runs = [descend(method, Setting(**{**asdict(setting), "seed": seed})) for seed in seeds]
        traces = [[float(f"{value:.4g}") for value in trace] for trace in runs]
        results.append({**asdict(setting), "method": method, "traces": traces})
    return results


def median_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1e} ({min(values):.1e} to {max(values):.1e})"


def line(result: Result, keys: Sequence[str], values: Sequence[float]) -> list[str]:
    """Cells of a table: the problem, and the distances by seed."""
    return [*(str(result[key]) for key in keys), median_range(values)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything; write the tables and their figures."""
    parser = argparse.ArgumentParser("python -m benchmarks.studies.minibatch_geometry", description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="print only")
    args, env = parser.parse_args(argv), environment()
    fixed: list[Result] = []
    stepwise: list[Result] = []
    for n, size in itertools.product(args.samples, args.batch_sizes):
        for dim in (2 * n, n // 2):
            fixed += theorems(n, size, dim, args.seeds)
            stepwise += curves(Setting(n, size, dim), args.seeds)
    problem = ("n", "batch_size", "dim")
    sets = [line(r, (*problem, "batches", "count"), r["distance"]) for r in fixed]
    ends = [line(r, (*problem, "method"), [trace[-1] for trace in r["traces"]]) for r in stepwise]
    parts = [
        table(["n", "B", "d", "batches", "number", "distance from the optimum"], sets, "rrrlr"),
        table(["n", "B", "d", "batches", "distance from the optimum after the last step"], ends, "rrrlr"),
    ]
    results = {"fixed": fixed, "stepwise": stepwise}
    finish("minibatch_geometry", "Which geometry small batches find", env, parts, results, args.quick)


if __name__ == "__main__":
    main()
