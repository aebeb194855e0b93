"""The ranks of one process group, or the single process without one: who I am, and the few collectives we use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compopt import accelerator
from compopt.distributed import collectives, control
from compopt.distributed.control import Caller, Control, Doing, ProcessGroup


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
        """Number of things in this part."""
        return self.stop - self.start

    def of(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor that is whole, a view."""
        return whole.narrow(dim, self.start, self.size)


class Ranks:
    """Collectives over one group. With one rank every method is the identity and communicates nothing.

    Control messages (sizes, indices, refusals) are host integers and travel over a CPU group, so that no rank
    waits for its accelerator to learn them; features and statistics travel over the group's own backend. Every
    operation begins with such a message, see :meth:`open`.

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
        self._control = control.control_of(self.group) if self.size > 1 else Control()
        self._caller = Caller()

    @classmethod
    def alone(cls) -> Ranks:
        """This process by itself, whatever groups there are."""
        ranks = cls.__new__(cls)
        ranks.group, ranks.rank, ranks.size, ranks._host = None, 0, 1, None
        ranks._control, ranks._caller = Control(), Caller()
        return ranks

    @property
    def host(self) -> ProcessGroup:
        """The group for control messages, formed at the first of them: parts of an estimator never send any."""
        if self._host is None:
            if _works_on_cpu(self.group):
                self._host = self.group
            else:
                self._host = self._control.host = self._control.host or self.new_host_group()
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
        return collectives.answered(self._form_host_group, self.group, control.now())

    def _form_host_group(self) -> ProcessGroup | None:
        if self.group is dist.group.WORLD:
            return dist.new_group(backend="gloo")
        count, counts = len(dist.distributed_c10d._world.pg_names), [0] * self.size
        if _works_on_cpu(self.group):
            counts = self.gather_objects(count)
        else:
            dist.all_gather_object(counts, count, group=self.group)
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

    def blank(self) -> Tensor:
        """An opening message to fill from its second integer on; as long as everybody's."""
        return torch.zeros(self._control.length, dtype=torch.int64, device="cpu")

    def make_room(self, length: int) -> None:
        """From here on opening messages have so many integers; on every rank after the same opening."""
        self._control.length = max(self._control.length, length)

    def open(self, message: Tensor | None = None, now: Doing | None = None) -> Tensor:
        """The first message of an operation: all ranks say which one they are in. Messages of all, ``(K, length)``.

        Args:
            message: :meth:`blank`, filled.
            now: the operation; ``None``: that of :func:`compopt.distributed.control.doing`.

        Raises:
            RuntimeError: on every rank, if they are in different ones; a rank did not come.
        """
        now = now or control.now()
        self._caller.check(now)
        self._control.doing = now
        message = self.blank() if message is None else message
        message[0] = control.OPERATIONS.index(now.operation)
        table = collectives.tell(message, self.host, self.size, self._control)
        control.refuse_different(table[:, 0].tolist())
        return table

    def gather_host(self, message: Tensor, group: ProcessGroup, what: str) -> Tensor:
        """Small CPU tensors of one shape ``(...)`` from all ranks over a group of their own, ``(K, ...)``."""
        return message[None] if self.size == 1 else collectives.tell(message, group, self.size, what)

    def gather_objects(self, value: Any) -> list[Any]:
        """Small picklable values of all ranks, by rank. Slow; for construction and checkpoints."""
        if self.size == 1:
            return [value]
        return collectives.gather_objects(value, self.host, self.size, self._control, sizes=self._everybodys)

    def _everybodys(self, count: int) -> list[int]:
        """A number of each rank."""
        message = self.blank()
        message[1] = count
        return self.open(message)[:, 1].tolist()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            self.open()

    def agree(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` everywhere; if it raised anywhere, raise everywhere, so that no rank waits for another.

        The rank that failed raises its own error, the others a ``RuntimeError`` that names it.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        try:
            messages = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        except RuntimeError as other:
            if error is None:
                raise
            raise error from other  # what this rank has to say itself tells more
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
        gathered = collectives.all_gather(message, self.group, self.size, self._control)
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
        return tensor if self.size == 1 else collectives.all_reduce(tensor, self.group, self._control)

    def sum_in_doubles(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, added as doubles (on the host, where a device has none); with one rank the tensor itself."""
        if self.size == 1:
            return tensor
        return self.sum(self._doubles(tensor)).to(tensor.dtype).to(tensor.device)

    def log_sum_exp(self, logs: Tensor, centre: Tensor) -> Tensor:
        """``log sum over ranks of exp(logs)`` by one all-reduce of doubles.

        Doubles hold ``exp(x)`` for ``|x| < 700``: no maximum has to be agreed on first.

        Args:
            logs: ``-inf`` where a rank has nothing to add.
            centre: known to all ranks; ``|logs - centre|`` must stay below 700.
        """
        doubles, centre = self._doubles(logs), self._doubles(centre)
        return (self.sum((doubles - centre).exp_()).log_() + centre).to(logs.dtype).to(logs.device)

    @staticmethod
    def _doubles(tensor: Tensor) -> Tensor:
        """In doubles; on the host, where a device has none."""
        device = tensor.device if accelerator.supports(tensor.device, torch.float64) else torch.device("cpu")
        return tensor.to(device).double()

    def sum_bits(self, words: Tensor) -> Tensor:
        """Sum over ranks, in place, of blocks that are zero on all ranks but one per entry: bit for bit."""
        self.sum(words.view(torch.int64))
        return words


def _row_bytes(tensor: Tensor) -> int:
    """Bytes of one row of a tensor that may have none."""
    count = 1
    for size in tensor.shape[1:]:
        count *= size
    return count * tensor.itemsize


def _works_on_cpu(group: ProcessGroup | None) -> bool:
    """Whether the group has a backend for CPU tensors (gloo or mpi, alone or beside nccl)."""
    try:
        return any(name in dist.get_backend_config(group).lower() for name in ("gloo", "mpi"))
    except (AttributeError, RuntimeError, ValueError):
        return "gloo" in str(dist.get_backend(group)).lower()
