"""Ranks of one process group, or a single process without a group, and their collectives."""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from compopt import accelerator
from compopt.distributed import collectives
from compopt.distributed.collectives import CALL, OBSERVE, OPERATIONS, Operation, ProcessGroup


@dataclass
class Control:
    """State of one process group, shared by all objects of this process that communicate over the group.

    Attributes:
        host: group for control messages, if the group itself has no backend for CPU tensors.
        length: number of integers in an opening message. Every rank takes part in every opening, so that the length is
            the same on all ranks in every operation; backends abort the process if lengths differ.
        doing: operation of the last opening, and the number of openings.
    """

    host: ProcessGroup | None = None
    length: int = 64  # initial value
    doing: Operation = Operation()


_controls: WeakKeyDictionary[Any, Control] = WeakKeyDictionary()


class Ranks:
    """Collectives over one group. With one rank every method is the identity and communicates nothing.

    Control messages (sizes, indices, failures) are host integers and are sent over a CPU group, so that no rank
    waits for its accelerator to read them; features and statistics are sent over the group's own backend. Every
    operation begins with a control message, see :meth:`open`.

    Args:
        group: a process group; ``None``: the default group if ``torch.distributed`` is initialised, else this
            process alone.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if group is not None and not ready:
            raise ValueError("process_group was given but torch.distributed is not initialised")
        group = group if group is not None or not ready else dist.group.WORLD
        self._join(group, dist.get_rank(group) if ready else 0, dist.get_world_size(group) if ready else 1)
        if self.rank < 0:
            raise ValueError("this process is not in process_group; build the estimator on the group's ranks only")

    @classmethod
    def alone(cls) -> Ranks:
        """Return the ranks of this process alone, without a group."""
        ranks = cls.__new__(cls)
        ranks._join(None, 0, 1)
        return ranks

    def _join(self, group: ProcessGroup | None, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._control = _controls.setdefault(group, Control()) if size > 1 else Control()
        self._host: ProcessGroup | None = None
        self._caller: threading.Thread | None = None

    @property
    def host(self) -> ProcessGroup:
        """Group for control messages, created at the first message."""
        if self._host is None:
            if not _works_on_cpu(self.group):
                self._control.host = self._control.host or self.new_host_group()
            self._host = self.group if _works_on_cpu(self.group) else self._control.host
            if self._host is None:
                raise RuntimeError(
                    "process_group has no backend for CPU tensors and none can be added to it; create it with "
                    "backend='cpu:gloo,cuda:nccl'"
                )
        return self._host

    def new_host_group(self, timeout: timedelta | None = None) -> ProcessGroup | None:
        """Create another CPU group of the same ranks, for collectives of another thread; ``None`` if torch cannot.

        Its timeout is that of the group unless another one is given.
        """
        form = partial(self._form_host_group, timeout)
        return None if self.size == 1 else collectives.run_collective(form, self.group, collectives.now())

    def _form_host_group(self, timeout: timedelta | None) -> ProcessGroup | None:
        timeout = timeout or _timeout(self.group)
        if self.group is dist.group.WORLD:
            return dist.new_group(timeout=timeout, backend="gloo")
        # new_group is collective over the whole world, but only the members of this group run this code: use local
        # synchronization. There may be no group for CPU tensors yet.
        count, counts = len(dist.distributed_c10d._world.pg_names), [0] * self.size
        if _works_on_cpu(self.group):
            counts = self.gather_objects(count)
        else:
            dist.all_gather_object(counts, count, group=self.group)
        if len(set(counts)) > 1:  # torch derives the group's name from this count
            return None
        members = dist.get_process_group_ranks(self.group)
        return dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copy of an estimator uses the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, ()  # a process group cannot be pickled: use the default group when unpickling

    def check_alive(self) -> None:
        """Raise inside ``Join`` of torch, which is looked for at the first call, and see :meth:`check_alone`.

        In ``Join`` a rank without data takes part in the collectives of DDP only.
        """
        self.check_alone()
        if self.size > 1 and self._caller is None:  # no call yet
            join = getattr(sys.modules.get("torch.distributed.algorithms.join"), "Join", None)
            if join is not None and any(type(each) is join and each._enable for each in gc.get_referrers(join)):
                raise RuntimeError(
                    "an estimator cannot be called inside torch's Join, whose ranks without data do not take part; "
                    "leave it out, and give all ranks as many batches (drop_last=True of the sampler), or empty ones"
                )

    def check_alone(self) -> None:
        """Raise if this object was created before ``torch.distributed`` was initialised with several ranks."""
        by_accident = self.size == 1 and self.group is None and dist.is_available() and dist.is_initialized()
        if by_accident and dist.get_world_size() > 1:
            raise RuntimeError(
                f"this estimator was built before torch.distributed was initialised with {dist.get_world_size()} "
                f"ranks; build it afterwards, or pass process_group= with this rank alone"
            )

    # -- host ---------------------------------------------------------------------------------------------------

    def blank(self) -> Tensor:
        """Return an opening message of zeros; the first integer is reserved for the operation."""
        return torch.zeros(self._control.length, dtype=torch.int64, device="cpu")

    def make_room(self, length: int) -> None:
        """Lengthen future opening messages; call on every rank after the same opening."""
        self._control.length = max(self._control.length, length)

    def open(self, message: Tensor | None = None, now: Operation | None = None) -> Tensor:
        """Send the first message of an operation and return the messages of all ranks, ``(K, length)``.

        Args:
            message: result of :meth:`blank`, filled in from the second integer on.
            now: the operation; ``None``: that of :func:`~compopt.distributed.collectives.doing`.

        Raises:
            RuntimeError: ranks are in different operations (raised on every rank); another rank did not take part;
                another thread calls the estimator, so that messages could be mixed up.
        """
        # also names the device collectives that follow
        self._control.doing = now = (now or collectives.now())._replace(number=self._control.doing.number + 1)
        thread, caller = threading.current_thread(), self._caller
        if now.operation in (CALL, OBSERVE):
            self._caller = thread
        elif caller is not None and caller is not thread and caller.is_alive():
            raise RuntimeError(
                f"{now} communicates with other ranks in thread {thread.name!r} while thread {caller.name!r} calls the "
                f"estimator: their messages would be mixed up. Do it in that thread; what it returns may be written to "
                f"a file in another one"
            )
        message = self.blank() if message is None else message
        # The message is the same for all operations, so that ranks in different operations raise here and do not wait
        # for each other in two collectives until the timeout.
        message[0] = OPERATIONS.index(now.operation)
        table = collectives.gather_small(message, self.host, self.size, now)
        collectives.refuse_different(table[:, 0].tolist())
        return table

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather small picklable values into a list by rank; slow."""
        if self.size == 1:
            return [value]
        self.open()
        return collectives.gather_objects(value, self.host, self.size, self._control.doing)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            self.open()

    def agree(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` on every rank; if it raises on one rank, raise a ``RuntimeError`` on the others."""
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
            raise error from other  # this rank's own error is more informative
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed: {message}")
        return result

    # -- device -------------------------------------------------------------------------------------------------

    def gather(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Gather rows of several tensors in one message of bytes, concatenated in the order of the ranks.

        Args:
            tensors: tensors of shape ``(b, ...)``, where ``b`` may differ between ranks; trailing shapes and dtypes
                must be the same on all ranks.
            sizes: ``b`` of every rank.

        Returns:
            Tensors of shape ``(sum of sizes, ...)``, bitwise equal to the inputs.
        """
        if self.size == 1:
            return list(tensors)
        # Send the bytes of all tensors, of any dtype, in one collective: one latency, and no rounding.
        rows, most = len(tensors[0]), max(sizes)
        widths = [math.prod(t.shape[1:]) * t.itemsize for t in tensors]
        message = tensors[0].new_zeros((most, sum(widths)), dtype=torch.uint8)  # padded to equal sizes
        if rows:
            parts = [t.detach().contiguous().view(rows, -1).view(torch.uint8) for t in tensors]
            torch.cat(parts, dim=1, out=message[:rows])
        gathered = collectives.all_gather(message, self.group, self.size, self._control.doing)
        if all(size == most for size in sizes):
            gathered = gathered.view(-1, gathered.shape[-1])
        else:
            gathered = torch.cat([gathered[k, :size] for k, size in enumerate(sizes)])
        result = []
        for tensor, own in zip(tensors, gathered.split(widths, dim=1), strict=True):
            # clone even a single row, which is contiguous at any stride: view(dtype) needs the exact stride
            own = own.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
            result.append(own.view(len(gathered), *tensor.shape[1:]))
        return result

    def part(self, count: int, rank: int | None = None) -> range:
        """Return the range of a rank's share of ``count`` items (default: this rank); sizes differ by at most one."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def own(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return a view of this rank's :meth:`part` of a tensor along ``dim``."""
        part = self.part(whole.shape[dim])
        return whole.narrow(dim, part.start, len(part))

    def join(self, own: Tensor, count: int, dim: int) -> Tensor:
        """Concatenate the parts of all ranks (see :meth:`part`) along ``dim``; collective."""
        if self.size == 1:
            return own
        sizes = [len(self.part(count, rank)) for rank in range(self.size)]
        return self.gather([own.movedim(dim, 0).contiguous()], sizes)[0].movedim(0, dim).contiguous()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        return tensor if self.size == 1 else collectives.all_reduce(tensor, self.group, self._control.doing)

    def sum_in_doubles(self, tensor: Tensor) -> Tensor:
        """Sum over ranks in float64; return the tensor itself with one rank.

        The order of summation depends on the backend and the number of ranks; float64 makes the effect negligible.
        """
        return tensor if self.size == 1 else self.sum(_doubles(tensor)).to(tensor.dtype).to(tensor.device)

    def log_sum_exp(self, logs: Tensor, centre: Tensor) -> Tensor:
        """Return ``log sum over ranks of exp(logs)`` by one all-reduce in float64; ``-inf`` adds nothing.

        float64 represents ``exp(x)`` for ``|x| < 700``, so that no maximum over ranks is needed: all ranks pass the
        same ``centre``, and ``|logs - centre|`` must be below 700.
        """
        doubles, centre = _doubles(logs), _doubles(centre)
        return (self.sum((doubles - centre).exp_()).log_() + centre).to(logs.dtype).to(logs.device)

    def sum_bits(self, words: Tensor) -> Tensor:
        """Sum blocks over ranks, in place and bitwise exact; each entry must be zero on all ranks but one."""
        # as integers: a sum of floats would lose the sign of -0 and the payload of NaN
        self.sum(words.view(torch.int64))
        return words


def _doubles(tensor: Tensor) -> Tensor:
    """Convert to float64; on the host if the device does not support float64."""
    device = tensor.device if accelerator.supports(tensor.device, torch.float64) else torch.device("cpu")
    return tensor.to(device).double()


def _timeout(group: Any) -> timedelta | None:
    """Return the timeout of a group, ``None`` if torch does not report it; ``new_group`` would take torch's default."""
    with suppress(AttributeError, IndexError, RuntimeError):  # private in torch
        return group._get_backend(group._device_types[0]).options._timeout
    return None


def _works_on_cpu(group: ProcessGroup | None) -> bool:
    return any(name in dist.get_backend_config(group).lower() for name in ("gloo", "mpi"))
