"""Ring of the newest features, from which the prototypes of a neural normalizer restart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compopt.distributed.ranks import Part


def empty_ring(networks: int, width: int, dim: int, part: Part, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a ring without features, as entries of a normalizer's state.

    ``queue``: this rank's slots, ``(D, m_k, d)``. ``queue_active``: slots of all ranks that hold a feature, ``(m,)``.
    ``queue_place``: next slot to fill, number of filled slots, and number of commits at the last restart (-1: none),
    ``(3,)`` int64 that stay on the host. They advance even if a device finds out later that the batch is unusable;
    the slots then keep what they held.
    """
    return {
        "queue": torch.zeros(networks, part.size, dim, dtype=dtype, device="cpu"),
        "queue_active": torch.zeros(width, dtype=torch.bool, device="cpu"),
        "queue_place": torch.tensor([0, 0, -1], device="cpu"),
    }


def push(
    state: Mapping[str, Tensor], new: Tensor, usable: Tensor, part: Part, t: int, restart_every: int | None
) -> tuple[dict[str, Tensor], bool]:
    """Add the features of a batch, and restart the prototypes where that is due.

    Args:
        state: ``prototypes`` and the entries of :func:`empty_ring`; left as it is, since a batch may be discarded.
        new: ``(D, P, d)``; of more than ``m`` features the last ``m`` are kept.
        usable: 0-d flag; if False the slots keep their content.
        part: slots of this rank.
        t: commits so far.
        restart_every: commits between restarts; ``None``: only when the ring first fills.

    Returns:
        New values of these entries, and True if the prototypes restarted.
    """
    queue, active, prototypes = state["queue"].clone(), state["queue_active"].clone(), state["prototypes"]
    width = len(active)
    start, filled, restarted_at = state["queue_place"].tolist()
    if new.shape[1] >= width:
        new, start = new[:, -width:], 0
    size = new.shape[1]
    now_filled = min(width, filled + size)
    restart = filled < width == now_filled
    if restart_every is not None:
        restart = restart or t // restart_every != restarted_at // restart_every
    known = part.of(state["queue_active"])
    # On an accelerator the host cannot know that every slot holds a feature without waiting.
    fill = not restart and not (known.device.type == "cpu" and known.all())
    if fill:
        prototypes = prototypes.clone()
    # slices of slots, since a selection by mask would make the host wait for the device; the second one wraps around
    for first, stop, taken in ((start, min(start + size, width), 0), (0, start + size - width, width - start)):
        if first >= stop:
            continue
        active[first:stop].logical_or_(usable)
        low, high = max(first, part.start), min(stop, part.stop)
        if low >= high:
            continue
        own = slice(low - part.start, high - part.start)
        features = new[:, taken + low - first : taken + high - first].to(queue.dtype)
        torch.where(usable, features, queue[:, own], out=queue[:, own])
        if fill:  # a slot that held nothing gets its feature as prototype
            prototypes[:, own] = torch.where(known[own, None], prototypes[:, own], queue[:, own])
    place = [(start + size) % width, now_filled, t if restart else restarted_at]
    return {
        "prototypes": queue if restart else prototypes,
        "queue": queue,
        "queue_active": active,
        "queue_place": torch.tensor(place, device="cpu"),
    }, restart
