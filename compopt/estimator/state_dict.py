"""``state_dict`` of an estimator or a part: complete, copied, refused as a whole if it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from compopt.batch import COUNT
from compopt.checks import values
from compopt.estimator.engine import Engine
from compopt.stores.table import RowTable

FORMAT_VERSION = 1
KEYS = ("version", "config", "sample_groups", "rows", "extra", "t")


def config(engine: Engine, roles: Sequence[str] | None = None) -> dict[str, Any]:
    """Return facts that must be equal for the writer and the reader of a checkpoint; of all parts or some roles."""
    parts = {role: part for role, part in engine.parts.items() if roles is None or role in roles}
    own = [column for role, columns in engine.columns().items() if role in parts for column in columns]
    columns = {c.name: [c.width, str(c.dtype)] for c in own}
    structures = {role: part.structure() for role, part in parts.items()}
    return {
        "mode": engine.mode,
        "method": {role: type(part).__name__ for role, part in parts.items()},
        "dtype": str(engine.dtype),
        "n": [group.get("n") for group in engine.groups.saved()],
        "columns": {**columns, **({COUNT: [engine.width, "torch.int32"]} if columns else {})},
        "options": {**engine.options, **{role: structure for role, structure in structures.items() if structure}},
    }


def compare(engine: Engine, given: Mapping[str, Any]) -> None:
    """Refuse the configuration of another estimator, with both values."""
    values.mapping("config", given)
    expected = config(engine)
    _compare("", expected, {"options": expected["options"], **given})  # early versions did not keep the options


def state_dict(engine: Engine) -> dict[str, Any]:
    """Return :meth:`Estimator.state_dict`."""
    rows = {} if engine.table is None else engine.table.state_dict()
    return {**rest(engine), "rows": rows}


def rest(engine: Engine) -> dict[str, Any]:
    """Return all of it but the rows."""
    extra = {role: part.saved_state() for role, part in engine.parts.items()}
    entries = {role: sorted(extra[role]) for role, part in engine.parts.items() if part.state_grows}
    return {
        "version": FORMAT_VERSION,
        "config": config(engine),
        "sample_groups": engine.groups.saved(),
        "extra": extra,
        **({"entries": entries} if entries else {}),
        "t": engine.t,
    }


def load_state_dict(
    engine: Engine, state: Mapping[str, Any], load_rows: Callable[[RowTable], None] | None = None
) -> None:
    """Run :meth:`Estimator.load_state_dict`; ``load_rows`` writes rows that the state does not have itself."""
    _check_keys(state)
    compare(engine, state["config"])
    t = commits(state["t"])
    _check_extra(engine, state)
    if load_rows is None:
        _check_rows(engine, state["rows"])
    engine.groups.replace(state["sample_groups"])
    engine.forget_prefetched()
    if engine.table is not None:
        (load_rows or (lambda table: table.load_state_dict(state["rows"])))(engine.table)
    for role, part in engine.parts.items():
        part.take_state(state["extra"][role])
    engine.t = t
    engine.discard()


def _check_keys(state: Mapping[str, Any]) -> None:
    """Refuse what no ``state_dict()`` returned, or a newer one."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict must be a dict made by est.state_dict(), got {type(state).__name__}")
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ValueError(f"state_dict lacks {', '.join(missing)}; pass what est.state_dict() returned")
    if values.integer("version", state["version"], 1, values.MOST) > FORMAT_VERSION:
        raise ValueError(
            f"version {state['version']} is newer than this library understands ({FORMAT_VERSION}); update compopt"
        )


def commits(t: Any) -> int:
    """Return the number of commits that a checkpoint has; refuse what is none."""
    return values.integer("t", t, 0, values.MOST)


