"""Tables of n rows: what they cost in memory and per step, ours and LibAUC's.

    python -m benchmarks.peers.rows    # writes results/peers_rows.md, .json and .png (a few minutes; 4 GiB of memory)

Each contender and size in a process of its own: construct, train on random samples, count what is resident. LibAUC
keeps one tensor per quantity, ours one row per sample. Pages that were never touched are not resident.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compopt
from benchmarks.kernel import TAU
from benchmarks.machine import RESULTS, ROOT, cell, environment, heading, resident, save, table, timed
from benchmarks.peers import packages

SIZES = (10**5, 10**6, 10**7, 10**8)
Step = Callable[[Tensor, Tensor, Tensor], None]


def _ours(make: Callable[[int], compopt.ContrastiveEstimator], n: int) -> Step:
    est = make(n)

    def step(z1: Tensor, z2: Tensor, index: Tensor) -> None:
        est(z1, z2, index).backward()
        est.step()

    return step


def _theirs(scheme: str, n: int) -> Step:
    loss = _gcl(scheme, n)

    def step(z1: Tensor, z2: Tensor, index: Tensor) -> None:
        loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), index)[0].backward()

    return step


def _gcl(scheme: str, n: int) -> nn.Module:
    return packages.gcl_bimodal(n, tau=TAU, gamma=0.9, temperature_scheme=scheme)


def sogclr(n: int) -> compopt.ContrastiveEstimator:
    return compopt.SogCLREstimator(n, tau=TAU)


def isogclr(n: int) -> compopt.ContrastiveEstimator:
    return compopt.ISogCLREstimator(n, tau_init=TAU, rho=1.0)


CONTENDERS: dict[str, Callable[[int], Step]] = {
    "compopt SogCLR": lambda n: _ours(sogclr, n),
    "compopt iSogCLR": lambda n: _ours(isogclr, n),
    "LibAUC GCLoss_v2": lambda n: _theirs("global_constant", n),
    "LibAUC GCLoss_v2, individual": lambda n: _theirs("individual_learnable", n),
}


def row_bytes() -> dict[str, int]:
    """What a sample takes in each, read off small ones."""
    widths = {}
    for name, make in (("compopt SogCLR", sogclr), ("compopt iSogCLR", isogclr)):
        widths[name] = sum(
            column[0].numel() * column.element_size() for column in make(2).state_dict()["rows"].values()
        )
    for name, scheme in (
        ("LibAUC GCLoss_v2", "global_constant"),
        ("LibAUC GCLoss_v2, individual", "individual_learnable"),
    ):
        tables = [value for value in vars(_gcl(scheme, 2)).values() if isinstance(value, Tensor) and value.dim() == 2]
        widths[name] = sum(value[0].numel() * value.element_size() for value in tables)
    return widths


def measure(name: str, n: int, batch: int, dim: int, rounds: int) -> dict[str, Any]:
    """One contender at one size."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, batch, dim, generator=generator)
    if name.startswith("LibAUC"):
        packages.libauc()  # importing it is not construction
    before = resident()["RssAnon"]
    built: list[Step] = []
    construction = timed(lambda: built.append(CONTENDERS[name](n)))
    step = built[0]
    seconds = []
    for number in range(rounds + 5):
        index = torch.randint(0, n, (batch,), generator=generator)
        a, b = (z.clone().requires_grad_() for z in features)
        taken = timed(lambda a=a, b=b, index=index: step(a, b, index))
        if number >= 5:
            seconds.append(1e3 * taken)
    grown = resident()["RssAnon"] - before
    return {"name": name, "n": n, "ms": seconds, "construction": construction, "resident": grown}


def lines(results: list[dict[str, Any]]) -> list[str]:
    """A row per contender and size."""
    body = [
        [
            r["name"],
            f"{r['n']:,}",
            cell(r["ms"]),
            f"{1e3 * r['construction']:.0f}",
            f"{r['resident'] / 2**20:.0f}",
        ]
        for r in results
    ]
    return table(["", "n", "ms per step", "construction, ms", "resident after the steps, MiB"], body)


def draw(results: list[dict[str, Any]]) -> None:
    """Memory and time of a step against the number of samples."""
    from recipes import plots

    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(11, 4, 1, 2)
        for number, name in enumerate(CONTENDERS):
            own = [r for r in results if r["name"] == name]
            style = {"color": plots.COLOURS[number + 3], "marker": "o", "label": name}
            style["linestyle"] = "-" if name.startswith("compopt") else "--"
            axes[0][0].plot([r["n"] for r in own], [r["resident"] / 2**20 for r in own], **style)
            axes[0][1].plot([r["n"] for r in own], [statistics.median(r["ms"]) for r in own], **style)
        axes[0][0].set(xscale="log", yscale="log", xlabel="samples", title="resident after the steps, MiB")
        axes[0][1].set(xscale="log", xlabel="samples", title="loss, gradients and rows, ms")
        axes[0][0].legend(fontsize=8)
        plots.save_figure(figure, RESULTS / "peers_rows.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.batch_size, args.dim, args.rounds)))
        return
    env = {**environment(), **packages.versions()}
    results = []
    for n in args.sizes:
        for name in CONTENDERS:
            command = [sys.executable, "-m", "benchmarks.peers.rows", "--one", name, str(n)]
            command += ["--batch-size", str(args.batch_size), "--dim", str(args.dim), "--rounds", str(args.rounds)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    note = f"B = {args.batch_size}, d = {args.dim}, loss, gradients and rows; {args.rounds} steps on random samples."
    widths = row_bytes()
    tables = "; ".join(f"{name}: {width} bytes" for name, width in widths.items())
    text = "\n".join([*heading("Tables of rows", env), note, f"Per sample: {tables}.", "", *lines(results)])
    print(text)
    save("peers_rows", text, env, {"row_bytes": widths, "steps": results})
    draw(results)


if __name__ == "__main__":
    main()
