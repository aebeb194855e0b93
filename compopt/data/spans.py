"""Stretches of a sequence of positions, and how ranks and workers share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from compopt.rng import fold

Span = tuple[int, int]  # the first position, and the one after the last
Integers = npt.NDArray[np.int64]


class Spans:
    """Positions in a given order, as stretches of successive ones.

    Kept in arrays: what thousands of workers leave of their blocks are millions of stretches.

    Args:
        spans: pairs, or an array ``(k, 2)``; neighbours that continue each other become one.
    """

    def __init__(self, spans: Iterable[Span] | Integers) -> None:
        pairs = np.asarray(spans if isinstance(spans, np.ndarray) else list(spans), dtype=np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        apart, edge = pairs[1:, 0] != pairs[:-1, 1], np.ones(min(1, len(pairs)), dtype=bool)
        self._starts, stops = pairs[np.append(edge, apart), 0], pairs[np.append(apart, edge), 1]
        self._ends = np.cumsum(stops - self._starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def cut(self, start: int, stop: int) -> Iterator[Span]:
        """The stretches of the ``start``-th to the last position before the ``stop``-th."""
        at = int(np.searchsorted(self._ends, start, side="right"))
        while at < len(self._ends) and start < stop:
            before = int(self._ends[at - 1]) if at else 0
            first = int(self._starts[at]) + start - before
            taken = min(stop, int(self._ends[at])) - start
            yield first, first + taken
            start, at = start + taken, at + 1


@dataclass(frozen=True)
class Layout:
    """How many ranks and workers read, and in which portions.

    A *lane* is what one worker of one rank reads: successive positions in blocks of ``shuffle``, each put into an order
    of its own. Every rank has equally many batches. The lanes of a rank give them in turn, so that the numbers of two
    lanes differ by one batch at most.
    """

    ranks: int
    workers: int
    batch_size: int
    shuffle: int

    def batches(self, total: int) -> int:
        """Batches of a rank; what does not fill one on every rank is left."""
        return total // (self.ranks * self.batch_size)

    def turns(self, worker: int, batches: int) -> int:
        """How many of a rank's first ``batches`` batches the worker gives."""
        return max(0, -(-(batches - worker) // self.workers))

    def lane(self, total: int, rank: int, worker: int) -> tuple[int, int]:
        """Where a lane begins, and its number of samples."""
        batches = self.batches(total)
        before = rank * batches + sum(self.turns(earlier, batches) for earlier in range(worker))
        return before * self.batch_size, self.turns(worker, batches) * self.batch_size

    def rest(self, spans: Spans, done: int, key: tuple[int, ...]) -> Spans:
        """What every rank's first ``done`` batches leave: the positions that were not given, to the last one."""
        left: list[list[Span] | Integers] = []
        for lane in range(self.ranks * self.workers):
            rank, worker = divmod(lane, self.workers)
            start, size = self.lane(len(spans), rank, worker)
            block, given = divmod(self.turns(worker, done) * self.batch_size, self.shuffle)
            first, last = start + block * self.shuffle, start + size
            if given:
                order = block_order((*key, lane, block), min(self.shuffle, last - first))
                held = np.concatenate([np.arange(*span) for span in spans.cut(first, first + len(order))])
                left.append(_runs(held[sorted(order[given:])]))
                first += len(order)
            left.append(list(spans.cut(first, last)))
        left.append(list(spans.cut(self.ranks * self.batches(len(spans)) * self.batch_size, len(spans))))
        return Spans(np.concatenate([np.array(part, dtype=np.int64).reshape(-1, 2) for part in left]))


def _runs(positions: Integers) -> Integers:
    """Positions as stretches ``(k, 2)``."""
    apart, edge = np.diff(positions) != 1, np.ones(min(1, len(positions)), dtype=bool)
    starts, lasts = positions[np.append(edge, apart)], positions[np.append(apart, edge)]
    return np.stack([starts, lasts + 1], axis=1)


def block_order(key: tuple[int, ...], size: int) -> list[int]:
    """The order of a block's samples, which its key alone decides."""
    return torch.randperm(size, generator=torch.Generator("cpu").manual_seed(fold(*key))).tolist()
