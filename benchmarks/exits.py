"""Exits: does a run of two ranks that has its result also end well, whatever is under way when it ends?

    python -m benchmarks.exits              # every setting once, writes benchmarks/results/exits.md and exits.json
    python -m benchmarks.exits --rounds 5   # five times
    python -m benchmarks.exits --quick      # shards on disk only, printed only

Every rank is a process that is forked from this one, which has imported torch and has no threads, and that goes through
the whole end of an interpreter: threads are joined, atexit runs, modules are torn down. An exit is good if the rank
had the right rows before and its exit code is 0 within a minute.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import hashlib
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import compopt
from benchmarks.saved import save
from compopt.samplers import OrderedBatchSampler
from recipes.report import environment, heading, table

RANKS, N, BATCH, STEPS, DIM = 2, 2000, 32, 4, 8
SECONDS = 60.0  # after which an exit counts as hung
SETTINGS = {
    "offload": [None, "cpu", "disk"],
    "shard": [False, True],
    "ahead": ["nothing", "a loader", "under way", "one rank"],  # what was prefetched when the loop ended
    "group": ["destroyed", "destroyed after the estimator", "kept"],
    "sampler": [False, True],  # plans of the next epoch are being made in a thread
    "threads": ["on time", "late"],  # torch's, that do the collectives
}
ABOUT = """Two ranks (gloo) train for four steps and end. *Under way*: rows of two batches are being prefetched and
nobody takes them; *one rank*: the same on rank 0 alone. The process group is destroyed before the estimator, after it,
or kept. *Threads late*: during and after its last collectives the rank does not hand over the interpreter's lock by
itself, so that torch's thread waits for it when it wants to let go of their tensors; on a busy machine that happens now
and then. *torch alone* is the control: one `all_gather` and the end, without compopt, the group kept."""
GROUPS = ("destroyed", "destroyed after the estimator", "kept")
KEPT = []  # what a script has in its global variables when it ends


# one rank -----------------------------------------------------------------------------------------


def batches(rank: int) -> list[tuple[torch.Tensor, ...]]:
    """This rank's part of every batch."""
    g, own = torch.Generator().manual_seed(7), slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
    data = [(torch.randn(2, BATCH, DIM, generator=g), torch.randperm(N, generator=g)[:BATCH]) for _ in range(STEPS + 2)]
    return [(z[0][own], z[1][own], index[own]) for z, index in data]


def train(rank: int, case: dict, folder: str) -> object:
    """Train, print a digest of the rows, and return what is alive at the end."""
    options = {"offload_dir": folder} if case["offload"] == "disk" else {}
    est = compopt.SogCLREstimator(N, offload=case["offload"], shard=case["shard"], **options)
    data = batches(rank)
    loop = data[:STEPS]
    for z1, z2, index in est.prefetch(loop) if case["ahead"] in ("a loader", "one rank") else loop:
        est(z1, z2, index)
        est.step()
    sampler = planning(rank) if case["sampler"] else None
    rows = est.read(torch.arange(N))
    print(hashlib.sha256(b"".join(column.numpy().tobytes() for column in rows.values())).hexdigest()[:16], flush=True)
    if case["ahead"] == "under way" or (case["ahead"] == "one rank" and rank == 0):
        for _, _, index in data[STEPS:]:
            est.prefetch(index)
    last(case, lambda: est.eval()(*data[0]))
    return est, sampler


def planning(rank: int) -> OrderedBatchSampler:
    """A sampler that is busy with its next epoch."""
    sampler = OrderedBatchSampler(64, 16, candidates=30, keep=5)
    own = torch.arange(64)[rank::RANKS]
    sampler.observe(own, *torch.randn(2, len(own), DIM, generator=torch.Generator().manual_seed(rank)))
    do = sampler.do

    def slowly(piece: object) -> torch.Tensor:
        time.sleep(0.01)
        return do(piece)

    sampler.do = slowly
    list(sampler)
    return sampler


def one_rank(rank: int, port: int, case: dict, folder: str) -> None:
    """Run one rank up to the point where a script's last line has been executed."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    if case.get("alone"):
        print("done", flush=True)
        gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        last(case, lambda: getattr(dist, gather)(torch.empty(2000), torch.ones(1000)))
    else:
        KEPT.append(train(rank, case, folder))
    if case["group"] == "destroyed after the estimator":
        KEPT.clear()
    if case["group"] != "kept":
        dist.destroy_process_group()


def last(case: dict, collectives: Callable[[], object]) -> None:
    """Carry out the last collectives of a rank, late ones if the case says so."""
    if case["threads"] == "late":
        make_late()
    collectives()


def make_late() -> None:
    """Let this thread keep the interpreter's lock during and after collectives, from here on."""
    sys.setswitchinterval(1000.0)
    for name in ("all_gather_single", "all_gather_into_tensor", "all_reduce"):
        if hasattr(dist, name):
            setattr(dist, name, late(getattr(dist, name)))


