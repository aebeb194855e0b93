"""Base class of all estimators: sample groups, rows, read / deposit / commit, hooks, checkpoints."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from compopt import checks
from compopt.batch import COUNT, RANK_STRIDE, Batch
from compopt.checks.context import in_backward, in_checkpoint, outside_of_graphs
from compopt.checks.inputs import check_vector
from compopt.data.prefetch_loader import PrefetchLoader
from compopt.distributed.collectives import doing
from compopt.estimator import state_dict as states
from compopt.estimator.attach import HasOptimizer
from compopt.estimator.engine import Engine
from compopt.estimator.groups import Groups

T = TypeVar("T")
Hook = Callable[..., Any]
FAMILIES = (
    *("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"),
    *("call", "discard"),
)


class Estimator:
    r"""Base class of losses with state that is updated after each optimizer step; methods as in ``torch.optim``.

    *Read, deposit, commit.* A call in training mode reads committed rows and deposits proposals, as ``backward``
    deposits gradients. Only :meth:`step` writes proposals to the rows. It commits all deposits since the last step
    (gradient accumulation). A row with several proposals is set to their mean (the mean of ``u``, where ``log u`` is
    stored). Under :meth:`eval` or ``torch.no_grad()`` nothing is deposited.

    :attr:`sample_groups` contains every hyper-parameter, in one dict per data set. Values may be changed there during
    training; the next call checks them. Keys that two components share are prefixed with ``normalizer.`` or
    ``temperature.``.

    Args:
        engine: groups, ranks and rows; ``None``: this is a part, which creates an engine when it is used alone.

    Attributes:
        data_fingerprint: fingerprint of the index that maps samples to rows (``ShardIndex``, ``KeyIndex``,
            ``UidIndex``); set by the user. :func:`compopt.save` stores it, and :func:`compopt.load` refuses the rows of
            another fingerprint.

    State: one row per sample with the columns of all components and ``count`` (int32, visits per direction), padded to
    a multiple of 16 bytes; state of the components that is not per sample; :attr:`t`.

    Threads: one thread calls the estimator. Meanwhile another thread may call :meth:`state_dict`, :meth:`read` or
    :func:`compopt.save`, and gets the state between two commits. A commit waits for that thread, except for a save with
    ``blocking=False``. Methods that communicate must run in the thread that calls; another thread gets a
    ``RuntimeError``.

    Processes: a worker of a ``DataLoader`` may read an estimator, and must not commit. A forked worker has the state of
    its start. A worker that is spawned, also by a fork server, shares rows on the CPU with the process that trains, and
    has everything else as of its start; rows on the disk cannot be sent to it.

    Communicates, with several ranks: construction is collective with ``offload="disk"``. The first message forms a CPU
    group if the backend of the process group does not support CPU tensors. Methods that communicate document it; the
    others do not communicate.

    Raises:
        IndexError: an index on the CPU is outside the data set. After this and every other error the state is
            unchanged.
        TypeError, ValueError: bad types, shapes or hyper-parameters; a dtype of the rows other than float32 or float64.
        RuntimeError: with several ranks, another rank refused the call, runs another operation, or did not respond.

    Warns:
        UserWarning: once each: no commit during three updates of a model, or during many calls; an index that is always
            ``0 .. B - 1``, the position in the batch.

    Example:
        >>> import torch, compopt
        >>> est = compopt.SogCLREstimator(n=100)  # every preset is an Estimator
        >>> z1, z2 = torch.randn(2, 8, 4, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()  # reads rows, deposits proposals
        >>> est.step()  # commits; est.discard() forgets
        >>> est.t, est.read(torch.tensor([0, 50]))["count"].tolist()
        (1, [1, 0])
    """

    data_fingerprint: str | None = None
    mode: str
    dtype: torch.dtype
    _fixed: tuple[str, ...] = ("mode", "dtype")  # attributes that determine the meaning of the rows: set only once

    def __init__(self, engine: Engine | None) -> None:
        self._hooks: dict[str, OrderedDict[int, Hook]] = {family: OrderedDict() for family in FAMILIES}
        self._core = engine
        if engine is not None:
            self.mode, self.dtype = engine.mode, engine.dtype
            engine.open()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed and name in self.__dict__:
            plain = str | bool | int | torch.dtype | None
            old, new = (
                repr(each) if isinstance(each, plain) else type(each).__name__ for each in (self.__dict__[name], value)
            )
            raise AttributeError(
                f"{name} of {type(self).__name__} is fixed at {old}, since its state depends on it: build another "
                f"estimator with {name}={new}"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._fixed:  # otherwise it could be set again after deletion
            raise AttributeError(f"{name} of {type(self).__name__} is fixed, since its state depends on it")
        super().__delattr__(name)

    @property
    def _engine(self) -> Engine:
        """Engine that methods modify; a part of another estimator raises an error that names its owner."""
        return self._facts

    @property
    def _facts(self) -> Engine:
        """Engine that properties read; for a part, the engine of its owner."""
        assert self._core is not None
        return self._core

    @property
    def _role(self) -> str | None:
        """Role of the part to which groups, rows and state are restricted; ``None``: no restriction."""
        return None

    @property
    def t(self) -> int:
        """Number of commits so far."""
        return self._facts.t

    @property
    def training(self) -> bool:
        """Return whether calls deposit, see :meth:`train`."""
        return self._facts.training

    # -- groups ------------------------------------------------------------------------------------------------

    @property
    def sample_groups(self) -> Groups:
        """List of one dict per data set, like ``param_groups``: ``n`` and every hyper-parameter.

        For a part of an estimator: views with the part's own hyper-parameters under the part's names. Edits change the
        groups of the owner.
        """
        groups, role = self._facts.groups, self._role
        return groups.groups if role is None else groups.of_part(role)

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of the hyper-parameters that a group leaves out (``None``: the default of the mode)."""
        groups, role = self._facts.groups, self._role
        return groups.defaults if role is None else groups.own(role, groups.defaults)

    @property
    def n(self) -> int | None:
        """Number of samples in all groups; ``None`` for an estimator without rows."""
        return self._facts.groups.n

    def add_sample_group(self, group: Mapping[str, Any]) -> None:
        """Append the rows of another data set; their indices follow all existing ones.

        Args:
            group: ``{"n": ..., key: value, ...}``; defaults replace missing keys.

        Raises:
            ValueError: an unknown key, a bad value, or an estimator without rows.
            TypeError: ``n`` is not an integer.

        Communicates: collective with several ranks.
        """
        engine = self._engine
        engine.await_save()
        with doing("add_sample_group()", self.t), engine.writing():
            new = engine.groups.completed(group)
            engine.forget_prefetched()
            if engine.table is not None:
                with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
                    engine.table.grow((self.n or 0) + new["n"])
            engine.groups.append(new)

    # -- rows --------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal on all ranks: what a load compares, and options that no checkpoint depends on."""
        engine, config = self._engine, states.config(self._engine)
        own = {role: part.shared_options() for role, part in engine.parts.items()}
        columns = config.pop("columns")  # last, since they follow from the others
        return {**config, **own, "shard": engine.placement.shard, "columns": columns}

    @property
    def _remembers_index(self) -> bool:
        return self.n is not None

    def _read(
        self,
        keys: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        facts: Mapping[str, int] | None = None,
        least: int = 1,
        more: int = 0,
    ) -> Batch:
        """Return the global batch of a call with its committed rows, see :meth:`BatchReader.read`."""
        engine = self._engine
        depositing = engine.training and torch.is_grad_enabled()
        self._refuse_checkpoint(engine, depositing)
        if depositing:
            self._drop_skipped()
            with engine.handshake.guard():  # warning filters may turn a warning into an error
                if engine.attachments.unsure_of_positions:
                    engine.attachments.positions(keys["index"], self.n, self._remembers_index)
        progress = {"depositing": int(depositing), "t": engine.t, "pending": engine.pending}
        progress |= {"calls": engine.committed + engine.pending, "followers": len(self._hooks["call"]), **(facts or {})}
        batch = engine.reader.read(keys, values, depositing, progress, self._identity, least, more)
        if depositing:
            for part in engine.parts.values():
                part.move(batch.rows.device)
        return batch

    def _index(self, index: Tensor | None, count: int) -> Tensor:
        """Return the checked index of a call; without an index and rows, number each sample uniquely."""
        if index is not None:
            return check_vector("index", index, count)
        if self.n is not None:
            raise TypeError(f"index is None; pass data-set positions: {type(self).__name__} has rows for n={self.n}")
        return torch.arange(count, device="cpu") + (self._engine.ranks.rank + 1) * RANK_STRIDE

    def _look(self, index: Tensor, like: Tensor, values: Mapping[str, Tensor] | None = None) -> Batch:
        """Read committed rows outside of a call, with the device and dtype of ``like``; collective on shards."""
        return self._engine.reader.look(index, like, values)

    def _refuse_checkpoint(self, engine: Engine, depositing: bool) -> None:
        """Refuse a call inside a checkpointed function, because the recomputation would deposit or gather twice."""
        keeps = engine.table is not None or any(part.has_state for part in engine.parts.values())
        deposits = keeps and depositing
        meets = engine.ranks.size > 1 and (torch.is_grad_enabled() or in_backward())
        if not (deposits or meets) or not in_checkpoint():
            return
        error = RuntimeError(
            f"{type(self).__name__} was called inside a checkpointed function (torch.utils.checkpoint, or "
            f"DeepSpeed's), which runs again in backward and would {'deposit' if deposits else 'gather'} the batch "
            f"twice; checkpoint the encoders alone and call the estimator on what they return: it keeps no B x B "
            f"matrix for backward"
        )
        if in_backward():  # the other ranks may not be in backward, so that they cannot be told
            raise error
        with engine.handshake.guard():
            raise error

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """Return a copy of committed values by column, on the rows' device.

        Args:
            index: data-set positions, ``(B,)``. On shards the call is collective, and ranks may pass different
                positions.

        Returns:
            Every column as stored, ``(B, 2)``, or ``(B, 1)`` in unimodal mode and with one direction; ``count`` is
            ``(B,)`` int64, the number of visits of the sample. Logarithms of a sample that was never visited (count 0)
            are 0. For a part of an estimator: the part's own columns and visits.

        Raises:
            IndexError: an index is outside the data set.
            TypeError, ValueError: the index is not a 1-D tensor of integers.
            RuntimeError: the estimator has no rows.
        """
        columns, count = self._read_rows(index)
        return {**columns, COUNT: count.amax(dim=1).to(torch.int64)}

    def _read_rows(self, index: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the columns of :meth:`read` and the visits of each direction, ``(B, D)``."""
        engine = self._facts.open()
        role = self._role or (next(iter(engine.parts)) if len(engine.parts) == 1 else None)
        own = None if role is None else [column.name for column in engine.columns()[role]]
        if engine.table is None or own == []:
            raise RuntimeError(f"{type(self).__name__} keeps nothing per sample; there are no rows to read")
        with doing("read()", self.t), engine.copying():
            rows = engine.reader.agree(lambda: check_vector("index", index, None)).cpu()
            like = torch.zeros((), dtype=engine.dtype, device=engine.table.store.device)
            batch = engine.reader.look(rows, like)
        columns = {name: value.clone() for name, value in batch.columns.items() if own is None or name in own}
        return columns, batch.count if own is None else torch.where(batch.seen(own[0]), batch.count, 0)

    @overload
    def prefetch(self, source: Tensor, index: Any = -1, index2: Any = None) -> None: ...

    @overload
    def prefetch(self, source: Iterable[T], index: Any = -1, index2: Any = None) -> PrefetchLoader[T]: ...

    def prefetch(self, source: Any, index: Any = -1, index2: Any = None) -> PrefetchLoader[Any] | None:
        """Start reading the rows of a future batch, or wrap a loader that does so for every batch.

        The call of the batch uses the values committed at the time of that call. Prefetching helps only with
        ``offload=``: rows on the features' device are read in the call itself.

        Args:
            source: the ``index`` of a future batch, ``(B,)``; or a loader, from which one batch is read ahead.
            index: with a loader, place of the index in a batch: a position, a key, or a function of the batch.
            index2: with an index, the index of the second modality; with a loader, its place in a batch.

        Returns:
            ``None`` for an index; for a loader, a :class:`~compopt.data.PrefetchLoader` over its batches, or the loader
            itself if the estimator has no rows.

        Raises:
            IndexError: an index on the CPU is outside the data set.
            TypeError, ValueError: an index is not a 1-D tensor of integers, or there are two second indices; for a
                loader, see ``PrefetchLoader``.

        Communicates: nothing, except on shards with ``offload=`` (on all ranks): a background thread exchanges row
        numbers, so that all ranks must prefetch the same batches in the same order.
        """
        if isinstance(source, Tensor):
            if isinstance(index, Tensor) and index2 is not None:
                raise TypeError("index and index2 both hold the second index; pass prefetch(index, index2)")
            self._prefetch(source, index if isinstance(index, Tensor) else index2)
            return None
        if isinstance(source, np.ndarray) or (isinstance(source, Sequence) and source and isinstance(source[0], int)):
            raise TypeError(
                f"index must be a tensor of integers, got {type(source).__name__}; pass torch.as_tensor(index)"
            )
        if self._engine.table is None:  # nothing to read: return the loader, whose batches need no index
            return cast(PrefetchLoader[Any], source)
        return PrefetchLoader(source, self._prefetch, self._engine.forget_prefetched, index, index2)

    def _prefetch(self, index: Tensor, index2: Tensor | None = None) -> None:
        given = {"index": index} if index2 is None else {"index": index, "index2": index2}
        self._engine.reader.prefetch({name: check_vector(name, value, None) for name, value in given.items()})

    # -- deposit and commit ------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of calls since the last commit that deposited proposals."""
        return self._facts.pending

    def _deposit(self, batch: Batch, proposals: Mapping[str, Tensor], valid: Tensor | None = None) -> None:
        engine = self._engine
        if engine.table is not None:
            engine.table.deposit(batch, proposals, valid)
        elif not (self._hooks["call"] or any(part.has_pending_state for part in engine.parts.values())):
            return  # neither this estimator nor a follower has anything to commit
        engine.pending += 1
        engine.attachments.pending(engine.pending)

    def _commits(self) -> bool:
        """Return whether a call has anything to commit: rows, other state, or those of a follower."""
        engine = self._engine
        own = (*engine.columns().values(), *(part.has_state for part in engine.parts.values()))
        return bool(self._hooks["call"]) or any(own)

    def _begin_saving(self) -> None:
        engine = self._facts
        engine.attachments.saving(self.t, engine.pending)
        self._run("state_dict_pre")

    @outside_of_graphs
    def step(self) -> None:
        """Write all pending proposals to the rows and increment :attr:`t`; with nothing pending, do nothing.

        An optimizer passed to :meth:`attach` calls it after each update. Step hooks run before and after the commit.
        Communicates nothing.

        Raises:
            RuntimeError: this is a part of another estimator; only that estimator commits.

        Warns:
            RuntimeWarning: a background save (``compopt.save(..., blocking=False)``) has failed.
        """
        self._commit(None)

    @outside_of_graphs
    def _commit(self, found_inf: Tensor | None) -> None:
        engine = self._engine
        if engine.saving is not None:
            engine.saving.warn()
        self._drop_skipped()
        if not engine.pending:
            return
        if found_inf is not None:
            found_inf = found_inf.reshape(())  # a flag of shape (1,) would broadcast 0-d state to 1-D
            if found_inf.device.type == "cpu" and found_inf.item() > 0:
                self.discard()
                return
        self._run("step_pre", (), {})
        # On an accelerator the host does not wait for the flag: where it is positive, the device keeps the old values.
        with engine.writing(), torch.no_grad():
            if engine.table is not None:
                engine.table.commit(found_inf)
            for part in engine.parts.values():
                part.commit_state(found_inf)
            engine.attachments.committed(engine.pending)
            engine.committed, engine.pending = engine.committed + engine.pending, 0
            engine.t += 1
        self._run("step_post", (), {} if found_inf is None else {"found_inf": found_inf})

    def _drop_skipped(self) -> None:
        """Drop what is pending if an attached engine has skipped the update."""
        if self._engine.attachments.skipped():
            self.discard()

    @outside_of_graphs
    def discard(self) -> None:
        """Drop all pending proposals, for example after a skipped update. Communicates nothing."""
        self._engine.discard()
        self._run("discard")

    def attach(self, optimizer: torch.optim.Optimizer | HasOptimizer, *, checkpoint: bool = False) -> RemovableHandle:
        """Run :meth:`step` after each real ``optimizer.step()``, and :meth:`discard` after a step skipped for overflow.

        Call it after ``deepspeed.initialize`` (with the engine) or ``accelerator.prepare``, and again for every new
        optimizer. A ``GradScaler`` that skips an unfused step does not call the optimizer: the finite rows of that
        window are part of the next commit, which is harmless because the weights did not change.
        :func:`compopt.integrations.amp.attach` and :meth:`discard` drop these rows.

        With ``checkpoint=True``, code that saves the optimizer also saves the estimator. ``optimizer.state_dict()``
        contains :meth:`state_dict` under the key ``"compopt"`` (``"compopt.1"`` for the second estimator attached to
        the optimizer, and so on), and ``optimizer.load_state_dict()`` loads it after the state of the optimizer; if
        either is refused, neither is loaded. Attach before loading. The state must not exceed 1 GiB.

        Args:
            optimizer: a torch optimizer, or a wrapper or engine that keeps one in ``.optimizer``.
            checkpoint: include the state of the estimator in the optimizer's state dict.

        Returns:
            A handle; ``remove()`` detaches the estimator and removes its state from the optimizer's state dict.

        Raises:
            TypeError: ``optimizer`` contains no torch optimizer.
            ValueError: with ``checkpoint=True``, the state is :attr:`split`, on disk or larger than 1 GiB, or the
                optimizer is DeepSpeed's or overrides ``state_dict`` or ``load_state_dict``. At
                ``optimizer.state_dict()``: ``torch.distributed.checkpoint.state_dict`` or FSDP would drop the entry.
            RuntimeError: this is a part of another estimator; attach that estimator.

        Warns:
            UserWarning: with ``checkpoint=True``, the optimizer was loaded before attaching, or loads a state without
                the entry.

        Communicates: nothing, neither at this call nor at a commit.
        """
        checks.flag("checkpoint", checkpoint)
        return self._engine.attachments.add(optimizer, self._commit, self if checkpoint else None)

    def between_commits(self) -> AbstractContextManager[None]:
        """Return a context in which no commit runs and no other thread copies the state."""
        return self._engine.writing()

    # -- modes, devices, parameters ----------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set whether calls deposit proposals (the default); equal on all ranks. Return the estimator."""
        self._engine.training = bool(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode: calls read committed state and deposit nothing. Pending deposits are kept.

        Return the estimator.
        """
        return self.train(False)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Self:
        """Move rows and other state to a device, and return the estimator; the meta device is a ``ValueError``.

        Rows and state are created on the CPU and move to the device of the features at the first training call. Rows
        with ``offload=`` are not moved. Dtypes do not change: ``dtype`` is a ``TypeError``. ``non_blocking`` has no
        effect.
        """
        if dtype is not None or isinstance(device, torch.dtype):
            raise TypeError(
                f"rows keep the dtype of the constructor, dtype=, got {dtype or device}; pass features of any "
                f"floating-point dtype as they are"
            )
        engine = self._engine
        device = self.device if device is None else torch.device(device)
        if device.type == "meta":
            raise ValueError("device must be one that holds values, got 'meta'; rows that are moved there are lost")
        with engine.writing():
            if engine.table is not None:
                engine.table.store.to(device)
            engine.device = device
            for part in engine.parts.values():
                part.move(device)
        return self

    @property
    def device(self) -> torch.device:
        """Device of the rows; without rows, of the other state; without state, the CPU or the target of :meth:`to`."""
        engine = self._facts
        if engine.table is not None:
            return engine.table.store.device
        states = (value for part in engine.parts.values() for value in part.state.values())
        return next((value.device for value in states), engine.device)

    @property
    def split(self) -> bool:
        """Return whether ranks hold different parts of the state, so that :meth:`state_dict` is collective."""
        engine = self._facts
        sharded = engine.table is not None and engine.table.sharded
        return sharded or any(part.split_state for part in engine.parts.values())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters to pass to the user's optimizer (a learned temperature); usually none."""
        for part in self._facts.parts.values():
            yield from part.learned()

    def learnables(self) -> dict[str, torch.nn.Module]:
        """Return, by role, the modules with the parameters that the user's optimizer learns."""
        return {role: part.learnable for role, part in self._facts.parts.items() if part.learnable is not None}

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors that describe the last call, by name; empty before the first call. Communicates nothing."""
        return {}

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all committed state: rows by column, groups, state that is not rows; no pending deposits.

        Another thread may call it during training and gets the state between two commits. A temperature that the user's
        optimizer learns is the exception: the optimizer may change it meanwhile.

        Returns:
            Plain containers and tensors: ``"version"``, ``"config"`` (which must equal that of the loading estimator),
            ``"sample_groups"``, ``"rows"`` (every column, ``(n, 2)`` or ``(n, 1)``), ``"extra"`` (state that is not
            rows, by role) and ``"t"``; ``"entries"``, the names in ``extra``, if a part creates state during training.
            For a part of an estimator: the state of the part, with ``"meaning"``, the facts of the composition that its
            values depend on.

        Communicates: collective if the state is :attr:`split` (shards, or a network that is split across ranks). Every
        rank gets the complete state. Otherwise nothing.
        """
        self._begin_saving()
        engine, role = self._facts.open(), self._role
        with doing("state_dict()", self.t), engine.copying():
            state = states.state_dict(engine) if role is None else states.part_state_dict(engine, role)
        replaced: dict[str, Any] = self._run("state_dict_post", state)
        return replaced

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` into an estimator of the same configuration; drop pending deposits.

        For a part of an estimator: restore the state of a part of the same kind, for example from another composition.
        The owner's hyper-parameters and :attr:`t` do not change. The number of visits of a sample becomes the maximum
        of the current and the loaded one. If only the loaded state has visited a sample, the other parts treat their
        next visit of that sample as the first one.

        The dtype and the device of this estimator do not change, and all values are copied. If any check fails, nothing
        is written. No other thread may call the estimator meanwhile.

        Args:
            state_dict: result of :meth:`state_dict`.

        Raises:
            ValueError: another n, mode, method or dtype (dtypes are never converted); missing or unknown entries;
                tensors that are sparse or on the meta device; values that no run writes, such as NaN or a count below
                0. For a part: values with another meaning in this composition (another reference or temperature).
            TypeError: ``state_dict`` is not a mapping, or an entry has another type.

        Communicates: nothing.
        """
        self._load_checked(self._checked_state(state_dict))

    def _checked_state(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state as the pre-hooks of a load leave it, or raise if it cannot be loaded; change nothing."""
        engine, role = self._facts.open(), self._role
        if isinstance(state_dict, Mapping):
            state_dict = self._run("load_state_dict_pre", dict(state_dict))
        with doing("load_state_dict()", self.t):
            if role is None:
                return states.check_all(engine, state_dict)
            states.check_part(engine, role, state_dict)
        return state_dict

    def _load_checked(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`_checked_state`."""
        engine, role = self._facts.open(), self._role
        engine.await_save()
        with doing("load_state_dict()", self.t), engine.writing():
            if role is None:
                states.load(engine, state)
            else:
                states.load_part(engine, role, state)
        self._run("load_state_dict_post")

    # -- hooks -------------------------------------------------------------------------------------------------

    # Hooks run without the estimator's lock: they may read, save, or wait for a thread that does.

    def _register(self, family: str, hook: Hook, prepend: bool = False) -> RemovableHandle:
        handle = RemovableHandle(self._hooks[family])
        self._hooks[family][handle.id] = hook
        if prepend:
            self._hooks[family].move_to_end(handle.id, last=False)
        return handle

    def _run(self, family: str, *args: Any) -> Any:
        """Run hooks; a hook with a single argument, a state, may return another state, which is passed on."""
        for hook in list(self._hooks[family].values()):
            result = hook(self, *args)
            args = (result,) if len(args) == 1 and result is not None else args
        return args[0] if args else None

    def register_step_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator, args, kwargs)`` before each commit, until ``remove()`` of the handle."""
        return self._register("step_pre", hook)

    def register_step_post_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator, args, kwargs)`` after each commit.

        ``kwargs`` has ``found_inf`` if a ``GradScaler`` gave it: where it is positive, the commit changed nothing.
        """
        return self._register("step_post", hook)

    def register_call_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator, batch, pairs)`` at the end of each call of a contrastive estimator.

        ``batch`` contains the samples of all ranks, and ``pairs`` the statistics of their pairs, which must not be
        changed. With such a hook, :meth:`step` also commits calls of an estimator without state.
        """
        return self._register("call", hook)

    def register_discard_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator)`` after each :meth:`discard`."""
        return self._register("discard", hook)

    def register_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator)`` before :meth:`state_dict`; with ``prepend``, before all other hooks."""
        return self._register("state_dict_pre", hook, prepend)

    def register_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator, state_dict)`` with the finished dict; the hook may return another dict."""
        return self._register("state_dict_post", hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator, state_dict)`` before all checks and writes; the hook may return another dict."""
        return self._register("load_state_dict_pre", hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator)`` after a successful load."""
        return self._register("load_state_dict_post", hook, prepend)

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(torch.nn.Module, name):
                raise AttributeError(
                    f"{type(self).__name__} is no torch.nn.Module and has no {name}(): est.to(device) moves it, as the "
                    f"first training call does by itself, est.parameters() are its learned scalars, and "
                    f"compopt.as_module(est) is a module",
                    name=name,
                    obj=self,
                )
            object.__getattribute__(self, name)  # raises, also what a property has raised

    # -- copies and repr ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the state and pending deposits without hooks, as torch optimizers do."""
        return {**self.__dict__, "_hooks": {family: OrderedDict() for family in self._hooks}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for part in self._engine.parts.values():
            part.belong(self)

    def __copy__(self) -> Self:
        """Return a deep copy, because two estimators must not write the same rows."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        lines += [f"    {key}: {value}" for key, value in self._described().items()]
        for number, group in enumerate(self.sample_groups):
            lines.append(f"Sample Group {number}")
            lines += [f"    {key}: {group[key]}" for key in sorted(group)]
        return "\n".join([*lines, ")"])

    def _described(self) -> dict[str, Any]:
        return {key: value for part in self._facts.parts.values() for key, value in part.described().items()}
