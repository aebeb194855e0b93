"""The neural normalizer's inner loop: time per call against the matrix products it cannot avoid, and against SogCLR.

    python -m benchmarks.network                    # writes benchmarks/results/network.md
    python -m benchmarks.network --quick            # small sizes, printed only

Contenders of one size run round-robin in one process on the same features.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

import compopt
from benchmarks.machine import timed
from benchmarks.report import environment, heading, quartiles, save, spread, table

SIZES = [  # batch, dim, prototypes
    (64, 128, 1024),
    (64, 128, 4096),
    (64, 512, 4096),
    (256, 128, 4096),
    (256, 512, 4096),
    (1024, 512, 4096),
]
UPDATES = 10
ABOUT = f"""Milliseconds per training step of the estimator alone (forward, backward, commit; both directions; float32,
tau 0.07), median (first to third quartile). *NeuCLIP*: {UPDATES} updates with AdaGrad, its call less SogCLR's on the
same features is *the network*. *Products*: the 2 x {UPDATES} + 1 products of (B, d) with (d, m) per direction that the
network needs, into memory that is at hand. *Sums*: AdaGrad's {UPDATES} steps alone, which read and write 3 x 2 x m x d
floats each. *Ratio*: network / products, and network / (products + sums), medians over rounds. *Queue* is the network
without updates whose prototypes are the newest m features (`updates=0, restart_every=1`)."""


def contenders(batch: int, dim: int, prototypes: int) -> dict[str, Callable[[], object]]:
    """Build what is timed at one size, warmed up: name -> action."""
    z = [torch.randn(2, batch, dim).unbind() for _ in range(3)]
    index, calls = torch.arange(batch), [0]
    options = {"dim": dim, "prototypes": prototypes}

    def step(est: compopt.ContrastiveEstimator) -> None:
        calls[0] += 1
        a, b = (x.clone().requires_grad_() for x in z[calls[0] % 3])
        est(a, b, index).backward()
        est.step()

    est = {
        "NeuCLIP": compopt.NeuCLIPEstimator(**options, updates=UPDATES),
        "queue": compopt.NeuCLIPEstimator(**options, updates=0, restart_every=1),
        "SogCLR": compopt.SogCLREstimator(batch),
    }
    for _ in range(-(-prototypes // batch) + 1):  # until the queue is full
        for each in est.values():
            step(each)
    e, w = torch.randn(2, batch, dim), torch.randn(2, prototypes, dim)
    s, v, sums = torch.empty(2, batch, prototypes), torch.empty_like(w), torch.rand_like(w)
    optimizer = torch.optim.Adagrad([sums], lr=1e-6, fused=True)
    sums.grad = torch.randn_like(w)

    def products() -> None:
        for _ in range(UPDATES):
            torch.bmm(e, w.mT, out=s)
            torch.bmm(s.mT, e, out=v)
        torch.bmm(e, w.mT, out=s)

    def adagrad() -> None:
        for _ in range(UPDATES):
            optimizer.step()

    steps: dict[str, Callable[[], object]] = {name: lambda each=each: step(each) for name, each in est.items()}
    return {**steps, "products": products, "sums": adagrad}


def measure(size: tuple[int, int, int], rounds: int) -> dict:
    """Times of every contender in every round, in milliseconds."""
    actions = contenders(*size)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            elapsed = timed(action)
            if number:  # the first round warms up
                times[name].append(1e3 * elapsed)
    network = [a - b for a, b in zip(times["NeuCLIP"], times["SogCLR"], strict=True)]
    both = [a + b for a, b in zip(times["products"], times["sums"], strict=True)]
    return {
        "size": size,
        "times": times,
        "ratio": statistics.median(a / b for a, b in zip(network, times["products"], strict=True)),
        "ratio with sums": statistics.median(a / b for a, b in zip(network, both, strict=True)),
    }


def report(env: dict, results: list[dict]) -> str:
    names = ["NeuCLIP", "SogCLR", "queue", "products", "sums"]
    head = ["B, d, m", *names, "ratio", "with sums"]
    lines = [
        [
            ", ".join(map(str, r["size"])),
            *(spread(quartiles(r["times"][name])) for name in names),
            f"{r['ratio']:.2f}",
            f"{r['ratio with sums']:.2f}",
        ]
        for r in results
    ]
    return "\n".join([*heading("The neural normalizer's inner loop", env), ABOUT, "", table(head, lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds, printed only")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    env = environment()
    sizes, rounds = (SIZES[:2], 3) if args.quick else (SIZES, args.rounds)
    results = [measure(size, rounds) for size in sizes]
    text = report(env, results)
    print(text)
    if not args.quick:
        save("network", text, env, results)


if __name__ == "__main__":
    main()
