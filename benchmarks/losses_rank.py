"""One rank of ``benchmarks/losses.py``: it trains, and one of them fails in some way."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import compopt

N, BATCH, DIM, STEPS, FAILS_AT, LOST = 400, 6, 4, 6, 3, 1
START = 120.0  # seconds until all ranks are there


def fail(how: str, clock: Path) -> bool:
    """Fail on purpose, and note when; whether the loop ends here."""
    clock.write_text(str(time.time()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises between calls":
        raise RuntimeError("a bug of the training script")
    if how == "hangs":
        time.sleep(3600)
    return how == "out of data"


def train(rank: int, how: str, place: dict, group: dist.ProcessGroup, clock: Path) -> None:
    """Train; the features carry a graph, as an encoder's do."""
    est = compopt.SogCLREstimator(N, gamma=0.9, tau=0.1, process_group=group, **place)
    for step in range(STEPS):
        index = torch.arange(BATCH) + BATCH * (dist.get_world_size() * step + rank)
        if rank == LOST and step == FAILS_AT:
            if fail(how, clock):
                break
            index = index + 10 * N  # "raises inside a call"
        z1, z2 = torch.randn(2, BATCH, DIM, requires_grad=True).unbind()
        est(z1, z2, index).backward()
        est.step()


def main() -> None:
    """Arguments: rank, ranks, port, how, the placement as JSON, seconds of the timeout, file for the time."""
    rank, size, port, how, place, timeout, clock = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(size),
        timeout=datetime.timedelta(seconds=START),
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.barrier()  # on a busy machine processes take longer to begin than ranks may wait for each other
    group = dist.new_group(timeout=datetime.timedelta(seconds=float(timeout)))
    try:
        train(int(rank), how, json.loads(place), group, Path(clock))
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "said": str(error), "at": time.time()}), flush=True)
        os._exit(1)
    print(json.dumps({"error": None, "said": "", "at": time.time()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
