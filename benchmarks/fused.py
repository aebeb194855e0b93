"""Report on the fused kernel without a GPU: its machine code, its errors, and the times that a model predicts.

    python -m benchmarks.fused            # writes benchmarks/results/fused.md and fused.json; in the environment of
                                          # make test-triton: .venv-triton/bin/python -m benchmarks.fused
    python -m benchmarks.fused --quick    # without compilation, printed and not written

`make gpu` measures what needs a GPU (benchmarks/gpu/fused.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported, in this process alone

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.compiled import TARGETS
from benchmarks.report import ROOT, environment, finish, table
from compopt import functional as F

B, D = 128, 128
TAUS = (0.07, 0.02, 0.01, 0.005)
# TFLOP/s of dense products, 10^12 exponentials/s and TB/s of memory, from data sheets; there are 16 exponentials per
# clock and multiprocessor (FlashAttention-3 gives the same 3.9 for H100 SXM).
DEVICES = {
    "H100 SXM": {"bf16": 989.0, "tf32": 495.0, "exp": 3.9, "memory": 3.35},
    "A100 SXM": {"bf16": 312.0, "tf32": 156.0, "exp": 2.4, "memory": 2.0},
}
BYTES = {"bf16": 2, "tf32": 4}

ABOUT = """**No GPU has run these kernels.** What is below ran on the machine of the table above: the numbers of the
kernels by Triton's interpreter, on the CPU; the machine code by Triton's compiler, for devices that are not here. The
times at the end come from a model; nothing was timed."""
COMPILED = """Registers per thread, bytes of stack (0: no register is spilled), KiB of shared memory per program (one
stage of a pipeline each) and instructions of tensor cores in the code, of every kernel that is shipped. *shared*: one
temperature of at least 0.025 for all anchors; *anchors*: a temperature of each, with moments and counts; *policy*: with
thresholds, two strengths, three keys and groups too. gfx942 has no product of the third precision."""
ERRORS = """Relative error of the gradient of the sum of `contrastive_sums` against float64, and the largest error of a
sum in nats; B = {B}, d = {D}, random unit features whose positives have a similarity of about 0.7. The interpreter
multiplies in float32. *TF32*: the features were rounded to 10 bits of mantissa; the coefficients were not, which a
device does in the second pair of products. *bf16*: features and coefficients are rounded."""
MODEL = """Milliseconds of a loss with both gradients, d = 512. *Bound*: the larger of products at the data sheet's
rate, exponentials, and traffic of the coefficients, in each of the two passes. *Sum*: nothing overlaps. Four products:
S, S again, A Y and A^T X. One exponential per pair and pass with one temperature (*shared*), two otherwise."""


# -- errors ------------------------------------------------------------------------------------------------------------


def to_tf32(z: Tensor) -> Tensor:
    """Round float32 to 10 bits of mantissa, to nearest, ties to even."""
    words = z.contiguous().view(torch.int32)
    return ((words + 0xFFF + ((words >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def features() -> tuple[Tensor, Tensor]:
    """Return unit features in float64."""
    generator = torch.Generator().manual_seed(0)
    z1, noise = torch.randn(2, B, D, generator=generator, dtype=torch.float64)
    return normalize(z1, dim=1), normalize(z1 + noise, dim=1)


def sums_and_gradients(z1: Tensor, z2: Tensor, tau: float, **options: Any) -> tuple[Tensor, Tensor]:
    leaves = [z.clone().requires_grad_() for z in (z1, z2)]
    sums = F.contrastive_sums(*leaves, tau, **options)
    sums.sum().backward()
    return sums.detach().double(), torch.cat([z.grad.double() for z in leaves if z.grad is not None])


def errors() -> list[dict[str, Any]]:
    z1, z2 = features()
    low = (z1.float(), z2.float())
    ways = {"float32": (low, "tf32"), "TF32": (tuple(map(to_tf32, low)), "tf32"), "bf16": (low, "bf16")}
    results = []
    for tau in TAUS:
        exact_sums, exact = sums_and_gradients(z1, z2, tau)
        for name, (given, precision) in ways.items():
            sums, gradient = sums_and_gradients(*given, tau, backend="triton", precision=precision)
            error = float((gradient - exact).norm() / exact.norm())
            results.append(
                {"tau": tau, "products": name, "gradient": error, "sums": float((sums - exact_sums).abs().max())}
            )
    return results


# -- machine code ------------------------------------------------------------------------------------------------------


def compiled() -> list[dict[str, Any]]:
    """Compile for every target, each in a process with Triton's interpreter off."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = []
    for target in TARGETS:
        print(f"compiling for {target} ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.compiled", target]
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
        found += [json.loads(line) for line in done.stdout.splitlines()]
    return found


