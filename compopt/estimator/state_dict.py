"""``state_dict`` of an estimator: complete, copied, refused as a whole when it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from compopt.checks import values
from compopt.estimator.component import Component
from compopt.estimator.groups import SampleGroups
from compopt.stores.table import RowTable

FORMAT_VERSION = 1
KEYS = ("version", "config", "sample_groups", "rows", "extra", "t")


class Saved(Protocol):
    """What is saved of an estimator."""

    mode: str
    dtype: torch.dtype
    t: int
    _components: dict[str, Component]
    _groups: SampleGroups
    _table: RowTable | None

    def _options(self) -> dict[str, Any]:
        """What decides the meaning of the state beside the parts and their hyper-parameters."""

    def _forget_prefetched(self) -> None:
        """Drop rows that were read ahead."""

    def discard(self) -> None:
        """Forget everything pending."""


def config(estimator: Saved) -> dict[str, Any]:
    """What must agree between the writer and the reader of a checkpoint."""
    table = estimator._table
    columns = () if table is None else table.layout.columns
    return {
        "mode": estimator.mode,
        "method": {role: type(part).__name__ for role, part in estimator._components.items()},
        "dtype": str(estimator.dtype),
        "n": [group.get("n") for group in estimator._groups.saved()],
        "columns": {c.name: [c.width, str(c.dtype)] for c in columns},
        "options": estimator._options(),
    }


def compare(estimator: Saved, given: Mapping[str, Any]) -> None:
    """Refuse the configuration of another estimator, with both values."""
    values.mapping("config", given)
    expected = config(estimator)
    _compare("", expected, {"options": expected["options"], **given})  # early versions did not keep the options


def state_dict(estimator: Saved) -> dict[str, Any]:
    """See :meth:`Estimator.state_dict`."""
    rows = {} if estimator._table is None else estimator._table.state_dict()
    return {**rest(estimator), "rows": rows}


def rest(estimator: Saved) -> dict[str, Any]:
    """All of it but the rows."""
    extra = {role: part.saved_state() for role, part in estimator._components.items()}
    entries = {role: sorted(extra[role]) for role, part in estimator._components.items() if part.state_grows}
    return {
        "version": FORMAT_VERSION,
        "config": config(estimator),
        "sample_groups": estimator._groups.saved(),
        "extra": extra,
        **({"entries": entries} if entries else {}),
        "t": estimator.t,
    }


def load_state_dict(
    estimator: Saved, state: Mapping[str, Any], load_rows: Callable[[RowTable], None] | None = None
) -> None:
    """See :meth:`Estimator.load_state_dict`; ``load_rows`` writes rows that the state does not have itself."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict must be a dict made by est.state_dict(), got {type(state).__name__}")
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ValueError(f"state_dict lacks {', '.join(missing)}; pass what est.state_dict() returned")
    if values.integer("version", state["version"], 1, values.MOST) > FORMAT_VERSION:
        raise ValueError(
            f"version {state['version']} is newer than this library understands ({FORMAT_VERSION}); update compopt"
        )
    compare(estimator, state["config"])
    t = commits(state["t"])
    _check_extra(estimator, state)
    if load_rows is None:
        _check_rows(estimator, state["rows"])
    estimator._groups.replace(state["sample_groups"])
    estimator._forget_prefetched()
    if estimator._table is not None:
        (load_rows or (lambda table: table.load_state_dict(state["rows"])))(estimator._table)
    for role, part in estimator._components.items():
        part.take_state(state["extra"][role])
    estimator.t = t
    estimator.discard()


def commits(t: Any) -> int:
    """Return the number of commits that a checkpoint has; refuse what is none."""
    return values.integer("t", t, 0, values.MOST)


def _check_extra(estimator: Saved, state: Mapping[str, Any]) -> None:
    """Refuse state that is not rows, by its roles and by what each part says."""
    extra, roles = state["extra"], list(estimator._components)
    values.mapping("extra", extra)
    values.mapping("entries", state.get("entries", {}))
    for role in extra:
        if role not in roles:
            raise ValueError(f"the checkpoint has state of a {role!r}, which this estimator has not; it has {roles}")
    for role, part in estimator._components.items():
        if role not in extra:
            raise ValueError(f"the checkpoint has no state of the {role}; it has that of {sorted(extra)}")
        values.mapping(f"extra of the {role}", extra[role])
        _check_entries(role, state)
        part.check_state(extra[role])


def _check_rows(estimator: Saved, rows: Any) -> None:
    """Refuse rows that cannot be loaded as they are."""
    values.mapping("rows", rows)
    if estimator._table is not None:
        estimator._table.check_state(rows)
    elif rows:
        raise ValueError(f"the checkpoint has the columns {sorted(rows)}, this estimator keeps nothing per sample")


def _check_entries(role: str, state: Mapping[str, Any]) -> None:
    """Refuse a state of which only a part was read; early versions did not keep the names.

    torch.distributed.checkpoint reads what there is before: nothing of an optimizer that has made no step.
    """
    given = sorted(state["extra"][role])
    saved = state.get("entries", {}).get(role, given)
    if saved != given:
        raise ValueError(
            f"the checkpoint has the entries {saved} of the {role}, {given} were read; with "
            f"torch.distributed.checkpoint save and load compopt.integrations.dcp.Stateful(est)"
        )


def _compare(where: str, expected: Any, given: Any) -> None:
    """Raise on the first entry that differs, with both values."""
    if isinstance(expected, Mapping) and isinstance(given, Mapping):
        for key in {**expected, **given}:
            _compare(f"{where}.{key}" if where else key, expected.get(key), given.get(key))
    elif expected != given:
        remedy = _sizes_remedy(given, expected) if where == "n" else ""
        raise ValueError(f"{where} differs: the checkpoint has {given!r}, this estimator has {expected!r}{remedy}")


def _sizes_remedy(saved: Any, own: list[int | None]) -> str:
    """How to load sample groups of other sizes: groups are only ever appended."""
    if not isinstance(saved, list) or not all(isinstance(n, int) for n in [*saved, *own]):
        return ""
    if own == saved[: len(own)]:
        return f"; before loading, append what the checkpoint has: {_appended(saved[len(own) :])}"
    rest = f", then append the rest: {_appended(own[len(saved) :])}" if saved == own[: len(saved)] else ""
    if len(own) == len(saved) and own[:-1] == saved[:-1] and own[-1] > saved[-1]:
        rest = f"; if the data set has grown at its end, {_appended([own[-1] - saved[-1]])} after that"
    return f"; load it into an estimator with {_groups(saved)}{rest}"


def _groups(sizes: list[int]) -> str:
    return f"n={[{'n': n} for n in sizes]!r}" if len(sizes) > 1 else f"n={sizes[0]}"


def _appended(sizes: list[Any]) -> str:
    return ", ".join(f"est.add_sample_group({{'n': {n}}})" for n in sizes)
