"""What batch samplers with a feature bank share: epochs, ranks, plans made ahead, states in the middle of an epoch."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from compopt import checks, draws, inputs
from compopt.ranks import ProcessGroup, Ranks
from compopt.samplers.bank import FeatureBank
from compopt.samplers.planner import Planner

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]


class BankSampler(Sampler[list[int]]):
    """Batches chosen by the newest features of every sample; random ones until every sample has features.

    The plan of an epoch is a sequence of global batches. It is made in a thread while the epoch before it runs, from
    the features observed until then, and from the bank as it is when an epoch begins whose plan was not made ahead
    (the first after the bank has filled; ``background=False``). Each iteration is an epoch; the first one after
    :meth:`load_state_dict` goes on where the state was taken.

    Subclasses define :meth:`work`, :meth:`do` and :meth:`assemble`.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        tau: float,
        seed: int,
        labels: Tensor | None,
        background: bool,
        lead: float,
        dtype: torch.dtype,
        offload: str | None,
        process_group: ProcessGroup | None,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        self.n, self.batch_size = checks.count("n", n), checks.count("batch_size", batch_size)
        if not 2 <= self.batch_size <= self.n:
            raise ValueError(f"batch_size must be between 2 and n={n}, got {batch_size}; a batch needs negatives")
        checks.positive("tau", tau)
        if checks.whole("seed", seed) >= 1 << 63:
            raise ValueError(f"seed must be below 2^63, got {seed}")
        checks.flag("background", background)
        checks.unit_interval("lead", lead)
        self.tau, self.seed, self.background, self.lead = float(tau), int(seed), background, float(lead)
        self.labels = None if labels is None else inputs.check_vector("labels", labels, self.n).cpu().long()
        self.bank = FeatureBank(self.n, dtype, offload)
        self._place(process_group, rank, world_size)
        self.epoch = 0
        self._planner = Planner(self, self._ranks)
        self._begun = self._follows = self._refreshed = False
        self._start = self._handed = self._seen = 0

    def _place(self, group: ProcessGroup | None, rank: int | None, world_size: int | None) -> None:
        """Who this rank is."""
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank and world_size go together, got rank={rank} and world_size={world_size}")
        if rank is None or world_size is None:
            self._ranks = Ranks(group)
            self.rank, self.world_size = self._ranks.rank, self._ranks.size
        else:
            if group is not None:
                raise ValueError("give process_group or rank and world_size, not both")
            self._ranks = Ranks.alone()
            self.rank, self.world_size = checks.whole("rank", rank), checks.count("world_size", world_size)
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size={self.world_size}, got {self.rank}")
        if self.batch_size < self.world_size:
            raise ValueError(
                f"batch_size={self.batch_size} counts over all ranks and must be at least world_size={self.world_size}"
            )

    # -- what subclasses define ------------------------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""

    @abstractmethod
    def work(self, epoch: int) -> list[Any]:
        """The plan's independent pieces, each of bounded size; ranks share them out."""

    @abstractmethod
    def do(self, piece: Any) -> Tensor:
        """One piece: a CPU tensor. Runs in a thread; reads the bank and nothing that training changes."""

    @abstractmethod
    def assemble(self, epoch: int, pieces: list[Any], results: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The samples of all batches, one batch after the other, and metrics."""

    def config(self) -> dict[str, Any]:
        """The arguments that a state must share with the sampler that loads it."""
        labels = None if self.labels is None else hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()[:16]
        values = {name: getattr(self, name) for name in ("n", "batch_size", "tau", "seed")}
        return {**values, "labels": labels, "dtype": str(self.bank.dtype)}

    # -- randomness: functions of seed, epoch and purpose ------------------------------------------------------------

    def draw(self, *counters: int) -> int:
        """63 random bits that belong to the counters."""
        state = self.seed
        for counter in counters:
            state = draws.scramble(state + counter + 1)
        return draws.scramble(state) >> 1

    def permutation(self, count: int, *counters: int) -> Tensor:
        """A random permutation that belongs to the counters, ``(count,)``."""
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.draw(*counters)))

    def random_batches(self, count: int, epoch: int, first: Tensor | None = None) -> Tensor:
        """``count`` full batches from as many permutations of the samples as it takes: ``(count, B)``.

        Args:
            count: number of batches.
            epoch: whose.
            first: True for samples that the first permutation begins with, ``(n,)``.
        """
        size = self.n // self.batch_size * self.batch_size
        orders = []
        for number in range(math.ceil(count * self.batch_size / size)):
            order = self.permutation(self.n, epoch, number)
            if first is not None and number == 0:
                order = torch.cat([order[first[order]], order[~first[order]]])
            orders.append(order[:size])
        return torch.cat(orders).view(-1, self.batch_size)[:count]

    def random_plan(self, epoch: int, unseen: Tensor) -> Tensor:
        """Before the bank is filled. Samples without features come first, so that those left out get theirs."""
        return self.random_batches(len(self), epoch, first=unseen).flatten()

    # -- epochs ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        plan, start = self._begin()
        epoch, count = self.epoch, len(self)
        for number in range(start, count):
            if self.epoch == epoch:  # a later iteration may have begun
                self._handed = number + 1
                if self._refreshed and not self._follows:
                    self._look_ahead(self._handed)
            yield self._own(plan, number).tolist()

    def _begin(self) -> tuple[Tensor, int]:
        """Enter an epoch, or go on with a loaded one."""
        if self._begun:
            self.epoch, self._start = self.epoch + 1, 0
        self._begun, start = True, self._start
        self._handed = self._seen = start
        return self._planner.of(self.epoch), start

    @property
    def metrics(self) -> dict[str, float]:
        """Of the newest plan and of this epoch."""
        return self._planner.metrics

    def _look_ahead(self, position: int) -> None:
        """Begin with the next epoch's plan once so many batches of this one are done."""
        if self.background and position >= math.ceil((1 - self.lead) * len(self)):
            self._planner.ahead(self.epoch + 1)

    def _part(self, batch: Tensor, rank: int) -> Tensor:
        low, high = (r * len(batch) // self.world_size for r in (rank, rank + 1))
        return batch[low:high]

    def _batch(self, plan: Tensor, number: int) -> Tensor:
        return plan[number * self.batch_size : (number + 1) * self.batch_size]

    def _own(self, plan: Tensor, number: int) -> Tensor:
        """This rank's part of a batch."""
        return self._part(self._batch(plan, number), self.rank)

    # -- features ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, index: Tensor, z1: Tensor, z2: Tensor) -> None:
        """Keep the features that the training loop has computed; call it once per batch.

        It also tells how far the loop is (a loader with workers asks for batches long before they are trained on), so
        that a state taken between two batches continues with the second.

        Args:
            index: data-set positions, ``(b,)`` integers, on the CPU (elsewhere they are waited for). With K ranks of
                a process group those of this rank's part; with ``rank=`` and ``world_size=`` of the whole batch.
            z1, z2: features, ``(b, d)``, normalised here; no gradient is kept. Rows that are not finite are skipped.

        Communicates, with K ranks: one all-gather of ``4 d`` bytes per sample in half precision, and two of integers.

        Raises:
            RuntimeError: forming the next epoch's batches failed in its thread.
        """
        self._planner.collect(wait=False)
        inputs.check_features(z1, z2, least=0)
        index = inputs.check_vector("index", index, len(z1)).cpu()
        inputs.check_range("index", index, self.n)
        self._write(index, z1, z2)
        if self._follow(index):
            self._look_ahead(self._seen)

    def _write(self, index: Tensor, z1: Tensor, z2: Tensor) -> None:
        """Features of this rank's samples, on all ranks."""
        rows = self.bank.rounded(z1, z2)
        if self._ranks.size > 1:
            sizes = self._ranks.gather_host(torch.tensor(len(index))).tolist()
            index, rows = self._ranks.gather([index.to(rows.device), rows], sizes)
        self.bank.write(index, rows)

    def _follow(self, index: Tensor) -> bool:
        """Whether these are the samples of a batch that was handed out; then the loop has come so far."""
        plan, alone = self._planner.plans.get(self.epoch), self._ranks.size < self.world_size
        if plan is None or not self._begun:
            return False
        for number in range(self._seen, self._handed):
            if torch.equal(index, self._batch(plan, number) if alone else self._own(plan, number)):
                self._seen, self._follows = number + 1, True
                return True
            if alone and len(index) and torch.equal(index, self._own(plan, number)):
                raise ValueError(
                    f"index holds this rank's {len(index)} samples; with rank= and world_size= pass those of the "
                    f"whole batch, or build the sampler with process_group="
                )
        return False

    @torch.no_grad()
    def refresh(self, encode: Encode, chunk_size: int = 1024) -> None:
        """Fill the bank by encoding every sample: an alternative to :meth:`observe`, before an epoch begins.

        A plan that was made ahead from older features is given up.

        Args:
            encode: ``encode(index (b,)) -> (z1, z2)``, each ``(b, d)``. With K ranks of a process group each encodes
                its part of every chunk, and gets an index of one sample where it has none.
            chunk_size: samples at a time.
        """
        checks.count("chunk_size", chunk_size)
        self._give_up()
        for index in torch.arange(self.n).split(chunk_size):
            own = self._ranks.part(len(index)).of(index)
            z1, z2 = (z[: len(own)] for z in encode(own if len(own) else index[:1]))
            inputs.check_features(z1, z2, least=0)
            inputs.check_vector("index", own, len(z1))
            self._write(own, z1, z2)
        self._refreshed = True

    def _give_up(self) -> None:
        """Forget what was planned ahead; an epoch that has been entered keeps its plan."""
        entered = self._begun or self._start > 0
        self._planner.give_up(self.epoch if entered else self.epoch - 1)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on, the same on every rank: bank, plans, epoch and position.

        The position is behind the last batch observed, or, in a loop that observes none, the last one handed out.
        Waits for a plan that is being made. Communicates nothing.
        """
        self._planner.collect()
        position = self._seen if self._follows else self._handed
        epoch = self.epoch
        if self._begun and position >= len(self):
            epoch, position = epoch + 1, 0
        if not self._begun:
            position = self._start
        return {
            "config": self.config(),
            "epoch": epoch,
            "position": position,
            "plans": {e: plan.clone() for e, plan in self._planner.plans.items() if e >= epoch},
            "follows": self._follows,
            "refreshed": self._refreshed,
            "bank": self.bank.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was taken, with the next iteration, on any number of ranks.

        Raises:
            ValueError: the state is of a sampler with other arguments.
        """
        own, other = self.config(), dict(state_dict["config"])
        for name in {**own, **other}:
            if own.get(name) != other.get(name):
                raise ValueError(f"the state is of a sampler with {name}={other.get(name)!r}, not {own.get(name)!r}")
        self._give_up()
        self.bank.load_state_dict(state_dict["bank"])
        self.epoch, self._start = int(state_dict["epoch"]), int(state_dict["position"])
        self._planner.plans = {int(epoch): plan.clone() for epoch, plan in state_dict["plans"].items()}
        self._follows, self._refreshed = bool(state_dict["follows"]), bool(state_dict["refreshed"])
        self._begun, self._handed, self._seen = False, self._start, self._start

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.config().items() if name != "kind")
        return f"{type(self).__name__}({arguments})"
