"""Nodes on one machine: agents of torchrun with a disk each."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.launching import environment
from tests.pool import free_port

WAIT = 600.0  # seconds; a busy machine can take minutes instead of seconds
LONG = ("--save-every", "3", "--shard", "--workers", "1")
Flags = Callable[..., Sequence[str]]  # takes an output folder and further flags


class Nodes:
    """An agent of torchrun for each of several nodes, which share an output folder and have a disk each."""

    def __init__(self, flags: Flags, outputs: Sequence[Path], disks: Sequence[Path], *more: str) -> None:
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
                pipes = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                self.agents.append(subprocess.Popen(command, env=environment(), **pipes))

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
