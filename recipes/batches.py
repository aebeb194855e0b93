"""Batches of a run, random or chosen by a batch sampler of the library."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from compopt import samplers
from recipes import launch

RANDOM, ORDERED, SPECTRAL = KINDS = ("random", "ordered", "spectral")


class Option(NamedTuple):
    """Option that some kinds of batches accept."""

    argument: str  # its name in the library
    type: Callable[[str], Any]
    meaning: str
    kinds: tuple[str, ...]


OPTIONS = {
    "batch_tau": Option("tau", float, "temperature of the losses that batches are chosen by", (ORDERED, SPECTRAL)),
    "candidates": Option("candidates", int, "random batches that are weighed", (ORDERED,)),
    "keep": Option("keep", int, "how many of them are trained on", (ORDERED,)),
    "sharpness": Option("sharpness", float, "sharpness of the clustered affinity exp(sharpness w)", (SPECTRAL,)),
    "cluster_group": Option("group", int, "batches whose samples are clustered together", (SPECTRAL,)),
}


def arguments(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options into the library's arguments; raise ValueError for an option that the kind does not accept."""
    known = {name: option.argument for name, option in OPTIONS.items() if kind in option.kinds}
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{kind} batches take no {', '.join(unknown)}; known: {', '.join(known) or 'none'}")
    return {known[name]: value for name, value in given.items()}


def build(
    options: Mapping[str, Any], n: int, size: int, per_epoch: int, seed: int, labels: Tensor | None = None
) -> Shuffled:
    """Return the batches that ``options`` describe."""
    given = dict(options)
    kind = given.pop("kind", RANDOM)
    chosen = arguments(kind, given)
    if kind == ORDERED:
        return Chosen(samplers.OrderedBatchSampler(n, size, seed=seed, labels=labels, **chosen))
    if kind == SPECTRAL:
        return Chosen(samplers.SpectralBatchSampler(n, size, seed=seed, drop_last=True, labels=labels, **chosen))
    return Shuffled(n, size, per_epoch, seed)


class Shuffled:
    """Random global batches, called with non-decreasing batch numbers.

    The order of an epoch is a function of (seed, epoch), so that a resumed run needs no stored state.
    """

    def __init__(self, n: int, size: int, per_epoch: int, seed: int) -> None:
        self._n, self._size, self._per_epoch, self._seed = n, size, per_epoch, seed
        self._order = -1, torch.empty(0)  # epoch and its permutation

    def __call__(self, number: int) -> Tensor:
        epoch, position = divmod(number, self._per_epoch)
        if epoch != self._order[0]:
            self._order = epoch, self.order(epoch)
        return self._order[1][position * self._size : (position + 1) * self._size]

    def order(self, epoch: int) -> Tensor:
        """Return all samples in the order of an epoch."""
        return torch.randperm(self._n, generator=seeded("order", self._seed, epoch))

    def observe(self, index: Tensor, z1: Tensor, z2: Tensor) -> None:
        """Receive the features that the loop has computed for this rank's samples."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""


class Chosen(Shuffled):
    """Batches of consecutive epochs of a sampler, which need not be passes over the data."""

    def __init__(self, sampler: samplers.BankSampler) -> None:
        self.sampler = sampler
        self._stream = self._epochs()
        self._known: dict[int, Tensor] = {}  # a batch may be requested early, to prefetch its rows, and again later
        self._next = self._seen = 0

    def _epochs(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler

    def __call__(self, number: int) -> Tensor:
        while self._next <= number:
            self._known = {n: batch for n, batch in self._known.items() if n >= self._next - 1}
            self._known[self._next] = _of_all_ranks(torch.tensor(next(self._stream)))
            self._next += 1
        return self._known[number]

    def observe(self, index: Tensor, z1: Tensor, z2: Tensor) -> None:
        self.sampler.observe(index, z1, z2)
        self._seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self._stream, self._known = self._epochs(), {}
        self._next = self._seen = state["seen"]


def _of_all_ranks(own: Tensor) -> Tensor:
    """Gather the equal parts of a batch from all ranks, in rank order."""
    parts: list[Any] = [own] * launch.world_size()
    if len(parts) > 1:
        dist.all_gather_object(parts, own)
    return torch.cat(parts)


def seeded(*key: object) -> torch.Generator:
    """Return a CPU generator whose seed is a function of ``key``."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
