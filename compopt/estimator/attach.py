"""Commit after every real update of a torch optimizer, whoever wraps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from compopt.checks.context import makes_optimizer_state, outside_of_graphs

Commit = Callable[[Tensor | None], None]


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Follow ``.optimizer`` through wrappers and engines to the object whose ``step`` runs hooks.

    Covers ``AcceleratedOptimizer``, DeepSpeed's engine and its ZeRO and FP16 optimizers, and anything else
    built the same way.
    """
    for inner in _chain(optimizer):
        if isinstance(getattr(inner, "_optimizer_step_post_hooks", None), dict):
            return inner
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

    ``found_inf`` is the tensor that ``GradScaler`` leaves on a fused optimizer, whose step hook fires on skipped
    steps too; ``None`` where there is none. The hook holds its owner weakly: an optimizer does not keep an
    estimator alive.

    ``torch.distributed.checkpoint`` calls ``step()`` of an optimizer that has no state yet, to make it; that is no
    update, and nothing is committed.

    An optimizer around a ``base_optimizer`` (SAM) may be used without its own ``step``: the hook is on both, and
    where both run, the second has nothing to commit.
    """
    reference = WeakMethod(commit)

    @outside_of_graphs
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        alive = reference()
        if alive is not None and not makes_optimizer_state():
            alive(getattr(optimizer, "found_inf", None))

    base = getattr(getattr(optimizer, "base_optimizer", None), "_optimizer_step_post_hooks", None)
    if not isinstance(base, dict):
        return optimizer.register_step_post_hook(hook)
    handle = RemovableHandle(optimizer._optimizer_step_post_hooks, extra_dict=base)
    optimizer._optimizer_step_post_hooks[handle.id] = base[handle.id] = hook
    return handle


class SkipCounter:
    """Counter of the updates that an engine skipped: DeepSpeed counts them, and runs no hook."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._seen = ref(engine), int(engine.skipped_steps)

    @staticmethod
    def of(optimizer: Any) -> SkipCounter | None:
        """Make the counter of the first wrapper that counts skipped steps; ``None`` where none does."""
        counting = (inner for inner in _chain(optimizer) if isinstance(getattr(inner, "skipped_steps", None), int))
        engine = next(counting, None)
        return None if engine is None else SkipCounter(engine)

    def rose(self) -> bool:
        """Return whether an update was skipped since the last call of this method."""
        engine = self._engine()
        before, self._seen = self._seen, self._seen if engine is None else int(engine.skipped_steps)
        return self._seen > before


class Attachments:
    """Optimizers that commit an estimator's deposits. Copies of an estimator are attached to nothing."""

    def __init__(self) -> None:
        self._handles: dict[int, RemovableHandle] = {}
        self._optimizers: dict[int, tuple[str, ref[torch.optim.Optimizer]]] = {}
        self._skips: dict[int, SkipCounter] = {}

    def add(self, optimizer: Any, commit: Commit) -> RemovableHandle:
        """Attach once; see :meth:`Estimator.attach`."""
        inner = unwrap(optimizer)
        handle = self._handles.get(id(inner))
        if handle is None or handle.id not in inner._optimizer_step_post_hooks:
            handle = self._handles[id(inner)] = commit_after_step(inner, commit)
            self._optimizers[id(inner)] = type(inner).__name__, ref(inner)
            counter = SkipCounter.of(optimizer)
            if counter is not None:
                self._skips[id(inner)] = counter
        return handle

    def skipped(self) -> bool:
        """Return whether an engine has skipped an update since the last call of this method."""
        rose = [counter.rose() for counter in self._skips.values()]  # every one must look
        return any(rose)

    def listening(self) -> str | None:
        """Return the kind of a living optimizer that has the hook, or ``None``."""
        return next((type(optimizer).__name__ for optimizer in self._listening()), None)

    def gone(self) -> str | None:
        """Return the kind of the last optimizer that was attached, if no attached one is alive; else ``None``."""
        if any(alive() is not None for _, alive in self._optimizers.values()):
            return None
        return next((name for name, _ in reversed(self._optimizers.values())), None)

    def have(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether attached optimizers have all of these in their groups."""
        groups = [group for optimizer in self._listening() for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        return all(id(parameter) in held for parameter in parameters)

    def scalars_without_gradient(self) -> list[Tensor]:
        """Return parameters of one number that require a gradient and have none, beside others that have one."""
        groups = [group for optimizer in self._listening() for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        if all(parameter.grad is None for parameter in parameters):  # taken away already
            return []
        return [parameter for parameter in parameters if parameter.grad is None and parameter.numel() == 1]

    def _listening(self) -> Iterator[torch.optim.Optimizer]:
        for key, (_, alive) in self._optimizers.items():
            optimizer = alive()
            if optimizer is not None and self._handles[key].id in optimizer._optimizer_step_post_hooks:
                yield optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        return Attachments, ()
