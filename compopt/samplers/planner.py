"""When plans are made: piece by piece, shared out over ranks, in a thread."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from compopt import accelerator
from compopt.distributed import collectives, control
from compopt.distributed.ranks import Ranks
from compopt.estimator.forgotten import warn
from compopt.samplers.background import Job
from compopt.samplers.bank import FeatureBank


class Planned(Protocol):
    """A sampler whose epochs are planned in pieces."""

    bank: FeatureBank

    def random_plan(self, epoch: int, unseen: Tensor) -> Tensor:
        """Random batches, those without features first."""

    def work(self, epoch: int) -> list[Any]:
        """The pieces of an epoch's plan."""

    def do(self, piece: Any) -> Tensor:
        """Compute one piece."""

    def assemble(self, epoch: int, pieces: list[Any], results: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The plan, and its metrics."""


class Planner:
    """The plans of this epoch and the next: made when they are asked for, or ahead of that in a thread.

    A plan's pieces are shared out: rank r of K does those with number r, r + K, ..., and all ranks then share the
    results. The exchange happens in the thread that plans, over a CPU group of its own, so that it meets no collective
    of the training loop. Where torch cannot form that group every rank does all pieces.

    Attributes:
        plans: epoch -> the samples of all its batches, one batch after the other.
        complete: every sample had been observed when the last epoch without a plan began.
        metrics: of the newest plan.
    """

    def __init__(self, sampler: Planned, ranks: Ranks) -> None:
        self._sampler, self._bank = sampler, sampler.bank
        with control.doing("the construction of a sampler"):
            self._group = ranks.new_host_group()
        self._rank, self._size = (ranks.rank, ranks.size) if self._group is not None else (0, 1)
        self.plans: dict[int, Tensor] = {}
        self.metrics: dict[str, float] = {}
        self.complete, self._warned = False, False
        self._job: tuple[int, Job] | None = None  # the epoch that is being planned
        self._failed: dict[int, Job] = {}

    def of(self, epoch: int) -> Tensor:
        """An epoch's plan, now; those of earlier epochs are forgotten.

        Raises:
            RuntimeError: it was made ahead, and failed. Asked again it is made anew.
        """
        started = time.perf_counter()
        self.collect()
        self.plans = {number: plan for number, plan in self.plans.items() if number >= epoch}
        if (failed := self._failed.pop(epoch, None)) is not None:
            failed.result()
        if epoch not in self.plans:
            unseen, missing = self._bank.unseen(), self._bank.missing()
            self.complete = not bool(missing.any())
            self.metrics["unseen"] = int(unseen.sum())
            if self.complete:
                self._warn(unseen)
                plan, metrics = self._run(epoch)
                self._keep(epoch, plan, metrics, time.perf_counter() - started)
            else:
                self.plans[epoch] = self._sampler.random_plan(epoch, missing)
        self.metrics["wait_seconds"] = time.perf_counter() - started
        return self.plans[epoch]

    def _warn(self, unseen: Tensor) -> None:
        """Warn of samples that were observed and have no features all the same."""
        samples = unseen.nonzero().flatten().tolist()
        if self._warned or not samples:
            return
        self._warned = True
        warn(
            f"{len(samples)} of n={len(unseen)} samples have never had finite features, the first is {samples[0]}; "
            f"they are dealt to batches at random, and the others are chosen without them: look at these samples"
        )

    def _keep(self, epoch: int, plan: Tensor, metrics: dict[str, float], seconds: float) -> None:
        self.plans[epoch] = plan
        self.metrics.update(metrics, plan_seconds=seconds)

    def ahead(self, epoch: int) -> None:
        """Begin with an epoch's plan in the thread, unless it is made or begun, or not all samples were observed."""
        if self._job or epoch in self.plans or epoch in self._failed or not self.complete:
            return
        self._bank.hold()  # what is observed from here on waits until the thread has read what it needs
        try:
            ready = self._ready(self._bank.rows)
            self._job = epoch, Job(lambda job: self._run(epoch, job, ready))
        except BaseException:
            self._bank.release()
            raise

    def collect(self, wait: bool = True) -> None:
        """Take the thread's plan; ``wait`` for it. Its error is kept for the epoch that it belongs to."""
        if self._job is None or not (wait or self._job[1].done):
            return
        epoch, job = self._job
        job.wait()
        self._job = None
        self._bank.release()
        if job.cancelled:
            return
        try:
            plan, metrics = job.result()
        except RuntimeError:
            self._failed[epoch] = job
        else:
            self._keep(epoch, plan, metrics, job.seconds)

    def give_up(self, last: int) -> None:
        """Forget what was planned for epochs after ``last``."""
        if self._job is not None:
            self._job[1].cancelled = True
        self.collect()
        self.plans = {epoch: plan for epoch, plan in self.plans.items() if epoch <= last}
        self._failed = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the plans, and neither thread nor process group."""
        self.collect()
        return {**vars(self), "_group": None, "_rank": 0, "_size": 1, "_failed": {}}

    @staticmethod
    def _ready(rows: Tensor | None) -> Any:
        """An event after which the bank's rows on a device are as they are now."""
        return None if rows is None else accelerator.event(rows.device)

    def _run(self, epoch: int, job: Job | None = None, ready: Any = None) -> tuple[Tensor, dict[str, float]]:
        """The plan of an epoch and its metrics; in float32 whatever the loop around it casts to."""
        assert self._bank.rows is not None
        device = self._bank.rows.device
        with torch.no_grad(), accelerator.current(device), torch.autocast(device.type, enabled=False):
            accelerator.wait_event(ready, device)
            pieces = self._sampler.work(epoch)
            own, error = [], None
            try:
                for piece in pieces[self._rank :: self._size]:
                    if job is not None and job.cancelled:
                        break
                    own.append(self._sampler.do(piece))
            except Exception as caught:
                error = caught
            results = self._shared(own, error, len(pieces))
            if job is not None and job.cancelled:
                return torch.empty(0, dtype=torch.int64, device="cpu"), {}
            return self._sampler.assemble(epoch, pieces, results)

    def _shared(self, own: list[Tensor], error: Exception | None, count: int) -> list[Tensor]:
        """Results of all ranks in the order of the pieces; an error of one rank is raised on all."""
        everyone: list[Any] = [(own, None if error is None else f"{type(error).__name__}: {error}")]
        if self._size > 1:  # also after an error: no rank waits for another
            what = "planning an epoch of a sampler"
            everyone = collectives.gather_objects(everyone[0], self._group, self._size, what)
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(everyone):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed: {message}")
        if sum(len(results) for results, _ in everyone) < count:
            return []  # cancelled
        return [everyone[number % self._size][0][number // self._size] for number in range(count)]
