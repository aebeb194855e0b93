"""Plans made piece by piece, shared out over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from compopt.ranks import Ranks
from compopt.samplers.background import Job

if TYPE_CHECKING:
    from compopt.samplers.base import BankSampler


class Planner:
    """Runs a plan's pieces: rank r of K those with number r, r + K, ..., whose results all ranks then share.

    The exchange happens in the thread that plans, over a CPU group of its own, so that it meets no collective of the
    training loop. Where torch cannot form that group every rank does all pieces.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = ranks.new_host_group()
        self._rank, self._size = (ranks.rank, ranks.size) if self._group is not None else (0, 1)

    @staticmethod
    def ready(rows: Tensor | None) -> Any:
        """An event after which the bank's rows on a device are as they are now."""
        if rows is None or rows.device.type != "cuda":
            return None
        return torch.cuda.current_stream(rows.device).record_event()

    @torch.no_grad()
    def run(
        self, sampler: BankSampler, epoch: int, job: Job | None = None, ready: Any = None
    ) -> tuple[Tensor, dict[str, float]]:
        """The plan of an epoch and its metrics."""
        if ready is not None:
            ready.wait()
        pieces = sampler.work(epoch)
        own, error = [], None
        try:
            for piece in pieces[self._rank :: self._size]:
                if job is not None and job.cancelled:
                    break
                own.append(sampler.do(piece))
        except Exception as caught:
            error = caught
        results = self._shared(own, error, len(pieces))
        if job is not None and job.cancelled:
            return torch.empty(0, dtype=torch.int64), {}
        return sampler.assemble(epoch, pieces, results)

    def _shared(self, own: list[Tensor], error: Exception | None, count: int) -> list[Tensor]:
        """Results of all ranks in the order of the pieces; an error of one rank is raised on all."""
        everyone: list[Any] = [(own, None if error is None else f"{type(error).__name__}: {error}")]
        if self._size > 1:  # also after an error: no rank waits for another
            message, everyone = everyone[0], [None] * self._size
            dist.all_gather_object(everyone, message, group=self._group)
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(everyone):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed: {message}")
        if sum(len(results) for results, _ in everyone) < count:
            return []  # cancelled
        return [everyone[number % self._size][0][number // self._size] for number in range(count)]
