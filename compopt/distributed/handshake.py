"""Handshake before a call: exchange the samples of all ranks, or the failure of one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from compopt.distributed.collectives import CALL, Operation, doing
from compopt.distributed.ranks import Ranks

KEYS = ("index", "index2", "labels")
# Values that must be equal on all ranks, with their description in error messages.
FACTS = {
    "width": "the feature dimension, or the numbers per sample of a compositional loss",
    "dtype": "the features' dtype",
    "depositing": "training mode (1: deposits, 0: eval() or no_grad)",
    "t": "the number of commits so far; every rank must call step() after the same updates",
    "pending": "the number of calls since the last commit",
    "calls": "the number of calls that are committed or pending; after an error in a call on one rank, call discard() "
    "before step(), or load a state, on all ranks",
    "parts": "commits of parts, or their pending calls; step, load or discard a part on all ranks",
    "configuration": "the configuration",
    "followers": "the number of call hooks; attach a ScoreKeeper on all ranks",
    "named": "index= (0: none, 1: given)",
    "encode": "encode of the sampler (0: none, 1: set)",
    "tau_kind": "tau= (0: none, 1: a number, 2: one per sample, 3: two per sample; 4 more: it requires grad; 8 more: "
    "float64)",
    "tau": "the value of tau=",
    "beta": "the value of beta=",
    "learning": "a gradient for the temperature (1: the graph is enabled and the temperature requires grad)",
    "parameters": "learned parameters, or tau; load the same state on all ranks, and change it on all",
    "negatives": "negatives=, or candidates= of a network (0: none, 1: given, 2: with positions)",
    "momentum": "keys= (0: none, 1: given)",
    "sampler": "the options of the sampler, seed= for example",
    "policy": "pairs= of the call, or the dimensions of its guide (0: no policy)",
    "values": "the tensors of the call: their names, dtypes and shapes per sample",
}
# Layout of a message: the operation, these five, FACTS, and blocks of equal length for the keys.
REFUSED, SIZE, KINDS, PREFETCHED, MORE = range(1, 6)
HEADER = 6 + len(FACTS)
MOST_ENTRIES = 4  # of those that differ, in an error message
NULL_CONTEXT: AbstractContextManager[None] = nullcontext()


class Fingerprint(int):
    """Integer that stands for a value in a message; error messages contain the value."""

    def __new__(cls, number: int, value: object = None) -> Self:
        fact = super().__new__(cls, number)
        fact.value = value
        return fact

    value: object


def fingerprint(value: object) -> Fingerprint:
    """Return the fingerprint of a value of FACTS that is not an integer, by a checksum of its ``repr``."""
    return Fingerprint(zlib.crc32(repr(value).encode()), value)


@dataclass
class Agreement:
    """Samples of all ranks in one call, in the order of the ranks.

    Attributes:
        keys: ``index`` and, if given, ``index2`` and ``labels``, ``(B,)`` int64.
        sizes: number of samples of every rank.
        own: slice of this rank's samples.
        more: number of further candidates of every rank.
        prefetched: number of the prefetch that all ranks hold for these samples; 0: not the same on all ranks.
    """

    keys: dict[str, Tensor]
    sizes: list[int]
    own: slice
    more: list[int] = field(default_factory=lambda: [0])
    prefetched: int = 0


def tau_facts(tau: float | Tensor | None) -> dict[str, int]:
    """Return the facts of ``tau`` that must be equal on all ranks: its kind, and its value on the host."""
    if tau is None:
        return {"tau_kind": 0, "tau": 0}
    if not isinstance(tau, Tensor):
        return {"tau_kind": 1, "tau": fingerprint(tau)}
    kind = (1 if tau.dim() == 0 else 1 + tau.shape[1]) + 4 * tau.requires_grad + 8 * (tau.dtype == torch.float64)
    return {"tau_kind": kind, "tau": fingerprint(tau.item()) if tau.dim() == 0 and tau.device.type == "cpu" else 0}


def add_facts(est: Any, given: Any) -> None:
    """Add the facts of a call to its checked arguments, an object of ``compopt.arguments.CallArguments``.

    Parameters on a device are compared there, as ``shared`` in ``values``.
    """
    tau, learned = given.tau, est.temperature.tensor
    shared = [*est.parameters(), *([] if learned is None else [learned])]
    wants = tau.requires_grad if isinstance(tau, Tensor) else tau is None and est.temperature.wants_gradient
    policy = {name: value.shape[1:] for name, value in given.values.items() if name[:-1] in ("guide", "within")}
    given.facts |= {
        "named": int(given.named),
        "encode": int(given.encoder is not None),
        "momentum": int("k1" in given.values),
        "negatives": 0 if given.negatives is None else 1 + ("positions" in given.of_negatives),
        **tau_facts(tau),
        "parameters": _parameters(est, shared),
        "learning": int(wants and given.graph),
    }
    if given.policy is not None:  # a fingerprint, since facts are single integers
        given.facts["policy"] = fingerprint({"pairs": given.policy, "dimensions": policy})
    numbers = [*shared, *([tau] if isinstance(tau, Tensor) and tau.dim() == 0 else [])]
    on_device = [number.detach().flatten().float() for number in numbers if number.device.type != "cpu"]
    if on_device:
        unit = given.own.unit
        given.values["shared"] = torch.cat([number.to(unit.device) for number in on_device]).expand(unit.shape[1], -1)


def _parameters(est: Any, shared: Sequence[Tensor]) -> int:
    """Return the fact for these tensors on the host; on a device, and for a dual, for their values at the first call.

    The host would wait for a device, where :meth:`AsyncChecks.check_equal` compares them in later calls.
    """
    if est._at_first is not None and (est.temperature.learns or any(x.device.type != "cpu" for x in shared)):
        return int(est._at_first)
    values = [f"{x.detach().cpu().tolist()} {x.dtype}" for x in shared]
    return fingerprint({"parameters": values, "tau": est.temperature.constants()})


class Handshake:
    """One small all-gather of host integers per call: sizes, indices, failures. No communication with one rank.

    The message has space for a fixed number of samples. For a batch that is larger than all previous ones, the ranks
    exchange a second, longer message.
    """

    def __init__(self, ranks: Ranks, operation: str = CALL) -> None:
        self.ranks, self.operation = ranks, operation

    def guard(self) -> AbstractContextManager[None]:
        """Wrap the work of this rank before the exchange: if it raises, the other ranks raise too and do not wait."""
        return NULL_CONTEXT if self.ranks.size == 1 else self._guard()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # the other ranks wait in exchange(): report the failure by a message of the same length
            message = self.ranks.blank()
            message[REFUSED] = 1
            try:
                self.ranks.open(message, Operation(self.operation))
            except RuntimeError as other:  # other operation, or lost connection: raise the original error
                raise error from other
            raise

    def agree(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` in the middle of the operation, on all ranks; if it raises on one, raise on the others."""
        with doing(self.operation):
            return self.ranks.agree(action)

    def exchange(
        self, keys: Mapping[str, Tensor], facts: Mapping[str, int], prefetched: int = 0, more: int = 0
    ) -> Agreement:
        """Send this rank's samples and return those of all ranks."""
        size = keys["index"].shape[0]
        if self.ranks.size == 1:
            return Agreement(dict(keys), [size], slice(0, size), [more], prefetched)
        keys = {name: key.cpu() for name, key in keys.items()}
        kinds = sum(1 << KEYS.index(name) for name in keys)
        header = [0, 0, size, kinds, prefetched, more, *(facts.get(name, 0) for name in FACTS)]
        now = Operation(self.operation, facts.get("t"))
        table = self.ranks.open(self._message(header, keys), now)
        self._compare(table, facts)
        sizes = table[:, SIZE].tolist()
        # Every rank decides from the same table: all ranks send the second message, or none does. Lengths never shrink,
        # so that batches of a constant size need a second message once per run.
        if max(sizes) > _room(table):
            self.ranks.make_room(HEADER + len(KEYS) * max(sizes))
            table = self.ranks.open(self._message(header, keys), now)
        blocks = dict(zip(KEYS, table[:, HEADER:].split(_room(table), dim=1), strict=False))
        first, numbers = sum(sizes[: self.ranks.rank]), table[:, PREFETCHED].tolist()
        return Agreement(
            {name: torch.cat([row[:count] for row, count in zip(blocks[name], sizes, strict=True)]) for name in keys},
            sizes,
            slice(first, first + size),
            table[:, MORE].tolist(),
            # if ranks hold rows of different prefetches, or none, all ranks read the rows again
            prefetched if set(numbers) == {prefetched} else 0,
        )

    def _message(self, header: list[int], keys: Mapping[str, Tensor]) -> Tensor:
        """Return a message with the keys of this rank's samples, if the message is long enough."""
        message = self.ranks.blank()
        message[:HEADER] = torch.tensor(header, device="cpu")
        room = _room(message)
        for name, key in keys.items() if header[SIZE] <= room else ():
            start = HEADER + KEYS.index(name) * room
            message[start : start + len(key)] = key
        return message

    def _compare(self, table: Tensor, facts: Mapping[str, int]) -> None:
        """Raise on every rank if one rank failed, or if the kinds of keys or FACTS differ."""
        refused = table[:, REFUSED].nonzero().flatten().tolist()
        if refused:
            raise RuntimeError(f"rank {refused[0]} refused its arguments, see its own error; no rank computed anything")
        kinds = table[:, KINDS].tolist()
        if len(set(kinds)) > 1:
            names = [[name for bit, name in enumerate(KEYS) if kind >> bit & 1] for kind in kinds]
            raise ValueError(f"all ranks must pass the same arguments, got by rank {names}")
        for number, (name, meaning) in enumerate(FACTS.items(), start=HEADER - len(FACTS)):
            if len(set(table[:, number].tolist())) > 1:  # on all ranks, so that all take part in the next message
                fact = facts.get(name, 0)
                with doing(self.operation):
                    found = [*_differences(self.ranks.gather_objects(_shown(getattr(fact, "value", fact))))]
                found[MOST_ENTRIES:] = ["..."] * (len(found) > MOST_ENTRIES)
                kind = RuntimeError if name in ("t", "pending", "calls", "depositing", "parts") else ValueError
                raise kind(f"the ranks differ in {meaning}: {'; '.join(found)}")


def _shown(value: object) -> Any:
    """Return nested mappings and lists as dicts of the ``repr`` of their entries."""
    if isinstance(value, list):
        value = {f"[{number}]": entry for number, entry in enumerate(value)}
    return {str(key): _shown(entry) for key, entry in value.items()} if isinstance(value, Mapping) else repr(value)


def _differences(found: list[Any], path: str = "") -> Iterator[str]:
    """Yield the entries that differ between ranks, with their values by rank."""
    mappings = [each if isinstance(each, dict) else {} for each in found]
    for key in dict.fromkeys(key for each in mappings for key in each):
        inside = [each.get(key, "none") if isinstance(each, dict) else each for each in found]
        yield from _differences(inside, f"{path}.{key}".replace(".[", "[").removeprefix("."))
    if not any(mappings) and len(set(map(str, found))) > 1:
        yield f"{path} by rank [{', '.join(map(str, found))}]".strip()


def _room(messages: Tensor) -> int:
    """Return the number of samples that fit into each message."""
    return (messages.shape[-1] - HEADER) // len(KEYS)
