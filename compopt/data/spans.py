"""Stretches of a sequence of positions, and how ranks and workers share them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from compopt.rng import fold

Span = tuple[int, int]  # the first position, and the one after the last


class Spans:
    """Positions in a given order, as stretches of successive ones."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans: list[Span] = []
        for start, stop in spans:
            if self.spans and self.spans[-1][1] == start:
                start = self.spans.pop()[0]
            if start < stop:
                self.spans.append((start, stop))
        self._ends = list(accumulate(stop - start for start, stop in self.spans))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def cut(self, start: int, stop: int) -> Iterator[Span]:
        """The stretches of the ``start``-th to the last position before the ``stop``-th."""
        at = bisect_right(self._ends, start)
        while at < len(self.spans) and start < stop:
            first, last = self.spans[at]
            skipped = start - (self._ends[at] - (last - first))
            taken = min(stop - start, last - first - skipped)
            yield first + skipped, first + skipped + taken
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
        left: list[Span] = []
        for lane in range(self.ranks * self.workers):
            rank, worker = divmod(lane, self.workers)
            start, size = self.lane(len(spans), rank, worker)
            block, given = divmod(self.turns(worker, done) * self.batch_size, self.shuffle)
            first, last = start + block * self.shuffle, start + size
            if given:
                order = block_order((*key, lane, block), min(self.shuffle, last - first))
                left += (span for at in sorted(order[given:]) for span in spans.cut(first + at, first + at + 1))
                first += len(order)
            left += spans.cut(first, last)
        left += spans.cut(self.ranks * self.batches(len(spans)) * self.batch_size, len(spans))
        return Spans(left)


def block_order(key: tuple[int, ...], size: int) -> list[int]:
    """The order of a block's samples, which its key alone decides."""
    return torch.randperm(size, generator=torch.Generator("cpu").manual_seed(fold(*key))).tolist()
