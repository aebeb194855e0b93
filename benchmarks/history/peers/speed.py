"""A loss with both feature gradients: time and memory, ours and the other packages'.

    python -m benchmarks.history.peers.speed            # writes results/peers_speed.md, .json and .png (half an hour)
    python -m benchmarks.history.peers.speed --quick    # small, printed only

Contenders run round-robin in one process on fresh features, as in ``benchmarks/kernel.py``; those that would need more
memory than ``--memory`` (their B x B matrices counted from the sizes before) are left out and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

import compopt
from benchmarks import contenders, kernel
from benchmarks.contenders import CHUNK, PRODUCTS, SAMPLES_PER_BATCH, TAU, Contender, estimator, loss_and_gradients
from benchmarks.history.peers import losses, packages
from benchmarks.saved import HISTORY, ROOT, save
from recipes import plots
from recipes.report import environment, heading, quartiles, spread, table

CHUNKED, CACHED = f"compopt SogCLR, chunk_size={CHUNK}", "sentence-transformers Cached...Loss"
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
    "open_clip ClipLoss": Contender("cross-entropy both ways", lambda B, d: loss_and_gradients(losses.clip(TAU))),
    "open_clip SigLipLoss": Contender("a logistic loss per pair", lambda B, d: loss_and_gradients(losses.siglip(TAU))),
    CACHED: Contender(
        f"cross-entropy both ways, {CHUNK} rows at a time", lambda B, d: loss_and_gradients(losses.cached_ranking(TAU))
    ),
    "LibAUC GCLoss_v2": Contender(
        "SogCLR", lambda B, d: loss_and_gradients(losses.gcl_bimodal(SAMPLES_PER_BATCH * B, TAU))
    ),
    "LibAUC GCLoss_v2, individual": Contender(
        "iSogCLR", lambda B, d: loss_and_gradients(losses.gcl_bimodal(SAMPLES_PER_BATCH * B, TAU, individual=True))
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
    "LibAUC GCLoss_v1": Contender(
        "SogCLR", lambda B, d: loss_and_gradients(losses.gcl_unimodal(SAMPLES_PER_BATCH * B, TAU))
    ),
    "metric-learning SupConLoss": Contender(
        "NT-Xent as a matrix", lambda B, d: loss_and_gradients(losses.sup_con(TAU))
    ),
    "metric-learning NTXentLoss": Contender(
        "NT-Xent, every positive with every negative", lambda B, d: loss_and_gradients(losses.nt_xent(TAU))
    ),
    "metric-learning CrossBatchMemory": Contender(
        "NT-Xent of z1 against the 4 B newest features; no gradient for z2",
        lambda B, d: loss_and_gradients(losses.cross_batch_memory(TAU, d, 4 * B)),
    ),
}
SUITES = {"bimodal": BIMODAL, "unimodal": UNIMODAL}
SIZES = {"bimodal": (256, 1024, 4096, 8192, 16384), "unimodal": (256, 1024, 4096)}
KEPT, KEEP_PAGES = (1024, 4096), {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
LARGE = 32768  # for those that never hold a B x B matrix
CUBIC = ("metric-learning NTXentLoss", "metric-learning CrossBatchMemory")  # in B: pairs of positives and negatives
AGAINST = {
    "compopt InfoNCE": ("open_clip ClipLoss", CACHED, "metric-learning SupConLoss"),
    "compopt SogCLR": ("open_clip ClipLoss", "LibAUC GCLoss_v2", "LibAUC GCLoss_v1"),
    CHUNKED: ("open_clip ClipLoss", "LibAUC GCLoss_v2", CACHED),
    "compopt iSogCLR": ("LibAUC GCLoss_v2, individual",),
}


def fits(peak: tuple[int, int] | None, name: str, B: int, limit: float) -> bool:
    """Whether a contender that took so many bytes at another batch size can be expected to fit now."""
    if peak is None:
        return True
    before, taken = peak
    return taken * (B / before) ** (3 if name in CUBIC else 2) < limit


def rounds(B: int, seconds: float) -> int:
    """The number of rounds: that of the kernel's benchmark, but at most 60, and 3 where one takes a minute."""
    return 3 if B > 8192 else min(60, kernel.rounds_for(B, seconds))


