"""Before any computation all ranks learn who brings which samples, or that somebody cannot take part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compopt.distributed.control import CALL, FIRST_LENGTH, Doing
from compopt.distributed.ranks import Ranks

ALONE = nullcontext()  # of one rank, whom nobody waits for
KEYS = ("index", "index2", "labels")
# What must be equal on all ranks, and what to say when it is not.
FACTS = {
    "width": "the feature dimension",
    "dtype": "the features' dtype",
    "depositing": "training mode (1: deposits, 0: eval() or no_grad)",
    "t": "the number of commits so far; every rank must call step() after the same updates",
    "pending": "the number of calls since the last commit",
    "configuration": "configuration: mode, n, dtype, shard, options and sample_groups (fingerprints)",
    "named": "index= (0: none, 1: given)",
    "encode": "encode= (0: none, 1: given)",
    "tau_kind": "tau= (0: none, 1: a number, 2: one per sample, 3: two per sample; 4 more: it requires grad; 8 more: "
    "float64)",
    "tau": "the value of tau= (its bits)",
    "extra": "extra= (0: none, 1: given, 2: with extra_index=)",
}
REFUSED, SIZE, KINDS, PREFETCHED, MORE = range(1, 6)  # after the number of the operation
HEADER = 6 + len(FACTS)
assert HEADER <= FIRST_LENGTH


@dataclass
class Agreement:
    """What the ranks know of each other's samples in one call, in the order of the ranks.

    Attributes:
        keys: ``index`` and, if given, ``index2`` and ``labels``, ``(B,)`` int64.
        sizes: samples of every rank.
        own: where this rank's are.
        more: further candidates of every rank.
        prefetched: number of the prefetched rows that every rank holds for these samples; 0: some do not.
    """

    keys: dict[str, Tensor]
    sizes: list[int]
    own: slice
    more: list[int] = field(default_factory=lambda: [0])
    prefetched: int = 0


class Handshake:
    """One small all-gather of host integers per call: sizes, indices, refusals. With one rank, none.

    The message has room for a fixed number of samples; a larger batch makes all ranks meet once more with room
    for it, which happens at the first call and then never again.

    Args:
        ranks: who meet.
        operation: what for.
    """

    def __init__(self, ranks: Ranks, operation: str = CALL) -> None:
        self.ranks, self.operation = ranks, operation

    def guard(self) -> AbstractContextManager[None]:
        """Wrap the work of this rank before the exchange: if it raises, the other ranks raise too and do not wait."""
        return ALONE if self.ranks.size == 1 else self._guard()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._refuse(error)
            raise

    def _refuse(self, error: Exception) -> None:
        """Tell the others; what they are doing instead, or that they do not come, is less than the error itself."""
        message = self.ranks.blank()
        message[REFUSED] = 1
        try:
            self.ranks.open(message, Doing(self.operation))
        except RuntimeError as other:
            raise error from other

    def exchange(
        self, keys: Mapping[str, Tensor], facts: Mapping[str, int], prefetched: int = 0, more: int = 0
    ) -> Agreement:
        """Everybody's samples.

        Raises:
            RuntimeError: a rank refused its arguments, or ranks are out of step.
            ValueError: ranks brought different kinds of arguments.
        """
        size = keys["index"].shape[0]
        if self.ranks.size == 1:
            return Agreement(dict(keys), [size], slice(0, size), [more], prefetched)
        keys = {name: key.cpu() for name, key in keys.items()}
        now = Doing(self.operation, facts.get("t"))
        counts = (prefetched, more)
        table = self.ranks.open(self._message(keys, facts, counts), now)
        self._compare(table)
        most = int(table[:, SIZE].max())
        if most > _room(table):
            self.ranks.make_room(HEADER + len(KEYS) * most)
            table = self.ranks.open(self._message(keys, facts, counts), now)
        sizes = table[:, SIZE].tolist()
        first = sum(sizes[: self.ranks.rank])
        numbers = table[:, PREFETCHED].tolist()
        return Agreement(
            {name: self._unpack(table, sizes, KEYS.index(name)) for name in keys},
            sizes,
            slice(first, first + size),
            table[:, MORE].tolist(),
            prefetched if all(other == prefetched for other in numbers) else 0,
        )

    def _message(self, keys: Mapping[str, Tensor], facts: Mapping[str, int], counts: tuple[int, ...]) -> Tensor:
        message = self.ranks.blank()
        size, kinds = len(keys["index"]), sum(1 << KEYS.index(name) for name in keys)
        header = [0, 0, size, kinds, *counts, *(facts.get(name, 0) for name in FACTS)]
        message[:HEADER] = torch.tensor(header, device="cpu")
        room = _room(message)
        if size <= room:
            for name, key in keys.items():
                start = HEADER + KEYS.index(name) * room
                message[start : start + size] = key
        return message

    def _unpack(self, table: Tensor, sizes: list[int], number: int) -> Tensor:
        start = HEADER + number * _room(table)
        return torch.cat([table[rank, start : start + size] for rank, size in enumerate(sizes)])

    def _compare(self, table: Tensor) -> None:
        """Refuse together what one rank refused, or what would silently differ."""
        refused = table[:, REFUSED].nonzero().flatten().tolist()
        if refused:
            raise RuntimeError(f"rank {refused[0]} refused its arguments, see its own error; no rank computed anything")
        kinds = table[:, KINDS].tolist()
        if len(set(kinds)) > 1:
            names = [[name for bit, name in enumerate(KEYS) if kind >> bit & 1] for kind in kinds]
            raise ValueError(f"all ranks must pass the same arguments (labels= is group=), got by rank {names}")
        for number, (name, meaning) in enumerate(FACTS.items()):
            values = table[:, HEADER - len(FACTS) + number].tolist()
            if len(set(values)) > 1:
                kind = RuntimeError if name in ("t", "pending", "depositing") else ValueError
                raise kind(f"the ranks differ in {meaning}: by rank {values}")


def _room(messages: Tensor) -> int:
    """For so many samples there is room in each."""
    return (messages.shape[-1] - HEADER) // len(KEYS)
