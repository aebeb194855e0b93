"""Mixed precision with ``torch.amp.GradScaler``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from weakref import WeakMethod, ref

from torch.utils.hooks import RemovableHandle

from compopt.estimator.attach import unwrap
from compopt.estimator.base import Estimator

_SKIPS = "_compopt_skips"  # attribute of a scaler: by handle, the optimizer and the method to call when it is skipped


def attach(est: Estimator, optimizer: Any, scaler: Any = None) -> RemovableHandle:
    """Call ``est.attach(optimizer)``, and ``est.discard()`` whenever the scaler skips a step of this optimizer.

    An unfused optimizer is not called at all on a skip, so that no hook of it can tell. ``scaler.step`` is replaced,
    on this instance, by one that sees whether the optimizer's hooks ran; nothing of the scaler's internals is used
    and nothing synchronises. A fused optimizer is called on skips too; ``est.attach`` deals with these.

    Args:
        est: the estimator.
        optimizer: see :meth:`~compopt.Estimator.attach`.
        scaler: a ``torch.amp.GradScaler``, which keeps ``state_dict()`` but can no longer be pickled. ``None``: there
            is none, and this is ``est.attach``.

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
    handle = est.attach(optimizer)
    if scaler is not None:
        if not hasattr(scaler, _SKIPS):
            _report_skips(scaler)
        skips = getattr(scaler, _SKIPS)
        skips[handle.id] = unwrap(optimizer), WeakMethod(est.discard)
        handle.extra_dict_ref += (ref(skips),)  # remove() takes the entry out too
    return handle


def _report_skips(scaler: Any) -> None:
    """Replace ``scaler.step`` by one that calls ``discard`` where no hook of the optimizer ran."""
    skips: OrderedDict[int, tuple[Any, WeakMethod[Any]]] = OrderedDict()  # a plain dict has no weak references
    original = scaler.step

    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # a hook for this one call: an optimizer may be stepped outside of the scaler, too
        inner, ran = unwrap(optimizer), []
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