def measure(suite: str, sizes: tuple[int, ...], d: int, seconds: float, limit: float) -> list[dict[str, Any]]:
    """Measure every size, without the contenders that would not fit."""
    results: list[dict[str, Any]] = []
    peaks: dict[str, tuple[int, int]] = {}  # the largest batch that each has had, and its bytes
    for B in sizes:
        names = [name for name in SUITES[suite] if fits(peaks.get(name), name, B, limit)]
        results.append(measure_one(suite, names, B, d, rounds(B, seconds)))
        peaks |= {name: (B, row["peak"]) for name, row in results[-1]["rows"].items() if row["peak"]}
    return results


def measure_one(suite: str, names: list[str], B: int, d: int, rounds: int, peaks: bool = True) -> dict[str, Any]:
    """Measure one size: quartiles of the seconds, ratios within a round, peak memory."""
    print(f"{suite}, B = {B} ...", file=sys.stderr, flush=True)
    times = kernel.interleaved({name: SUITES[suite][name] for name in names}, B, d, rounds)
    rows = {}
    for name in names:
        others = [PRODUCTS, *(other for other in AGAINST.get(name, ()) if other in names)]
        apart = (suite, name, B, d, "benchmarks.history.peers.speed")
        rows[name] = {
            "seconds": quartiles(times[name]),
            "ratio": {other: kernel.ratios(times, name, other) for other in others},
            "peak": None if name == PRODUCTS or not peaks else kernel.peak_bytes_apart(*apart),
        }
    left_out = [name for name in SUITES[suite] if name not in names]
    return {"suite": suite, "batch": B, "dim": d, "rounds": rounds, "rows": rows, "left_out": left_out}


