"""The contract of every estimator: groups, rows, read / deposit / commit, hooks, checkpoints."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from compopt import attach as attaching
from compopt import checkpoint
from compopt.component import Component
from compopt.deposits import COUNT, Deposit
from compopt.groups import Groups, Hyper, SampleGroups
from compopt.hooks import Hooks
from compopt.inputs import check_range, check_vector, distinct_values
from compopt.monitor import Monitor
from compopt.table import RowTable

DIRECTIONS = {"bimodal": 2, "unimodal": 1, "single": 1}
# Calls without a commit after which somebody has probably forgotten step() or attach(): before the first commit, and
# ever (long accumulation is legitimate, a leak is not).
PATIENCE, LONG_PATIENCE = 256, 8192


@dataclass
class Visit:
    """The rows that one call reads.

    Attributes:
        rows: ``(B, 1)``, or ``(B, 2)`` when the second modality has rows of its own.
        columns: committed values, ``(B, D)``, with ``count``.
        old: the gathered blocks, ``(B * R, words)``; ``None`` without rows.
        distinct: the host knows that no row occurs twice.
        bad: 0-d flag on the device: an index is out of range.
        depositing: the call is in training mode with gradients enabled.
    """

    groups: SampleGroups
    rows: Tensor
    columns: dict[str, Tensor]
    old: Tensor | None
    distinct: bool
    bad: Tensor | None
    dtype: torch.dtype
    depositing: bool

    def hypers(self, component: str) -> Hyper:
        """Hyper-parameters of one component for these rows."""
        return self.groups.hyper(component, self.rows, self.dtype)

    def hyper(self, component: str, key: str) -> Any:
        """One hyper-parameter for these rows."""
        return self.hypers(component)(key)

    def guard(self, value: Tensor) -> Tensor:
        """Make a value NaN if an index on the device was out of range."""
        return value if self.bad is None else torch.where(self.bad, torch.nan, value)


class Estimator(Hooks):
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

    State: one row per sample, the columns of all components and ``count`` (int32, visits per direction).

    Errors leave the state as it was: ``IndexError`` for an index outside the data set, ``TypeError`` for one
    that is not integral, ``ValueError`` for bad shapes and hyper-parameters.
    """

    def __init__(self, components: Mapping[str, Component], *, mode: str, dtype: torch.dtype) -> None:
        super().__init__()
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype of the rows must be a torch.dtype such as torch.float32, got {dtype!r}")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype of the rows must be torch.float32 or torch.float64, got {dtype}")
        _refuse_many_ranks()
        self.mode, self.dtype = mode, dtype
        self.training = True
        self.t = 0
        self._components = dict(components)
        self._groups = SampleGroups(self._components, mode)
        self._table = self._make_table()
        self._deposits: list[Deposit] = []
        self._pending = 0
        self._handles: dict[int, RemovableHandle] = {}
        self._monitor = Monitor()

    # -- groups ------------------------------------------------------------------------------------------------

    @property
    def sample_groups(self) -> Groups:
        """One dict per data set, as ``param_groups``: ``n`` and every hyper-parameter."""
        return self._groups.groups

    @property
    def defaults(self) -> dict[str, Any]:
        """What fills a group that leaves a hyper-parameter out (``None``: by mode)."""
        return self._groups.defaults

    @property
    def n(self) -> int | None:
        """Samples in all groups; ``None`` for an estimator without rows."""
        return self._groups.n

    def add_sample_group(self, group: Mapping[str, Any]) -> None:
        """Append the rows of another data set, ``{"n": ..., key: value, ...}``; defaults fill what it leaves out.

        Its samples take the indices after all existing ones. The table is copied once.
        """
        self._groups.add(group)
        if self._table is not None:
            self._table.store.grow(self._groups.n or 0)

    # -- rows --------------------------------------------------------------------------------------------------

    def _make_table(self) -> RowTable | None:
        directions = DIRECTIONS[self.mode]
        if not any(part.columns(directions, self.dtype) for part in self._components.values()):
            return None
        return RowTable(self._components, self._groups, directions, self.dtype)

    def _visit(self, index: Any, like: Tensor, index2: Any = None) -> Visit:
        """Check indices and read their committed rows."""
        if self._owned:
            raise RuntimeError("this object is part of a ContrastiveEstimator, which reads and writes its rows")
        self._monitor.poll()
        self._groups.check()
        given = {"index": check_vector("index", index, len(like))}
        if index2 is not None:
            given["index2"] = check_vector("index2", index2, len(like))
        flags = [check_range(name, value, self.n) for name, value in given.items()]
        distinct = distinct_values(given["index"]) == len(given["index"]) and index2 is None
        rows = torch.stack([value.to(like.device, non_blocking=True) for value in given.values()], dim=1)
        bad: Tensor | None = None
        for flag in flags:
            if flag is not None:
                bad = flag.to(rows.device) if bad is None else bad | flag.to(rows.device)
        if bad is not None:
            self._monitor.watch(bad.to(torch.int32), self._refuse_index)
            rows = rows.clamp(0, (self.n or 1) - 1)
        dtype = torch.promote_types(torch.promote_types(like.dtype, torch.float32), self.dtype)
        columns, old = {COUNT: torch.zeros_like(rows, dtype=torch.int32)}, None
        depositing = self.training and torch.is_grad_enabled()
        if self._table is not None:
            if depositing:
                self._table.store.to(rows.device)
            columns, old = self._table.read(rows, dtype)
        return Visit(self._groups, rows, columns, old, distinct, bad, dtype, depositing)

    @property
    def _owned(self) -> bool:
        """This estimator is a component of another one."""
        return isinstance(self, Component) and self.owner is not None

    def _refuse_index(self, bad: int) -> None:
        if bad:
            raise IndexError(
                f"an index of an earlier call was outside n={self.n} (its loss was NaN); pass data-set indices, "
                f"not batch positions, and pass them on the CPU to learn of this at once"
            )

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """Committed values by column.

        Args:
            index: data-set positions, ``(B,)``.

        Returns:
            A copy of every column, ``(B, 2)`` in bimodal and ``(B, 1)`` in unimodal mode, in the rows' dtype;
            ``count`` is ``(B,)`` int64, the visits of the sample (0: never seen, its logarithms read 0).
        """
        if self._table is None:
            raise RuntimeError(f"{type(self).__name__} keeps nothing per sample; there are no rows to read")
        batch = len(index) if isinstance(index, Tensor) and index.dim() else 0
        rows = check_vector("index", index, batch).cpu()
        check_range("index", rows, self.n)
        columns, _ = self._table.read(rows.to(self._table.store.device)[:, None], self.dtype)
        columns[COUNT] = columns[COUNT].amax(dim=1).to(torch.int64)
        return {name: value.clone() for name, value in columns.items()}

    # -- deposit and commit ------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Calls whose proposals wait for :meth:`step`."""
        return self._pending

    def _deposit(self, visit: Visit, proposals: Mapping[str, Tensor], valid: Tensor | None = None) -> None:
        """Keep the proposals of one call, ``(B, D)`` each, until the commit."""
        if visit.old is not None:
            if visit.rows.shape[1] == 2:
                proposals = {k: v.repeat_interleave(2, dim=0) for k, v in proposals.items()}
                own = torch.eye(2, dtype=torch.bool, device=visit.rows.device).repeat(len(visit.rows), 1)
                valid = own if valid is None else own & valid.repeat_interleave(2, dim=0)
            if visit.bad is not None:
                valid = torch.ones_like(visit.columns[COUNT], dtype=torch.bool) if valid is None else valid
                valid = valid & ~visit.bad
            values = {name: value.detach() for name, value in proposals.items()}
            self._deposits.append(Deposit(visit.rows.flatten(), visit.old, values, valid, visit.distinct))
        elif not any(part.has_pending_state for part in self._components.values()):
            return  # a stateless estimator has nothing to commit
        self._pending += 1
        if self._pending == (PATIENCE if self.t == 0 else LONG_PATIENCE):
            warnings.warn(
                f"{self._pending} calls have deposited and none was committed: call est.step() after "
                f"optimizer.step(), or est.attach(optimizer) (after deepspeed.initialize or prepare)",
                stacklevel=3,
            )

    def step(self) -> None:
        """Commit everything pending; with nothing pending, do nothing. Communicates nothing."""
        self._commit(None)

    def _commit(self, found_inf: Tensor | None) -> None:
        if not self._pending:
            return
        if found_inf is not None and found_inf.device.type == "cpu" and found_inf.item() > 0:
            self.discard()
            return
        self._run("step_pre", (), {})
        with torch.no_grad():
            if self._table is not None and self._deposits:
                self._table.commit(self._deposits, found_inf)
            for part in self._components.values():
                part.promote(found_inf)
        self._deposits.clear()
        self._pending = 0
        self.t += 1
        self._run("step_post", (), {})

    def discard(self) -> None:
        """Forget everything pending: call it when an update was skipped."""
        self._deposits.clear()
        self._pending = 0
        for part in self._components.values():
            part.forget()

    def attach(self, optimizer: Any) -> RemovableHandle:
        """Run :meth:`step` after each real ``optimizer.step()``; a step skipped for overflow discards.

        Wrappers and engines are unwrapped; attaching twice changes nothing. Call it after
        ``deepspeed.initialize`` or ``accelerator.prepare``. An unfused ``GradScaler`` skip and a DeepSpeed
        overflow do not touch the optimizer at all: the finite rows of that window then join the next commit,
        which is harmless because the weights did not move; call :meth:`discard` to drop them.

        Returns:
            A handle with ``remove()``.

        Raises:
            TypeError: no torch optimizer is inside.
        """
        inner = attaching.unwrap(optimizer)
        handle = self._handles.get(id(inner))
        if handle is None or handle.id not in inner._optimizer_step_post_hooks:
            handle = attaching.commit_after_step(inner, self._commit)
            self._handles[id(inner)] = handle
        return handle

    # -- modes, devices, parameters ----------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Estimator:
        """Deposit proposals (the default)."""
        self.training = bool(mode)
        return self

    def eval(self) -> Estimator:
        """Estimate from what is committed, deposit nothing."""
        return self.train(False)

    def to(self, device: torch.device | str) -> Estimator:
        """Move rows and other state to a device; they otherwise follow the first features in training mode."""
        device = torch.device(device)
        if self._table is not None:
            self._table.store.to(device)
        for part in self._components.values():
            part.move(device)
        return self

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """What the user's optimizer must learn (a learned temperature); usually empty."""
        for part in self._components.values():
            yield from part.learned()

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors that describe the last call, by name."""
        return {}

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All committed state, copied: rows by column, groups, state that is not rows. Pending deposits are not."""
        self._run("state_dict_pre")
        return self._run_replacing("state_dict_post", checkpoint.state_dict(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` into an estimator of the same configuration; drops anything pending.

        dtype and device stay those of this estimator. Nothing is written unless everything fits.

        Raises:
            ValueError: another n, mode, method or dtype; the message names both values.
        """
        if isinstance(state_dict, Mapping):
            state_dict = self._run_replacing("load_state_dict_pre", dict(state_dict))
        checkpoint.load_state_dict(self, state_dict)
        self._run("load_state_dict_post")

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep state and deposits; hooks and attachments stay behind, as with torch optimizers."""
        fresh = {"_hooks": {family: OrderedDict() for family in self._hooks}, "_handles": {}, "_monitor": Monitor()}
        return {**self.__dict__, **fresh}

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.sample_groups):
            lines.append(f"Sample Group {number}")
            lines += [f"    {key}: {group[key]}" for key in sorted(group)]
        return "\n".join([*lines, ")"])


def _refuse_many_ranks() -> None:
    """Gradients over a part of the global batch would silently be others than on one rank."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            f"this version works in one process, got a process group of {distributed.get_world_size()}: negatives and "
            f"state would silently be those of each rank alone; use one process"
        )
