"""``state_dict`` of an estimator: complete, copied, refused as a whole when it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compopt.estimator import Estimator

FORMAT_VERSION = 1
KEYS = ("version", "config", "sample_groups", "rows", "extra", "t")
# Rows copied at a time, so that the copy of a large table needs little beside itself.
BLOCK_ROWS = 1 << 20


def config(estimator: Estimator) -> dict[str, Any]:
    """What must agree between the writer and the reader of a checkpoint."""
    layout = estimator._layout
    return {
        "mode": estimator.mode,
        "method": {role: type(part).__name__ for role, part in estimator._components.items()},
        "dtype": str(estimator.dtype),
        "n": [group.get("n") for group in estimator.sample_groups],
        "columns": {} if layout is None else {c.name: [c.width, str(c.dtype)] for c in layout.columns},
    }


def state_dict(estimator: Estimator) -> dict[str, Any]:
    """See :meth:`Estimator.state_dict`."""
    return {
        "version": FORMAT_VERSION,
        "config": config(estimator),
        "sample_groups": [dict(group) for group in estimator.sample_groups],
        "rows": _rows(estimator),
        "extra": {role: part.state_dict() for role, part in estimator._components.items()},
        "t": estimator.t,
    }


def _rows(estimator: Estimator) -> dict[str, Tensor]:
    layout, store = estimator._layout, estimator._store
    if layout is None or store is None:
        return {}
    rows = {c.name: torch.empty(store.n, c.width, dtype=c.dtype, device=store.device) for c in layout.columns}
    for start in range(0, store.n, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, store.n)
        for name, view in layout.unpack(store.block(start, stop)).items():
            rows[name][start:stop].copy_(view)
    return rows


def load_state_dict(estimator: Estimator, state: Mapping[str, Any]) -> None:
    """See :meth:`Estimator.load_state_dict`."""
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ValueError(f"this is not an estimator's state_dict: it lacks {', '.join(missing)}")
    if state["version"] > FORMAT_VERSION:
        raise ValueError(
            f"version {state['version']} is newer than this library understands ({FORMAT_VERSION}); update compopt"
        )
    _compare("", config(estimator), state["config"])
    layout, store = estimator._layout, estimator._store
    if layout is not None and store is not None:
        for column in layout.columns:
            given, expected = tuple(state["rows"][column.name].shape), (store.n, column.width)
            if given != expected:
                raise ValueError(f"column {column.name!r} has shape {given}, this estimator needs {expected}")
    previous = [dict(group) for group in estimator.sample_groups]
    try:
        for group, saved in zip(estimator.sample_groups, state["sample_groups"], strict=True):
            group.clear()
            group.update(saved)
        estimator._check_groups()
    except Exception:
        for group, kept in zip(estimator.sample_groups, previous, strict=True):
            group.clear()
            group.update(kept)
        raise
    _write_rows(estimator, state["rows"])
    for role, part in estimator._components.items():
        part.load_state_dict(state["extra"][role])
    estimator.t = int(state["t"])
    estimator.discard()


def _compare(where: str, expected: Any, given: Any) -> None:
    """Raise on the first entry that differs, with both values."""
    if isinstance(expected, Mapping) and isinstance(given, Mapping):
        for key in sorted({*expected, *given}):
            _compare(f"{where}.{key}" if where else key, expected.get(key), given.get(key))
    elif expected != given:
        raise ValueError(f"{where} differs: the checkpoint has {given!r}, this estimator has {expected!r}")


def _write_rows(estimator: Estimator, rows: Mapping[str, Tensor]) -> None:
    layout, store = estimator._layout, estimator._store
    if layout is None or store is None:
        return
    for start in range(0, store.n, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, store.n)
        values = {name: rows[name][start:stop].to(store.device) for name in rows}
        store.write_block(start, layout.pack(values, base=store.block(start, stop)))
