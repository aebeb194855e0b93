"""The contract of every estimator: groups, rows, read / deposit / commit, hooks, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from compopt import attach as attaching
from compopt import checkpoint, checks
from compopt.component import Component
from compopt.deposits import COUNT, Deposit, merge
from compopt.groups import Groups, Hyper, membership, parse
from compopt.hooks import Hooks
from compopt.indexing import check_range, check_vector, distinct_values
from compopt.monitor import Monitor
from compopt.rows import Column, RowLayout
from compopt.stores import MemoryStore, RowStore

DIRECTIONS = {"bimodal": 2, "unimodal": 1, "single": 1}
# Forward calls without a commit after which somebody has probably forgotten step() or attach().
PATIENCE = 256


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

    estimator: Estimator
    rows: Tensor
    columns: dict[str, Tensor]
    old: Tensor | None
    distinct: bool
    bad: Tensor | None
    dtype: torch.dtype
    depositing: bool

    def hypers(self, component: str) -> Hyper:
        """Hyper-parameters of one component for these rows."""
        return self.estimator._hypers(component, self.rows, self.dtype)

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
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype of the rows must be torch.float32 or torch.float64, got {dtype}")
        self.mode, self.dtype = mode, dtype
        self.training = True
        self.t = 0
        self._components = dict(components)
        self._names = _group_names(self._components)
        self.defaults: dict[str, Any] = {
            self._names[role][key]: value
            for role, part in self._components.items()
            for key, value in part.defaults.items()
        }
        self.sample_groups: Groups = self._merge_groups()
        self._snapshot: Groups = []
        self._check_groups()
        self._layout, self._store = self._make_rows()
        self._deposits: list[Deposit] = []
        self._pending = 0
        self._handles: dict[int, RemovableHandle] = {}
        self._monitor = Monitor()

    # -- groups ------------------------------------------------------------------------------------------------

    def _merge_groups(self) -> Groups:
        """One list of groups from the components' own; they must agree on the sizes."""
        owners = {role: part for role, part in self._components.items() if part.sample_groups}
        sizes = {role: [group["n"] for group in part.sample_groups] for role, part in owners.items()}
        for role, size in sizes.items():
            first, reference = next(iter(sizes.items()))
            if size != reference:
                raise ValueError(f"n differs: {first} has {reference}, {role} has {size}; give both the same n")
        merged: Groups = [{"n": n} for n in next(iter(sizes.values()))] if sizes else [{}]
        for role, part in self._components.items():
            for number, group in enumerate(merged):
                own = part.sample_groups[number] if part.sample_groups else part.defaults
                group.update({self._names[role][key]: own[key] for key in part.defaults})
        for group in merged:
            self._fill(group)
        for part in self._components.values():
            part.sample_groups = merged
        return merged

    def _own(self, role: str, group: Mapping[str, Any]) -> dict[str, Any]:
        """The hyper-parameters of one component, under its own names."""
        return {key: group[name] for key, name in self._names[role].items()}

    def _fill(self, group: dict[str, Any]) -> None:
        for role, part in self._components.items():
            own = self._own(role, group)
            part.fill(own, self.mode)
            group.update({self._names[role][key]: value for key, value in own.items()})

    def _check_groups(self) -> None:
        """Look at the groups again if anything changed since the last call."""
        if self.sample_groups == self._snapshot:
            return
        known = {"n", *self.defaults}
        for number, group in enumerate(self.sample_groups):
            checks.known_keys(f"sample group {number}", group, known)
            for key in self.defaults:
                if key not in group:
                    raise ValueError(f"sample group {number} has lost its hyper-parameter {key!r}")
            if number < len(self._snapshot) and group.get("n") != self._snapshot[number].get("n"):
                was = self._snapshot[number].get("n")
                raise ValueError(f"n of sample group {number} is fixed at {was}; add rows with add_sample_group")
            for role, part in self._components.items():
                part.check(self._own(role, group))
        if self._snapshot and len(self._snapshot) != len(self.sample_groups):
            raise ValueError(
                f"there are {len(self.sample_groups)} sample groups instead of {len(self._snapshot)}; "
                f"add them with add_sample_group"
            )
        self._snapshot = [dict(group) for group in self.sample_groups]

    def _override(self, groups: Any) -> None:
        """Let the groups that a user gave to a preset override its defaults."""
        if isinstance(groups, int):
            return
        merged = [
            {**own, **given} for own, given in zip(self.sample_groups, parse(groups), strict=True)
        ]
        for number, (own, given) in enumerate(zip(self.sample_groups, merged, strict=True)):
            checks.known_keys(f"sample group {number}", given, own)
            own.update(given)
            self._fill(own)
        self._check_groups()

    def add_sample_group(self, group: Mapping[str, Any]) -> None:
        """Append the rows of another data set, ``{"n": ..., key: value, ...}``; defaults fill what it leaves out.

        Its samples take the indices after all existing ones. The table is copied once.
        """
        if self.n is None:
            raise ValueError("this estimator keeps no rows and has no n; there is nothing to add")
        (new,) = parse([group])
        checks.known_keys(f"sample group {len(self.sample_groups)}", new, {"n", *self.defaults})
        new = {**self.defaults, **new}
        self._fill(new)
        for role, part in self._components.items():
            part.check(self._own(role, new))
        self._check_groups()
        self.sample_groups.append(new)
        self._snapshot.append(dict(new))
        if self._store is not None:
            self._store.grow(self._require_n())

    @property
    def n(self) -> int | None:
        """Samples in all groups; ``None`` for an estimator without rows."""
        if "n" not in self.sample_groups[0]:
            return None
        return sum(group["n"] for group in self.sample_groups)

    def _require_n(self) -> int:
        n = self.n
        assert n is not None
        return n

    def _hypers(self, role: str, rows: Tensor, dtype: torch.dtype) -> Hyper:
        return Hyper(self.sample_groups, self._names[role], membership(self.sample_groups, rows), dtype)

    # -- rows --------------------------------------------------------------------------------------------------

    def _make_rows(self) -> tuple[RowLayout | None, RowStore | None]:
        directions = DIRECTIONS[self.mode]
        columns = [c for part in self._components.values() for c in part.columns(directions, self.dtype)]
        if not columns:
            return None, None
        layout = RowLayout((*columns, Column(COUNT, directions, torch.int32)))
        return layout, MemoryStore(self._require_n(), layout.words)

    def _visit(self, index: Any, like: Tensor, index2: Any = None) -> Visit:
        """Check indices and read their committed rows."""
        if getattr(self, "_owner", None) is not None:
            raise RuntimeError("this object is part of a ContrastiveEstimator, which reads and writes its rows")
        self._monitor.poll()
        self._check_groups()
        given = [check_vector("index", index, len(like))]
        if index2 is not None:
            given.append(check_vector("index2", index2, len(like)))
        flags = [check_range(name, x, self.n) for name, x in zip(("index", "index2"), given, strict=False)]
        distinct = distinct_values(given[0]) == len(given[0]) and index2 is None
        rows = torch.stack([x.to(like.device, non_blocking=True) for x in given], dim=1)
        bad = next((flag for flag in flags if flag is not None), None)
        for flag in flags[1:]:
            bad = bad if flag is None else bad | flag.to(bad.device)
        if bad is not None:
            self._monitor.watch(bad.to(torch.int32), self._refuse_index)
            rows = rows.clamp(0, self._require_n() - 1)
        dtype = torch.promote_types(torch.promote_types(like.dtype, torch.float32), self.dtype)
        columns, old = self._read_rows(rows, dtype)
        return Visit(self, rows, columns, old, distinct, bad, dtype, self._depositing)

    def _refuse_index(self, bad: int) -> None:
        if bad:
            raise IndexError(
                f"an index of an earlier call was outside n={self.n} (its loss was NaN); pass data-set indices, "
                f"not batch positions, and pass them on the CPU to learn of this at once"
            )

    def _read_rows(self, rows: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None]:
        if self._layout is None or self._store is None:
            return {COUNT: torch.zeros_like(rows, dtype=torch.int32)}, None
        if self._depositing:
            self._store.to(rows.device)
        old = self._store.gather(rows.flatten().to(self._store.device)).to(rows.device)
        views = self._layout.unpack(old)
        if rows.shape[1] == 2:  # direction 1 lives in the rows of index, direction 2 in those of index2
            views = {k: torch.stack([v[0::2, 0], v[1::2, 1]], dim=1) for k, v in views.items()}
        return self._decode(views, rows, dtype), old

    def _decode(self, views: Mapping[str, Tensor], rows: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Columns as floats of the working dtype; rows never visited show their initial value."""
        assert self._layout is not None
        columns = {COUNT: views[COUNT]}
        for role, part in self._components.items():
            for column in part.columns(DIRECTIONS[self.mode], self.dtype):
                value = views[column.name].to(dtype)
                if column.initial is not None:
                    initial = self._hypers(role, rows, dtype)(column.initial)
                    value = torch.where(columns[COUNT] == 0, initial, value)
                columns[column.name] = value
        return columns

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """Committed values by column.

        Args:
            index: data-set positions, ``(B,)``.

        Returns:
            A copy of every column, ``(B, 2)`` in bimodal and ``(B, 1)`` in unimodal mode, in the rows' dtype;
            ``count`` is ``(B,)`` int64, the visits of the sample (0: never seen, its logarithms read 0).
        """
        if self._layout is None or self._store is None:
            raise RuntimeError(f"{type(self).__name__} keeps nothing per sample; there are no rows to read")
        batch = len(index) if isinstance(index, Tensor) and index.dim() else 0
        rows = check_vector("index", index, batch).cpu()
        check_range("index", rows, self.n)
        rows = rows.to(self._store.device)[:, None]
        views = self._layout.unpack(self._store.gather(rows.flatten()))
        columns = self._decode(views, rows, self.dtype)
        columns[COUNT] = columns[COUNT].amax(dim=1).to(torch.int64)
        return {name: value.clone() for name, value in columns.items()}

    # -- deposit and commit ------------------------------------------------------------------------------------

    @property
    def _depositing(self) -> bool:
        return self.training and torch.is_grad_enabled()

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
        elif all(part._pending_state is None for part in self._components.values()):
            return  # a stateless estimator has nothing to commit
        self._pending += 1
        if self._pending == PATIENCE and self.t == 0:
            warnings.warn(
                f"{PATIENCE} calls have deposited and none was committed: call est.step() after "
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
            if self._deposits:
                assert self._layout is not None and self._store is not None
                rows, old, new = merge(self._deposits, self._layout)
                if found_inf is not None:
                    new = torch.where(found_inf.to(new.device) > 0, old, new)
                self._store.scatter(rows, new)
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
            part.discard()

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
        if handle is None or handle.id not in inner._optimizer_step_post_hooks:  # type: ignore[attr-defined]
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
        if self._store is not None:
            self._store.to(device)
        for part in self._components.values():
            part.to(device)
        return self

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """What the user's optimizer must learn (a learned temperature); usually empty."""
        for part in self._components.values():
            yield from part.parameters()

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
        state = self._run_replacing("load_state_dict_pre", dict(state_dict))
        checkpoint.load_state_dict(self, state)
        self._run("load_state_dict_post")

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.sample_groups):
            lines.append(f"Sample Group {number}")
            lines += [f"    {key}: {group[key]}" for key in sorted(group)]
        return "\n".join([*lines, ")"])


def _group_names(components: Mapping[str, Component]) -> dict[str, dict[str, str]]:
    """Component keys -> group keys; a key that two components share is prefixed with the role."""
    keys = [key for part in components.values() for key in part.defaults]
    return {
        role: {key: f"{role}.{key}" if keys.count(key) > 1 else key for key in part.defaults}
        for role, part in components.items()
    }
