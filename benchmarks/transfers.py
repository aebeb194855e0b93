"""Waits and transfers of a training step, by estimator and placement, counted on the pretend accelerator.

    python -m benchmarks.transfers            # writes benchmarks/results/transfers.md and transfers.json
    python -m benchmarks.transfers --quick    # one estimator, printed and not written

The pretend accelerator (tests/pretend) computes on the CPU and has the manners of a device: it lists what makes the
host wait, every copy between host and device, and the line of the library that caused either. Times mean nothing there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import compopt
from benchmarks.report import environment, heading, save, table
from tests import pretend
from tests.pretend import LEDGER, NAMED

N, B, D = 10_000, 64, 128
WARM, STEPS = 3, 6
KIB = 1024

Build = Callable[..., compopt.ContrastiveEstimator]
ESTIMATORS: dict[str, Build] = {
    "InfoNCE": lambda **o: compopt.InfoNCEEstimator(0.07, **o),
    "CLIP (learned tau)": lambda **o: compopt.InfoNCEEstimator(0.07, learn_tau=True, multiply_tau=False, **o),
    "DCL": lambda **o: compopt.DCLEstimator(0.07, **o),
    "SogCLR": lambda **o: compopt.SogCLREstimator(N, **o),
    "iSogCLR": lambda **o: compopt.ISogCLREstimator(N, rho=1.0, **o),
    "FastCLIP v0": lambda **o: compopt.FastCLIPEstimator(N, "v0", **o),
    "FastCLIP v1": lambda **o: compopt.FastCLIPEstimator(N, "v1", **o),
    "FastCLIP v2": lambda **o: compopt.FastCLIPEstimator(N, "v2", rho=1.0, **o),
    "FastCLIP v3": lambda **o: compopt.FastCLIPEstimator(N, "v3", rho=1.0, **o),
    "NeuCLIP": lambda **o: compopt.NeuCLIPEstimator(D, prototypes=1024, **o),
    "Residual": lambda **o: compopt.ResidualEstimator(D, N, prototypes=1024, **o),
    "Memory": lambda **o: compopt.MemoryEstimator(D, **o),
    "EMC2": lambda **o: compopt.EMC2Estimator(N, tau=0.2, **o),
}
WITHOUT_ROWS = {"InfoNCE", "CLIP (learned tau)", "DCL", "NeuCLIP", "Memory"}


@dataclass(frozen=True)
class Placement:
    """Where rows live, and whether they are read ahead."""

    name: str
    options: dict[str, Any]
    prefetch: bool = False


PLACEMENTS = [
    Placement("device", {}),
    Placement("host", {"offload": "cpu"}),
    Placement("host, prefetch", {"offload": "cpu"}, True),
    Placement("disk, prefetch", {"offload": "disk"}, True),
]


def batches(device: torch.device, count: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        z1, z2 = (z.to(device).requires_grad_() for z in torch.randn(2, B, D, generator=generator))
        made.append((z1, z2, torch.randperm(N, generator=generator)[:B]))
    return made


def train(est: compopt.ContrastiveEstimator, given: Any) -> None:
    """Steps, each part under its name."""
    for z1, z2, index in given:
        with LEDGER.during("forward"):
            loss = est(z1, z2, index)
        with LEDGER.during("backward"):
            loss.backward()
        with LEDGER.during("step"):
            est.step()
        LEDGER.phase = "prefetch"  # what runs between the steps


def measure(device: torch.device, name: str, mode: str, placement: Placement, folder: str) -> dict[str, Any]:
    """Counts per step of one estimator with its rows in one place."""
    options = dict(placement.options)
    if options.get("offload") == "disk":
        options["offload_dir"] = folder
    est = ESTIMATORS[name](mode=mode, **options)
    train(est, batches(device, WARM, 1))  # allocations, the table's move to the device
    given = batches(device, STEPS, 2)
    LEDGER.clear()
    train(est, est.prefetch(given) if placement.prefetch else given)
    counted = counts()
    if name not in WITHOUT_ROWS:
        est.read(torch.arange(4))  # commits are in the store before its folder goes
        est._engine.table.rows.close()
    return {"estimator": name, "mode": mode, "placement": placement.name, **counted}


def counts() -> dict[str, Any]:
    """Per step: waits of the training thread, copies and their bytes each way, by line; operations; races."""
    copies: Counter[str] = Counter()
    for (one, times), size in zip(LEDGER.transfers.items(), LEDGER.transferred.values(), strict=True):
        file = one.line.split(":")[0]
        copies[f"{one.way}|copies"] += times
        copies[f"{one.way}|bytes"] += size
        copies[f"{file}|{one.phase}|{one.way}"] += times
        copies["not pinned"] += 0 if one.pinned else times
    return {
        "waits": {f"{w.what} in {w.phase}, {w.line}": n / STEPS for w, n in LEDGER.waits.items()},
        "waits of the training thread": len(LEDGER.waits_of_training()) / STEPS,
        "copies": {key: value / STEPS for key, value in copies.items()},
        "operations": sum(LEDGER.operations.values()) / STEPS,
        "races": list(LEDGER.races),
    }


def rows_of(results: list[dict[str, Any]]) -> list[list[str]]:
    body = []
    for r in results:
        copies = r["copies"]
        there, back = (
            f"{copies.get(f'{way}|copies', 0):.1f}, {copies.get(f'{way}|bytes', 0) / KIB:.2f}"
            for way in ("to device", "to host")
        )
        body.append(
            [
                r["estimator"], r["mode"], r["placement"], f"{r['waits of the training thread']:g}", there, back,
                f"{copies.get('not pinned', 0):g}", f"{r['operations']:.0f}",
            ]
        )  # fmt: skip
    return body


def lines_of(results: list[dict[str, Any]]) -> list[list[str]]:
    """Which file copies what, over all results."""
    found: dict[tuple[str, str], set[str]] = {}
    for r in results:
        for key in r["copies"]:
            if key.count("|") == 2:
                file, phase, way = key.split("|")
                found.setdefault((file, way), set()).add(phase)
    body = []
    for (file, way), phases in sorted(found.items()):
        body.append([f"`{file}`", way, ", ".join(sorted(phases)), NAMED.get(file, "not foreseen")])
    return body


def report(env: dict[str, Any], results: list[dict[str, Any]]) -> str:
    head = [
        "estimator",
        "mode",
        "rows",
        "waits",
        "to device: copies, KiB",
        "to host: copies, KiB",
        "not pinned",
        "operations",
    ]
    races, waits = [r for r in results if r["races"]], [r for r in results if r["waits of the training thread"]]
    lines = heading("Waits and transfers of a training step", env)
    lines += [
        f"Counted on a pretend accelerator, not on a GPU: B = {B}, d = {D}, n = {N:,}, per step, mean of {STEPS} steps",
        f"after {WARM} others. The index is on the CPU, features are on the device. *Waits*: how often the training",
        "thread waits for the device in forward, backward, step or prefetch; the thread that writes rows waits for its",
        "own copies, which is not counted. *Not pinned*: copies from or to memory that is not pinned. *Operations*:",
        "what a device would launch, views and copies left out.",
        "",
        f"{len(waits)} of {len(results)} rows wait, {len(races)} have a race.",
        "",
        table(head, rows_of(results), "lllrrrrr"),
        "",
        "## What is copied",
        "",
        table(["file in compopt/", "way", "when", "what"], lines_of(results), "l"),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="SogCLR alone, printed only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = environment()
    device = pretend.install()
    results = []
    for name in ["SogCLR"] if args.quick else ESTIMATORS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        for placement in PLACEMENTS[:1] if name in WITHOUT_ROWS else PLACEMENTS:
            for mode in ("bimodal", "unimodal"):
                with tempfile.TemporaryDirectory() as folder:
                    results.append(measure(device, name, mode, placement, folder))
    text = report(env, results)
    print(text)
    if not args.quick:
        save("transfers", text, env, results)


if __name__ == "__main__":
    main()
