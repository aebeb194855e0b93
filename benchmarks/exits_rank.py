"""One rank of ``benchmarks/exits.py``: it trains, and is in the middle of something when its script ends."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import compopt
from compopt.samplers import OrderedBatchSampler

RANKS, N, BATCH, STEPS, DIM = 2, 2000, 32, 4, 8


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


def one_rank(rank: int, port: int, case: dict, folder: str, kept: list[object]) -> None:
    """Run one rank up to the point where a script's last line has been executed; ``kept`` is the script's."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    if case.get("alone"):
        print("done", flush=True)
        gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        last(case, lambda: getattr(dist, gather)(torch.empty(2000), torch.ones(1000)))
    else:
        kept.append(train(rank, case, folder))
    if case["group"] == "destroyed after the estimator":
        kept.clear()
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
    for name in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single", "all_reduce"):
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
