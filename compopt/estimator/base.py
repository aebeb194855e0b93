"""The contract of every estimator: groups, rows, read / deposit / commit, hooks, checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor

from compopt.batch import COUNT, Batch
from compopt.checks.context import in_backward, in_checkpoint
from compopt.checks.inputs import check_index
from compopt.data.prefetch_loader import PrefetchLoader
from compopt.distributed.control import doing
from compopt.distributed.handshake import Handshake
from compopt.distributed.ranks import Ranks
from compopt.estimator import state_dict as states
from compopt.estimator.async_checks import AsyncChecks
from compopt.estimator.commits import Commits
from compopt.estimator.component import Component
from compopt.estimator.exclusive import Exclusive
from compopt.estimator.fixed import fixed
from compopt.estimator.groups import Groups, SampleGroups
from compopt.estimator.reader import ROW_KEYS, BatchReader
from compopt.stores.layout import Column
from compopt.stores.placement import Placement
from compopt.stores.table import RowTable

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

T = TypeVar("T")

DIRECTIONS = {"bimodal": 2, "unimodal": 1, "single": 1}


class Estimator(Commits):
    r"""State per sample beside any torch optimizer, with the manners of ``torch.optim``.

    *Read, deposit, commit.* A call in training mode reads committed rows and deposits proposals, as ``backward``
    deposits gradients; only :meth:`step` writes them. Several deposits before one step (gradient accumulation)
    are all committed; a row deposited more than once gets the mean of its proposals (of ``u``, where ``log u``
    is stored). Under :meth:`eval` or ``torch.no_grad()`` nothing is deposited.

    Every hyper-parameter lives in :attr:`sample_groups`, one dict per data set, and may be changed there while
    training; changes are checked at the next call. Keys that two components share are prefixed with
    ``normalizer.`` or ``temperature.``.

    Args:
        components: parts by role.
        mode: ``"bimodal"`` (two values per column), ``"unimodal"`` or ``"single"`` (one).
        dtype: of the floating-point columns.
        directions: how many have anchors: 1 makes the columns of bimodal mode as narrow as those of the others.
        placement: where rows live; ``None``: in this process's memory.
        sample_groups: one mapping per data set, which overrides the hyper-parameters of the components.

    Attributes:
        data_fingerprint: set it to that of the index that gives samples their rows (``ShardIndex``, ``KeyIndex``,
            ``UidIndex``): :func:`compopt.save` stores it, and :func:`compopt.load` refuses the rows of another one.

    State: one row per sample, the columns of all components and ``count`` (int32, visits per direction), padded to a
    multiple of 16 bytes; beside the rows what components keep for all samples, and :attr:`t`.

    Threads: one thread calls. Another may take :meth:`state_dict` or :meth:`read`, or run :func:`compopt.save`,
    meanwhile, and sees the state between two commits; a commit waits for it, and does not for a save with
    ``blocking=False``. What communicates with other ranks must run in the thread that calls, and is refused elsewhere
    with a ``RuntimeError``.

    Communicates, with several ranks: construction is collective with ``offload="disk"``; the first message forms a CPU
    group where the group's backend takes no CPU tensors. A method that communicates says so; the others do not.

    Raises:
        IndexError: an index on the CPU is outside the data set. This and the other errors leave the state as it was.
        TypeError: an index that is not integral; a dtype that is none.
        ValueError: bad shapes or hyper-parameters; rows neither float32 nor float64.
        RuntimeError: with several ranks, another rank refused, does something else, or did not come.

    Warns:
        UserWarning: once each: many calls have deposited and none was committed; a learned temperature had gradients
            and kept its value; every index was ``0 .. B - 1``, as if it were a position in the batch.

    Example:
        >>> import torch, compopt
        >>> est = compopt.SogCLREstimator(n=100)  # every preset is an Estimator
        >>> z1, z2 = torch.randn(2, 8, 4, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()  # reads rows, deposits proposals
        >>> est.discard()  # the update is not made
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()  # commits
        >>> est.t, est.read(torch.tensor([0, 50]))["count"].tolist()
        (1, [1, 0])
    """

    data_fingerprint: str | None = None
    mode: str = fixed()
    dtype: torch.dtype = fixed()

    def __init__(
        self,
        components: Mapping[str, Component],
        *,
        mode: str,
        dtype: torch.dtype,
        directions: int = 2,
        placement: Placement | None = None,
        sample_groups: Groups | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype of the rows must be a torch.dtype such as torch.float32, got {dtype!r}")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype of the rows must be torch.float32 or torch.float64, got {dtype}")
        self.mode, self.dtype = mode, dtype
        self._width = min(directions, DIRECTIONS[mode])
        self.training = True
        self._components = dict(components)
        self._groups = SampleGroups(self._components, mode, sample_groups)
        placement = placement or Placement()
        self._ranks = Ranks(placement.process_group)
        self._table = self._make_table(placement)
        self._connect()

    # -- groups ------------------------------------------------------------------------------------------------

    @property
    def sample_groups(self) -> Groups:
        """One dict per data set, as ``param_groups``: ``n`` and every hyper-parameter."""
        return self._groups.groups

    @sample_groups.setter
    def sample_groups(self, value: Any) -> NoReturn:
        raise AttributeError(
            "sample_groups is one list for as long as the estimator lives: change the values in it, "
            "est.sample_groups[0][key] = value, or append a data set with est.add_sample_group"
        )

    @property
    def defaults(self) -> dict[str, Any]:
        """What fills a group that leaves a hyper-parameter out (``None``: by mode)."""
        return self._groups.defaults

    @property
    def n(self) -> int | None:
        """Samples in all groups; ``None`` for an estimator without rows."""
        return self._groups.n

    @n.setter
    def n(self, value: Any) -> NoReturn:
        raise AttributeError(
            f"n of {type(self).__name__} is fixed at {self.n}, got {value!r}: append the rows of another data set with "
            f"est.add_sample_group, or build another estimator"
        )

    def add_sample_group(self, group: Mapping[str, Any]) -> None:
        """Append the rows of another data set; its samples take the indices after all existing ones.

        The table is copied once. If that fails, the estimator is as it was.

        Args:
            group: ``{"n": ..., key: value, ...}``; defaults fill what it leaves out.

        Raises:
            ValueError: an unknown key, a bad value, or an estimator without rows.
            TypeError: ``n`` is no integer.

        Communicates: collective with several ranks.
        """
        self.stand_alone()
        self._await_save()
        with doing("add_sample_group()", self.t), self._state.writing():
            self._groups.add(group)
            try:
                if self._table is not None:
                    self._forget_prefetched()
                    with torch.inference_mode(False):  # rows made inside it could not be written outside
                        self._table.grow(self.n or 0)
            except BaseException:
                self._groups.drop_last()
                raise

    # -- rows --------------------------------------------------------------------------------------------------

    @property
    def _row_keys(self) -> Sequence[str]:
        """Which keys of a call name rows."""
        return ROW_KEYS

    def _connect(self) -> None:
        initial = {c.name: (role, c.initial) for role, own in self._columns().items() for c in own if c.initial}
        self._handshake, self._async_checks = Handshake(self._ranks), AsyncChecks()
        self._reader = BatchReader(
            self._groups,
            self._table,
            self._handshake,
            self._async_checks,
            self.dtype,
            self._identity,
            initial,
            self._row_keys,
        )

    def _options(self) -> dict[str, Any]:
        """What decides the meaning of the state beside the parts and their hyper-parameters."""
        return {}

    def _identity(self) -> object:
        """What must be alike on all ranks."""
        return states.config(self), self._table is not None and self._table.sharded

    def _make_table(self, placement: Placement) -> RowTable | None:
        columns = [column for own in self._columns().values() for column in own]
        if not columns:
            return None
        columns.append(Column(COUNT, self._width, torch.int32))
        with torch.inference_mode(False):  # rows made inside it could not be written outside
            return RowTable(columns, self.n or 0, placement, self._ranks)

    def _columns(self) -> dict[str, list[Column]]:
        """What each part keeps per sample, by role."""
        return {role: part.columns(self._width, self.dtype) for role, part in self._components.items()}

    @property
    def _remembers_index(self) -> bool:
        """Whether samples of earlier batches are known by their index."""
        return self.n is not None

    def _read(
        self,
        keys: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        facts: Mapping[str, int] | None = None,
        least: int = 1,
        more: int = 0,
    ) -> Batch:
        """The global batch of a call with its committed rows; arguments as of :meth:`BatchReader.read`."""
        self.stand_alone()
        self._refuse_checkpoint()
        depositing = self.training and torch.is_grad_enabled()
        if depositing:
            self._drop_skipped()
            with self._handshake.guard():  # a warning may be an error
                self._forgotten.positions(keys["index"], self.n, self._remembers_index)
                self._forgotten.learned(list(self.parameters()), self._attachments, self._async_checks)
        progress = {"depositing": int(depositing), "t": self.t, "pending": self._pending, **(facts or {})}
        batch = self._reader.read(keys, values, depositing, progress, least, more)
        if depositing:
            for part in self._components.values():
                part.move(batch.rows.device)
        return batch

    def _look(self, index: Tensor, like: Tensor, values: Mapping[str, Tensor] | None = None) -> Batch:
        """Committed rows without a call, in the dtype and on the device of ``like``; collective only on shards."""
        return self._reader.look(index, like, values)

    def _refuse_checkpoint(self) -> None:
        """Inside a checkpointed function: it runs again in backward, where a call would repeat what it did.

        Allowed where that is nothing: one rank, and a stateless estimator, ``eval()`` or ``torch.no_grad()``.
        """
        grad = torch.is_grad_enabled()
        keeps = self._table is not None or any(part.has_state for part in self._components.values())
        deposits = keeps and self.training and grad
        meets = self._ranks.size > 1 and (grad or in_backward())
        if not (deposits or meets) or not in_checkpoint():
            return
        message = (
            f"{type(self).__name__} was called inside a checkpointed function (torch.utils.checkpoint, or "
            f"DeepSpeed's), which runs again in backward and would {'deposit' if deposits else 'gather'} the batch "
            f"twice; checkpoint the encoders alone and call the estimator on what they return: it keeps no B x B "
            f"matrix for backward"
        )
        if in_backward():  # the other ranks may not be
            raise RuntimeError(message)
        with self._handshake.guard():
            raise RuntimeError(message)

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """Committed values by column.

        Args:
            index: data-set positions, ``(B,)``. On shards a collective call, in which each rank may ask for others.

        Returns:
            A copy of every column, ``(B, 2)``, or ``(B, 1)`` in unimodal mode and with one direction, on the rows'
            device, floats in the rows' dtype and integers as stored; ``count`` is ``(B,)`` int64, the visits of the
            sample (0: never seen, its logarithms read 0).

        Raises:
            IndexError: outside the data set.
            TypeError, ValueError: the index is no 1-D tensor of integers.
            RuntimeError: nothing is kept per sample; or this is a part of another estimator, which has the rows.
        """
        self.stand_alone()
        if self._table is None:
            raise RuntimeError(f"{type(self).__name__} keeps nothing per sample; there are no rows to read")
        with doing("read()", self.t), self._state.copying():
            rows = self._reader.agree(lambda: check_index("index", index)).cpu()
            like = torch.zeros((), dtype=self.dtype, device=self._table.store.device)
            columns = self._look(rows, like).columns
        columns[COUNT] = columns[COUNT].amax(dim=1).to(torch.int64)
        return {name: value.clone() for name, value in columns.items()}

    @overload
    def prefetch(self, source: Tensor, index: Any = -1, index2: Any = None) -> None: ...

    @overload
    def prefetch(self, source: Iterable[T], index: Any = -1, index2: Any = None) -> PrefetchLoader[T]: ...

    def prefetch(self, source: Any, index: Any = -1, index2: Any = None) -> PrefetchLoader[Any] | None:
        """Start reading the rows of a batch that will be called soon, or wrap a loader so that this happens by itself.

        Values are those committed at the time of the call, whatever was committed in between. Worth it where rows
        are not beside the features (``offload=``, ``shard=True``).

        Args:
            source: the ``index`` of a coming batch, ``(B,)``; or a loader, from which one batch is taken ahead.
            index: where a loader's batch holds the index: a position, a key, or a function of the batch.
            index2: with an index, that of the second modality; with a loader, where the batch holds it.

        Returns:
            ``None`` for an index; for a loader an iterable over its batches, a :class:`~compopt.data.PrefetchLoader`
            (the loader itself, where nothing is kept per sample).

        Raises:
            IndexError: an index on the CPU is outside the data set.
            TypeError, ValueError: an index is no 1-D tensor of integers; a loader, see there.

        Communicates: nothing; on shards the row numbers, in a background thread and over a group of their own, so
        that all ranks must prefetch the same batches in the same order.
        """
        self.stand_alone()
        if isinstance(source, Tensor):
            self._prefetch(source, index if isinstance(index, Tensor) else index2)
            return None
        if isinstance(source, np.ndarray) or (isinstance(source, Sequence) and source and isinstance(source[0], int)):
            raise TypeError(
                f"index must be a tensor of integers, got {type(source).__name__}; pass torch.as_tensor(index)"
            )
        if self._table is None:  # nothing to read, so no index is asked for; the loader itself does
            return cast(PrefetchLoader[Any], source)
        return PrefetchLoader(source, self._prefetch, self._forget_prefetched, index, index2)

    def _prefetch(self, index: Tensor, index2: Tensor | None = None) -> None:
        given = {"index": index} if index2 is None else {"index": index, "index2": index2}
        self._reader.prefetch({name: check_index(name, value) for name, value in given.items()})

    def _forget_prefetched(self) -> None:
        if self._reader.prefetcher is not None:
            self._reader.prefetcher.drop_all()

    # -- modes, devices, parameters ----------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Deposit proposals (the default).

        Args:
            mode: ``False`` is :meth:`eval`. Equal on all ranks at a call.

        Returns:
            The estimator.
        """
        self.training = bool(mode)
        return self

    def eval(self) -> Self:
        """Estimate from what is committed, deposit nothing; what is pending stays pending. Returns the estimator."""
        return self.train(False)

    def to(self, device: torch.device | str) -> Self:
        """Move rows and other state to a device.

        They are made on the CPU, whatever torch's default device is, and follow the first features in training mode.
        Rows with ``offload=`` stay where they are. No dtype changes.

        Returns:
            The estimator.

        Raises:
            ValueError: the meta device.
        """
        device = torch.device(device)
        if device.type == "meta":
            raise ValueError("device must be one that holds values, got 'meta'; rows that are moved there are lost")
        with self._state.writing():
            if self._table is not None:
                self._table.store.to(device)
            for part in self._components.values():
                part.move(device)
        return self

    @property
    def device(self) -> torch.device:
        """Where the rows are, or, without rows, other state; the CPU without any."""
        if self._table is not None:
            return self._table.store.device
        states = (value for part in self._components.values() for value in part.state.values())
        return next((value.device for value in states), torch.device("cpu"))

    @device.setter
    def device(self, value: Any) -> NoReturn:
        raise AttributeError(f"device is where the state is: move it with est.to({str(value)!r})")

    @property
    def split(self) -> bool:
        """Ranks hold different parts of the state, or share one file of rows: :meth:`state_dict` is collective."""
        parts = any(part.split_state for part in self._components.values())
        return parts or (self._table is not None and self._table.split)

    def learnables(self) -> dict[str, torch.nn.Module]:
        """By role, the modules whose parameters the user's optimizer learns."""
        return {role: part.learnable for role, part in self._components.items() if part.learnable is not None}

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors that describe the last call, by name; empty before one. Communicates nothing."""
        return {}

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All committed state, copied: rows by column, groups, state that is not rows. Pending deposits are not.

        In a thread beside training it is the state between two commits; but a temperature in the hands of the user's
        optimizer is taken as it is. State-dict hooks run.

        Returns:
            Plain containers and tensors: ``"version"``, ``"config"`` (what a loading estimator must have alike),
            ``"sample_groups"``, ``"rows"`` (every column, ``(n, 2)`` or ``(n, 1)``), ``"extra"`` (by role, state that
            is not rows) and ``"t"``; ``"entries"``, the names of ``extra``, where these grow.

        Raises:
            RuntimeError: this is a part of another estimator; with several ranks, another one failed or does something
                else.

        Communicates: collective where the state is :attr:`split`: on shards and with a network that ranks split, which
        every rank gets whole, and where ranks share a file. Otherwise nothing.
        """
        self.stand_alone()
        self._begin_saving()
        with doing("state_dict()", self.t), self._state.copying():
            state = states.state_dict(self)
        return self._run_replacing("state_dict_post", state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` into an estimator of the same configuration; drops anything pending.

        dtype and device stay those of this estimator. Nothing is written unless everything fits. Not beside calls in
        another thread. State-dict hooks run.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: another n, mode, method or dtype; the message names both values. Entries that are missing.
            TypeError: ``state_dict`` is no mapping.

        Communicates: collective where ranks share a file; otherwise nothing.
        """
        self.stand_alone()
        if isinstance(state_dict, Mapping):
            state_dict = self._run_replacing("load_state_dict_pre", dict(state_dict))
        self._await_save()
        with doing("load_state_dict()", self.t), self._state.writing():
            states.load_state_dict(self, state_dict)
        self._run("load_state_dict_post")

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep state and deposits; hooks and attachments stay behind, as with torch optimizers."""
        hooks: dict[str, Any] = {family: OrderedDict() for family in self._hooks}
        own = {"_reader": None, "_handshake": None, "_async_checks": None, "_saving": None}
        return {**self.__dict__, "_hooks": hooks, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_state": Exclusive(), "_saving": None, **state})
        self._connect()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        lines += [f"    {key}: {value}" for key, value in self._described().items()]
        for number, group in enumerate(self.sample_groups):
            lines.append(f"Sample Group {number}")
            lines += [f"    {key}: {group[key]}" for key in sorted(group)]
        return "\n".join([*lines, ")"])

    def _described(self) -> dict[str, Any]:
        """What ``repr`` shows beside the sample groups, by name."""
        return {key: value for part in self._components.values() for key, value in part.described().items()}
