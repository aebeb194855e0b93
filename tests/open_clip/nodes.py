"""Nodes on one machine: agents of torchrun with a disk each, and events that interrupt them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from recipes.clip_trainer import STOPPED
from tests.launching import environment
from tests.pool import free_port

WAIT = 600.0  # seconds; a busy machine can take minutes instead of seconds
LONG = ("--save-every", "3", "--shard", "--workers", "1")
Flags = Callable[..., Sequence[str]]  # takes an output folder and further flags


class Nodes:
    """An agent of torchrun for each of several nodes, which share an output folder and have a disk each."""

    def __init__(
        self, flags: Flags, outputs: Sequence[Path], disks: Sequence[Path], *more: str, before: str = ""
    ) -> None:
        self.outputs, self.disks, self.agents, self.logs = outputs, disks, [], []
        port = str(free_port())
        for node, (output, disk) in enumerate(zip(outputs, disks, strict=True)):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(disks))]
            command += ["--node_rank", str(node), "--nproc_per_node", "1"]
            command += ["--master_addr", "127.0.0.1", "--master_port", port, "-m", "recipes.clip_trainer"]
            command += flags(output, "--batch-size", "2", *more)
            command += ["--offload", "disk", "--offload-dir", str(disk)]
            self.logs.append(disk.with_suffix(".log"))
            with open(self.logs[-1], "w") as log:
                shell = ["bash", "-c", f'{before} exec "$@"', "bash", *command]
                pipes = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                self.agents.append(subprocess.Popen(shell, env=environment(), **pipes))

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in range(len(self.agents)):
            self.kill(node)

    def kill(self, node: int) -> None:
        """Lose a node: kill all of its processes at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.agents[node].pid)
            for process in (agent, *agent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.agents[node].wait()

    def await_state(self, after: str | None = None) -> str:
        """Wait for a state that is newer than another one; return its name."""
        deadline = time.monotonic() + WAIT
        while (found := latest(self.outputs[0])) in (None, after):
            assert time.monotonic() < deadline and self.agents[0].poll() is None, self.said()
            time.sleep(0.01)
        return found

    def end(self) -> list[int]:
        """Wait for all agents; return their exit codes."""
        return [agent.wait(WAIT) for agent in self.agents]

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


def disks_of(folder: Path, count: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [folder / f"disk{node}" for node in range(count)]


def latest(output: Path) -> str | None:
    """Return the name of the newest state."""
    pointer = output / "state" / "latest"
    return pointer.read_text() if pointer.exists() else None


# -- a day -------------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An event that ends a run on two nodes."""

    happen: Callable[[Nodes], object]  # called once there is a further state
    said: str = ""  # expected in the output of some process
    limit: str = ""  # shell commands on each node before it starts
    store: bool = True  # whether the store can be reached


def stop(nodes: Nodes) -> None:
    os.kill(nodes.agents[0].pid, signal.SIGTERM)


def lose(nodes: Nodes) -> None:
    nodes.kill(1)


def lose_all(nodes: Nodes) -> None:
    """Lose both nodes, their disks and the folder that they share; the next start has only the store."""
    nodes.kill(0)
    nodes.kill(1)
    for folder in (nodes.outputs[0], *nodes.disks):
        shutil.rmtree(folder)


def wait(nodes: Nodes) -> None:
    nodes.end()


SMALL = "ulimit -f 500;"  # files of up to 500 KiB, as on a full disk
EVENTS = {
    "a node is told to stop": Event(stop, f"exitcode  : {STOPPED}"),
    "a node is lost": Event(lose),
    "uploads fail, and a node is lost": Event(lose, "is not in the store", store=False),
    "the disk is full": Event(wait, "is complete: --resume goes on from it", limit=SMALL),
    "both nodes and all folders are lost": Event(lose_all),
}


class Day:
    """A run on two nodes with a store, which is started again after every event."""

    def __init__(self, flags: Flags, folder: Path, epochs: int) -> None:
        self.flags, self.folder, self.epochs = flags, folder, epochs
        self.output, self.store = folder / "out", folder / "store"
        self.events: list[dict[str, Any]] = []
        (folder / "file").touch()  # no folder can be created below it

    def start(self, event: Event | None = None) -> Nodes:
        url = f"file://{self.store}" if event is None or event.store else f"file://{self.folder}/file/run"
        more = ("--epochs", str(self.epochs), *LONG, "--resume", f"file://{self.store}", "--upload", url)
        limit = "" if event is None else event.limit
        return Nodes(self.flags, [self.output] * 2, disks_of(self.folder, 2), *more, before=limit)

    def bear(self, name: str) -> None:
        """Start, trigger an event once there is a further state, and record the state that remains."""
        event, before, started = EVENTS[name], latest(self.output), time.perf_counter()
        with self.start(event) as nodes:
            if not event.limit:  # a full disk allows no further state
                nodes.await_state(before)
            event.happen(nodes)
            codes = nodes.end()
            assert 0 not in codes and event.said in nodes.said(), nodes.said()
        seconds = time.perf_counter() - started
        left = latest(self.output)
        self.events.append({"event": name, "before": before, "left": left, "codes": codes, "seconds": seconds})

    def finish(self) -> None:
        with self.start() as nodes:
            assert nodes.end() == [0, 0] and "begins anew" not in nodes.said(), nodes.said()
