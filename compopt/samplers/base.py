"""Base of the batch samplers with a feature bank: epochs, plans, ranks, and states in the middle of an epoch."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Sampler

from compopt import checks, rng
from compopt.checks import inputs
from compopt.checks.context import warn
from compopt.distributed.collectives import OBSERVE, doing
from compopt.distributed.handshake import Handshake
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.samplers.bank import FeatureBank, Offload

PLANNING = "the planning of a sampler's epoch"


def twins(labels: Tensor) -> Tensor:
    """True where two different samples have one label, ``(..., B, B)``."""
    equal = labels[..., :, None] == labels[..., None, :]
    return equal & ~torch.eye(labels.shape[-1], dtype=torch.bool, device=labels.device)


class BankOptions(TypedDict, total=False):
    """Keywords of :class:`BankSampler` that every sampler with a bank takes; type checkers read them here."""

    dtype: torch.dtype
    offload: Offload | None
    process_group: ProcessGroup | None
    background: bool | None
    lead: float | None


class BankSampler(Sampler[list[int]]):
    """Batches chosen by the newest features of every sample; random ones until every sample was observed.

    A sample whose features have never been finite is dealt to a batch at random; the others are chosen without it.

    The plan of an epoch is a sequence of global batches, made when the epoch begins. Each iteration is an epoch; the
    first one after :meth:`load_state_dict` goes on where the state was taken.

    Subclasses define ``__len__``, :meth:`work`, :meth:`do` and :meth:`assemble`. State, communication and metrics: see
    :class:`~compopt.samplers.SpectralBatchSampler`.

    Args:
        n: number of samples; indices are 0 .. n - 1.
        batch_size: ``B``, over all ranks.
        tau: temperature of the losses by which batches are chosen.
        seed: seed of all random choices, together with the epoch.
        labels: ``(n,)`` integers; samples with equal labels are not each other's negatives.
        dtype: dtype of the bank: float16, bfloat16, float32, float64.
        offload: ``None``: the bank is on the features' device; ``"cpu"``: in host memory.
        process_group: the ranks that share each global batch; ``None``: the default group, if ``torch.distributed`` is
            initialised.
        background, lead: deprecated, without effect.

    Attributes:
        epoch: number of the epoch that was entered last.
        metrics: figures of the newest plan and of this epoch; seconds are those of this rank.

    Raises:
        ValueError: batch_size < 2 or > n, tau <= 0, a seed of 2^63 or more, bad labels; fewer samples in a batch than
            ranks; another dtype or ``offload``.
        TypeError: an argument of the wrong type; ``labels`` and ``group`` together.
        RuntimeError: at an iteration: another rank could not make its part of the plan. The next iteration tries again.

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
        tau: float,
        seed: int = 0,
        labels: Tensor | None = None,
        dtype: torch.dtype = torch.float16,
        offload: Offload | None = None,
        process_group: ProcessGroup | None = None,
        background: bool | None = None,
        lead: float | None = None,
    ) -> None:
        if background is not None or lead is not None:
            text = "background= and lead= have no effect: batches are formed when an epoch begins; leave them out"
            warnings.warn(text, DeprecationWarning, stacklevel=4)
        self.n, self.batch_size = checks.count("n", n), checks.count("batch_size", batch_size)
        if not 2 <= self.batch_size <= self.n:
            raise ValueError(f"batch_size must be between 2 and n={n}, got {batch_size}; a batch needs negatives")
        checks.positive("tau", tau)
        if checks.whole("seed", seed) >= 1 << 63:
            raise ValueError(f"seed must be below 2^63, got {seed}")
        self.tau, self.seed = float(tau), int(seed)
        if labels is not None:
            labels = inputs.check_vector("labels", labels, self.n, "a data set of {} samples").cpu().long().clone()
        self.labels = labels
        self.bank = FeatureBank(self.n, dtype, offload)
        self._ranks = Ranks(process_group)
        self.rank, self.world_size = self._ranks.rank, self._ranks.size
        if self.batch_size < self.world_size:
            raise ValueError(
                f"batch_size={self.batch_size} counts over all ranks and must be at least world_size={self.world_size}"
            )
        self._handshake = Handshake(self._ranks, OBSERVE)
        # Position. A loader with workers asks for batches long before they are trained on: a loop that observes its
        # batches tells how far it is; of any other loop only the number of batches handed out is known.
        self.epoch = 0
        self._begun = False  # an iteration has entered the epoch
        self._handed = self._seen = 0  # batches handed out; batches up to the last one observed
        self._follows = self._matched = False  # batches of the epoch before, or of this one, were observed
        self._strangers = self._warned_of_strangers = False  # samples were observed that are no batch of this epoch
        # Epoch -> samples of all its batches, one batch after the other; states of 0.2 also have the next epoch's.
        self._plans: dict[int, Tensor] = {}
        self.metrics: dict[str, float] = {}
        self._warned_of_unseen = False

    # -- what subclasses define ------------------------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""

    @abstractmethod
    def work(self, epoch: int) -> list[Any]:
        """Independent pieces of an epoch's plan, each of bounded size; ranks divide them between themselves."""

    @abstractmethod
    def do(self, piece: Any) -> Tensor:
        """Compute one ``piece``: a CPU tensor of any shape."""

    @abstractmethod
    def assemble(self, epoch: int, pieces: list[Any], results: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Form the plan of an epoch, the samples of its batches in turn, ``(samples,)`` int64; and metrics."""

    def read(self, samples: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features ``(..., d)``, twice, and labels ``(...)`` or ``None`` of samples ``(...)``, on the bank's device."""
        z1, z2 = self.bank.read(samples)
        return z1, z2, None if self.labels is None else self.labels[samples].to(z1.device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that a state must share with the sampler that loads it."""
        labels = None if self.labels is None else hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()[:16]
        values = {name: getattr(self, name) for name in ("n", "batch_size", "tau", "seed")}
        return {**values, "labels": labels, "dtype": str(self.bank.dtype)}

    def random_plan(self, epoch: int, missing: Tensor) -> Tensor:
        """Plan of random batches, ``(samples,)`` int64; those never observed, ``missing`` ``(n,)``, come first."""
        return self.random_batches(len(self), epoch, first=missing).flatten()

    # -- random orders, functions of the seed and of counters --------------------------------------------------------

    def draw(self, *counters: int) -> int:
        """63 random bits that belong to the counters."""
        return rng.fold(self.seed, *counters) >> 1

    def permutation(self, count: int, *counters: int) -> Tensor:
        """Random permutation that belongs to the counters, ``(count,)``."""
        return rng.permutation(count, self.seed, *counters)

    def random_batches(self, count: int, epoch: int, first: Tensor | None = None) -> Tensor:
        """``count`` full batches from as many permutations of the samples as it takes: ``(count, B)``.

        The first permutation begins with the samples that are True in ``first``, ``(n,)``.
        """
        size = self.n // self.batch_size * self.batch_size
        orders = []
        for number in range(math.ceil(count * self.batch_size / size)):
            order = self.permutation(self.n, epoch, number)
            if first is not None and number == 0:
                order = torch.cat([order[first[order]], order[~first[order]]])
            orders.append(order[:size])
        return torch.cat(orders).view(-1, self.batch_size)[:count]

    # -- epochs ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        plan, epoch = self._begin(), self.epoch
        for number in range(self._seen, len(self)):
            if self.epoch == epoch:  # a later iteration may have begun
                self._handed = number + 1
            batch = plan[number * self.batch_size : (number + 1) * self.batch_size]
            yield self._ranks.own(batch).tolist()

    def _begin(self) -> Tensor:
        """Enter the next epoch, or a loaded one where its state was taken, and return its plan."""
        self._ranks.check_alive()
        if self._strangers and not (self._matched or self._warned_of_strangers):
            self._warned_of_strangers = True
            warnings.warn(
                "all that observe() was given in this epoch was no batch of it (a loader sharded once more, parts of "
                "batches, another order?): features are kept, but the sampler does not know how far the loop is, and a "
                "state counts the batches handed out instead",
                stacklevel=3,
            )
        if self._begun:  # otherwise this iteration goes on in the epoch that was loaded, or whose plan failed
            self.epoch, self._seen, self._follows = self.epoch + 1, 0, self._matched
        self._matched, self._strangers, self._handed = False, False, self._seen
        self._begun = False  # if the plan fails, the next iteration tries this epoch again
        started = time.perf_counter()
        self._plans = {epoch: plan for epoch, plan in self._plans.items() if epoch >= self.epoch}
        if self.epoch not in self._plans:
            unseen, missing = self.bank.unseen(), self.bank.missing()
            self.metrics["unseen"] = int(unseen.sum())
            if missing.any():
                self._plans[self.epoch] = self.random_plan(self.epoch, missing)
            else:
                samples = unseen.nonzero().flatten().tolist()
                if samples and not self._warned_of_unseen:
                    self._warned_of_unseen = True
                    warn(
                        f"{len(samples)} of n={self.n} samples have never had finite features, the first is "
                        f"{samples[0]}; they are dealt to batches at random, and the others are chosen without them: "
                        f"look at these samples"
                    )
                self._plans[self.epoch] = self._make_plan()
        self._begun = True
        self.metrics["wait_seconds"] = time.perf_counter() - started
        return self._plans[self.epoch]

    def _make_plan(self) -> Tensor:
        """Compute the plan of this epoch; rank r of K computes the pieces r, r + K, ..."""
        assert self.bank.rows is not None
        started, ranks = time.perf_counter(), self._ranks
        pieces = self.work(self.epoch)
        # autocast of the loop around it would round similarities, and with them the choice
        with torch.no_grad(), torch.autocast(self.bank.rows.device.type, enabled=False), doing(PLANNING):
            # an error of one rank is raised on all, so that none waits in the exchange
            own = ranks.agree(lambda: [self.do(piece) for piece in pieces[ranks.rank :: ranks.size]])
            everyone = ranks.gather_objects(own)
        results = [everyone[number % ranks.size][number // ranks.size] for number in range(len(pieces))]
        plan, metrics = self.assemble(self.epoch, pieces, results)
        self.metrics.update(metrics, plan_seconds=time.perf_counter() - started)
        return plan

    # -- features ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, index: Tensor, z1: Tensor, z2: Tensor) -> None:
        """Keep the features that the training loop has computed; call it once per batch.

        It also tells how far the loop is (a loader with workers asks for batches long before they are trained on), so
        that a state taken between two batches continues with the second.

        Args:
            index: data-set positions, ``(b,)`` integers, on the CPU (elsewhere they are waited for); with K ranks those
                of this rank's part.
            z1, z2: features, ``(b, d)``, normalised here; no gradient is kept. Rows that are not finite are left out,
                and a warning counts them when the next epoch begins.

        Communicates, with K ranks: one all-gather of ``4 d`` bytes per sample in half precision, and one of integers.

        Raises:
            RuntimeError: another rank refused its arguments.
            IndexError: a position outside ``0 .. n - 1``.
            TypeError, ValueError: wrong types or shapes, another ``d`` than before.
        """
        self._ranks.check_alive()
        with self._handshake.guard():
            index = self._checked(index, z1, z2)
        index = self._write(index, z1, z2)
        plan = self._plans.get(self.epoch)
        if plan is not None and self._begun:
            self._follow(index, plan)

    def _checked(self, index: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
        inputs.check_features(z1, z2, least=0)
        index = inputs.check_vector("index", index, len(z1)).cpu().long()
        inputs.check_range("index", index, self.n)
        self.bank.check_width(z1.shape[1])
        return index

    def _write(self, index: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
        """Write features of this rank's samples into the banks of all ranks; return the samples of all."""
        rows = self.bank.rounded(z1, z2)
        samples = self._handshake.exchange({"index": index}, {"width": rows.shape[2]})
        self.bank.write(samples.keys["index"], self._ranks.gather([rows], samples.sizes)[0])
        return samples.keys["index"]

    def _follow(self, index: Tensor, plan: Tensor) -> None:
        """Note how far the loop is if these are the samples of one batch handed out, or of several in a row."""
        size = self.batch_size
        # an accumulation window may be observed at once, and batches before it may have been skipped
        firsts = plan[::size][self._seen : self._handed]
        for number in (firsts == index[:1]).nonzero().flatten().tolist() if len(index) else ():
            start = (self._seen + number) * size
            stop = start + len(index)
            whole = len(index) % size == 0 or stop == len(plan)
            if whole and stop <= self._handed * size and torch.equal(index, plan[start:stop]):
                self._seen, self._matched = -(-stop // size), True
                return
        self._strangers |= 0 < len(index) <= size

    @torch.no_grad()
    def refresh(self, encode: Callable[[Tensor], tuple[Tensor, Tensor]], chunk_size: int = 1024) -> None:
        """Fill the bank by encoding every sample: an alternative to :meth:`observe`, before an epoch begins.

        Args:
            encode: ``encode(index (b,)) -> (z1, z2)``, each ``(b, d)``. With K ranks each encodes its part of
                every chunk, and gets an index of one sample where it has none.
            chunk_size: samples at a time.

        Raises:
            RuntimeError: another rank failed.
            TypeError, ValueError: what ``encode`` returned is no pair of features, or of another ``d`` than before.

        Communicates, with K ranks: as :meth:`observe`, once per chunk.
        """
        checks.count("chunk_size", chunk_size)
        entered = self._begun or self._seen > 0
        self._plans = {epoch: plan for epoch, plan in self._plans.items() if entered and epoch == self.epoch}
        for index in torch.arange(self.n, device="cpu").split(chunk_size):
            own = self._ranks.own(index)
            asked = own if len(own) else index[:1]
            with self._handshake.guard():
                z1, z2 = encode(asked)
                self._checked(asked, z1, z2)
            self._write(own, z1[: len(own)], z2[: len(own)])

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the rest of the run depends on, the same on every rank: bank, plans, epoch and position.

        The position is behind the last batch observed, or, in a loop that observes none, the last one handed out. After
        an epoch that was left early it is inside that epoch, while the run itself would go on with the next one.
        Communicates nothing.
        """
        follows = self._follows or self._matched
        epoch, batch = self.epoch, self._seen if follows or not self._begun else self._handed
        if batch >= len(self):
            epoch, batch = epoch + 1, 0
        return {
            "config": self.config(),
            "epoch": epoch,
            "batch": batch,
            "follows": follows,
            "plans": {number: plan.clone() for number, plan in self._plans.items() if number >= epoch},
            "bank": self.bank.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was taken, with the next iteration, on any number of ranks. Communicates nothing.

        Raises:
            ValueError: ``state_dict`` is of a sampler with other arguments.
        """
        own, other = self.config(), dict(state_dict["config"])
        for name in {**own, **other}:
            if own.get(name) != other.get(name):
                raise ValueError(f"the state is of a sampler with {name}={other.get(name)!r}, not {own.get(name)!r}")
        self.bank.load_state_dict(state_dict["bank"])
        self.epoch, self._begun = int(state_dict["epoch"]), False
        self._handed = self._seen = int(state_dict["batch"])
        self._follows, self._matched, self._strangers = bool(state_dict["follows"]), False, False
        self._plans = {int(epoch): plan.cpu().clone() for epoch, plan in state_dict["plans"].items()}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.config().items() if name != "kind")
        return f"{type(self).__name__}({arguments})"
