"""What a step costs at 1e9 samples on 64 GPUs: an estimate on paper, from what was counted and measured here.

    python -m benchmarks.history.scaling    # writes results/scaling.md, .json and .png (a minute)

Bytes sent and floating-point operations follow formulas in K (ranks), B (batch of all ranks), b = B/K, d and the bytes
of a row. They are counted here on 1, 2, 4 and 8 ranks, and must agree with the formulas to the byte, or this script
fails. Memory follows from the code and is not counted, but for the rows. What a GPU and a network do is assumed, and
said to be: change it with the options. Rows are sharded and in host memory, the matrix is not chunked.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import compopt
from benchmarks.history.traffic import Traffic, on_ranks
from benchmarks.saved import HISTORY, save, stored
from compopt.distributed.handshake import HEADER, KEYS
from recipes import plots
from recipes.report import environment, heading, table

RANKS, BATCH, DIM, SAMPLES = (1, 2, 4, 8), 256, 64, 10_000  # what is counted
GIB, MIB = 2**30, 2**20
ESTIMATORS = {"SogCLR": compopt.SogCLREstimator, "iSogCLR": partial(compopt.ISogCLREstimator, rho=1.0)}


# -- formulas ------------------------------------------------------------------------------------------------------


def sent(K: int, B: int, d: int, row: int, moments: bool, shard: bool) -> dict[str, float]:
    """Bytes that a rank sends in a ring, by message; the first over the host's network, the others over the GPUs'."""
    if K == 1:
        return {}
    share = (K - 1) / K
    rows = {"rows": 2 * share * B * row} if shard else {}  # an all-reduce of each owner's
    statistics = 4 * (5 if moments else 3)  # positive, and two or four sums per sample
    carried = {"features": share * B * (8 * d + (0 if shard else row))}
    return {
        "control": (K - 1) * 8 * (HEADER + len(KEYS) * B // K),
        **rows,
        **carried,
        "statistics": share * B * statistics,
    }


def operations(K: int, B: int, d: int) -> float:
    """Operations of the matrix products: a panel per direction, then its gradient; one process shares the matrix."""
    return 2 * (3 if K == 1 else 4 / K) * B * B * d


def memory(K: int, B: int, d: int, n: float, row: int) -> dict[str, float]:
    """Bytes of a rank, with one temperature for all."""
    return {
        "rows": n * row / K,
        "gathered features": 16 * B * d,
        "strips of the matrix": 12 * (B / K) * B,
    }


# -- counted -------------------------------------------------------------------------------------------------------


def count(rank: int, ranks: int, name: str, shard: bool) -> dict[str, Any]:
    """One rank's third step: what it sent and computed, and the bytes of its rows."""
    est = ESTIMATORS[name](SAMPLES, shard=shard)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        features = torch.randn(2, BATCH, DIM, generator=generator)
        own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        z1, z2 = (z[own].clone().requires_grad_() for z in features)
        index = torch.randperm(SAMPLES, generator=generator)[:BATCH][own]
        with Traffic(ranks) as traffic, FlopCounterMode(display=False, custom_mapping=IN_PLACE) as flops:
            est(z1, z2, index).backward()
            est.step()
    return {"sent": traffic.sent, "operations": flops.get_total_flops(), "row": est._engine.table.layout.row_bytes}


def _in_place(_: Any, a: torch.Size, b: torch.Size, **_more: Any) -> int:
    """Count a product that torch does not count: it is added to something in place."""
    return 2 * a[0] * a[1] * b[1]


IN_PLACE = {torch.ops.aten.addmm_: _in_place}


def counted() -> list[dict[str, Any]]:
    """Check every number of ranks against the formulas."""
    found = []
    for name in ESTIMATORS:
        for K in RANKS:
            for shard in (False, True)[: 1 if K == 1 else 2]:
                one = on_ranks(K, count, name, shard)[0]
                wanted = sent(K, BATCH, DIM, one["row"], name == "iSogCLR", shard)
                assert [round(x) for x in one["sent"]] == [round(x) for x in wanted.values()], (
                    name,
                    K,
                    shard,
                    one,
                    wanted,
                )
                assert one["operations"] == operations(K, BATCH, DIM), (name, K, one["operations"])
                found.append({"name": name, "K": K, "shard": shard, "messages": wanted, **one})
    return found


# -- assumed -------------------------------------------------------------------------------------------------------


def times(K: int, B: int, args: argparse.Namespace, row: int, overhead: float, gather: float) -> dict[str, float]:
    """Milliseconds of a step, term by term; nothing is overlapped."""
    messages = sent(K, B, args.dim, row, False, True)
    device = sum(size for name, size in messages.items() if name != "control")
    control = (args.hop + (K - 1) * args.message) * 1e3 * (K > 1)
    control += messages.get("control", 0) / args.host_bandwidth * 1e3
    return {
        "pair weights": overhead * operations(K, B, args.dim) / args.rate * 1e3,
        "features, statistics, rows over the network": device / args.bandwidth * 1e3 + 3 * args.latency * 1e3 * (K > 1),
        "control message between hosts": control,
        "reading and committing rows": gather,
    }


