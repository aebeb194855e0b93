"""Measure how and when the other ranks fail after one rank is killed, raises, hangs, leaves or skips a call.

    python -m benchmarks.losses               # writes benchmarks/results/losses.md and losses.json
    python -m benchmarks.losses --timeout 45  # of the process group, in seconds

Three ranks (gloo) train with DDP, and one of them fails in its fourth step. Every other rank must end with its own
error within the group's timeout, and reports its warnings and this error. A rank that is still running a minute after
the timeout ends the program with an error. ``docs/guides/checkpoints.md`` says what to do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compopt
from benchmarks.machine import free_port
from benchmarks.report import ROOT, environment, finish, table
from compopt.distributed import collectives
from tests.launching import environment as launching

RANKS, LOST, GRACE = 3, 1, 60.0
START = 120.0  # seconds that ranks may need to start
N, BATCH, DIM, STEPS, FAILS_AT = 400, 6, 4, 6, 3
LEAVES, SKIPS = "leaves the loop, then `dist.barrier()`", "skips a call, then `dist.barrier()` after the loop"
WAYS = ("killed", "raises inside a call", "raises between calls", "out of data", "hangs", LEAVES, SKIPS)
LOOPS: dict[str, dict[str, Any] | None] = {"with an estimator": {}, "DDP alone": None}
ABOUT = """Three ranks (gloo) train with DDP, and rank 1 fails in its fourth step. *Seconds*: time from the failure
until the last of the other ranks had said this. The timeout of the process group was {timeout:.0f} s."""
HEAD = ["rank 1", "loop", "seconds", "what the other ranks say"]


# -- one rank ------------------------------------------------------------------------------------------------------


def fail(how: str, clock: Path) -> None:
    """Fail on purpose, if the process is to end or to stop here, and record the time."""
    clock.write_text(str(time.time()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises between calls":
        raise RuntimeError("a bug of the training script")
    if how == "hangs":
        time.sleep(3600)


def train(rank: int, how: str, place: dict[str, Any] | None, group: dist.ProcessGroup, clock: Path) -> None:
    """Train a linear layer with an estimator, or (``place=None``) with a loss of its own samples."""
    model = torch.nn.Linear(DIM, DIM)
    wrapped, optimizer = DistributedDataParallel(model, process_group=group), torch.optim.SGD(model.parameters(), 0.1)
    est = None
    if place is not None:
        est = compopt.SogCLREstimator(N, gamma=0.9, tau=0.1, process_group=group, **place)
        est.attach(optimizer)
    for step in range(STEPS):
        index = torch.arange(BATCH) + BATCH * (dist.get_world_size() * step + rank)
        if rank == LOST and step == FAILS_AT:
            fail(how, clock)
            if how in ("out of data", LEAVES):
                break
            if how == SKIPS:
                continue
            index = index + 10 * N  # "raises inside a call"
        z1, z2 = wrapped(torch.randn(2, BATCH, DIM)).unbind()
        if est is not None:
            loss = est(z1, z2, index)
        elif index.max() < N:
            loss = torch.nn.functional.cross_entropy(z1 @ z2.T, torch.arange(BATCH))
        else:
            raise IndexError("outside of the data set")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if how in (LEAVES, SKIPS):
        dist.barrier(group)


def one_rank(rank: int, port: str, how: str, place: dict[str, Any] | None, timeout: float, clock: Path) -> None:
    """Train, and print as JSON what was said and when: warnings, and the error that ended the training."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=START),
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.barrier()  # on a busy machine the start of the processes takes longer than the group's timeout
    group, said = dist.new_group(timeout=datetime.timedelta(seconds=timeout)), []
    warnings.showwarning = lambda message, *_: said.append(("UserWarning", str(message), time.time()))
    try:
        train(rank, how, place, group, clock)
    except Exception as error:
        said.append((type(error).__name__, str(error), time.time()))
    print(json.dumps(said), flush=True)
    os._exit(0)  # at once, like a process that an error ends


# -- all ranks -----------------------------------------------------------------------------------------------------


def lose(how: str, place: dict[str, Any] | None, timeout: float, patience: float, folder: Path) -> list[list[Any]]:
    """Run the ranks; return what each of the others said: kind, text, and seconds since the failure."""
    if place is not None and place.get("offload") == "disk":
        place = {**place, "offload_dir": str(folder / "rows")}
    given = [str(free_port()), how, json.dumps(place), str(timeout), str(patience), str(folder / "clock")]
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
    return [[[kind, text, at - failed] for kind, text, at in answer] for answer in answers]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table: a row for each warning or error of rank 0, with the time of the slowest rank."""
    found = []
    for result in results:
        for number, (kind, text, _) in enumerate(result["answers"][0]):
            seconds = max(answer[number][2] for answer in result["answers"])
            short = re.sub(r"\[\S*/gloo/\S*\] |\. This is typically.*| ?\[[\d.]+\]:\d+", "", text, flags=re.S)
            found.append([result["how"], result["loop"], f"{seconds:.0f}", f"{kind}: {short}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=45.0, help="timeout of the process group, in seconds")
    parser.add_argument("--rank", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, port, how, place, timeout, patience, clock = args.rank
        collectives.WARN_SECONDS = float(patience)
        collectives.MARK = min(collectives.MARK, collectives.WARN_SECONDS / 2)
        one_rank(int(rank), port, how, json.loads(place), float(timeout), Path(clock))
        return
    env, results = environment(), []
    for loop, place in LOOPS.items():
        for how in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                answers = lose(how, place, args.timeout, collectives.WARN_SECONDS, Path(folder))
            if not all(answers):
                raise SystemExit(f"{loop}, {how}: a rank noticed nothing: {answers}")
            results.append({"loop": loop, "how": how, "timeout": args.timeout, "answers": answers})
    body = table(HEAD, rows(results), "llrl")
    finish(
        "losses",
        "What the other ranks say after one has failed",
        env,
        [ABOUT.format(timeout=args.timeout), body],
        results,
    )


if __name__ == "__main__":
    main()
