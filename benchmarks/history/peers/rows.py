"""Tables of n rows: what they cost in memory and per step, ours and LibAUC's.

    python -m benchmarks.history.peers.rows    # writes peers_rows.md, .json and .png (a few minutes; 12 GiB of memory)

Memory: each contender and size in a process of its own; construct, train on random samples, count what is resident.
Time: all contenders of a size in one process, in turns on the same features. LibAUC keeps one tensor per quantity and
writes all of it at construction, ours one row per sample, whose pages come when they are touched: so the first steps,
which touch them, are timed apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import compopt
from benchmarks.contenders import TAU
from benchmarks.history.peers import losses, packages
from benchmarks.machine import status, timed
from benchmarks.saved import HISTORY, ROOT, save
from recipes import plots
from recipes.report import environment, heading, quartiles, spread, table

SIZES = (10**5, 10**6, 10**7, 10**8)
FIRST, ALL = 5, "all"
Step = Callable[[Tensor, Tensor, Tensor], None]


def _ours(make: Callable[[int], compopt.ContrastiveEstimator], n: int) -> Step:
    est = make(n)

    def step(z1: Tensor, z2: Tensor, index: Tensor) -> None:
        est(z1, z2, index).backward()
        est.step()

    return step


def _theirs(individual: bool, n: int) -> Step:
    loss = losses.gcl_bimodal(n, TAU, individual=individual)
    return lambda z1, z2, index: loss(z1, z2, index).backward()


def sogclr(n: int) -> compopt.ContrastiveEstimator:
    return compopt.SogCLREstimator(n, tau=TAU)


def isogclr(n: int) -> compopt.ContrastiveEstimator:
    return compopt.ISogCLREstimator(n, tau_init=TAU, rho=1.0)


CONTENDERS: dict[str, Callable[[int], Step]] = {
    "compopt SogCLR": lambda n: _ours(sogclr, n),
    "compopt iSogCLR": lambda n: _ours(isogclr, n),
    "LibAUC GCLoss_v2": lambda n: _theirs(False, n),
    "LibAUC GCLoss_v2, individual": lambda n: _theirs(True, n),
}


def row_bytes() -> dict[str, int]:
    """Bytes of a sample in each contender, read off small tables."""
    widths = {}
    for name, make in (("compopt SogCLR", sogclr), ("compopt iSogCLR", isogclr)):
        widths[name] = sum(
            column[0].numel() * column.element_size() for column in make(2).state_dict()["rows"].values()
        )
    for name, individual in (("LibAUC GCLoss_v2", False), ("LibAUC GCLoss_v2, individual", True)):
        loss = losses.gcl_bimodal_object(2, TAU, individual=individual)
        tables = [value for value in vars(loss).values() if isinstance(value, Tensor) and value.dim() == 2]
        widths[name] = sum(value[0].numel() * value.element_size() for value in tables)
    return widths


class Batches:
    """Random features and samples, the same for all contenders of a round."""

    def __init__(self, n: int, batch: int, dim: int) -> None:
        self.n, self.batch, self._generator = n, batch, torch.Generator().manual_seed(0)
        self._features = torch.randn(2, batch, dim, generator=self._generator)

    def index(self) -> Tensor:
        return torch.randint(0, self.n, (self.batch,), generator=self._generator)

    def seconds(self, step: Step, index: Tensor) -> float:
        """Time one step of one contender."""
        z1, z2 = (z.clone().requires_grad_() for z in self._features)
        return timed(lambda: step(z1, z2, index))


def memory(name: str, batches: Batches, rounds: int) -> int:
    """Bytes resident after the steps, beyond those before construction."""
    losses.gcl_bimodal(2, TAU)  # importing packages is not construction
    before = status("RssAnon")
    step = CONTENDERS[name](batches.n)
    for _ in range(rounds):
        batches.seconds(step, batches.index())
    return status("RssAnon") - before


def times(batches: Batches, rounds: int) -> dict[str, dict[str, Any]]:
    """Time every contender's construction, first steps and later ones, in turns."""
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    losses.gcl_bimodal(2, TAU)
    for name, build in CONTENDERS.items():
        construction = timed(lambda name=name, build=build: steps.update({name: build(batches.n)}))
        found[name] = {"construction": construction, "first": 0.0, "ms": []}
    for number in range(FIRST + rounds):
        index = batches.index()
        for name, step in random.Random(number).sample(list(steps.items()), len(steps)):
            taken = batches.seconds(step, index)
            if number < FIRST:
                found[name]["first"] += taken
            else:
                found[name]["ms"].append(1e3 * taken)
    return found


def lines(results: list[dict[str, Any]]) -> str:
    """A row per contender and size."""
    body = [
        [
            r["name"],
            f"{r['n']:,}",
            spread(quartiles(r["ms"])),
            f"{1e3 * r['first']:.0f}",
            f"{1e3 * r['construction']:.0f}",
            f"{r['resident'] / 2**20:.0f}",
        ]
        for r in results
    ]
    head = ["", "n", "ms per step", f"first {FIRST} steps, ms", "construction, ms", "resident after the steps, MiB"]
    return table(head, body)


def apart(args: argparse.Namespace, name: str, n: int) -> Any:
    """Measure in a process of its own: a contender's memory, or the times of all."""
    command = [sys.executable, "-m", "benchmarks.history.peers.rows", "--one", name, str(n)]
    command += ["--batch-size", str(args.batch_size), "--dim", str(args.dim), "--rounds", str(args.rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def draw(results: list[dict[str, Any]]) -> None:
    """Memory and time of a step against the number of samples."""
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
        plots.save_figure(figure, HISTORY / "peers_rows.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, batches = args.one[0], Batches(int(args.one[1]), args.batch_size, args.dim)
        print(json.dumps(times(batches, args.rounds) if name == ALL else memory(name, batches, args.rounds)))
        return
    env = {**environment(), **packages.versions()}
    results = []
    for n in args.sizes:
        taken = apart(args, ALL, n)
        results += [{"name": name, "n": n, "resident": apart(args, name, n), **taken[name]} for name in CONTENDERS]
    note = f"B = {args.batch_size}, d = {args.dim}, loss, gradients and rows; {args.rounds} steps on random samples."
    widths = row_bytes()
    tables = "; ".join(f"{name}: {width} bytes" for name, width in widths.items())
    text = "\n".join([*heading("Tables of rows", env), note, f"Per sample: {tables}.", "", lines(results)])
    print(text)
    save("peers_rows", text, env, {"row_bytes": widths, "steps": results}, HISTORY)
    draw(results)


if __name__ == "__main__":
    main()