def _check_extra(engine: Engine, state: Mapping[str, Any]) -> None:
    """Refuse state that is not rows, by its roles and by what each part says."""
    extra, roles = state["extra"], list(engine.parts)
    values.mapping("extra", extra)
    values.mapping("entries", state.get("entries", {}))
    for role in extra:
        if role not in roles:
            raise ValueError(f"the checkpoint has state of a {role!r}, which this estimator has not; it has {roles}")
    for role, part in engine.parts.items():
        if role not in extra:
            raise ValueError(f"the checkpoint has no state of the {role}; it has that of {sorted(extra)}")
        values.mapping(f"extra of the {role}", extra[role])
        _check_entries(role, state)
        part.check_state(extra[role])


def _check_rows(engine: Engine, rows: Any) -> None:
    """Refuse rows that cannot be loaded as they are."""
    values.mapping("rows", rows)
    if engine.table is not None:
        engine.table.check_state(rows)
    elif rows:
        raise ValueError(f"the checkpoint has the columns {sorted(rows)}, this estimator keeps nothing per sample")


def part_state_dict(engine: Engine, role: str) -> dict[str, Any]:
    """Return the state of one part, see :meth:`Component.state_dict`."""
    part = engine.parts[role]
    columns = engine.columns()[role]
    rows = {}
    if columns and engine.table is not None:
        rows = engine.table.state_dict([*(column.name for column in columns), COUNT])
        blank = rows[columns[0].name] == columns[0].blank
        rows[COUNT].masked_fill_(blank, 0)
        rows[columns[0].name].masked_fill_(blank, 0)
    return {
        "version": FORMAT_VERSION,
        "config": config(engine, [role]),
        "sample_groups": [dict(group) for group in engine.groups.of_part(role)],
        "rows": rows,
        "extra": {role: part.saved_state()},
        "meaning": part.meaning(),
        "t": engine.t,
    }


def load_part(engine: Engine, role: str, state: Mapping[str, Any]) -> None:
    """Restore one part, see :meth:`Component.load_state_dict`."""
    _check_keys(state)
    part, columns, table = engine.parts[role], engine.columns(), engine.table
    _compare_part(engine, role, state)
    rows = state["rows"]
    values.mapping("rows", rows)
    if table is not None and columns[role]:
        table.check_state(rows, [*(column.name for column in columns[role]), COUNT])
    part.check_meaning(state)
    if table is not None and columns[role]:
        others = [own[0].name for other, own in columns.items() if own and other != role]
        engine.forget_prefetched()

        def adapt(at: Tensor, block: Mapping[str, Tensor], loaded: Tensor, before: Tensor) -> None:
            for each, other in engine.parts.items():
                hyper = engine.groups.hyper(each, at[:, None], engine.dtype)
                other.adapt_rows({**block, "visits": block[COUNT], COUNT: loaded if each == role else before}, hyper)

        table.load_part(rows, columns[role][0].name, others, adapt)
    part.take_state(state["extra"][role])
    engine.discard()


def _compare_part(engine: Engine, role: str, state: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of part, or of a whole estimator."""
    values.mapping("config", state["config"])
    needed, given, part = config(engine, [role]), state["config"], engine.parts[role]
    if list(given.get("method", ())) != [role]:
        raise ValueError(
            f"the state must be that of one {role}, such as est.{role}.state_dict(); it has {given.get('method')}"
        )
    alone = given.get("mode") == "single"  # of an object that was used alone: one value per sample
    for key in ("method", *(() if alone else ("mode",)), "n", "dtype", "columns"):
        _compare(key, needed[key], given.get(key))
    _compare(f"options.{role}", needed["options"].get(role), given.get("options", {}).get(role))
    groups = state["sample_groups"]
    if not isinstance(groups, list) or [isinstance(g, Mapping) and g.get("n") for g in groups] != needed["n"]:
        raise ValueError(f"sample_groups must be mappings with n of {needed['n']}, the checkpoint has {groups!r}")
    values.mapping("meaning", state.get("meaning", {}))
    values.mapping("extra", state["extra"])
    values.mapping(f"extra of the {role}", state["extra"].get(role))
    _check_entries(role, state)
    part.check_state(state["extra"][role])


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
    """Return advice for loading sample groups of other sizes: groups are only ever appended."""
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
