"""Compare time and memory of our losses, with both feature gradients, with those of other packages.

    python -m benchmarks.peers.speed            # writes benchmarks/results/peers_speed.md (half an hour)
    python -m benchmarks.peers.speed --quick    # small, printed only

Contenders run in turns in one process on fresh features, as in ``benchmarks/kernel.py``. Those that are expected to
need more memory than ``--memory`` (extrapolated from smaller sizes) are left out and listed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import compopt
from benchmarks import contenders, kernel
from benchmarks.contenders import CHUNK, PRODUCTS, SAMPLES_PER_BATCH, TAU, Contender, estimator, loss_and_gradients
from benchmarks.machine import MIB
from benchmarks.peers import losses, packages
from benchmarks.report import environment, finish, quartiles, spread, table

CHUNKED, CACHED = f"compopt SogCLR, chunk_size={CHUNK}", "sentence-transformers Cached...Loss"


def _peer(what: str, make: Any) -> Contender:
    return Contender(what, lambda B, d: loss_and_gradients(make(B, d)))


BIMODAL = {
    PRODUCTS: contenders.BIMODAL[PRODUCTS],
    "compopt InfoNCE": contenders.BIMODAL["InfoNCE"],
    "compopt SogCLR": contenders.BIMODAL["SogCLR + step"],
    CHUNKED: Contender(
        f"`SogCLREstimator(n, tau, chunk_size={CHUNK})` and the commit of its rows",
        estimator(lambda n: compopt.SogCLREstimator(n, tau=TAU, chunk_size=CHUNK), commit=True),
    ),
    "compopt iSogCLR": Contender(
        "`ISogCLREstimator(n)` and the commit of its rows",
        estimator(lambda n: compopt.ISogCLREstimator(n, tau_init=TAU, rho=1.0), commit=True),
    ),
    "torch cross_entropy": contenders.BIMODAL["cross_entropy"],
    "open_clip ClipLoss": _peer("cross-entropy in both directions", lambda B, d: losses.clip(TAU)),
    "open_clip SigLipLoss": _peer("a logistic loss per pair", lambda B, d: losses.siglip(TAU)),
    CACHED: _peer(f"cross-entropy in both directions, {CHUNK} rows at a time", lambda B, d: losses.cached_ranking(TAU)),
    "LibAUC GCLoss_v2": _peer("SogCLR", lambda B, d: losses.gcl_bimodal(SAMPLES_PER_BATCH * B, TAU)),
    "LibAUC GCLoss_v2, individual": _peer(
        "iSogCLR", lambda B, d: losses.gcl_bimodal(SAMPLES_PER_BATCH * B, TAU, individual=True)
    ),
}
UNIMODAL = {
    PRODUCTS: contenders.UNIMODAL[PRODUCTS],
    "compopt SogCLR": Contender(
        '`SogCLREstimator(n, tau, mode="unimodal")` and the commit of its rows',
        estimator(lambda n: compopt.SogCLREstimator(n, tau=TAU, mode="unimodal"), commit=True),
    ),
    "compopt InfoNCE": Contender(
        '`InfoNCEEstimator(tau, mode="unimodal")`',
        estimator(lambda n: compopt.InfoNCEEstimator(TAU, mode="unimodal")),
    ),
    "LibAUC GCLoss_v1": _peer("SogCLR", lambda B, d: losses.gcl_unimodal(SAMPLES_PER_BATCH * B, TAU)),
    "metric-learning SupConLoss": _peer("NT-Xent as a matrix", lambda B, d: losses.sup_con(TAU)),
    "metric-learning NTXentLoss": _peer(
        "NT-Xent, every positive with every negative", lambda B, d: losses.nt_xent(TAU)
    ),
    "metric-learning CrossBatchMemory": _peer(
        "NT-Xent of z1 against the 4 B newest features; no gradient for z2",
        lambda B, d: losses.cross_batch_memory(TAU, d, 4 * B),
    ),
}
SUITES = {"bimodal": BIMODAL, "unimodal": UNIMODAL}
SIZES = {"bimodal": (256, 1024, 4096, 8192, 16384), "unimodal": (256, 1024, 4096)}
LARGE = 32768  # for contenders that never hold a B x B matrix
CUBIC = ("metric-learning NTXentLoss", "metric-learning CrossBatchMemory")  # in B: pairs of positives and negatives
AGAINST = {
    "compopt InfoNCE": ("open_clip ClipLoss", CACHED, "metric-learning SupConLoss"),
    "compopt SogCLR": ("open_clip ClipLoss", "LibAUC GCLoss_v2", "LibAUC GCLoss_v1"),
    CHUNKED: ("open_clip ClipLoss", "LibAUC GCLoss_v2", CACHED),
    "compopt iSogCLR": ("LibAUC GCLoss_v2, individual",),
}
ABOUT = """One call computes a loss with both feature gradients; for compopt it includes the commit of the rows, which
the other packages write in the forward pass. Cells are the median (first to third quartile) over rounds in which all
contenders run in random order on the same new features; ratios are taken within a round. *Peak*: memory that a call
adds to a new process, including gradients. `chunk_size` and the mini-batches of sentence-transformers are the number of
rows of the B x B matrix that are held at a time. On a CPU, newly allocated pages of large temporaries cost time that
the caching allocator of a GPU saves."""


def rounds(B: int, seconds: float) -> int:
    """Return the number of rounds: that of the kernel benchmark, at most 60, and 3 above B = 8192."""
    return 3 if B > 8192 else min(60, kernel.rounds_for(B, seconds))


def measure(suite: str, names: list[str], B: int, d: int, rounds: int) -> dict[str, Any]:
    """Return quartiles of the seconds at one size, ratios within a round, and peak memory."""
    print(f"{suite}, B = {B} ...", file=sys.stderr, flush=True)
    times = kernel.interleaved({name: SUITES[suite][name] for name in names}, B, d, rounds)
    rows = {}
    for name in names:
        others = [PRODUCTS, *(other for other in AGAINST.get(name, ()) if other in names)]
        apart = (suite, name, B, d, "benchmarks.peers.speed")
        rows[name] = {
            "seconds": quartiles(times[name]),
            "ratio": {other: kernel.ratios(times, name, other) for other in others},
            "peak": None if name == PRODUCTS else kernel.peak_bytes_apart(*apart),
        }
    left_out = [name for name in SUITES[suite] if name not in names]
    return {"suite": suite, "batch": B, "dim": d, "rounds": rounds, "rows": rows, "left_out": left_out}


def measure_suite(suite: str, sizes: tuple[int, ...], d: int, seconds: float, limit: float) -> list[dict[str, Any]]:
    """Measure every size, without contenders that are expected to need more than ``limit`` bytes."""
    results: list[dict[str, Any]] = []
    peaks: dict[str, tuple[int, int]] = {}  # the largest measured batch of each contender, and its bytes
    for B in sizes:
        names = []
        for name in SUITES[suite]:
            before, taken = peaks.get(name, (B, 0))
            if taken * (B / before) ** (3 if name in CUBIC else 2) < limit:
                names.append(name)
        results.append(measure(suite, names, B, d, rounds(B, seconds)))
        peaks |= {name: (B, row["peak"]) for name, row in results[-1]["rows"].items() if row["peak"]}
    return results


def section(result: dict[str, Any]) -> list[str]:
    """Return the section of one size."""
    body = []
    for name, row in result["rows"].items():
        peak = "" if row["peak"] is None else f"{row['peak'] / MIB:.1f}"
        body.append([name, spread(row["seconds"], 1, 1e-3), spread(row["ratio"][PRODUCTS]), peak])
    title = f"## {result['suite']}, B = {result['batch']:,}, d = {result['dim']} ({result['rounds']} rounds)"
    parts = [title, table(["", "ms", "ratio to products", "peak, MiB"], body)]
    if result["left_out"]:
        parts.append(f"Left out to limit memory or, at B = {LARGE:,}, time: {', '.join(result['left_out'])}.")
    return parts


def ratios(results: list[dict[str, Any]]) -> str:
    """Return a table of our time divided by theirs, and of their memory divided by ours."""
    body = []
    for result in results:
        for name, row in result["rows"].items():
            for other, times in row["ratio"].items():
                if other != PRODUCTS:
                    memory = f"{result['rows'][other]['peak'] / row['peak']:.1f}"
                    body.append([name, other, f"{result['batch']:,}", spread(times), memory])
    return table(["ours", "against", "B", "time, ours / theirs", "memory, theirs / ours"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes of the bimodal part")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=45.0, help="approximate time for each size")
    parser.add_argument("--memory", type=float, default=12.0, help="largest memory of a contender in GiB")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="B = 256 and 1024, no files")
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak_of:
        suite, name = args.peak_of
        print(kernel.peak_bytes(SUITES[suite][name], args.sizes[0], args.dim))
        return
    env = {**environment(), **packages.versions()}
    sizes = {"bimodal": tuple(args.sizes or SIZES["bimodal"]), "unimodal": SIZES["unimodal"]}
    if args.quick:
        sizes, args.seconds = {"bimodal": (256, 1024), "unimodal": (256,)}, 3.0
    limit = args.memory * 2**30
    results = [r for suite, own in sizes.items() for r in measure_suite(suite, own, args.dim, args.seconds, limit)]
    if not args.quick:
        results.append(measure("bimodal", [PRODUCTS, CHUNKED, CACHED], LARGE, args.dim, rounds(LARGE, args.seconds)))
    calls = [[f"{suite}: {name}", c.what] for suite, members in SUITES.items() for name, c in members.items()]
    parts = [
        ABOUT,
        table(["", "what one call does"], calls),
        "## Time and memory relative to other packages",
        ratios(results),
    ]
    parts += [part for result in results for part in section(result)]
    finish("peers_speed", "Loss and gradients compared with other packages", env, parts, results, quick=args.quick)


if __name__ == "__main__":
    main()
