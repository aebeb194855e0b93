"""Compare time and memory of the pair-weight kernel with the unavoidable matrix products and with plain autograd.

    python -m benchmarks.kernel            # writes benchmarks/results/kernel.md and kernel.json
    python -m benchmarks.kernel --quick    # a smaller run, printed and not written
    python -m benchmarks.kernel --small --threads 1 --rounds 2000    # small calls alone, printed

Every contender computes a loss and both feature gradients from two normalised feature matrices. Contenders run in turns
in one process, in a random order in each round, each round on fresh random features, so that a temporary slowdown of
the machine affects all of them; ratios are taken within a round. Peak memory is measured in a separate process for each
contender.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from benchmarks.contenders import (
    BIMODAL,
    CROSS_ENTROPY,
    LOW,
    PRODUCTS,
    SAMPLES_PER_BATCH,
    SMALL,
    SPREAD,
    SUITES,
    TAU,
    UNIMODAL,
    Contender,
    cross_entropy_both_ways,
    operations_alone,
    products,
)
from benchmarks.machine import status
from benchmarks.report import ROOT, environment, finish, quartiles, spread, table

ABOUT = """A call computes a loss and both feature gradients. Each cell is the median (first to third quartile) over
the rounds; ratios are taken between calls of the same round. Features are float32, random, normalised, and new in
every round; every loss normalises them again. *Spread similarities*: features in a random subspace of 16 dimensions,
so that similarities lie between -0.9 and 0.9 as those of trained encoders do. Peak memory is the resident memory that
one call adds to a new process, without inputs and BLAS workspace, including its two B x d gradients. The last column
is the peak without these gradients, in units of a float32 B x B matrix. A load average well above 0 before the run
means that other programs were running."""
RANK = 16  # dimension of features with spread similarities


def batch(B: int, d: int, seed: int, rank: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return two matrices of random features, in a random subspace of dimension ``rank`` if it is given; an index."""
    generator = torch.Generator().manual_seed(seed)
    z1, z2 = (F.normalize(torch.randn(B, rank or d, generator=generator), dim=1) for _ in range(2))
    if rank:
        basis = torch.linalg.qr(torch.randn(d, rank, generator=generator))[0].T
        z1, z2 = z1 @ basis, z2 @ basis
    return z1, z2, torch.randperm(SAMPLES_PER_BATCH * B, generator=generator)[:B]


def interleaved(contenders: dict[str, Contender], B: int, d: int, rounds: int, rank: int = 0) -> dict[str, list[float]]:
    """Return the seconds of each call: `rounds` values per contender, after two warm-up rounds."""
    runners = {name: contender.build(B, d) for name, contender in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for i in range(-2, rounds):
        z1, z2, index = batch(B, d, i + 2, rank)
        for name, run in random.Random(i).sample(list(runners.items()), len(runners)):  # random order
            a, b = z1.clone().requires_grad_(), z2.clone().requires_grad_()
            start = time.perf_counter()
            run(a, b, index)
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], name: str, base: str) -> list[float]:
    """Return the quartiles of the ratio of two contenders in the same round."""
    return quartiles([a / b for a, b in zip(seconds[name], seconds[base], strict=True)])


def peak_bytes(contender: Contender, B: int, d: int) -> int:
    """Return the bytes that one call adds to this process at its peak, with its gradients and without its inputs."""
    z1, z2, index = batch(B, d, seed=1)
    products(preallocate=False)(B, d)(z1, z2, index)  # BLAS allocates its own workspace
    for size in (8, B):
        run = contender.build(size, d)
        a, b = z1[:size].clone().requires_grad_(), z2[:size].clone().requires_grad_()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current VmRSS
        before = status("VmRSS")
        run(a, b, torch.arange(size) if size < B else index)
    return status("VmHWM") - before


def peak_bytes_apart(suite: str, name: str, B: int, d: int, module: str = "benchmarks.kernel") -> int:
    """Run `peak_bytes` in a separate process whose allocator returns freed memory, so that only live buffers count."""
    command = [sys.executable, "-m", module, "--peak-of", suite, name, "--sizes", str(B), "--dim", str(d)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=ROOT).stdout)


def check_equal_work(B: int, d: int) -> None:
    """Check that the estimator and its bare operations give the gradient of cross-entropy (times tau)."""
    z1, z2, index = batch(B, d, seed=0)
    grads = []
    for loss in (cross_entropy_both_ways, compopt.InfoNCEEstimator(TAU), operations_alone):
        a, b = z1.clone().requires_grad_(), z2.clone().requires_grad_()
        loss(a, b, index).backward()
        grads.append(torch.cat([a.grad, b.grad]))
    for ours in grads[1:]:
        torch.testing.assert_close(ours, TAU * grads[0], rtol=1e-3, atol=1e-7)


