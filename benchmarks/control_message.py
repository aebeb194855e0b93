"""The control message of a step: told to every rank at once, or gathered in a ring.

    python -m benchmarks.control_message    # writes benchmarks/results/control_message.md (a minute)

Measured on this machine's loopback, and on paper for ranks on other hosts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.history.traffic import Traffic, on_ranks
from benchmarks.machine import in_turns
from benchmarks.saved import save
from compopt.distributed import collectives
from compopt.distributed.handshake import HEADER, KEYS
from recipes.report import environment, heading, quartiles, spread, table

RANKS, ON_PAPER, EACH, ROUNDS = (2, 4, 8), (8, 64, 512), 80, 200
HOP, MESSAGE, BANDWIDTH = 30e-6, 5e-6, 3e9  # seconds, seconds, bytes per second
WAYS: dict[str, Callable[..., Tensor]] = {"ring": collectives.all_gather, "told": collectives.tell}
ABOUT = f"""Every call of an estimator begins with one message of {HEADER} integers and up to {len(KEYS)} per sample
from every rank to every other, on the host. *Ring*: gloo's all-gather, K - 1 hops one after another. *Told*: what
compopt does,
all-to-all, one hop. Both send the same bytes, which are counted. A batch of {EACH} samples per rank."""


def length() -> int:
    """Integers of a message."""
    return HEADER + len(KEYS) * EACH


def measure(rank: int, ranks: int) -> dict[str, list[float]]:
    """Seconds of both, in turns, and the bytes that this rank sends."""
    message = torch.arange(length()) + 1000 * rank
    calls = {name: lambda way=way: way(message, dist.group.WORLD, ranks, "a benchmark") for name, way in WAYS.items()}
    sent = {}
    for name, call in calls.items():
        with Traffic(ranks) as traffic:
            heard = call()
        assert torch.equal(heard[ranks - 1], torch.arange(length()) + 1000 * (ranks - 1))
        sent[f"{name} bytes"] = [traffic.bytes]
    return in_turns({name: lambda call=call: _seconds(call) for name, call in calls.items()}, ROUNDS) | sent


def _seconds(call: Callable[[], Tensor]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def on_paper(ranks: int) -> dict[str, float]:
    """Seconds where every rank is on another host."""
    wire = (ranks - 1) * 8 * length() / BANDWIDTH
    return {"ring": (ranks - 1) * HOP + wire, "told": HOP + (ranks - 1) * MESSAGE + wire}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    env = environment()
    found = {ranks: on_ranks(ranks, measure)[0] for ranks in RANKS}
    paper = {ranks: on_paper(ranks) for ranks in ON_PAPER}
    for each in found.values():
        assert each["ring bytes"] == each["told bytes"]
    micro = {name: [spread(quartiles(each[name]), 0, 1e-6) for each in found.values()] for name in WAYS}
    sent = [f"{each['told bytes'][0]:,.0f}" for each in found.values()]
    text = [
        *heading("The control message of a step", env),
        ABOUT,
        "",
        "## Measured",
        "",
        f"Microseconds on loopback, {env['cores']} cores for all ranks; median (quartiles) of {ROUNDS}.",
        "",
        table(
            ["", *(f"K = {ranks}" for ranks in found)],
            [*([name, *cells] for name, cells in micro.items()), ["bytes", *sent]],
        ),
        "",
        "## On paper",
        "",
        f"Milliseconds with every rank on a host of its own: {HOP * 1e6:.0f} us for a hop, {MESSAGE * 1e6:.0f} us "
        f"for a further message, {BANDWIDTH / 1e9:.1f} GB/s.",
        "",
        table(
            ["", *(f"K = {ranks}" for ranks in paper)],
            [[name, *(f"{1e3 * each[name]:.2f}" for each in paper.values())] for name in WAYS],
        ),
    ]
    print("\n".join(text))
    save("control_message", "\n".join(text), env, {"measured": found, "on paper": paper})


if __name__ == "__main__":
    main()
