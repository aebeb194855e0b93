"""Utilities that measure time and memory of processes and run functions on several local ranks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def status(field: str) -> int:
    """Return a size in bytes from ``/proc/self/status``, for example ``VmRSS``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def resident() -> dict[str, int]:
    """Return the resident bytes of this process: anonymous memory, and pages of files."""
    return {field: status(field) for field in ("RssAnon", "RssFile")}


class Peak(threading.Thread):
    """Highest anonymous memory of this process inside a ``with`` block, sampled every 2 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._ended = status("RssAnon"), threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, status("RssAnon"))

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self.join()


def free_port() -> int:
    """Return a TCP port of the loopback interface that is currently unused."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``work(rank, ranks, *args)`` in fresh processes, in a gloo group if several; return results by rank."""
    import torch.multiprocessing as mp

    context, port = mp.get_context("spawn"), free_port()
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, work, args, queue), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = dict(queue.get() for _ in processes)
    for process in processes:
        process.join()
    for result in found.values():
        if isinstance(result, Exception):
            raise result
    return [found[rank] for rank in range(ranks)]


def _rank(rank: int, ranks: int, port: int, work: Callable[..., Any], args: tuple[Any, ...], queue: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        queue.put((rank, work(rank, ranks, *args)))
    except Exception as error:
        queue.put((rank, error))
        raise
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
