"""Hooks with removable handles, in the six families of ``torch.optim``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

Hook = Callable[..., Any]
FAMILIES = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)


class Hooks:
    """Mixin that keeps one ordered table of hooks per family.

    A hook runs before or after the estimator locks its state, never meanwhile: it may read, save, or wait for a thread
    that does.
    """

    def __init__(self) -> None:
        self._hooks: dict[str, OrderedDict[int, Hook]] = {family: OrderedDict() for family in FAMILIES}

    def _register(self, family: str, hook: Hook, prepend: bool = False) -> RemovableHandle:
        handle = RemovableHandle(self._hooks[family])
        self._hooks[family][handle.id] = hook
        if prepend:
            self._hooks[family].move_to_end(handle.id, last=False)
        return handle

    def _run(self, family: str, *args: Any) -> None:
        for hook in list(self._hooks[family].values()):
            hook(self, *args)

    def _run_replacing(self, family: str, state: dict[str, Any]) -> dict[str, Any]:
        """Run hooks that may return a new state; ``None`` keeps the (possibly edited) one."""
        for hook in list(self._hooks[family].values()):
            result = hook(self, state)
            state = state if result is None else result
        return state

    def register_step_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator, args, kwargs)`` before each commit; not where nothing is pending.

        Returns:
            A handle with ``remove()``, here and below.
        """
        return self._register("step_pre", hook)

    def register_step_post_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator, args, kwargs)`` after each commit; not where nothing was pending."""
        return self._register("step_post", hook)

    def register_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator)`` before :meth:`state_dict` is built; ``prepend``: before the other hooks."""
        return self._register("state_dict_pre", hook, prepend)

    def register_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator, state_dict)`` on the finished dict; it may return another one.

        ``prepend``: before the other hooks.
        """
        return self._register("state_dict_post", hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator, state_dict)`` before anything is checked or written; it may return another dict.

        ``prepend``: before the other hooks.
        """
        return self._register("load_state_dict_pre", hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator)`` after a successful load; ``prepend``: before the other hooks."""
        return self._register("load_state_dict_post", hook, prepend)
