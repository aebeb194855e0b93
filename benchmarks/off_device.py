"""State that is not rows: its bytes, what a step reads and writes of it, and what copies to the host would add.

python -m benchmarks.off_device            # writes benchmarks/results/off_device.md and off_device.json
python -m benchmarks.off_device --quick    # a small network and queue, printed and not written
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from benchmarks.saved import save
from recipes.report import environment, heading, table

B, D, M = 64, 512, 4096
LINK, MEMORY = 25e9, 2e12  # bytes per second
ABOUT = f"""Float32, bimodal, B = {B}, d = {{dim}}, m = {{length}}. *State*: bytes of all tensors that are not rows (W,
queue and AdaGrad's sums of two networks; queue and keys of the memory). *Traffic*: bytes of tensors as large as a
network, or the queue, that the operations of one step (forward, backward, commit) read and write, counted where torch
dispatches them; views count nothing. *Copies*: the state to the device before a step and back after it, at
{LINK / 1e9:.0f} GB/s; the memory sends back only the {B} new features. *Memory*: what the traffic takes at
{MEMORY / 1e12:.0f} TB/s, the rate of a device's own memory. Both rates are assumptions. *Step here*: the least CPU
time of {{rounds}} steps, which other programs of the machine disturb less than the clock's."""


class Traffic(TorchDispatchMode):
    """Bytes of large tensors that operations read and write."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.bytes = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if not func.is_view:
            for value in torch.utils._pytree.tree_leaves((args, kwargs, given)):
                if isinstance(value, Tensor) and value.numel() >= self.least:
                    self.bytes += value.numel() * value.element_size()
        return given


def build(dim: int, length: int) -> dict[str, compopt.ContrastiveEstimator]:
    return {
        "NeuralNormalizer": compopt.NeuCLIPEstimator(dim, prototypes=length),
        "MemoryNormalizer": compopt.MemoryEstimator(dim, length=length),
    }


def stepper(est: compopt.ContrastiveEstimator, dim: int) -> Callable[[], None]:
    index, z = torch.arange(B), torch.randn(2, B, dim)

    def step() -> None:
        a, b = (x.clone().requires_grad_() for x in z)
        est(a, b, index + B * est.t).backward()
        est.step()

    return step


def measure(name: str, est: compopt.ContrastiveEstimator, dim: int, length: int, rounds: int) -> dict[str, Any]:
    """Bytes and seconds of one estimator, once its queue is full."""
    step = stepper(est, dim)
    for _ in range(-(-length // B) + 2):
        step()
    times = []
    for _ in range(rounds):
        before = time.process_time()
        step()
        times.append(1e3 * (time.process_time() - before))
    with Traffic(length * dim) as traffic:
        step()
    state = sum(value.numel() * value.element_size() for value in est.normalizer.state.values())
    back = 2 * B * dim * 4 if name == "MemoryNormalizer" else state
    return {"name": name, "state": state, "traffic": traffic.bytes, "copied": state + back, "times": times}


def report(env: dict, results: list[dict[str, Any]], dim: int, length: int) -> str:
    head = ["", "state, MB", "traffic, MB", "copies, ms", "memory, ms", "copies / memory", "step here, ms"]
    lines = []
    for r in results:
        copies, memory = 1e3 * r["copied"] / LINK, 1e3 * r["traffic"] / MEMORY
        sizes = [f"{r['state'] / 1e6:.1f}", f"{r['traffic'] / 1e6:,.0f}"]
        lines.append(
            [r["name"], *sizes, f"{copies:.2f}", f"{memory:.2f}", f"{copies / memory:.1f}", f"{min(r['times']):.0f}"]
        )
    about = ABOUT.format(dim=dim, length=length, rounds=len(results[0]["times"]))
    return "\n".join([*heading("State that is not rows, off the device", env), about, "", table(head, lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small network and queue, printed only")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    env = environment()
    dim, length = (64, 256) if args.quick else (D, M)
    results = [measure(name, est, dim, length, args.rounds) for name, est in build(dim, length).items()]
    text = report(env, results, dim, length)
    print(text)
    if not args.quick:
        save("off_device", text, env, results)


if __name__ == "__main__":
    main()
