"""Mixed precision with ``torch.amp.GradScaler``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from weakref import WeakMethod, ref

from torch.utils.hooks import RemovableHandle

from compopt.estimator.attach import unwrap
from compopt.estimator.base import Estimator

_SKIPS = "_compopt_skips"  # attribute of a scaler: by handle, optimizer and method to call on skips


def attach(est: Estimator, optimizer: Any, scaler: Any = None) -> RemovableHandle:
    """Commit after each update, and discard whenever the gradient scaler skips one.

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

    For a skipped step the scaler does not call an unfused optimizer, so that no hook of the optimizer runs.
    ``scaler.step`` of this instance is replaced by a function that checks whether the optimizer's hooks ran, without
    the scaler's internals and without synchronisation. A fused optimizer is also called for skipped steps;
    ``est.attach`` handles this case.

    Args:
        est: the estimator.
        optimizer: see :meth:`~compopt.Estimator.attach`.
        scaler: a ``torch.amp.GradScaler``; its ``state_dict()`` still works, but it can no longer be pickled. ``None``:
            no scaler, the same as ``est.attach``.

    Returns:
        A handle with ``remove()``; the scaler's ``step`` stays replaced.

    Raises:
        TypeError: ``optimizer`` is not, and does not wrap, a torch optimizer.

    Communicates: nothing.
    """
    handle = est.attach(optimizer)
    if scaler is not None:
        if not hasattr(scaler, _SKIPS):
            _report_skips(scaler)
        skips = getattr(scaler, _SKIPS)
        skips[handle.id] = unwrap(optimizer), WeakMethod(est.discard)
        handle.extra_dict_ref += (ref(skips),)  # remove() also removes the entry
    return handle


def _report_skips(scaler: Any) -> None:
    """Replace ``scaler.step`` by a function that calls ``discard`` if no hook of the optimizer ran."""
    skips: OrderedDict[int, tuple[Any, WeakMethod[Any]]] = OrderedDict()  # a plain dict has no weak references
    original = scaler.step

    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            inner = unwrap(optimizer)
        except TypeError:  # one that est.attach() refuses, beside the attached one
            return original(optimizer, *args, **kwargs)
        # register a hook for this call only: the optimizer may also step outside of the scaler
        ran: list[bool] = []
        handle = inner.register_step_post_hook(lambda *_: ran.append(True))
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            handle.remove()
        for attached, reference in [] if ran else list(skips.values()):
            discard = reference()
            if attached is inner and discard is not None:
                discard()
        return result

    scaler.step = step
    setattr(scaler, _SKIPS, skips)
