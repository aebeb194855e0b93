"""Measure how and when the other ranks fail after one rank is killed, raises, hangs or runs out of data.

    python -m benchmarks.losses              # writes benchmarks/results/losses.md and losses.json
    python -m benchmarks.losses --timeout 5  # of the process group, in seconds

Three ranks (gloo) train, and one of them fails in its fourth step. Every other rank must end with its own error within
the group's timeout, and reports this error. A rank that is still running a minute after the timeout ends the program
with an error.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import compopt
from benchmarks.machine import free_port
from benchmarks.report import ROOT, environment, finish, table
from tests.launching import environment as launching

RANKS, LOST, GRACE = 3, 1, 60.0
START = 120.0  # seconds that ranks may need to start
N, BATCH, DIM, STEPS, FAILS_AT = 400, 6, 4, 6, 3
WAYS = ("killed", "raises inside a call", "raises between calls", "out of data", "hangs")
PLACES = {"on the device": {}, "on disk, sharded": {"offload": "disk", "shard": True}}
ABOUT = """Three ranks (gloo) train, and rank 1 fails in its fourth step. *seconds*: time from the failure until the
last of the other ranks raised its error. The timeout of the process group was {timeout:.0f} s."""


# -- one rank ------------------------------------------------------------------------------------------------------


def fail(how: str, clock: Path) -> bool:
    """Fail on purpose and record the time; return whether the loop must end here."""
    clock.write_text(str(time.time()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises between calls":
        raise RuntimeError("a bug of the training script")
    if how == "hangs":
        time.sleep(3600)
    return how == "out of data"


def train(rank: int, how: str, place: dict[str, Any], group: dist.ProcessGroup, clock: Path) -> None:
    """Train on features with a graph, like those of an encoder."""
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


def one_rank(rank: int, port: str, how: str, place: dict[str, Any], timeout: float, clock: Path) -> None:
    """Train, and print the error that ended the training as JSON."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=START),
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.barrier()  # on a busy machine the start of the processes takes longer than the group's timeout
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    try:
        train(rank, how, place, group, clock)
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "said": str(error), "at": time.time()}), flush=True)
        os._exit(1)
    print(json.dumps({"error": None, "said": "", "at": time.time()}), flush=True)
    dist.destroy_process_group()


# -- all ranks -----------------------------------------------------------------------------------------------------


def lose(how: str, place: dict[str, Any], timeout: float, folder: Path) -> list[dict[str, Any]]:
    """Run the ranks; return the errors of the others and the seconds from the failure to each error."""
    if place.get("offload") == "disk":
        place = {**place, "offload_dir": str(folder / "rows")}
    given = [str(free_port()), how, json.dumps(place), str(timeout), str(folder / "clock")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.losses", "--rank", str(rank), *given], cwd=ROOT, env=launching(), **pipes
        )
        for rank in range(RANKS)
    ]
    try:
        others = [ranks[rank] for rank in range(RANKS) if rank != LOST]
        answers = [json.loads(other.communicate(timeout=START + timeout + GRACE)[0]) for other in others]
    finally:
        for process in ranks:
            process.kill()
    ranks[LOST].communicate()
    failed = float((folder / "clock").read_text())
    return [{**answer, "seconds": answer["at"] - failed} for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=5.0, help="timeout of the process group, in seconds")
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, port, how, place, timeout, clock = args.rank
        one_rank(int(rank), port, how, json.loads(place), float(timeout), Path(clock))
        return
    env, results, lines = environment(), [], []
    for where, place in PLACES.items():
        for how in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                answers = lose(how, place, args.timeout, Path(folder))
            if any(answer["error"] is None for answer in answers):
                raise SystemExit(f"{where}, {how}: a rank noticed nothing: {answers}")
            results.append({"where": where, "how": how, "timeout": args.timeout, "answers": answers})
            seconds, first = max(answer["seconds"] for answer in answers), answers[0]
            lines.append([how, where, f"{seconds:.2f}", f"{first['error']}: {first['said']}"])
    head = ["rank 1", "rows", "seconds", "error of the other ranks"]
    finish(
        "losses",
        "Errors after the loss of a rank",
        env,
        [ABOUT.format(timeout=args.timeout), table(head, lines, "llrl")],
        results,
    )


if __name__ == "__main__":
    main()
