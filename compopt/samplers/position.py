"""How far a training loop is in its epochs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Position:
    """The epoch, and what of it was handed out and trained on.

    A loader with workers asks for batches long before they are trained on. A loop that observes its batches tells how
    far it is; of one that does not, or whose samples are no batch of the epoch, what was handed out is all that is
    known.

    Attributes:
        epoch: its number.
        begun: an iteration has entered it.
        handed: batches handed out.
        seen: batches up to the last one observed.
        follows: batches of the epoch before this one were observed.
        matched: batches of this epoch were.
        strangers: samples were observed, as many as a batch may have, that are none of its batches.
    """

    epoch: int = 0
    begun: bool = False
    handed: int = 0
    seen: int = 0
    follows: bool = False
    matched: bool = False
    strangers: bool = False

    def enter(self) -> int:
        """The batch that an iteration begins with: the first of the next epoch, or where a state was taken."""
        if self.begun:
            self.epoch, self.seen, self.follows = self.epoch + 1, 0, self.matched
        self.begun, self.matched, self.strangers, self.handed = True, False, False, self.seen
        return self.seen

    def follow(self, index: Tensor, plan: Tensor, size: int) -> bool:
        """Whether these are the samples of a batch that was handed out, or of some in a row: the loop has come so far.

        Args:
            index: samples of all ranks, on the CPU.
            plan: of this epoch, one batch after another.
            size: of a batch.
        """
        firsts = plan[::size][self.seen : self.handed]
        for number in (firsts == index[:1]).nonzero().flatten().tolist() if len(index) else ():
            start = (self.seen + number) * size
            stop = start + len(index)
            whole = len(index) % size == 0 or stop == len(plan)
            if whole and stop <= self.handed * size and torch.equal(index, plan[start:stop]):
                self.seen, self.matched = -(-stop // size), True
                return True
        self.strangers |= 0 < len(index) <= size
        return False

    def next(self, count: int) -> tuple[int, int]:
        """Epoch and batch with which a loop goes on that stops now; ``count`` batches are an epoch."""
        batch = self.seen if self.follows or self.matched or not self.begun else self.handed
        return (self.epoch, batch) if batch < count else (self.epoch + 1, 0)
