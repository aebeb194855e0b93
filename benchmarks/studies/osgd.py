"""Ordered SGD and SGD on the toy problem of section 5.1 of Cho et al., Mini-Batch Optimization of Contrastive Loss.

The problem has four vectors on a circle, ``u_i = v_i = (cos t_i, sin t_i)``, in two opposite pairs whose angles differ
by 2 epsilon; batches of two; tau = 1. The optimum is a cross-polytope with the loss 1.253. SGD takes one of the six
batches at random, ordered SGD the one with the highest loss::

    python -m benchmarks.studies.osgd      # a minute on one core

At the start, ordered SGD moves each vector in every second step. SGD moves it in one of six steps, and slightly
backwards in steps with two nearly opposite vectors: its mean speed is ``(e^2 - 1) / (3 (e^2 + 1))`` times that of
ordered SGD, which is the factor between the leading terms of Theorem 6.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.report import environment, finish, mean_spread, table
from compopt.samplers import OrderedBatchSampler
from compopt.samplers.ordered import batch_losses

LR, OPTIMUM = 0.05, 2 * math.log(1 + (2 + math.exp(-1)) / math.e)
NEAR, MOST = 0.01, 5_000  # difference from the optimal loss at which the optimum counts as reached; largest step count


def start(epsilon: float) -> Tensor:
    """Return the initial angles, ``(4,)`` float64."""
    return torch.tensor([epsilon, -epsilon, math.pi + epsilon, math.pi - epsilon], dtype=torch.float64)


def vectors(angles: Tensor) -> Tensor:
    """Return the four vectors, ``(4, 2)``."""
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def losses(angles: Tensor, batches: Tensor) -> Tensor:
    """Return the paper's loss of each batch, ``(k, B)`` -> ``(k,)``: the sum of both directions."""
    z = vectors(angles)[batches]
    return 2 * batch_losses(z, z, tau=1.0)


def gradient(angles: Tensor, batches: Tensor) -> Tensor:
    """Return the gradient of the mean loss of some batches, ``(4,)``."""
    angles = angles.clone().requires_grad_()
    return torch.autograd.grad(losses(angles, batches).mean(), angles)[0]


def steps_to_optimum(epsilon: float, candidates: int, seed: int, keep: int = 1) -> int:
    """Return the number of steps to the optimum with the ``keep`` hardest of ``candidates`` random batches per step."""
    angles, everyone = start(epsilon), torch.arange(4)
    sampler = OrderedBatchSampler(4, 2, candidates, keep, tau=1.0, seed=seed, dtype=torch.float64)
    for step in range(MOST):
        if losses(angles, everyone[None])[0] < OPTIMUM + NEAR:
            return step
        sampler.observe(everyone, vectors(angles), vectors(angles))
        angles = angles - LR * gradient(angles, torch.tensor(list(sampler)))
    raise RuntimeError(f"not near the optimum after {MOST} steps")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    args, env = parser.parse_args(argv), environment()
    body, results = [], {}
    for epsilon in (0.2, 0.1, 0.05):
        ordered, random = ([steps_to_optimum(epsilon, k, seed) for seed in range(args.seeds)] for k in (60, 1))
        results[epsilon] = {"ordered": ordered, "random": random}
        ratio = sum(random) / sum(ordered)
        body.append([str(epsilon), mean_spread(ordered, digits=0), mean_spread(random, digits=0), f"{ratio:.2f}"])
    text = table(["epsilon", "OSGD, steps", "SGD, steps", "ratio"], body, "lrrr")
    slower = 3 * (math.e**2 + 1) / (math.e**2 - 1)
    note = (
        f"Number of steps of size {LR} until the loss is within {NEAR} of its optimum {OPTIMUM:.3f}: mean ± standard "
        f"deviation of {args.seeds} seeds. The ratio of the mean speeds at the start is {slower:.2f}."
    )
    finish("osgd", "Ordered SGD on a toy problem with four vectors", env, [note, text], results)


if __name__ == "__main__":
    main()
