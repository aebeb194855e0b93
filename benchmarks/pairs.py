"""Measure the cost per call of each option of a pair policy, relative to the same estimator without a policy.

    python -m benchmarks.pairs            # writes benchmarks/results/pairs.md and pairs.json, in some four minutes
    python -m benchmarks.pairs --quick    # B = 256, printed and not written

A call is a loss with both feature gradients. Contenders run in turns in one process, in a new order each round;
ratios pair the calls of one round. Batches of more than 1,024 samples run with ``chunk_size`` only, in fewer rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from torch import Tensor

import compopt
from benchmarks.kernel import batch, ratios
from benchmarks.report import environment, finish, quartiles, spread, table
from compopt import PairPolicy

ABOUT = """DCL, tau 0.07, float32, random normalised features, d = {dim}. *ms*: processor time of a call;
*ratio*: to no policy in the same round; median (first to third quartile)."""
TAU, GUIDE_DIM, CHUNK = 0.07, 64, 512
SMALL = 1024  # largest batch that also runs without chunks, and in all rounds
POLICIES: dict[str, PairPolicy | None] = {
    "none": None,
    "false_negatives": PairPolicy(false_negatives=0.1),
    "hardness": PairPolicy(hardness=5.0),
    "false_negatives and hardness": PairPolicy(false_negatives=0.1, hardness=5.0),
    "guided": PairPolicy(false_negatives=0.1, guided=True),
    "within": PairPolicy(within=True),
}


def given(policy: PairPolicy | None, rows: Tensor) -> dict[str, Any]:
    """Return the additional arguments that a policy requires; residues of the rows serve as data sets."""
    if policy is None:
        return {}
    guide = torch.randn(2, len(rows), GUIDE_DIM, generator=torch.Generator().manual_seed(len(rows)))
    return {**({"guide": list(guide)} if policy.guided else {}), **({"within": rows % 2} if policy.within else {})}


def measure(B: int, d: int, rounds: int, chunk_size: int | None) -> dict[str, list[float]]:
    """Return the processor time of each call by policy, after a warm-up round on at most ``SMALL`` samples."""
    made = {name: compopt.DCLEstimator(TAU, pairs=p, chunk_size=chunk_size) for name, p in POLICIES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for i in range(-1, rounds):
        z1, z2, index = batch(B if i >= 0 else min(B, SMALL), d, seed=i + 1)
        for name, est in random.Random(i).sample(list(made.items()), len(made)):
            a, b = z1.clone().requires_grad_(), z2.clone().requires_grad_()
            more = given(POLICIES[name], index)
            start = time.process_time()
            est(a, b, index, **more).backward()
            if i >= 0:
                seconds[name].append(time.process_time() - start)
    return seconds


def section(B: int, chunk_size: int | None, seconds: dict[str, list[float]]) -> str:
    """Return the table of one batch size."""
    body = [
        [name, spread(quartiles(values), 1, 1e-3), spread(ratios(seconds, name, "none"))]
        for name, values in seconds.items()
    ]
    rounds = len(seconds["none"])
    return f"B = {B}, chunk_size = {chunk_size}, {rounds} rounds\n\n" + table(["policy", "ms", "ratio"], body)


def tables(sizes: list[int]) -> list[tuple[int, int | None]]:
    """Return batch sizes with their ``chunk_size``."""
    return [(B, chunk) for B in sizes for chunk in (None, CHUNK) if chunk or B <= SMALL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=512, help="feature dimension d")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 8192], help="batch sizes B")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each policy; a third of them for large batches")
    parser.add_argument("--quick", action="store_true", help="B = 256, printed only")
    args = parser.parse_args()
    env, parts, results = environment(), [ABOUT.format(dim=args.dim)], []
    for B, chunk_size in tables([256] if args.quick else args.sizes):
        seconds = measure(B, args.dim, args.rounds if B <= SMALL else max(2, args.rounds // 3), chunk_size)
        results.append({"B": B, "chunk_size": chunk_size, "seconds": seconds})
        parts.append(section(B, chunk_size, seconds))
    finish("pairs", "What a policy of pairs costs", env, parts, results, args.quick)


if __name__ == "__main__":
    main()