# -- a model of time ---------------------------------------------------------------------------------------------------


def model(device: str, precision: str, size: int, d: int, exponentials: int) -> dict[str, Any]:
    """Predict the seconds of a loss with gradients, see :data:`MODEL`; coefficients are written once and read twice."""
    rates, pairs = DEVICES[device], size * size
    product = 2 * pairs * d / (rates[precision] * 1e12)
    exps = exponentials * pairs / (rates["exp"] * 1e12)
    traffic = 3 * pairs * BYTES[precision] / (rates["memory"] * 1e12)
    bound = max(product, exps) + max(3 * product, exps, traffic)
    facts = {"device": device, "precision": precision, "B": size, "d": d, "exponentials": exponentials}
    return {**facts, "bound": bound, "sum": 4 * product + 2 * exps + traffic, "three products": 3 * product}


def models() -> list[dict[str, Any]]:
    sizes = (1024, 4096, 16384, 32768, 65536, 131072)
    cases = itertools.product(DEVICES, BYTES, sizes, (1, 2))
    return [model(device, precision, size, 512, n) for device, precision, size, n in cases]


# -- the page ----------------------------------------------------------------------------------------------------------


def compiled_table(found: Sequence[dict[str, Any]]) -> str:
    head = ["target", "kernel", "products in", "variant", "tile", "warps", "stages"]
    body = []
    for r in found:
        *shape, warps, stages = r["tile"]
        size = [str(warps), str(stages), *(str(r[key]) for key in ("registers", "stack"))]
        size += [f"{r['shared'] / 1024:.0f}", str(r["instructions"])]
        body.append([r["target"], r["kernel"], r["precision"], r["variant"], " x ".join(map(str, shape)), *size])
    return table([*head, "registers", "stack", "shared, KiB", "tensor-core instructions"], body, "lllllr")


def errors_table(found: Sequence[dict[str, Any]]) -> str:
    body = [[f"{r['tau']}", r["products"], f"{r['gradient']:.1e}", f"{r['sums']:.1e}"] for r in found]
    return table(["tau", "products in", "gradient", "sum, nats"], body, "rlr")


def model_table(found: Sequence[dict[str, Any]]) -> str:
    body = []
    for one, two in zip(found[::2], found[1::2], strict=True):
        times = [one["three products"], one["bound"], one["sum"], two["bound"], two["sum"]]
        body.append([one["device"], one["precision"], f"{one['B']:,}", *(f"{1e3 * value:.2f}" for value in times)])
    head = ["device", "products in", "B", "three products", "bound, shared", "sum, shared", "bound", "sum"]
    return table(head, body, "llr")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no compilation; print only")
    args = parser.parse_args()
    env = {**environment(), "triton": version("triton")}
    results = {"errors": errors(), "model": models(), "compiled": [] if args.quick else compiled()}
    about = ERRORS.format(B=B, D=D)
    parts = [ABOUT, "## Errors, in the interpreter", about, errors_table(results["errors"])]
    parts += ["## Machine code", COMPILED, compiled_table(results["compiled"])]
    parts += ["## A model of time", MODEL, model_table(results["model"])]
    finish("fused", "The fused kernel: machine code, errors, a model of time", env, parts, results, args.quick)


if __name__ == "__main__":
    main()
