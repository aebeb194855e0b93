"""Mixed precision with ``torch.amp.GradScaler``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch.utils.hooks import RemovableHandle

from compopt.estimator.attach import unwrap
from compopt.estimator.base import Estimator

_WATCHERS = "_compopt_watchers"
Watcher = Callable[[torch.optim.Optimizer], None]


class Handles:
    """Several handles as one.

    Example:
        >>> import torch
        >>> from compopt.integrations.amp import Handles
        >>> layer = torch.nn.Linear(2, 2)
        >>> both = Handles(layer.register_forward_hook(print), layer.register_forward_pre_hook(print))
        >>> both.remove()
    """

    def __init__(self, *handles: RemovableHandle) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove all of them; what is pending stays pending."""
        for handle in self._handles:
            handle.remove()


def attach(est: Estimator, optimizer: Any, scaler: Any) -> Handles:
    """``est.attach(optimizer)``, and ``est.discard()`` whenever the scaler skips a step of this optimizer.

    An unfused optimizer is not called at all on a skip, so that no hook of it can tell. ``scaler.step`` is replaced,
    on this instance, by one that sees whether the optimizer's hooks ran; nothing of the scaler's internals is used
    and nothing synchronises. A fused optimizer is called on skips too; ``est.attach`` deals with these.

    Args:
        est: the estimator.
        optimizer: as for :meth:`~compopt.Estimator.attach`.
        scaler: a ``torch.amp.GradScaler``; it keeps ``state_dict()`` but can no longer be pickled.

    Returns:
        A handle with ``remove()``; the scaler's ``step`` stays replaced.

    Raises:
        TypeError: no torch optimizer is inside ``optimizer``.

    Communicates: nothing.

    Example:
        >>> import torch, compopt
        >>> from compopt.integrations import amp
        >>> est, weight = compopt.SogCLREstimator(10), torch.nn.Parameter(torch.ones(4, 4))
        >>> optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
        >>> handle = amp.attach(est, optimizer, scaler)
        >>> x = torch.randn(4, 4)
        >>> scaler.scale(est(x @ weight, x, torch.arange(4))).backward()
        >>> scaler.step(optimizer); scaler.update()
        >>> est.t
        1
    """
    inner, discard = unwrap(optimizer), WeakMethod(est.discard)

    def skipped(stepped: torch.optim.Optimizer) -> None:
        alive = discard()
        if stepped is inner and alive is not None:
            alive()

    watchers = _watch(scaler)
    handle = RemovableHandle(watchers)
    watchers[handle.id] = skipped
    return Handles(est.attach(optimizer), handle)


def _watch(scaler: Any) -> OrderedDict[int, Watcher]:
    """Whom the scaler tells about skipped steps; its ``step`` is replaced the first time."""
    if hasattr(scaler, _WATCHERS):
        return getattr(scaler, _WATCHERS)
    watchers: OrderedDict[int, Watcher] = OrderedDict()
    original = scaler.step

    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        inner, ran = unwrap(optimizer), []
        handle = inner.register_step_post_hook(lambda *_: ran.append(True))
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            handle.remove()
        if not ran:
            for watcher in list(watchers.values()):
                watcher(inner)
        return result

    scaler.step = step
    setattr(scaler, _WATCHERS, watchers)
    return watchers
