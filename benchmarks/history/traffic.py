"""Several ranks on one machine, and what they send each other: counted where torch dispatches collectives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Bytes that one rank sends, gathering in a ring, in all and by collective that it takes part in as a sender."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, []

    @property
    def bytes(self) -> float:
        return sum(self.sent)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sent = self._sent(func.__name__.split(".")[0], args)
            self.sent += [sent] if sent is not None else []
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> float | None:
        """Bytes; None where this rank sends nothing of its own accord."""
        share = (self.ranks - 1) / self.ranks
        if name.startswith("allreduce"):
            return 2 * share * _bytes(args[0])
        if name.startswith("alltoall"):
            return share * _bytes(args[1])
        if "allgather" in name:
            return share * _bytes(args[0])  # what is gathered
        if "reduce_scatter" in name:
            return share * _bytes(args[1])
        if name.startswith("scatter"):  # gloo makes a reduce-scatter of one scatter by every rank
            return share * _bytes(args[1]) or None
        if name == "send":
            return _bytes(args[0])
        if name.startswith(("recv", "barrier", "monitored_barrier")):
            return None
        raise NotImplementedError(f"what does {name} send?")


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(entry) for entry in value) if isinstance(value, list | tuple) else 0


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``work(rank, ranks, *args)`` in so many processes of one gloo group; what they return, by rank."""
    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, work, args, queue), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = dict(queue.get() for _ in processes)
    for process in processes:
        process.join()
    failures = [result for result in found.values() if isinstance(result, Exception)]
    if failures:
        raise failures[0]
    return [found[rank] for rank in range(ranks)]


def _rank(rank: int, ranks: int, port: int, work: Callable[..., Any], args: tuple, queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        queue.put((rank, work(rank, ranks, *args)))
    except Exception as error:
        queue.put((rank, error))
        raise
    dist.barrier()
    dist.destroy_process_group()
