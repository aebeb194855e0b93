"""Commit after every real update of a torch optimizer, whoever wraps it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Protocol
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from compopt.checks.context import drops_entries, makes_optimizer_state, outside_of_graphs

Commit = Callable[[Tensor | None], None]

KEY = "compopt"
LIMIT = 1 << 30  # bytes of a state that goes into an optimizer's: a copy in memory, and in every file


class HasOptimizer(Protocol):
    """Wrapper or engine around an optimizer."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | HasOptimizer:  # not Any, which the __getattr__ of modules fulfils
        """Optimizer, or another wrapper."""


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Follow ``.optimizer`` through wrappers and engines to the object whose ``step`` runs hooks."""
    hooked = [each for each in _chain(optimizer) if isinstance(getattr(each, "_optimizer_step_post_hooks", None), dict)]
    if hooked:  # a proxy, such as Lightning's, shows the hooks of what it wraps
        hooks = hooked[0]._optimizer_step_post_hooks
        return [each for each in hooked if each._optimizer_step_post_hooks is hooks][-1]
    raise TypeError(
        f"attach() needs a torch optimizer, or a wrapper that keeps one in .optimizer; got "
        f"{type(optimizer).__name__}. Call est.step() yourself after each real update instead"
    )


def _chain(optimizer: Any) -> Iterator[Any]:
    """Yield the object, the object that it wraps, and so on, each once."""
    seen: list[Any] = []
    while optimizer is not None and not any(optimizer is other for other in seen):
        seen.append(optimizer)
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def commit_after_step(optimizer: Any, commit: Commit) -> RemovableHandle:
    """Call ``commit(found_inf)`` after each ``optimizer.step()``.

    ``found_inf`` is the tensor that ``GradScaler`` leaves on a fused optimizer, whose step hook runs on skipped
    steps too; ``None`` where there is none.
    """
    reference = WeakMethod(commit)  # an optimizer does not keep an estimator alive

    @outside_of_graphs
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        alive = reference()
        # torch.distributed.checkpoint calls step() of an optimizer that has no state yet, to make it: that is no update
        if alive is not None and not makes_optimizer_state():
            alive(getattr(optimizer, "found_inf", None))

    # An optimizer around a base_optimizer (SAM) may be used without its own step: the hook is on both, and where both
    # run, the second has nothing to commit.
    base = getattr(getattr(optimizer, "base_optimizer", None), "_optimizer_step_post_hooks", None)
    if not isinstance(base, dict):
        return optimizer.register_step_post_hook(hook)
    handle = RemovableHandle(optimizer._optimizer_step_post_hooks, extra_dict=base)
    optimizer._optimizer_step_post_hooks[handle.id] = base[handle.id] = hook
    return handle


class Entry:
    """An estimator's state as an entry of an optimizer's; its hooks have the id of the handle, which removes them too.

    The saved parameter groups say that there is an entry: an optimizer that is loaded without these hooks ignores the
    entry, but keeps its groups, so that attaching later finds out.
    """

    def __init__(self, est: Any, optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
        families = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")
        tables: Any = [getattr(optimizer, f"_optimizer_{family}_hooks") for family in families]
        others = [getattr(hook, "__self__", None) for hook in tables[0].values()]
        taken = {other.key for other in others if isinstance(other, Entry) and other.est() is not None}
        self.est: ref[Any] = ref(est)
        self.loading: Any = None
        self.key: str = next(key for number in count() if (key := f"{KEY}.{number}" if number else KEY) not in taken)
        for table, hook in zip(tables, (self.save, self.take, self.load), strict=True):
            table[handle.id] = hook
        handle.extra_dict_ref += tuple(ref(table) for table in tables)
        if optimizer.param_groups[0].pop(self.key, False):
            warnings.warn(
                f"{type(optimizer).__name__} was loaded before attach(checkpoint=True), and the entry {self.key!r} of "
                f"that state, an estimator's, was dropped; attach before optimizer.load_state_dict(state), or load it "
                f"now with est.load_state_dict(state[{self.key!r}])",
                stacklevel=4,
            )

    def save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Put the entry into a state that the optimizer made."""
        est = self.est()
        if est is not None:
            if drops_entries():
                refuse_entry(est, "torch.distributed takes parameters and groups from that, and drops the rest")
            state_dict[self.key] = est.state_dict()
            state_dict["param_groups"][0][self.key] = True

    def take(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep the entry until the optimizer has loaded its own state, a copy without it."""
        groups = [{k: v for k, v in group.items() if k != self.key} for group in state_dict["param_groups"]]
        state_dict = {**state_dict, "param_groups": groups}
        self.loading, est = state_dict.pop(self.key, None), self.est()
        if self.loading is None and est is not None:
            warnings.warn(
                f"the state that {type(optimizer).__name__} loads has no entry {self.key!r}: the {type(est).__name__} "
                f"stays as it is; load it with compopt.load() or est.load_state_dict()",
                stacklevel=5,
            )
        return state_dict

    def load(self, optimizer: torch.optim.Optimizer) -> None:
        """Load what :meth:`take` has kept."""
        est, state, self.loading = self.est(), self.loading, None
        if est is not None and state is not None:
            est.load_state_dict(state)


def refuse_entry(est: Any, why: str) -> None:
    """Raise: the state of an estimator cannot be an entry of the optimizer's."""
    raise ValueError(
        f"attach(checkpoint=True) makes the state of the {type(est).__name__} a part of optimizer.state_dict(), but "
        f"{why}; attach without checkpoint=, and save with compopt.save(est, directory), with the callbacks and "
        f"functions of compopt.integrations, or with compopt.integrations.dcp.Stateful(est)"
    )


def check_entry(est: Any, optimizer: Any, inner: torch.optim.Optimizer) -> None:
    """Refuse a state that should not be copied into one file, and an optimizer that would not run the hooks."""
    engine, torchs = est._engine, torch.optim.Optimizer
    size = 0 if engine.table is None else engine.table.n * engine.table.layout.row_bytes
    size += sum(value.nbytes for part in engine.parts.values() for value in part.state.values())
    if est.split:
        refuse_entry(est, "ranks hold different parts of it")
    if engine.placement.offload == "disk":
        refuse_entry(est, "its rows are on the disk")
    if size > LIMIT:
        refuse_entry(est, f"it takes {size:,} bytes, more than the limit of {LIMIT:,}")
    if any(type(each).__module__.startswith("deepspeed") for each in _chain(optimizer)):
        refuse_entry(est, "DeepSpeed saves a state of its own")
    for name in ("state_dict", "load_state_dict"):
        if getattr(getattr(inner, name, None), "__func__", None) is not getattr(torchs, name):
            refuse_entry(est, f"{type(inner).__name__} has its own {name}(), which may not run torch's hooks")


class Attached:
    """Optimizer that commits an estimator's deposits, held weakly."""

    def __init__(self, given: Any, inner: torch.optim.Optimizer, commit: Commit) -> None:
        self.kind, self.optimizer, self.handle = type(inner).__name__, ref(inner), commit_after_step(inner, commit)
        # DeepSpeed's engine counts the updates that it skipped, and runs no hook for them.
        counting = [each for each in _chain(given) if isinstance(getattr(each, "skipped_steps", None), int)]
        self._engine = ref(counting[0]) if counting else None
        self._skipped: int = counting[0].skipped_steps if counting else 0

    def skipped(self) -> bool:
        """Return whether the engine has skipped an update since the last call of this method."""
        engine, before = None if self._engine is None else self._engine(), self._skipped
        self._skipped = before if engine is None else int(engine.skipped_steps)
        return self._skipped > before

    def listening(self) -> torch.optim.Optimizer | None:
        """Return the optimizer if it is alive and has the hook."""
        optimizer = self.optimizer()
        hooked = optimizer is not None and self.handle.id in optimizer._optimizer_step_post_hooks
        return optimizer if hooked else None


class Attachments:
    """Optimizers that commit an estimator's deposits."""

    def __init__(self) -> None:
        self._attached: dict[int, Attached] = {}  # by the optimizer's id

    def add(self, optimizer: Any, commit: Commit, carried: Any = None) -> RemovableHandle:
        """Attach once; see :meth:`Estimator.attach`. ``carried``: the estimator, where its state is to travel."""
        inner = unwrap(optimizer)
        if carried is not None:
            check_entry(carried, optimizer, inner)
        attached = self._attached.get(id(inner))
        if attached is None or attached.listening() is not inner:
            attached = self._attached[id(inner)] = Attached(optimizer, inner, commit)
        if carried is not None and attached.handle.id not in inner._optimizer_state_dict_post_hooks:
            Entry(carried, inner, attached.handle)
        return attached.handle

    def skipped(self) -> bool:
        """Return whether an engine has skipped an update since the last call of this method."""
        skipped = [each.skipped() for each in self._attached.values()]  # every one must look
        return any(skipped)

    def listening(self) -> str | None:
        """Return the kind of a living optimizer that has the hook, or ``None``."""
        return next((type(optimizer).__name__ for optimizer in self._listening()), None)

    def gone(self) -> str | None:
        """Return the kind of the last optimizer that was attached, if no attached one is alive; else ``None``."""
        alive = any(each.optimizer() is not None for each in self._attached.values())
        return None if alive else next((each.kind for each in reversed(self._attached.values())), None)

    def have(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether attached optimizers have all of these in their groups."""
        return {id(parameter) for parameter in parameters} <= {id(parameter) for parameter in self._parameters()}

    def scalars_without_gradient(self) -> list[Tensor]:
        """Return parameters of one number that require a gradient and have none, beside others that have one."""
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad]
        if all(parameter.grad is None for parameter in parameters):  # taken away already
            return []
        return [parameter for parameter in parameters if parameter.grad is None and parameter.numel() == 1]

    def _listening(self) -> Iterator[torch.optim.Optimizer]:
        return (optimizer for each in self._attached.values() if (optimizer := each.listening()) is not None)

    def _parameters(self) -> Iterator[Tensor]:
        return (p for optimizer in self._listening() for group in optimizer.param_groups for p in group["params"])