def measured() -> dict[str, float]:
    """Read from other results: the kernel's time over the bare products, a read and a commit in ms, LibAUC's rows."""
    speed = next(r for r in stored("kernel")["results"] if r["suite"] == "bimodal" and r["batch"] == 4096)["rows"]
    alone = speed["SogCLR + step"]["ratio to products"][1]
    tables = {(t["offload"], t["n"]): t["seconds"] for t in stored("rows")["results"]["tables"]}
    rows = tables["cpu", 2 * 10**8]
    return {
        # one process does 3 products and one sweep of exponentials, a rank of several 4 and two
        "overhead": 1 + 1.5 * (alone - 1),
        "gather": (rows["gather, warm"][1] + rows["scatter, warm"][1]) * 1e3,
        "theirs": stored("peers_rows", HISTORY)["results"]["row_bytes"]["LibAUC GCLoss_v2"],
    }


# -- the report ----------------------------------------------------------------------------------------------------


def report(env: dict, found: list[dict], args: argparse.Namespace, known: dict[str, float]) -> tuple[list[str], dict]:
    """Write the page, and return it with its figures."""
    K, B, d, n = args.ranks, args.batch_size, args.dim, args.samples
    row = {f["name"]: f["row"] for f in found}
    held = memory(K, B, d, n, row["SogCLR"])
    messages = sent(K, B, d, row["SogCLR"], False, True)
    spent = times(K, B, args, row["SogCLR"], known["overhead"], known["gather"])
    encoder = 3 * 2 * args.encoder_macs * (B / K) / args.encoder_rate * 1e3
    head = [""] + [f"{f['name']}{', shard' * f['shard']}, K = {f['K']}" for f in found if f["K"] > 1]
    body = [
        [name, *(f"{f['messages'].get(name, 0):,.0f}" for f in found if f["K"] > 1)]
        for name in ("control", "rows", "features", "statistics")
    ]
    body.append(["operations, 10^6", *(f"{f['operations'] / 1e6:.2f}" for f in found if f["K"] > 1)])
    text = [
        *heading("1e9 samples on 64 GPUs, on paper", env),
        "## Counted",
        "",
        f"Bytes that a rank sends in one step, and its floating-point operations, at B = {BATCH}, d = {DIM}:",
        "each equals its formula (`benchmarks/history/scaling.py`).",
        "",
        table(head, body),
        "",
        f"## Extrapolated: n = {n:.0e}, K = {K}, B = {B:,} ({B // K} each), d = {d}",
        "",
        "Bytes and operations are the formulas above at these sizes. Seconds rest on what is assumed below.",
        "",
        table(["memory of a rank", "", "where it comes from"], _memory(held, n, row, known, K)),
        "",
        table(["sent by a rank in a step", "MiB", "formula"], _traffic(messages)),
        "",
        table(["time of a step", "ms", "where it comes from"], _time(spent, args, encoder)),
        "",
        *_assumed(args),
    ]
    total = sum(spent.values())
    figures = {"memory": held, "sent": messages, "ms": spent, "encoder_ms": encoder, "share": total / (total + encoder)}
    return text, {**figures, "row_bytes": row, "theirs": n * known["theirs"]}


def _memory(held: dict[str, float], n: float, row: dict[str, int], known: dict[str, float], K: int) -> list[list[str]]:
    whole, theirs = n * row["SogCLR"], n * known["theirs"]
    notes = {
        "rows": f"n x {row['SogCLR']} bytes / K, in host memory; measured to be so on four ranks (`memory.md`)",
        "gathered features": "16 B d, float32: twice while they are unpacked",
        "strips of the matrix": "12 b B: one matrix per direction and one beside them; `chunk_size` bounds it",
    }
    lines = [[name, f"{size / MIB:,.0f} MiB", notes[name]] for name, size in held.items()]
    isogclr = n * row["iSogCLR"] / K / MIB
    return [
        *lines,
        ["the same rows of iSogCLR", f"{isogclr:,.0f} MiB", f"n x {row['iSogCLR']} bytes / K"],
        ["rows, not sharded", f"{whole / GIB:,.1f} GiB", "on every rank"],
        [
            "LibAUC's tables",
            f"{theirs / GIB:,.1f} GiB",
            f"n x {known['theirs']} bytes in the memory of every rank (`peers_rows.md`)",
        ],
    ]


def _traffic(messages: dict[str, float]) -> list[list[str]]:
    formulas = {
        "control": f"8 (K - 1) ({HEADER} + {len(KEYS)} b), between hosts",
        "rows": "2 (K - 1)/K x 16 B",
        "features": "(K - 1)/K x 8 d B",
        "statistics": "(K - 1)/K x 12 B",
    }
    return [[name, f"{size / MIB:,.2f}", formulas[name]] for name, size in messages.items()]


