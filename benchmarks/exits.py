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
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.exits_rank import RANKS, one_rank
from benchmarks.report import environment, heading, save, table

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
KEPT: list[object] = []  # what a script has in its global variables when it ends
GROUPS = ("destroyed", "destroyed after the estimator", "kept")


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
            one_rank(rank, port, case, str(place / "rows"), KEPT)
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
