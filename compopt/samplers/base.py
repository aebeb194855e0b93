"""Base class of the batch samplers with a feature bank: epochs, plans, ranks, and states within an epoch."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Sampler

from compopt import checks, rng
from compopt.checks import inputs, values
from compopt.checks.context import warn
from compopt.distributed.collectives import OBSERVE, doing
from compopt.distributed.handshake import Handshake, fingerprint
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.samplers.bank import FeatureBank, Offload

PLANNING = "the planning of a sampler's epoch"


def same_label_pairs(labels: Tensor) -> Tensor:
    """Return a mask of the pairs of different samples with equal labels, ``(..., B, B)``."""
    equal = labels[..., :, None] == labels[..., None, :]
    return equal & ~torch.eye(labels.shape[-1], dtype=torch.bool, device=labels.device)


class BankOptions(TypedDict, total=False):
    """Keywords of :class:`BankSampler` that every sampler with a bank accepts, for type checkers."""

    dtype: torch.dtype
    offload: Offload | None
    process_group: ProcessGroup | None


class BankSampler(Sampler[list[int]]):
    """Batch sampler that uses the latest features of all samples.

    Example:
        >>> import compopt
        >>> sampler = compopt.samplers.SpectralBatchSampler(64, batch_size=8)
        >>> isinstance(sampler, compopt.samplers.BankSampler), len(sampler)
        (True, 8)

    Samples without finite features are assigned to batches at random, and the other samples are selected without them.

    The plan of an epoch is a sequence of global batches, computed at the beginning of the epoch. Each iteration is an
    epoch; the first iteration after :meth:`load_state_dict` continues at the position of the state.

    Subclasses define ``__len__``, :meth:`work`, :meth:`do` and :meth:`assemble`. State, communication and metrics: see
    :class:`~compopt.samplers.SpectralBatchSampler`.

    Args:
        n: number of samples; indices are 0 .. n - 1.
        batch_size: ``B``, summed over all ranks.
        tau: temperature of the losses by which batches are selected.
        seed: seed of all random choices, together with the epoch.
        labels: ``(n,)`` integers; samples with equal labels are not each other's negatives.
        dtype: dtype of the bank: float16, bfloat16, float32, float64.
        offload: ``None``: the bank is on the device of the features; ``"cpu"``: in host memory.
        process_group: the ranks that share each global batch; ``None``: the default group, if ``torch.distributed`` is
            initialised.

    Attributes:
        epoch: number of the current epoch.
        metrics: values for the latest plan and this epoch; seconds are those of this rank.

    Raises:
        ValueError: ``batch_size`` < 2 or > ``n`` or less than the number of ranks; ``tau`` <= 0; ``seed`` >= 2^63;
            invalid ``labels``, ``dtype`` or ``offload``.
        TypeError: an argument has the wrong type.
        RuntimeError: in an iteration, if another rank failed to compute its part of the plan. The next iteration tries
            again.

    Warns:
        UserWarning: at the beginning of an epoch, if features were not finite, if samples never had finite features, or
            if none of the observed samples of the previous epoch formed one of its batches.
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
    ) -> None:
        self.n, self.batch_size = checks.positive_int("n", n), checks.positive_int("batch_size", batch_size)
        if not 2 <= self.batch_size <= self.n:
            raise ValueError(f"batch_size must be between 2 and n={n}, got {batch_size}; a batch needs negatives")
        checks.positive("tau", tau)
        self.tau, self.seed = float(tau), checks.seed(seed)
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
        # Position. A loader with workers requests batches long before they are trained on. Observed batches show the
        # position of the loop; for a loop without observe() only the number of batches handed out is known.
        self.epoch = 0
        self._begun = False  # an iteration has entered the epoch
        self._yielded = self._seen = 0  # batches handed out; batches up to the last one observed
        self._matched_before = self._matched = False  # batches of the previous or this epoch were observed
        self._unmatched = self._warned_unmatched = False  # observed samples formed no batch of this epoch
        # Epoch -> samples of all its batches, concatenated.
        self._plans: dict[int, Tensor] = {}
        self.metrics: dict[str, float] = {}
        self._warned_of_unseen = False

    # -- defined by subclasses -------------------------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches per epoch, the same on every rank."""

    @abstractmethod
    def work(self, epoch: int) -> list[Any]:
        """Return independent pieces of an epoch's plan, each of bounded size, to be divided over ranks."""

    @abstractmethod
    def do(self, piece: Any) -> Tensor:
        """Compute one ``piece``; return a CPU tensor of any shape."""

    @abstractmethod
    def assemble(self, epoch: int, pieces: list[Any], results: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the plan of an epoch, the concatenated samples of its batches, ``(samples,)`` int64, and metrics."""

    def read(self, samples: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return both features, ``(..., d)``, and labels (or ``None``) of samples ``(...)``, on the bank's device."""
        z1, z2 = self.bank.read(samples)
        return z1, z2, None if self.labels is None else self.labels[samples].to(z1.device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that must be equal for a state and the sampler that loads it."""
        labels = None if self.labels is None else hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()[:16]
        values = {name: getattr(self, name) for name in ("n", "batch_size", "tau", "seed")}
        return {**values, "labels": labels, "dtype": str(self.bank.dtype)}

    @cached_property
    def _fingerprint(self) -> int:
        """Fingerprint of the arguments; a property because :meth:`config` hashes all labels."""
        return fingerprint(self.config())

    def random_plan(self, epoch: int, missing: Tensor) -> Tensor:
        """Return random batches, ``(samples,)`` int64; samples never observed, ``missing`` ``(n,)``, come first."""
        return self.random_batches(len(self), epoch, first=missing).flatten()

    # -- random orders, functions of the seed and of counters --------------------------------------------------------

    def draw(self, *counters: int) -> int:
        """Return 63 random bits, a function of the seed and the counters."""
        return rng.fold(self.seed, *counters) >> 1

    def permutation(self, count: int, *counters: int) -> Tensor:
        """Return a random permutation, ``(count,)``, a function of the seed and the counters."""
        return rng.permutation(count, self.seed, *counters)

    def random_batches(self, count: int, epoch: int, first: Tensor | None = None) -> Tensor:
        """Return ``count`` full batches from as many permutations of the samples as necessary, ``(count, B)``.

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
                self._yielded = number + 1
            batch = plan[number * self.batch_size : (number + 1) * self.batch_size]
            yield self._ranks.own(batch).tolist()

    def _begin(self) -> Tensor:
        """Begin the next epoch, or continue a loaded one, and return its plan."""
        self._ranks.check_alive()
        if self._unmatched and not (self._matched or self._warned_unmatched):
            self._warned_unmatched = True
            warnings.warn(
                "the samples passed to observe() in this epoch form no batch of it (was the loader sharded again, or "
                "were batches divided or reordered?): features are stored, but the position in the epoch is unknown, "
                "and state_dict() uses the number of batches yielded",
                stacklevel=3,
            )
        if self._begun:  # otherwise continue the loaded epoch, or repeat the epoch for which planning failed
            self.epoch, self._seen, self._matched_before = self.epoch + 1, 0, self._matched
        self._matched, self._unmatched, self._yielded = False, False, self._seen
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
        # an enclosing autocast would round similarities and change the selection
        with torch.no_grad(), torch.autocast(self.bank.rows.device.type, enabled=False), doing(PLANNING):
            # agree() raises the error of one rank on all ranks, so that no rank waits in the exchange
            own = ranks.agree(lambda: [self.do(piece) for piece in pieces[ranks.rank :: ranks.size]])
            everyone = ranks.gather_objects(own)
        results = [everyone[number % ranks.size][number // ranks.size] for number in range(len(pieces))]
        plan, metrics = self.assemble(self.epoch, pieces, results)
        self.metrics.update(metrics, plan_seconds=time.perf_counter() - started)
        return plan

    # -- features ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, index: Tensor, z1: Tensor, z2: Tensor) -> None:
        """Store the features that the training loop has computed; call it once per batch.

        The call also marks the position of the loop, since a loader with workers requests batches long before they are
        trained on. A state that is taken between two batches continues with the second.

        Args:
            index: data-set positions, ``(b,)`` integers, preferably on the CPU, since the call waits for an index on a
                device; with K ranks the positions of this rank's part.
            z1, z2: features, ``(b, d)``. They are detached and normalised. Rows that are not finite are skipped, and a
                warning at the beginning of the next epoch reports their number.

        Communicates, with K ranks: one all-gather of ``4 d`` bytes per sample in half precision, and one of integers.

        Raises:
            RuntimeError: the arguments of another rank were invalid.
            IndexError: a position is outside ``0 .. n - 1``.
            TypeError, ValueError: a type or shape is wrong, or ``d`` has changed.
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
        """Write features of this rank's samples to the banks of all ranks; return the samples of all ranks."""
        rows = self.bank.rounded(z1, z2)
        samples = self._handshake.exchange({"index": index}, {"width": rows.shape[2], "sampler": self._fingerprint})
        self.bank.write(samples.keys["index"], self._ranks.gather([rows], samples.sizes)[0])
        return samples.keys["index"]

    def _follow(self, index: Tensor, plan: Tensor) -> None:
        """Update the position of the loop if the samples are those of one or several consecutive batches handed out."""
        size = self.batch_size
        # several batches of an accumulation window may be observed together, and earlier batches may be skipped
        firsts = plan[::size][self._seen : self._yielded]
        for number in (firsts == index[:1]).nonzero().flatten().tolist() if len(index) else ():
            start = (self._seen + number) * size
            stop = start + len(index)
            whole = len(index) % size == 0 or stop == len(plan)
            if whole and stop <= self._yielded * size and torch.equal(index, plan[start:stop]):
                self._seen, self._matched = -(-stop // size), True
                return
        self._unmatched |= 0 < len(index) <= size

    @torch.no_grad()
    def refresh(self, encode: Callable[[Tensor], tuple[Tensor, Tensor]], chunk_size: int = 1024) -> None:
        """Fill the bank by encoding all samples before an epoch begins, as an alternative to :meth:`observe`.

        Args:
            encode: ``encode(index (b,)) -> (z1, z2)``, each ``(b, d)``. With K ranks each rank encodes its part of
                every chunk; a rank with an empty part encodes one sample, the result of which is discarded.
            chunk_size: samples per call of ``encode``, summed over all ranks.

        Raises:
            RuntimeError: another rank failed.
            TypeError, ValueError: ``encode`` does not return a pair of features, or ``d`` has changed.

        Communicates, with K ranks: as :meth:`observe`, once per chunk.
        """
        checks.positive_int("chunk_size", chunk_size)
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
        """Return the state, the same on every rank: bank, plans, epoch and position.

        The position is after the last batch observed or, in a loop that observes none, after the last batch handed out.
        If the loop left an epoch early, the position is within that epoch, whereas the run itself would continue with
        the next epoch. Communicates nothing.
        """
        follows = self._matched_before or self._matched
        epoch, batch = self.epoch, self._seen if follows or not self._begun else self._yielded
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

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit, with a ``TypeError`` or ``ValueError``; change nothing."""
        values.entries("state_dict", state_dict, ("config", "epoch", "batch", "follows", "plans", "bank"))
        values.mapping("config", state_dict["config"])
        own, other = self.config(), dict(state_dict["config"])
        for name in {**own, **other}:
            if not values.equal(own.get(name), other.get(name)):
                raise ValueError(f"the state is of a sampler with {name}={other.get(name)!r}, not {own.get(name)!r}")
        values.integer("epoch", state_dict["epoch"], 0, values.INT64_MAX)
        values.integer("batch", state_dict["batch"], 0, len(self) - 1)
        checks.flag("follows", state_dict["follows"])
        values.mapping("plans", state_dict["plans"])
        sizes = [len(self) * self.batch_size]
        if math.ceil(self.n / self.batch_size) == len(self):
            sizes.append(self.n)  # the last batch may be smaller
        for epoch, plan in state_dict["plans"].items():
            values.integer("the epoch of a plan", epoch, 0, values.INT64_MAX)
            size = next((size for size in sizes if getattr(plan, "shape", None) == (size,)), sizes[-1])
            expected = {"samples": torch.empty(size, dtype=torch.int64, device="meta")}
            values.tensors(f"plans[{epoch}]", {"samples": plan}, expected)
            values.bounded(f"plans[{epoch}]", {"samples": plan}, {"samples": ""}, self.n)
        self.bank.check_state(state_dict["bank"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; the next iteration continues at its position, on any number of ranks. No communication.

        Raises:
            TypeError, ValueError: the state is that of a sampler with other arguments, or not one that
                :meth:`state_dict` returns: entries are missing, positions lie outside the data set or the epoch.
                Nothing is changed in these cases.
        """
        self.check_state(state_dict)
        plans = {int(epoch): plan.to("cpu", copy=True) for epoch, plan in state_dict["plans"].items()}
        self.bank.load_state_dict(state_dict["bank"])
        self.epoch, self._begun = int(state_dict["epoch"]), False
        self._yielded = self._seen = int(state_dict["batch"])
        self._matched_before, self._matched, self._unmatched = state_dict["follows"], False, False
        self._plans = plans

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.config().items() if name != "kind")
        return f"{type(self).__name__}({arguments})"