def measure(suite: str, names: list[str], B: int, d: int, rounds: int, memory: bool) -> dict:
    """Measure some contenders at one size."""
    contenders = {name: SUITES[suite][name] for name in names}
    seconds = interleaved(contenders, B, d, rounds, RANK if suite == SPREAD else 0)
    rows = {}
    for name in names:
        row: dict = {"seconds": quartiles(seconds[name])}
        for base in (CROSS_ENTROPY,) if suite in ("small", SPREAD) else (PRODUCTS, "products, preallocated"):
            if base in names:
                row[f"ratio to {base}"] = ratios(seconds, name, base)
        if suite == "small":
            row["least"] = min(seconds[name])
        if memory:
            row["peak_bytes"] = peak_bytes_apart(suite, name, B, d)
        rows[name] = row
    return {"suite": suite, "batch": B, "dim": d, "rounds": rounds, "rows": rows}


def section(result: dict) -> list[str]:
    """Return title and table of one suite at one size."""
    B, d = result["batch"], result["dim"]
    bases = [key for key in next(iter(result["rows"].values())) if key.startswith("ratio")]
    small = result["suite"] == "small"
    head = ["", "us" if small else "ms", *bases, *(["least, us", "ratio of the least"] if small else [])]
    with_memory = "peak_bytes" in next(iter(result["rows"].values()))
    if with_memory:
        head += ["peak, MiB", "without gradients, B x B buffers"]
    body = []
    for name, row in result["rows"].items():
        cells = [name, spread(row["seconds"], 0, 1e-6) if small else spread(row["seconds"], 1, 1e-3)]
        cells += [spread(row[base]) for base in bases]
        if small:
            cells += [f"{row['least'] * 1e6:.0f}", f"{row['least'] / result['rows'][CROSS_ENTROPY]['least']:.2f}"]
        if with_memory:
            peak = row["peak_bytes"]  # includes 8 B d bytes of two float32 gradients of B x d
            cells += [f"{peak / 2**20:.1f}", f"{(peak - 8 * B * d) / (4 * B * B):.2f}"]
        body.append(cells)
    return [f"## {result['suite']}, B = {B}, d = {d} ({result['rounds']} rounds)", table(head, body)]


def rounds_for(B: int, seconds: float) -> int:
    """Return the number of rounds, from 5 to 200, that take about ``seconds`` at ten contenders and 60 GFLOP/s."""
    per_round = 10 * 1.5 * 6 * 512 * B * B / 60e9
    return int(min(200, max(5, seconds / per_round)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 8192], help="batch sizes B")
    parser.add_argument("--dim", type=int, default=512, help="feature dimension d")
    parser.add_argument("--seconds", type=float, default=45.0, help="approximate time for each size")
    parser.add_argument("--unimodal-size", type=int, default=1024, help="batch size of the unimodal section")
    parser.add_argument("--threads", type=int, default=None, help="number of torch threads (default: that of torch)")
    parser.add_argument("--small", action="store_true", help="measure only B = 64 and write no files")
    parser.add_argument("--rounds", type=int, default=1000, help="number of rounds at B = 64")
    parser.add_argument("--quick", action="store_true", help="B = 256 and 1024, few rounds, no files")
    parser.add_argument("--peak-of", nargs=2, metavar=("SUITE", "CONTENDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak_of:
        suite, name = args.peak_of
        print(peak_bytes(SUITES[suite][name], args.sizes[0], args.dim))
        return
    if args.quick:
        args.sizes, args.seconds, args.unimodal_size = [256, 1024], 3.0, 256
    env = environment()
    check_equal_work(256, args.dim)
    results = [measure("small", SMALL, 64, 128, 100 if args.quick else args.rounds, memory=False)]
    if args.small:
        print("\n\n".join(section(results[0])))
        return
    for B in args.sizes:
        print(f"bimodal, B = {B} ...", file=sys.stderr, flush=True)
        results.append(measure("bimodal", list(BIMODAL), B, args.dim, rounds_for(B, args.seconds), memory=True))
    results.append(measure(SPREAD, list(LOW), 1024, args.dim, rounds_for(1024, args.seconds), memory=False))
    B = args.unimodal_size
    print(f"unimodal, B = {B} ...", file=sys.stderr, flush=True)
    results.append(measure("unimodal", list(UNIMODAL), B, args.dim, rounds_for(2 * B, args.seconds), memory=True))
    measured = {(r["suite"], name) for r in results for name in r["rows"]}
    known = [(suite, name, c.what) for suite, contenders in SUITES.items() for name, c in contenders.items()]
    body = [[f"{suite}: {name}", what] for suite, name, what in known if (suite, name) in measured]
    parts = [ABOUT, table(["contender", "what one call does"], body, "l")]
    parts += [part for result in results for part in section(result)]
    finish("kernel", "Time and memory of the pair-weight kernel", env, parts, results, args.quick)


if __name__ == "__main__":
    main()