def late(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective after which torch's thread is the last that has the tensors, and waits for the lock."""

    def call(*tensors: torch.Tensor, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            collective(*tensors, **options)
            return
        future = collective(*tensors, **options, async_op=True).get_future()
        while not future.done():
            pass
        future.value()  # raises its error
        del future
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass

    return call


# many runs ----------------------------------------------------------------------------------------


def pair(case: dict, folder: str) -> list[dict]:
    """Run two ranks from beginning to end; what each said, and its exit code. A rank does not return: it ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = Path(tempfile.mkdtemp(dir=folder))
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
                os.dup2(os.open(place / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), stream.fileno())
            faulthandler.register(signal.SIGUSR1)
            one_rank(rank, port, case, str(place / "rows"))
            raise SystemExit  # through all of the interpreter's end, unlike os._exit
        children.append(child)
    codes = wait(children)
    said = [[(place / f"{name}{rank}").read_text() for name in ("out", "err")] for rank in range(RANKS)]
    shutil.rmtree(place)
    return [{"code": code, "out": out.strip(), "err": err} for code, (out, err) in zip(codes, said, strict=True)]


def wait(children: list[int]) -> list[int | None]:
    """Wait for the exit codes: minus the signal where one ended the process, None where the end had to be forced."""
    codes: dict[int, int | None] = {}
    latest = time.monotonic() + SECONDS
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > latest:
                os.kill(child, signal.SIGUSR1)  # faulthandler shows where it hung
                time.sleep(1)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = None
        time.sleep(0.005)
    return [codes[child] for child in children]


def judge(answer: dict, expected: str) -> str:
    """Name the way in which one process ended."""
    if answer["out"] != expected:
        return "no result" if not answer["out"] else "wrong"
    if answer["code"] is None:
        return "hung"
    if answer["code"] == 0:
        return "good"
    return signal.Signals(-answer["code"]).name if answer["code"] < 0 else f"code {answer['code']}"


def measure(cases: list[dict], rounds: int, folder: str) -> list[dict]:
    """Run every case so many times; how often each way of ending occurred."""
    expected: dict[bool, str] = {}
    counts = [collections.Counter() for _ in cases]
    for turn in range(rounds):
        for number, case in enumerate(cases):
            answers = pair(case, folder)
            right = expected.setdefault(bool(case.get("alone")), answers[0]["out"])
            for rank, answer in enumerate(answers):
                how = judge(answer, right)
                counts[number][how] += 1
                if how != "good" and not case.get("alone"):
                    print(f"{case}, rank {rank}: {how}\n{answer['err'][-2000:]}", file=sys.stderr, flush=True)
            done = turn * len(cases) + number + 1
            print(f"{done} of {rounds * len(cases)} runs", file=sys.stderr, end="\r", flush=True)
    return [{**case, "exits": dict(count)} for case, count in zip(cases, counts, strict=True)]


def settings(quick: bool) -> list[dict]:
    """Every setting; placements change quickest, so that a machine that gets busy is busy for all."""
    space = {**SETTINGS, "offload": ["disk"], "shard": [True], "sampler": [False]} if quick else SETTINGS
    names = list(space)
    cases = [dict(zip(reversed(names), values, strict=True)) for values in itertools.product(*reversed(space.values()))]
    return [{name: case[name] for name in names} for case in cases]


# the report ---------------------------------------------------------------------------------------


def bad_of_all(results: list[dict], **chosen: object) -> str:
    """``bad of all`` exits of the results that agree with what was chosen."""
    found = [r["exits"] for r in results if all(r[key] == value for key, value in chosen.items())]
    every = sum(sum(count.values()) for count in found)
    return f"{every - sum(count.get('good', 0) for count in found)} of {every}"


def report(env: dict, results: list[dict], control: dict) -> str:
    """The page: a line per placement, a column for each moment at which the group is destroyed."""
    lines = [
        [
            f"{offload or 'beside the features'}{', shard=True' if shard else ''}; threads {threads}",
            *(bad_of_all(results, offload=offload, shard=shard, threads=threads, group=group) for group in GROUPS),
        ]
        for threads in SETTINGS["threads"]
        for offload in SETTINGS["offload"]
        for shard in SETTINGS["shard"]
        if any(r["offload"] == offload and r["shard"] == shard for r in results)
    ]
    lines.append([f"torch alone; threads {control['threads']}", "-", "-", bad_of_all([control])])
    lines.append(["all but the control", *(bad_of_all(results, group=group) for group in GROUPS)])
    kinds = collections.Counter()
    for result in results:
        kinds.update(result["exits"])
    total = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    head = ["bad exits; group:", *GROUPS]
    facts = f"All exits but the control's: {total}."
    return "\n".join([*heading("Exits of two ranks", env), ABOUT, "", table(head, lines), "", facts, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="runs per setting")
    parser.add_argument("--control", type=int, default=25, help="runs of torch alone")
    parser.add_argument("--quick", action="store_true", help="shards on disk only, printed only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env, parent, folder = environment(), os.getpid(), tempfile.mkdtemp(prefix="exits-")
    try:
        (control,) = measure([{"alone": True, "group": "kept", "threads": "late"}], args.control, folder)
        results = measure(settings(args.quick), args.rounds, folder)
    finally:
        if os.getpid() == parent:  # a rank passes here on its way out
            shutil.rmtree(folder)
    text = report(env, results, control)
    print(text)
    if not args.quick:
        save("exits", text, env, [control, *results])


if __name__ == "__main__":
    main()