def _time(spent: dict[str, float], args: argparse.Namespace, encoder: float) -> list[list[str]]:
    sources = {
        "pair weights": "operations counted; their rate assumed; what exponentials add measured on a CPU, one "
        "process (`kernel.md`, B = 4,096), times 1.5 for two sweeps beside four products",
        "features, statistics, rows over the network": "bytes and messages counted; bandwidth and latency assumed",
        "control message between hosts": "bytes and messages counted; one hop, since every rank tells every other",
        "reading and committing rows": "measured on a CPU: 5,120 rows of 2e8 in host memory (`rows.md`); a rank owns "
        f"{args.batch_size // args.ranks} of a batch on average",
    }
    total = sum(spent.values())
    return [
        *([name, f"{ms:.2f}", sources[name]] for name, ms in spent.items()),
        ["**all of compopt, nothing overlapped**", f"**{total:.2f}**", "sum"],
        ["encoders, forward and backward", f"{encoder:.0f}", "assumed, for comparison"],
        ["share of the step", f"{100 * total / (total + encoder):.1f} %", ""],
    ]


def _assumed(args: argparse.Namespace) -> list[str]:
    values = [
        [
            "float32 products of one GPU",
            f"{args.rate / 1e12:.0f} TFLOP/s",
            "`--rate`; 60 % of an H100's data sheet (67)",
        ],
        [
            "between GPUs, per GPU",
            f"{args.bandwidth / 1e9:.0f} GB/s",
            "`--bandwidth`; 400 Gbit/s InfiniBand per GPU, 80 % of it",
        ],
        ["latency of a collective", f"{args.latency * 1e6:.0f} us", "`--latency`; 64 GPUs on eight nodes"],
        ["hop between hosts", f"{args.hop * 1e6:.0f} us", "`--hop`; TCP"],
        ["a further message to a host", f"{args.message * 1e6:.0f} us", "`--message`; system calls, both ways"],
        ["between hosts", f"{args.host_bandwidth / 1e9:.1f} GB/s", "`--host-bandwidth`; 25 Gbit/s"],
        [
            "both encoders, per pair",
            f"{args.encoder_macs / 1e9:.1f} GMAC",
            "`--encoder-macs`; ViT-B/16 and a text transformer",
        ],
        [
            "rate of the encoders",
            f"{args.encoder_rate / 1e12:.0f} TFLOP/s",
            "`--encoder-rate`; bfloat16 at 40 % of 989",
        ],
    ]
    return ["Assumed, measured nowhere in this repository:", "", table(["", "", "option"], values)]


def draw(args: argparse.Namespace, row: int, known: dict[str, float], path: Path) -> None:
    """Draw memory and time of a rank against the number of ranks; the batch of each rank stays the same."""
    each = args.batch_size // args.ranks
    sizes = [2**power for power in range(3, 11)]
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(11, 4, 1, 2)
        held = [memory(K, each * K, args.dim, args.samples, row) for K in sizes]
        spent = [times(K, each * K, args, row, known["overhead"], known["gather"]) for K in sizes]
        for axis, series, unit in ((axes[0][0], held, GIB), (axes[0][1], spent, 1)):
            for number, name in enumerate(series[0]):
                axis.plot(
                    sizes, [one[name] / unit for one in series], "o-", label=name, color=plots.COLOURS[number + 3]
                )
        axes[0][0].axhline(
            args.samples * known["theirs"] / GIB, color=plots.WRONG, linestyle="--", label="LibAUC's tables"
        )
        axes[0][0].set(xscale="log", yscale="log", xlabel=f"ranks, {each} pairs each", title="memory of a rank, GiB")
        axes[0][1].set(
            xscale="log", yscale="log", xlabel=f"ranks, {each} pairs each", title="a step, ms (extrapolated)"
        )
        for axis in axes[0]:
            axis.legend(fontsize=8)
        plots.save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, unit in (
        ("samples", 1e9, "n"),
        ("rate", 40e12, "FLOP/s of float32 products"),
        ("bandwidth", 40e9, "bytes/s between GPUs"),
        ("latency", 150e-6, "seconds of a collective"),
        ("hop", 30e-6, "seconds of a hop between hosts"),
        ("message", 5e-6, "seconds of each further message of a host to others"),
        ("host-bandwidth", 3e9, "bytes/s between hosts"),
        ("encoder-macs", 20.5e9, "multiply-adds of both encoders per pair"),
        ("encoder-rate", 400e12, "FLOP/s of the encoders"),
    ):
        parser.add_argument(f"--{name}", type=float, default=default, help=unit)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32768)
    parser.add_argument("--dim", type=int, default=512)
    args = parser.parse_args()
    known = measured()
    env = environment()
    found = counted()
    text, figures = report(env, found, args, known)
    print("\n".join(text))
    save("scaling", "\n".join(text), env, figures, HISTORY)
    draw(args, figures["row_bytes"]["SogCLR"], known, HISTORY / "scaling.png")


if __name__ == "__main__":
    main()
