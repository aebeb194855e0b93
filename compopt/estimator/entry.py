"""State of an estimator as an entry of an optimizer's state dict: ``est.attach(optimizer, checkpoint=True)``."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle

from compopt.checks.context import STATE_FILTERS, called_from

KEY = "compopt"
FAMILIES = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")  # hooks that save and load an entry
LIMIT = 1 << 30  # largest state, in bytes, that an optimizer's state dict may contain: it is copied into every file


def refuse_entry(est: Any, why: str) -> None:
    """Raise the ValueError for an estimator state that cannot be an entry of the optimizer's state dict."""
    raise ValueError(
        f"attach(checkpoint=True) makes the state of the {type(est).__name__} a part of optimizer.state_dict(), but "
        f"{why}; attach without checkpoint=, and save with compopt.save(est, directory), with the callbacks and "
        f"functions of compopt.integrations, or with compopt.integrations.dcp.Stateful(est)"
    )


def check_entry(est: Any, chain: list[Any], inner: torch.optim.Optimizer) -> None:
    """Refuse a state that must not be copied into one file, and an optimizer that does not run the hooks."""
    objects, torchs = est._objects().values(), torch.optim.Optimizer
    tables = [each._table for each in objects if each._table is not None]
    size = sum(table.n * table.layout.row_bytes for table in tables)
    size += sum(value.nbytes for each in objects for value in each.state.values())
    if est.split:
        refuse_entry(est, "ranks hold different parts of it")
    if any(each._ensure_form().placement.offload == "disk" for each in objects):
        refuse_entry(est, "its rows are on the disk")
    if size > LIMIT:
        refuse_entry(est, f"it takes {size:,} bytes, more than the limit of {LIMIT:,}")
    if any(type(each).__module__.startswith("deepspeed") for each in chain):
        refuse_entry(est, "DeepSpeed saves a state of its own")
    for name in ("state_dict", "load_state_dict"):
        if getattr(getattr(inner, name, None), "__func__", None) is not getattr(torchs, name):
            refuse_entry(est, f"{type(inner).__name__} has its own {name}(), which may not run torch's hooks")


class Entry:
    """Hooks that save and load an estimator's state as an entry of an optimizer's state dict.

    They are registered under the id of the handle that attaches the estimator, so that ``handle.remove()`` removes them
    too. The first saved parameter group records that the entry exists: an optimizer that is loaded without these hooks
    drops the entry but keeps its groups, so that a later ``attach`` detects the loss.
    """

    def __init__(self, est: Any, optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
        tables: Any = [getattr(optimizer, f"_optimizer_{family}_hooks") for family in FAMILIES]
        taken = _taken(tables[0])
        self.est: ref[Any] = ref(est)
        self.key: str = next(key for number in count() if (key := f"{KEY}.{number}" if number else KEY) not in taken)
        self._loading: ref[OrderedDict[str, Any]] | None = None  # the checked entry that the optimizer is loading
        for table, hook in zip(tables, (self._save, self._take, self._load), strict=True):
            table[handle.id] = hook
        handle.extra_dict_ref += tuple(ref(table) for table in tables)
        if optimizer.param_groups[0].pop(self.key, False):
            warnings.warn(
                f"{type(optimizer).__name__} was loaded before attach(checkpoint=True), and the entry {self.key!r} of "
                f"that state, an estimator's, was dropped; attach before optimizer.load_state_dict(state), or load it "
                f"now with est.load_state_dict(state[{self.key!r}])",
                stacklevel=4,
            )

    def _save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the estimator's entry to the optimizer's state dict."""
        est = self.est()
        if est is not None:
            if called_from(STATE_FILTERS):
                refuse_entry(est, "torch.distributed takes parameters and groups from that, and drops the rest")
            state_dict[self.key] = est.state_dict()
            state_dict["param_groups"][0][self.key] = True

    def _take(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check the entry before the optimizer loads anything, and return a copy of the state dict for the optimizer.

        Only that copy keeps the entry for :meth:`_load`: its memory is freed if the optimizer refuses the state.
        """
        groups = [{k: v for k, v in group.items() if k != self.key} for group in state_dict["param_groups"]]
        state_dict = {**state_dict, "param_groups": groups}
        entry, est, self._loading = state_dict.pop(self.key, None), self.est(), None
        if est is not None and entry is not None:
            checked = OrderedDict(est._checked_state(entry))  # a plain dict has no weak references
            state_dict[self.key], self._loading = checked, ref(checked)
        elif est is not None:
            warnings.warn(
                f"the state that {type(optimizer).__name__} loads has no entry {self.key!r}: the {type(est).__name__} "
                f"stays as it is; load it with compopt.load() or est.load_state_dict()",
                stacklevel=5,
            )
        return state_dict

    def _load(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the entry that :meth:`_take` has checked."""
        est, loading, self._loading = self.est(), self._loading, None
        state = None if loading is None else loading()
        if est is not None and state is not None:
            est._load_checked(state)
        elif est is not None and loading is not None:
            raise RuntimeError(
                f"a later pre-hook of {type(optimizer).__name__}.load_state_dict() has dropped the entry {self.key!r} "
                f"of the {type(est).__name__}; let it keep the other entries, or load this with est.load_state_dict()"
            )


def warn_unclaimed_entries(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Warn if the optimizer loads a state with the entry of an estimator, and no estimator takes it."""
    taken = _taken(optimizer._optimizer_load_state_dict_pre_hooks)
    left = [key for key in map(str, state_dict) if key.partition(".")[0] == KEY and key not in taken]
    if left:
        warnings.warn(
            f"the state that {type(optimizer).__name__} loads has the entry {left[0]!r} of an estimator, which is "
            f"dropped; attach with checkpoint=True before the load, or load it with "
            f"est.load_state_dict(state[{left[0]!r}])",
            stacklevel=5,
        )


def _taken(hooks: Mapping[int, Any]) -> set[str]:
    """Return the keys of the entries that hooks of one kind save or load for living estimators."""
    others = [getattr(hook, "__self__", None) for hook in hooks.values()]
    return {other.key for other in others if isinstance(other, Entry) and other.est() is not None}