def with_kept_pages(sizes: Sequence[int], d: int, seconds: float) -> list[dict[str, Any]]:
    """Measure times in a process whose allocator keeps its pages, as a caching allocator of a GPU does."""
    command = [sys.executable, "-m", "benchmarks.history.peers.speed", "--times-only", "--sizes", *map(str, sizes)]
    command += ["--dim", str(d), "--seconds", str(seconds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | KEEP_PAGES, cwd=ROOT)
    return [result | {"kept": True} for result in json.loads(done.stdout.splitlines()[-1])]


def section(result: dict[str, Any]) -> list[str]:
    """The table of one size."""
    B = result["batch"]
    title = f"## {result['suite']}, B = {B:,}, d = {result['dim']} ({result['rounds']} rounds)"
    title += ", pages kept" * result.get("kept", False)
    body = []
    for name, row in result["rows"].items():
        peak = "" if row["peak"] is None else f"{row['peak'] / 2**20:.1f}"
        body.append([name, spread(row["seconds"], 1, 1e-3), spread(row["ratio"][PRODUCTS]), peak])
    lines = [title, "", table(["", "ms", "of the products", "peak, MiB"], body)]
    if result["left_out"]:
        lines += ["", f"Left out, for want of memory or, at B = {LARGE:,}, of time: {', '.join(result['left_out'])}."]
    return [*lines, ""]


def ratios(results: list[dict[str, Any]]) -> list[str]:
    """Time of ours over time of theirs, and memory of theirs over memory of ours."""
    body = []
    for result in results:
        for name, row in result["rows"].items():
            for other, times in row["ratio"].items():
                if other != PRODUCTS:
                    memory = f"{result['rows'][other]['peak'] / row['peak']:.1f}" if row["peak"] else ""
                    size = f"{result['batch']:,}" + ", pages kept" * result.get("kept", False)
                    body.append([name, other, size, spread(times), memory])
    head = ["ours", "against", "B", "time, ours over theirs", "memory, theirs over ours"]
    return ["## Ours over theirs", "", table(head, body), ""]


def report(env: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The result page."""
    lines = heading("Loss and gradients: compopt and the other packages", {**env, **packages.versions()})
    lines += [
        "One call is a loss with both feature gradients, and for compopt the commit of the rows, which the others",
        "write inside forward. Median (first to third quartile) over rounds in which all contenders take turns on the",
        "same fresh features, in another order each time; ratios are taken within a round. Peak: what a call adds to a",
        "fresh process, gradients included. `chunk_size` and sentence-transformers' mini-batches: rows of the B x B",
        "matrix held at a time.",
        "",
        "On a CPU, fresh pages of large temporaries cost time that a GPU's caching allocator does not take; sections",
        "*pages kept* repeat two sizes with an allocator that never returns memory. Nothing here was run on a GPU.",
        "",
        table(
            ["", "what one call does"], [[f"{s}: {n}", c.what] for s, all_ in SUITES.items() for n, c in all_.items()]
        ),
        "",
    ]
    lines += [*ratios(results), *(line for result in results for line in section(result))]
    return "\n".join(lines)


def draw(results: list[dict[str, Any]]) -> None:
    """Time and memory against the batch size."""
    bimodal = [r for r in results if r["suite"] == "bimodal" and not r.get("kept")]
    names = [name for name in BIMODAL if name != PRODUCTS]
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(11, 4.2, 1, 2)
        for number, name in enumerate(names):
            known = [result for result in bimodal if name in result["rows"]]
            sizes = [result["batch"] for result in known]
            rows = [result["rows"][name] for result in known]
            lap, colour = divmod(number, len(plots.COLOURS))
            style = {"label": name, "color": plots.COLOURS[colour], "marker": "os"[lap]}
            style["linestyle"] = "-" if name.startswith("compopt") else "--"
            axes[0][0].plot(sizes, [row["ratio"][PRODUCTS][1] for row in rows], **style)
            axes[0][1].plot(sizes, [row["peak"] / 2**20 for row in rows], **style)
        axes[0][0].set(xscale="log", xlabel="batch size", title="time, of the three bare products")
        axes[0][1].set(xscale="log", yscale="log", xlabel="batch size", title="peak memory of a call, MiB")
        axes[0][0].legend(fontsize=8)
        plots.save_figure(figure, HISTORY / "peers_speed.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes of the bimodal part")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=45.0, help="approximate time for each size")
    parser.add_argument("--memory", type=float, default=12.0, help="GiB that a contender may need")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="B = 256 and 1024, printed only")
    parser.add_argument("--times-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak_of:
        suite, name = args.peak_of
        print(kernel.peak_bytes(SUITES[suite][name], args.sizes[0], args.dim))
        return
    if args.times_only:
        names = list(BIMODAL)
        counts = {B: rounds(B, args.seconds) for B in args.sizes}
        print(json.dumps([measure_one("bimodal", names, B, args.dim, counts[B], peaks=False) for B in args.sizes]))
        return
    env = environment()
    limit = args.memory * 2**30
    sizes = {"bimodal": tuple(args.sizes or SIZES["bimodal"]), "unimodal": SIZES["unimodal"]}
    if args.quick:
        sizes, args.seconds = {"bimodal": (256, 1024), "unimodal": (256,)}, 3.0
    results = [r for suite, own in sizes.items() for r in measure(suite, own, args.dim, args.seconds, limit)]
    if not args.quick:
        results += with_kept_pages(KEPT, args.dim, args.seconds)
        results.append(
            measure_one("bimodal", [PRODUCTS, CHUNKED, CACHED], LARGE, args.dim, rounds(LARGE, args.seconds))
        )
    text = report(env, results)
    print(text)
    if not args.quick:
        save("peers_speed", text, {**env, **packages.versions()}, results, HISTORY)
        draw(results)


if __name__ == "__main__":
    main()
