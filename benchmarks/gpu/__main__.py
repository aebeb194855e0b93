"""Run all measurements that need an accelerator, in eight minutes at most.

    python -m benchmarks.gpu                      # writes benchmarks/results/gpu.md and gpu.json
    python -m benchmarks.gpu --pretend            # a trial on the pretend accelerator; writes runs/gpu-trial/
    python -m benchmarks.gpu --device cpu --small # a trial on the CPU
    python -m benchmarks.gpu --parts trace steps  # some parts

It needs torch, NumPy and safetensors; pytest for the tests, open_clip for its ClipLoss, Triton for the fused kernel,
and memeff and inf_cl for their losses. If a package is missing or a measurement fails, the page says so and the other
measurements continue.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import fused, losses, report, rows, steps, suite, trace
from benchmarks.gpu.machine import Machine
from benchmarks.report import RESULTS, ROOT, save
from compopt import accelerator

# the seconds are those of a run of eight minutes; compilation and allocation take additional time
PARTS = {
    "errors": lambda machine, scale: losses.errors(machine),
    "tests": lambda machine, scale: suite.measure(machine, 100 * scale),
    "trace": lambda machine, scale: trace.measure(machine),
    "fused": lambda machine, scale: fused.measure(machine, 70 * scale),
    "losses": lambda machine, scale: losses.measure(machine, 70 * scale),
    "steps": lambda machine, scale: steps.measure(machine, 30 * scale),
    "rows": lambda machine, scale: rows.measure(machine, 40 * scale),
    "largest": lambda machine, scale: losses.largest(machine, 20 * scale),
}


def chosen_device(args: argparse.Namespace) -> torch.device:
    if args.pretend:
        from tests import pretend

        return pretend.install()
    if args.device:
        return torch.device(args.device)
    device = accelerator.available()
    if device is None:
        raise SystemExit("this machine has no accelerator that torch can use; --pretend or --device cpu is a trial")
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="device (default: the accelerator of this machine)")
    parser.add_argument(
        "--pretend", action="store_true", help="use the pretend accelerator of the tests, with small sizes"
    )
    parser.add_argument("--small", action="store_true", help="use small sizes, for a trial")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit after which no measurement starts")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--output", type=Path, help="folder of the result (default: benchmarks/results, for a trial runs/gpu-trial)"
    )
    args = parser.parse_args()
    device = accelerator.here(chosen_device(args))
    small = args.small or args.pretend
    trial = small or device.type == "cpu"
    folder = args.output or (ROOT / "runs" / "gpu-trial" if trial else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    machine = Machine(device, small, args.pretend, started + 60 * args.minutes - 10)
    env = machine.describe()
    results: dict[str, Any] = {}
    for name in args.parts:
        print(f"{time.monotonic() - started:5.0f} s  {name} ...", file=sys.stderr, flush=True)
        try:
            results[name] = PARTS[name](machine, 0.05 if small and name != "tests" else args.minutes / 8)
        except Exception as error:  # the other parts continue
            traceback.print_exc()
            machine.left_out.append(f"{name}: {type(error).__name__}: {error}")
        machine.forget()
        results["left_out"] = machine.left_out
        env["minutes"] = round((time.monotonic() - started) / 60, 1)
        text = report.page(env, results)
        save("gpu", text, env, results, folder)  # after each part, so that no result is lost
    print(text)


if __name__ == "__main__":
    main()
