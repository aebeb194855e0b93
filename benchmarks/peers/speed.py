"""A loss with both feature gradients: time and memory, ours and the other packages'.

    python -m benchmarks.peers.speed            # writes results/peers_speed.md, .json and .png (an hour)
    python -m benchmarks.peers.speed --quick    # small, printed only

Contenders run round-robin in one process on fresh features, as in ``benchmarks/kernel.py``; those that would need more
memory than ``--memory`` (their B x B matrices counted from the sizes before) are left out and said to be.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

import compopt
from benchmarks import kernel
from benchmarks.kernel import CHUNK, PRODUCTS, RESULTS, SAMPLES_PER_BATCH, TAU, Contender, estimator, loss_and_gradients
from benchmarks.machine import environment, heading
from benchmarks.peers import losses, packages

BIMODAL = {
    PRODUCTS: kernel.BIMODAL[PRODUCTS],
    "compopt InfoNCE": kernel.BIMODAL["InfoNCE"],
    "compopt SogCLR": kernel.BIMODAL["SogCLR + step"],
    f"compopt SogCLR, chunk_size={CHUNK}": Contender(
        f"`SogCLREstimator(n, tau, chunk_size={CHUNK})` and the commit of its rows",
        estimator(lambda n: compopt.SogCLREstimator(n, tau=TAU, chunk_size=CHUNK), commit=True),
    ),
    "compopt iSogCLR": Contender(
        "`ISogCLREstimator(n)` and the commit of its rows",
        estimator(lambda n: compopt.ISogCLREstimator(n, tau_init=TAU, rho=1.0), commit=True),
    ),
    "torch cross_entropy": kernel.BIMODAL["cross_entropy"],
    "open_clip ClipLoss": Contender("cross-entropy both ways", lambda B, d: loss_and_gradients(losses.clip(TAU))),
    "open_clip SigLipLoss": Contender("a logistic loss per pair", lambda B, d: loss_and_gradients(losses.siglip(TAU))),
    "LibAUC GCLoss_v2": Contender(
        "SogCLR", lambda B, d: loss_and_gradients(losses.gcl_bimodal(SAMPLES_PER_BATCH * B, TAU))
    ),
    "LibAUC GCLoss_v2, individual": Contender(
        "iSogCLR", lambda B, d: loss_and_gradients(losses.gcl_bimodal(SAMPLES_PER_BATCH * B, TAU, individual=True))
    ),
}
UNIMODAL = {
    PRODUCTS: kernel.UNIMODAL[PRODUCTS],
    "compopt SogCLR": Contender(
        '`SogCLREstimator(n, tau, mode="unimodal")` and the commit of its rows',
        estimator(lambda n: compopt.SogCLREstimator(n, tau=TAU, mode="unimodal"), commit=True),
    ),
    "LibAUC GCLoss_v1": Contender(
        "SogCLR", lambda B, d: loss_and_gradients(losses.gcl_unimodal(SAMPLES_PER_BATCH * B, TAU))
    ),
    "metric-learning NTXentLoss": Contender("NT-Xent", lambda B, d: loss_and_gradients(losses.nt_xent(TAU))),
    "metric-learning CrossBatchMemory": Contender(
        "NT-Xent against the 4 B newest features too",
        lambda B, d: loss_and_gradients(losses.cross_batch_memory(TAU, d, 4 * B)),
    ),
}
SUITES = {"bimodal": BIMODAL, "unimodal": UNIMODAL}
SIZES = {"bimodal": (256, 1024, 4096, 8192, 16384), "unimodal": (256, 1024, 4096)}


def fits(peaks: dict[str, int], name: str, B: int, before: int, limit: float) -> bool:
    """Whether a contender that took so much at batch ``before`` can be expected to fit now."""
    return before == 0 or peaks.get(name, 0) * (B / before) ** 2 < limit


def measure(suite: str, sizes: tuple[int, ...], d: int, seconds: float, limit: float) -> list[dict[str, Any]]:
    """Every size: quartiles of the seconds, ratios to the products, peak memory."""
    results, peaks, before = [], {}, 0
    for B in sizes:
        print(f"{suite}, B = {B} ...", file=sys.stderr, flush=True)
        names = [name for name in SUITES[suite] if fits(peaks, name, B, before, limit)]
        contenders = {name: SUITES[suite][name] for name in names}
        times = kernel.interleaved(contenders, B, d, kernel.rounds_for(B, seconds))
        peaks = {
            name: kernel.peak_bytes_apart(suite, name, B, d, "benchmarks.peers.speed")
            for name in names
            if name != PRODUCTS
        }
        rows = {
            name: {
                "seconds": kernel.quartiles(times[name]),
                "ratio": kernel.ratios(times, name, PRODUCTS),
                "peak": peaks.get(name),
            }
            for name in names
        }
        left_out = [name for name in SUITES[suite] if name not in names]
        results.append({"suite": suite, "batch": B, "dim": d, "rows": rows, "left_out": left_out})
        before = B
    return results


def section(result: dict[str, Any]) -> list[str]:
    """A table."""
    B = result["batch"]
    lines = [f"## {result['suite']}, B = {B:,}, d = {result['dim']}", "", "| | ms | of the products | peak, MiB |"]
    lines.append("|---|---:|---:|---:|")
    for name, row in result["rows"].items():
        peak = "" if row["peak"] is None else f"{row['peak'] / 2**20:.1f}"
        lines.append(
            f"| {name} | {kernel.spread(row['seconds'], 1e-3, 1)} | {kernel.spread(row['ratio'], 1, 2)} | {peak} |"
        )
    if result["left_out"]:
        lines += ["", f"Left out, for want of memory: {', '.join(result['left_out'])}."]
    return [*lines, ""]


def report(env: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The result file."""
    lines = heading("Loss and gradients: compopt and the other packages", {**env, **packages.versions()})
    lines += [
        "One call is a loss with both feature gradients, and for compopt the commit of the rows, which the others",
        "write inside forward. Median (first to third quartile) over rounds in which all contenders take turns on the",
        "same fresh features; ratios are taken within a round. Peak: what a call adds to a fresh process, gradients",
        "included.",
        "",
    ]
    for result in results:
        lines += section(result)
    return "\n".join(lines)


