"""Commit after every real update of a torch optimizer, whoever wraps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Commit = Callable[[Tensor | None], None]


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Follow ``.optimizer`` through wrappers and engines to the object whose ``step`` runs hooks.

    Covers ``AcceleratedOptimizer``, DeepSpeed's engine and its ZeRO and FP16 optimizers, and anything else
    built the same way.
    """
    seen: list[Any] = []
    inner = optimizer
    while inner is not None and not any(inner is other for other in seen):
        if isinstance(getattr(inner, "_optimizer_step_post_hooks", None), dict):
            return inner
        seen.append(inner)
        inner = getattr(inner, "optimizer", None)
    raise TypeError(
        f"attach() needs a torch optimizer, or a wrapper that keeps one in .optimizer; got "
        f"{type(optimizer).__name__}. Call est.step() yourself after each real update instead"
    )


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
