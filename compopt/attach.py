"""Commit after every real update of a torch optimizer, whoever wraps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

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
    """The object, what it wraps, what that wraps, ..., each once."""
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
    """
    reference = WeakMethod(commit)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        alive = reference()
        if alive is not None:
            alive(getattr(optimizer, "found_inf", None))

    return optimizer.register_step_post_hook(hook)


class SkipCounter:
    """Notices afterwards that an engine skipped an update: DeepSpeed counts them, and runs no hook."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._seen = ref(engine), int(engine.skipped_steps)

    @staticmethod
    def of(optimizer: Any) -> SkipCounter | None:
        """That of the first object in a chain of wrappers that counts; ``None`` where none does."""
        counting = (inner for inner in _chain(optimizer) if isinstance(getattr(inner, "skipped_steps", None), int))
        engine = next(counting, None)
        return None if engine is None else SkipCounter(engine)

    def rose(self) -> bool:
        """An update was skipped since the last time that this was asked."""
        engine = self._engine()
        before, self._seen = self._seen, self._seen if engine is None else int(engine.skipped_steps)
        return self._seen > before


class Attachments:
    """The optimizers that commit an estimator's deposits. Copies of an estimator are attached to nothing."""

    def __init__(self) -> None:
        self._handles: dict[int, RemovableHandle] = {}
        self._skips: dict[int, SkipCounter] = {}

    def add(self, optimizer: Any, commit: Commit) -> RemovableHandle:
        """Attach once; see :meth:`Estimator.attach`."""
        inner = unwrap(optimizer)
        handle = self._handles.get(id(inner))
        if handle is None or handle.id not in inner._optimizer_step_post_hooks:
            handle = self._handles[id(inner)] = commit_after_step(inner, commit)
            counter = SkipCounter.of(optimizer)
            if counter is not None:
                self._skips[id(inner)] = counter
        return handle

    def skipped(self) -> bool:
        """Whether an engine has skipped an update since this was last asked."""
        rose = [counter.rose() for counter in self._skips.values()]  # every one must look
        return any(rose)

    def __reduce__(self) -> tuple[Any, ...]:
        return Attachments, ()
