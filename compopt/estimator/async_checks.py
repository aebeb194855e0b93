"""Checks of facts that a device learns, made later so that no call waits for it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator


class AsyncChecks:
    """Small integers copied to the host asynchronously and handed to a callback once they have arrived.

    On the CPU there is nothing to wait for and the callback runs at once. From a device without streams they are
    copied when the next call asks for them.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Tensor, Callable[[int], None]]] = []

    def watch(self, value: Tensor, react: Callable[[int], None]) -> None:
        """Call ``react(int(value))`` as soon as that is free: now on the CPU, at a later :meth:`poll` elsewhere."""
        if value.device.type == "cpu":
            react(int(value))
            return
        if accelerator.has_streams(value.device):
            host = accelerator.to_host(value)
            self._waiting.append((accelerator.event(value.device), host, react))
        else:
            self._waiting.append((None, value, react))

    def poll(self) -> None:
        """Run the callbacks of everything that has arrived; one that raises is not run again."""
        while self._waiting and (self._waiting[0][0] is None or self._waiting[0][0].query()):
            _, value, react = self._waiting.pop(0)
            react(int(value))

    def two_samples(self, name: str, key: Tensor) -> Tensor | None:
        """Refuse a global batch without two distinct samples; on a device a 0-d flag, and the refusal later."""
        if len(key) < 2:
            raise ValueError(
                f"the batch has {len(key)} samples on all ranks together; it needs at least two: if it is the last of "
                f"an epoch, give its DataLoader drop_last=True"
            )
        if key.device.type != "cpu":
            flag = (key == key[0]).all()
            self.watch(flag.to(torch.int32), _refuse_batch)
            return flag
        values = key.numpy()
        if values[0] == values.min() == values.max():
            raise ValueError(
                f"{'labels (or group)' if name == 'labels' else name} is {values[0]} for the whole batch; a batch must "
                f"have at least two distinct samples"
            )
        return None

    def watch_features(self, value: Tensor, *features: Tensor) -> None:
        """Warn of bad rows of prepared features ``(k, b, d)``, if the value says that there may be some."""
        if value.device.type == "cpu" and math.isfinite(value.item()):
            return  # a bad feature reaches the value, see ``nothing``
        with torch.no_grad():
            bad = torch.cat([z[..., 0].flatten() for z in features]).isnan()  # they are NaN throughout
            self.watch(bad.sum(), _warn_features)


def _refuse_batch(one_sample: int) -> None:
    if one_sample:
        raise ValueError(
            "an index, index2 or labels (group) of an earlier call was one value for the whole batch (its loss was "
            "NaN); a batch must have at least two distinct samples"
        )


def _warn_features(bad: int) -> None:
    if bad:
        warnings.warn(
            f"{bad} feature rows of a batch are NaN, infinite or too large to compute similarities of: its loss is "
            f"not finite and the rows of its samples keep their previous values",
            stacklevel=7,
        )


def warn_rho(groups: Sequence[Mapping[str, Any]], negatives: int) -> bool:
    """Warn if rho is too large for a batch with so many negatives per anchor, and return whether it is."""
    largest, limit = max((group.get("rho") or 0.0 for group in groups), default=0.0), math.log(negatives)
    if largest < limit:
        return False
    warnings.warn(
        f"rho={largest} is not below log|N_i|={limit:.2f} of this batch: the KL constraint can never bind "
        f"and every tau is pushed to tau_min; use a smaller rho or a larger batch",
        stacklevel=5,
    )
    return True
