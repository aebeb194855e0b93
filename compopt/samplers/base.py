"""What batch samplers with a feature bank share: epochs, ranks, plans made ahead, states in the middle of an epoch."""

from __future__ import annotations

import hashlib
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from compopt import checks
from compopt.checks import inputs
from compopt.distributed.control import OBSERVE
from compopt.distributed.handshake import Handshake
from compopt.distributed.ranks import Part, ProcessGroup, Ranks
from compopt.samplers.bank import FeatureBank
from compopt.samplers.orders import Orders
from compopt.samplers.planner import Planner
from compopt.samplers.position import Position

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]


class BankSampler(Sampler[list[int]]):
    """Batches chosen by the newest features of every sample; random ones until every sample was observed.

    A sample whose features have never been finite is dealt to a batch at random; the others are chosen without it.

    The plan of an epoch is a sequence of global batches. In a loop that observes its batches it is made in a thread
    while the epoch before it runs, from the features observed until then; otherwise while the epoch before it runs too,
    from the bank as it was when that began; and from the bank as it is when the epoch itself begins if its plan was not
    made ahead (the first after the bank has filled; ``background=False``). Each iteration is an epoch; the first one
    after :meth:`load_state_dict` goes on where the state was taken.

    Subclasses define ``__len__``, :meth:`work`, :meth:`do` and :meth:`assemble`. Arguments, state, communication and
    metrics: as of :class:`~compopt.samplers.SpectralBatchSampler`.

    Raises:
        ValueError: batch_size < 2 or > n, tau <= 0, lead outside (0, 1], a seed of 2^63 or more, bad labels; rank
            without world_size or beside a process_group, fewer samples in a batch than ranks; another dtype or
            ``offload``.
        TypeError: an argument of the wrong type; ``labels`` and ``group`` together.
        RuntimeError: at an iteration: the epoch's plan could not be made in the thread, on this rank or another. The
            next iteration tries again.

    Warns:
        UserWarning: when an epoch begins: features that were not finite; samples that never had finite ones; nothing
            of what was observed in the epoch before was one of its batches.

    Example:
        >>> import compopt
        >>> sampler = compopt.samplers.SpectralBatchSampler(64, batch_size=8)
        >>> isinstance(sampler, compopt.samplers.BankSampler), len(sampler)
        (True, 8)
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        tau: float,
        seed: int,
        labels: Tensor | None,
        group: Tensor | None = None,
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
        labels = inputs.one_name(labels, group)
        if labels is not None:
            labels = inputs.check_vector("labels", labels, self.n, "a data set of {} samples").cpu().long().clone()
        self.labels = labels
        self.bank = FeatureBank(self.n, dtype, offload)
        self.orders = Orders(self.n, self.batch_size, self.seed)
        self._join(process_group, rank, world_size)
        self._planner, self._handshake = Planner(self, self._ranks), Handshake(self._ranks, OBSERVE)
        self._position, self._warned = Position(), False

    def _join(self, group: ProcessGroup | None, rank: int | None, world_size: int | None) -> None:
        """Who this rank is."""
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank and world_size go together, got rank={rank} and world_size={world_size}")
        self._apart = rank is not None  # ranks that do not talk to each other
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
        """The independent pieces of an epoch's plan, each of bounded size; ranks share them out."""

    @abstractmethod
    def do(self, piece: Any) -> Tensor:
        """Compute one ``piece``: a CPU tensor of any shape. Runs in a thread; of what changes reads the bank alone."""

    @abstractmethod
    def assemble(self, epoch: int, pieces: list[Any], results: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The plan of an epoch from its pieces and their results.

        Returns:
            The samples of all batches, one batch after the other, ``(samples,)`` int64; and metrics.
        """

    def read(self, samples: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Both features of ``samples`` and their labels, if there are any, on the bank's device.

        Args:
            samples: data-set positions, of any shape.

        Returns:
            Features ``(..., d)``, twice, float32 or wider, and labels ``(...)``, int64, or ``None``.
        """
        z1, z2 = self.bank.read(samples)
        return z1, z2, None if self.labels is None else self.labels[samples].to(z1.device)

    def config(self) -> dict[str, Any]:
        """The arguments that a state must share with the sampler that loads it."""
        labels = None if self.labels is None else hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()[:16]
        values = {name: getattr(self, name) for name in ("n", "batch_size", "tau", "seed")}
        return {**values, "labels": labels, "dtype": str(self.bank.dtype)}

    def random_plan(self, epoch: int, missing: Tensor) -> Tensor:
        """A plan of random batches, before all samples were observed: ``(samples,)`` int64.

        Args:
            epoch: decides the order, together with the seed.
            missing: samples never observed, ``(n,)`` bool; they come first, so that those left out get their turn.
        """
        return self.orders.batches(len(self), epoch, first=missing).flatten()

    # -- epochs ------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the epoch that was entered last."""
        return self._position.epoch

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of the newest plan and of this epoch, a copy; seconds are those of this rank."""
        return dict(self._planner.metrics)

    def __getstate__(self) -> dict[str, Any]:
        self._planner.collect()  # a copy of the bank must not wait for a plan that the copy does not make
        return dict(vars(self))

    def __iter__(self) -> Iterator[list[int]]:
        self._planner.collect()  # here, before a loader starts its workers: a process that forks had better not compute
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        plan, start = self._begin()
        position, epoch = self._position, self.epoch
        for number in range(start, len(self)):
            if self.epoch == epoch:  # a later iteration may have begun
                position.handed = number + 1
            yield self._own(plan, number).tolist()

    def _begin(self) -> tuple[Tensor, int]:
        """Enter an epoch, or go on with a loaded one."""
        if not self._apart:
            self._ranks.check_alive()
        self._warn()
        start = self._position.enter()
        try:
            plan = self._planner.of(self.epoch)
        except BaseException:
            self._position.begun = False  # the next iteration tries this epoch again
            raise
        if self.background and not self._position.follows:
            self._planner.ahead(self.epoch + 1)
        return plan, start

    def _own(self, plan: Tensor, number: int) -> Tensor:
        """This rank's part of a batch."""
        batch = plan[number * self.batch_size : (number + 1) * self.batch_size]
        return Part.share(len(batch), self.rank, self.world_size).of(batch)

    # -- features ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, index: Tensor, z1: Tensor, z2: Tensor) -> None:
        """Keep the features that the training loop has computed; call it once per batch.

        It also tells how far the loop is (a loader with workers asks for batches long before they are trained on), so
        that a state taken between two batches continues with the second.

        Args:
            index: data-set positions, ``(b,)`` integers, on the CPU (elsewhere they are waited for). With K ranks of
                a process group those of this rank's part; with ``rank=`` and ``world_size=`` of the whole batch.
            z1, z2: features, ``(b, d)``, normalised here; no gradient is kept. Rows that are not finite are left out,
                and a warning counts them when the next epoch begins.

        Communicates, with K ranks: one all-gather of ``4 d`` bytes per sample in half precision, and one of integers.

        Raises:
            RuntimeError: another rank refused its arguments.
            IndexError: a position outside ``0 .. n - 1``.
            TypeError, ValueError: wrong types or shapes, another ``d`` than before; with ``rank=`` an index that is
                only this rank's part of a batch.
        """
        if not self._apart:
            self._ranks.check_alive()
        with self._handshake.guard():
            inputs.check_features(z1, z2, least=0)
            index = inputs.check_vector("index", index, len(z1)).cpu().long()
            inputs.check_range("index", index, self.n)
            self.bank.check_width(z1.shape[1])
            self._check_whole(index)
        index = self._write(index, z1, z2)
        plan = self._planner.plans.get(self.epoch)
        self._planner.collect(wait=False)
        if plan is None or not self._position.begun:
            return
        known = self._position.follow(index, plan, self.batch_size)
        if known and self.background and self._position.seen >= math.ceil((1 - self.lead) * len(self)):
            self._planner.ahead(self.epoch + 1)

    def _check_whole(self, index: Tensor) -> None:
        """Ranks that do not talk to each other must each observe the whole batch."""
        plan, position = self._planner.plans.get(self.epoch), self._position
        if self._apart and self.world_size > 1 and plan is not None and len(index):
            for number in range(position.seen, position.handed):
                if torch.equal(index, self._own(plan, number)):
                    raise ValueError(
                        f"index holds this rank's {len(index)} samples; with rank= and world_size= pass those of the "
                        f"whole batch, or build the sampler with process_group="
                    )

    def _warn(self) -> None:
        """At the end of an epoch: what was observed was none of its batches."""
        if self._position.strangers and not (self._position.matched or self._warned):
            self._warned = True
            warnings.warn(
                "all that observe() was given in this epoch was no batch of it (a loader sharded once more, parts of "
                "batches, another order?): features are kept, but the sampler does not know how far the loop is, and a "
                "state counts the batches handed out instead",
                stacklevel=3,
            )

    def _write(self, index: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
        """Features of this rank's samples, on all ranks; the samples of all."""
        rows = self.bank.rounded(z1, z2)
        samples = self._handshake.exchange({"index": index}, {"width": rows.shape[2]})
        self.bank.write(samples.keys["index"], self._ranks.gather([rows], samples.sizes)[0])
        return samples.keys["index"]

    @torch.no_grad()
    def refresh(self, encode: Encode, chunk_size: int = 1024) -> None:
        """Fill the bank by encoding every sample: an alternative to :meth:`observe`, before an epoch begins.

        A plan that was made ahead from older features is given up.

        Args:
            encode: ``encode(index (b,)) -> (z1, z2)``, each ``(b, d)``. With K ranks of a process group each encodes
                its part of every chunk, and gets an index of one sample where it has none.
            chunk_size: samples at a time.

        Raises:
            RuntimeError: another rank failed.
            TypeError, ValueError: what ``encode`` returned is no pair of features, or of another ``d`` than before.

        Communicates, with K ranks: as :meth:`observe`, once per chunk.
        """
        checks.count("chunk_size", chunk_size)
        self._give_up()
        for index in torch.arange(self.n, device="cpu").split(chunk_size):
            own = self._ranks.part(len(index)).of(index)
            asked = own if len(own) else index[:1]
            with self._handshake.guard():
                z1, z2 = encode(asked)
                inputs.check_features(z1, z2, least=0)
                inputs.check_vector("index", asked, len(z1))
                self.bank.check_width(z1.shape[1])
            self._write(own, z1[: len(own)], z2[: len(own)])

    def _give_up(self) -> None:
        """Forget what was planned ahead; an epoch that has been entered keeps its plan."""
        entered = self._position.begun or self._position.seen > 0
        self._planner.give_up(self.epoch if entered else self.epoch - 1)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on, the same on every rank: bank, plans, epoch and position.

        The position is behind the last batch observed, or, in a loop that observes none, the last one handed out. After
        an epoch that was left early it is inside that epoch, while the run itself would go on with the next one. Waits
        for a plan that is being made. Communicates nothing.
        """
        self._planner.collect()
        epoch, batch = self._position.next(len(self))
        return {
            "config": self.config(),
            "epoch": epoch,
            "batch": batch,
            "follows": self._position.follows or self._position.matched,
            "complete": self._planner.complete,
            "plans": {number: plan.clone() for number, plan in self._planner.plans.items() if number >= epoch},
            "bank": self.bank.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was taken, with the next iteration, on any number of ranks. Communicates nothing.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: the state is of a sampler with other arguments.
        """
        own, other = self.config(), dict(state_dict["config"])
        for name in {**own, **other}:
            if own.get(name) != other.get(name):
                raise ValueError(f"the state is of a sampler with {name}={other.get(name)!r}, not {own.get(name)!r}")
        self._give_up()
        self.bank.load_state_dict(state_dict["bank"])
        batch, follows = int(state_dict["batch"]), bool(state_dict["follows"])
        self._position = Position(int(state_dict["epoch"]), handed=batch, seen=batch, follows=follows)
        self._planner.complete = bool(state_dict["complete"])
        self._planner.plans = {int(epoch): plan.cpu().clone() for epoch, plan in state_dict["plans"].items()}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.config().items() if name != "kind")
        return f"{type(self).__name__}({arguments})"
