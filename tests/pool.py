"""Processes with gloo that start once: `pool.run(function, K, *args)` runs a function on the first K of them."""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from compopt.checkpoint import manifest
from compopt.stores import table

WORLD = 4
PIECE_ROWS = manifest.PIECE_ROWS
BLOCK_ROWS = table.BLOCK_ROWS
TIMEOUT = 30  # seconds for an answer
PRELOAD = ["compopt", "compopt.losses", "pytest", "tests.helpers"]
START = 120  # seconds for the first answer: the processes import torch, on a machine that may be busy


class Pool:
    """Processes that wait for functions. A function is called as `function(group, *args)` on every member."""

    def __init__(self, world: int = WORLD, timeout: float = TIMEOUT) -> None:
        self.timeout, self.started = timeout, False
        context = mp.get_context("forkserver")  # its server imports once, for the processes of all pools
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, timeout, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """Return results by rank; an error on any rank is raised here, that of the lowest rank first."""
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks, args))
        answers, patience = [], self.timeout if self.started else max(self.timeout, START)
        for rank, pipe in enumerate(self.pipes[:ranks]):
            if not pipe.poll(patience):
                _pools.clear()  # the next test starts new processes
                self.kill()
                raise TimeoutError(f"rank {rank} of {ranks} did not answer in {patience} s: {function.__name__}")
            answers.append(pipe.recv())
        self.started = True
        for rank, (_value, error) in enumerate(answers):
            if error is not None:
                raise AssertionError(f"rank {rank} of {ranks}: {error}")
        return [value for value, _ in answers]

    def close(self) -> None:
        """Kill the processes, which only wait for a task; an orderly shutdown takes seconds."""
        self.kill()
        for process in self.processes:
            process.join(10)

    def kill(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, world: int, port: int, timeout: float, pipe: Any) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not searched again
    dist.init_process_group("gloo", rank=rank, world_size=world)
    groups = {k: dist.new_group(list(range(k)), backend="gloo") for k in range(1, world)}
    groups[world] = None  # the default group
    while True:
        task = pipe.recv()
        faulthandler.dump_traceback_later(timeout * 0.9)  # shows where a rank waits for another
        function, ranks, args = task
        table.BLOCK_ROWS = BLOCK_ROWS  # a function may have reduced them
        manifest.PIECE_ROWS = PIECE_ROWS
        try:
            pipe.send((function(groups[ranks], *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()


_pools: dict[int, Pool] = {}


def the_pool(world: int = WORLD, timeout: float = TIMEOUT) -> Pool:
    """Return the pool of this size, which is shared by the test session."""
    if world not in _pools:
        _pools[world] = Pool(world, timeout)
    return _pools[world]


def close_pools() -> None:
    """Close all pools at the end of the session."""
    while _pools:
        _pools.popitem()[1].close()