def draw(results: list[dict[str, Any]]) -> None:
    """Time and memory against the batch size."""
    from recipes import plots

    bimodal = [result for result in results if result["suite"] == "bimodal"]
    names = [name for name in BIMODAL if name != PRODUCTS]
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(11, 4.2, 1, 2)
        for number, name in enumerate(names):
            known = [result for result in bimodal if name in result["rows"]]
            sizes = [result["batch"] for result in known]
            rows = [result["rows"][name] for result in known]
            style = {"label": name, "color": plots.COLOURS[number % len(plots.COLOURS)], "marker": "o"}
            style["linestyle"] = "-" if name.startswith("compopt") else "--"
            axes[0][0].plot(sizes, [row["ratio"][1] for row in rows], **style)
            axes[0][1].plot(sizes, [row["peak"] / 2**20 for row in rows], **style)
        axes[0][0].set(xscale="log", xlabel="batch size", title="time, of the three bare products")
        axes[0][1].set(xscale="log", yscale="log", xlabel="batch size", title="peak memory of a call, MiB")
        axes[0][0].legend(fontsize=8)
        plots.save_figure(figure, RESULTS / "peers_speed.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes of the bimodal part")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=45.0, help="approximate time for each size")
    parser.add_argument("--memory", type=float, default=12.0, help="GiB that a contender may need")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="B = 256 and 1024, printed only")
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak_of:
        suite, name = args.peak_of
        print(kernel.peak_bytes(SUITES[suite][name], args.sizes[0], args.dim))
        return
    env = environment()
    limit = args.memory * 2**30
    sizes = {"bimodal": tuple(args.sizes or SIZES["bimodal"]), "unimodal": SIZES["unimodal"]}
    if args.quick:
        sizes, args.seconds = {"bimodal": (256, 1024), "unimodal": (256,)}, 3.0
    results = [r for suite, own in sizes.items() for r in measure(suite, own, args.dim, args.seconds, limit)]
    text = report(env, results)
    print(text)
    if not args.quick:
        (RESULTS / "peers_speed.md").write_text(text)
        content = {"environment": {**env, **packages.versions()}, "results": results}
        (RESULTS / "peers_speed.json").write_text(json.dumps(content, indent=1) + "\n")
        draw(results)


if __name__ == "__main__":
    main()
