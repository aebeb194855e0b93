"""The ranks of one process group, or the single process without one: who I am, and the few collectives we use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ProcessGroup = Any  # torch.distributed.ProcessGroup, which builds without distributed support do not have


@dataclass(frozen=True)
class Part:
    """The contiguous part ``start`` to ``stop`` that one rank has of something all ranks share."""

    start: int
    stop: int

    @classmethod
    def share(cls, count: int, rank: int, size: int) -> Part:
        """What rank ``rank`` of ``size`` has of ``count`` things, in pieces whose sizes differ by one at most."""
        return cls(rank * count // size, (rank + 1) * count // size)

    @property
    def size(self) -> int:
        """How much it is."""
        return self.stop - self.start

    def of(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor that is whole, a view."""
        return whole.narrow(dim, self.start, self.size)


class Ranks:
    """Collectives over one group. With one rank every method is the identity and communicates nothing.

    Control messages (sizes, indices, refusals) are host integers and travel over a CPU group, so that no rank
    waits for its accelerator to learn them; features and statistics travel over the group's own backend.

    Args:
        group: a process group; ``None`` is the default group if ``torch.distributed`` is initialised, else this
            process alone.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if group is not None and not ready:
            raise ValueError("process_group was given but torch.distributed is not initialised")
        self.group = group if group is not None or not ready else dist.group.WORLD
        self.rank = dist.get_rank(self.group) if ready else 0
        self.size = dist.get_world_size(self.group) if ready else 1
        if self.rank < 0:
            raise ValueError("this process is not in process_group; build the estimator on the group's ranks only")
        self._host: ProcessGroup | None = None

    @classmethod
    def alone(cls) -> Ranks:
        """This process by itself, whatever groups there are."""
        ranks = cls.__new__(cls)
        ranks.group, ranks.rank, ranks.size, ranks._host = None, 0, 1, None
        return ranks

    @property
    def host(self) -> ProcessGroup:
        """The group for control messages, formed at the first of them: parts of an estimator never send any."""
        if self._host is None:
            self._host = self.group if _works_on_cpu(self.group) else self.new_host_group()
            if self._host is None:
                raise RuntimeError(
                    "process_group has no backend for CPU tensors and none can be added to it; create it with "
                    "backend='cpu:gloo,cuda:nccl'"
                )
        return self._host

    def new_host_group(self) -> ProcessGroup | None:
        """Another CPU group of the same ranks, for collectives from a thread of their own (collective).

        ``None`` if there is one rank, or if torch cannot form it: the name that it gives to a group formed by its
        members alone depends on how many groups each member already has.
        """
        if self.size == 1:
            return None
        if self.group is dist.group.WORLD:
            return dist.new_group(backend="gloo")
        counts: list[Any] = [None] * self.size
        dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group=self.group)
        if len(set(counts)) > 1:
            return None
        members = dist.get_process_group_ranks(self.group)
        return dist.new_group(members, backend="gloo", use_local_synchronization=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copy of an estimator talks to the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, ()  # a process group cannot travel: the reader's own default group

    def check_alive(self) -> None:
        """Refuse to compute alone what a group formed later would expect of all its ranks."""
        if self.size == 1 and self._alone_by_accident():
            raise RuntimeError(
                f"this estimator was built before torch.distributed was initialised with {dist.get_world_size()} "
                f"ranks; build it afterwards, or pass process_group= with this rank alone"
            )

    def _alone_by_accident(self) -> bool:
        return self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    # -- host ---------------------------------------------------------------------------------------------------

    def gather_host(self, message: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """CPU tensors of one shape ``(...)`` from all ranks, ``(K, ...)``."""
        if self.size == 1:
            return message[None]
        return _all_gather(message, group or self.host, self.size)

    def gather_objects(self, value: Any) -> list[Any]:
        """Small picklable values of all ranks, by rank. Slow; for construction and checkpoints."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather_host(torch.zeros((), dtype=torch.int64))

    def agree(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` everywhere; if it raised anywhere, raise everywhere, so that no rank waits for another.

        The rank that failed raises its own error, the others a ``RuntimeError`` that names it.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        messages = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed: {message}")
        return result

    # -- device -------------------------------------------------------------------------------------------------

    def gather(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Rows of several tensors from all ranks in one message, concatenated in the order of the ranks.

        Args:
            tensors: each ``(b, ...)`` with this rank's own ``b``; same trailing shapes and dtypes on all ranks.
            sizes: ``b`` of every rank.

        Returns:
            Each ``(sum of sizes, ...)``, bit for bit.
        """
        if self.size == 1:
            return list(tensors)
        rows, most = len(tensors[0]), max(sizes)
        parts = [t.detach().contiguous().view(rows, -1).view(torch.uint8) if rows else None for t in tensors]
        widths = [t[0:1].numel() * t.itemsize if rows else _row_bytes(t) for t in tensors]
        message = tensors[0].new_zeros((most, sum(widths)), dtype=torch.uint8)
        start = 0
        for part, width in zip(parts, widths, strict=True):
            if part is not None:
                message[:rows, start : start + width] = part
            start += width
        gathered = _all_gather(message, self.group, self.size)
        if all(size == most for size in sizes):
            gathered = gathered.view(-1, gathered.shape[-1])
        else:
            gathered = torch.cat([gathered[k, :size] for k, size in enumerate(sizes)])
        result, start = [], 0
        for tensor, width in zip(tensors, widths, strict=True):
            # a copy even of a single row, which counts as contiguous at any stride but has the wrong one for view
            own = gathered[:, start : start + width].clone(memory_format=torch.contiguous_format).view(tensor.dtype)
            result.append(own.view(len(gathered), *tensor.shape[1:]))
            start += width
        return result

    def part(self, count: int) -> Part:
        """This rank's share of ``count`` things, in pieces whose sizes differ by one at most."""
        return Part.share(count, self.rank, self.size)

    def join(self, own: Tensor, count: int, dim: int) -> Tensor:
        """The whole of what :meth:`part` split along ``dim``; collective."""
        if self.size == 1:
            return own
        sizes = [Part.share(count, rank, self.size).size for rank in range(self.size)]
        return self.gather([own.movedim(dim, 0).contiguous()], sizes)[0].movedim(0, dim).contiguous()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def log_sum_exp(self, logs: Tensor, centre: Tensor) -> Tensor:
        """``log sum over ranks of exp(logs)`` by one all-reduce of doubles.

        Doubles hold ``exp(x)`` for ``|x| < 700``: no maximum has to be agreed on first.

        Args:
            logs: ``-inf`` where a rank has nothing to add.
            centre: known to all ranks; ``|logs - centre|`` must stay below 700.
        """
        centre = centre.double()
        return (self.sum((logs.double() - centre).exp_()).log_() + centre).to(logs.dtype)

    def sum_bits(self, words: Tensor) -> Tensor:
        """Sum over ranks, in place, of blocks that are zero on all ranks but one per entry: bit for bit."""
        if self.size > 1:
            dist.all_reduce(words.view(torch.int64), group=self.group)
        return words


def _row_bytes(tensor: Tensor) -> int:
    """Bytes of one row of a tensor that may have none."""
    count = 1
    for size in tensor.shape[1:]:
        count *= size
    return count * tensor.itemsize


def _all_gather(message: Tensor, group: ProcessGroup | None, size: int) -> Tensor:
    """``(...)`` -> ``(K, ...)``; torch renamed the collective."""
    gathered = message.new_empty((size, *message.shape))
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collect(gathered.view(-1), message.contiguous().view(-1), group=group)
    return gathered


def _works_on_cpu(group: ProcessGroup | None) -> bool:
    """Whether the group has a backend for CPU tensors (gloo or mpi, alone or beside nccl)."""
    try:
        return any(name in dist.get_backend_config(group).lower() for name in ("gloo", "mpi"))
    except (AttributeError, RuntimeError, ValueError):
        return "gloo" in str(dist.get_backend(group)).lower()
