"""Functions that build, check and load the ``state_dict`` of an estimator or of a part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from compopt.batch import COUNT
from compopt.checks import values
from compopt.checks.context import warn
from compopt.estimator.engine import Engine

FORMAT_VERSION = 1
KEYS = ("version", "config", "sample_groups", "rows", "extra", "t")


def config(engine: Engine, roles: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the configuration that a checkpoint and its reader must share, of all parts or of some roles."""
    parts = {role: engine.parts[role] for role in roles or engine.parts}
    own = engine.columns()
    columns = {column.name: [column.width, str(column.dtype)] for role in parts for column in own[role]}
    structures = {role: part.structure() for role, part in parts.items()}
    return {
        "mode": engine.mode,
        "method": {role: type(part).__name__ for role, part in parts.items()},
        "dtype": str(engine.dtype),
        "n": [group.get("n") for group in engine.groups.saved()],
        # before the columns, which follow from them: a load names the first entry that differs
        "options": {**engine.options, **{role: structure for role, structure in structures.items() if structure}},
        "columns": {**columns, **({COUNT: [engine.width, "torch.int32"]} if columns else {})},
    }


def compare(engine: Engine, given: Mapping[str, Any]) -> None:
    """Raise if the configuration of a checkpoint differs; the message has both values."""
    values.mapping("config", given)
    _compare("", config(engine), given)


def state_dict(engine: Engine) -> dict[str, Any]:
    """Return the whole state."""
    return {**rest(engine), "rows": {} if engine.table is None else engine.table.state_dict()}


def rest(engine: Engine) -> dict[str, Any]:
    """Return the state without the rows."""
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


def flat(extra: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return state that is not rows on the CPU, with keys ``role.name``."""
    return {f"{role}.{name}": value.detach().cpu() for role, own in extra.items() for name, value in own.items()}


def by_role(engine: Engine, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return tensors with keys ``role.name`` by role and name, the inverse of :func:`flat`."""
    found: dict[str, dict[str, Tensor]] = {role: {} for role in engine.parts}
    for key, value in tensors.items():
        role, _, name = key.partition(".")
        if role not in found:
            raise ValueError(f"the checkpoint has {key!r}, which this estimator has not; load another one")
        found[role][name] = value
    return found


def of_parts(engine: Engine, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what belongs to the parts of this engine in a state, or in a manifest, of 0.3.

    Estimators of 0.3 kept scores as a third part, with columns in their rows. A :class:`~compopt.ScoreKeeper` takes
    these, and an estimator the others, with a warning. ``spare_negatives`` of a policy was named ``spare_extra``.
    """
    config = values.mapping("config", state["config"])
    options = config.get("options")
    if isinstance(options, Mapping) and "spare_extra" in (pairs := str(options.get("pairs"))):
        config = {**config, "options": {**options, "pairs": pairs.replace("spare_extra", "spare_negatives")}}
        state = {**state, "config": config}
    method = config.get("method")
    if not isinstance(method, Mapping) or "scores" not in method or list(method) == list(engine.parts):
        return state
    if "scores" not in engine.parts:
        warn(
            "the checkpoint has scores, which are rows of a keeper now: attach a compopt.ScoreKeeper(n) to the "
            "estimator, and pass the checkpoint to keeper.load_state_dict() or compopt.load(keeper, directory)"
        )
    columns = {column.name for own in engine.columns().values() for column in own}
    columns |= {COUNT} if columns else set()
    keys = {name for names in engine.groups.names.values() for name in names.values()}
    keys |= set() if engine.groups.n is None else {"n"}

    def own(what: str, entries: Any, names: Collection[str]) -> dict[str, Any]:
        return {name: value for name, value in values.mapping(what, entries).items() if name in names}

    config = {
        **config,
        "method": own("method", method, engine.parts),
        "options": own("options", config.get("options"), {*engine.options, *engine.parts}),
        "columns": own("columns", config.get("columns"), columns),
        "n": config.get("n") if "n" in keys else [None],
    }
    groups = [own("sample_groups", group, keys) for group in state["sample_groups"]]
    kept = {"rows": columns, "extra": engine.parts}  # a manifest has neither
    parts = {key: own(key, state[key], names) for key, names in kept.items() if key in state}
    return {**state, "config": config, "sample_groups": groups, **parts}


def check_all(engine: Engine, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a whole state for :func:`load`; refuse one that it cannot load."""
    _check_keys(state)
    state = of_parts(engine, state)
    check(engine, state)
    rows, table = state["rows"], engine.table
    values.mapping("rows", rows)
    if table is not None:
        table.check_state(rows)
    elif rows:
        raise ValueError(f"the checkpoint has the columns {sorted(rows)}, this estimator keeps nothing per sample")
    engine.groups.checked_as(state["sample_groups"])
    return state


def load(engine: Engine, state: Mapping[str, Any]) -> None:
    """Load a whole state that :func:`check_all` has accepted; see :meth:`Estimator.load_state_dict`."""
    engine.groups.replace(state["sample_groups"])
    fill(engine, state, lambda: None if engine.table is None else engine.table.load_state_dict(state["rows"]))


def check(engine: Engine, state: Mapping[str, Any]) -> None:
    """Refuse the state of another estimator; the rows are not checked here."""
    _check_keys(state)
    compare(engine, state["config"])
    commits(state["t"])
    _check_extra(engine, state, engine.parts)


def fill(engine: Engine, state: Mapping[str, Any], load_rows: Callable[[], None]) -> None:
    """Load checked state into an estimator; its groups have already been replaced."""
    engine.forget_prefetched()
    load_rows()
    for role, part in engine.parts.items():
        part.take_state(state["extra"][role])
    engine.t, engine.committed = commits(state["t"]), 0
    engine.discard()


def commits(t: Any) -> int:
    """Return the checked number of commits of a checkpoint."""
    return values.integer("t", t, 0, values.MOST)


def part_state_dict(engine: Engine, role: str) -> dict[str, Any]:
    """Return the state of one part."""
    part, columns, rows = engine.parts[role], engine.columns()[role], {}
    if columns and engine.table is not None:
        rows = engine.table.state_dict([*(column.name for column in columns), COUNT])
        first = columns[0]
        blank = rows[first.name] == first.blank  # samples that only other parts have visited
        rows[COUNT].masked_fill_(blank, 0)
        rows[first.name].masked_fill_(blank, 0)
    return {
        "version": FORMAT_VERSION,
        "config": config(engine, [role]),
        "sample_groups": [dict(group) for group in engine.groups.of_part(role)],
        "rows": rows,
        "extra": {role: part.saved_state()},
        "meaning": part.meaning(),
        "t": engine.t,
    }


def check_part(engine: Engine, role: str, state: Mapping[str, Any]) -> None:
    """Refuse the state of one part that :func:`load_part` cannot load."""
    _check_keys(state)
    _compare_part(engine, role, state)
    _check_extra(engine, state, [role])
    values.mapping("rows", state["rows"])
    own = [column.name for column in engine.columns()[role]]
    if engine.table is not None and own:
        engine.table.check_state(state["rows"], [*own, COUNT])
    engine.parts[role].check_meaning(state)


def load_part(engine: Engine, role: str, state: Mapping[str, Any]) -> None:
    """Load the state of one part that :func:`check_part` has accepted."""
    columns, table = engine.columns(), engine.table
    own = [column.name for column in columns[role]]
    if table is not None and own:
        engine.forget_prefetched()

        def adapt(at: Tensor, block: Mapping[str, Tensor], loaded: Tensor, before: Tensor) -> None:
            for each, part in engine.parts.items():
                hyper = engine.groups.hyper(each, at[:, None], engine.dtype)
                part.adapt_rows({**block, "visits": block[COUNT], COUNT: loaded if each == role else before}, hyper)

        others = [own[0].name for other, own in columns.items() if own and other != role]
        table.load_part(state["rows"], own[0], others, adapt)
    engine.parts[role].take_state(state["extra"][role])
    engine.discard()


# -- refusals ---------------------------------------------------------------------------------------------------


def _check_keys(state: Mapping[str, Any]) -> None:
    """Refuse an object that ``state_dict()`` did not return, or a newer format version."""
    values.entries("state_dict", state, KEYS)
    if values.integer("version", state["version"], 1, values.MOST) > FORMAT_VERSION:
        raise ValueError(
            f"version {state['version']} is newer than this library understands ({FORMAT_VERSION}); update compopt"
        )


def _check_extra(engine: Engine, state: Mapping[str, Any], roles: Iterable[str]) -> None:
    """Check state that is not rows: its roles, its entries, and the tensors by :meth:`Component.check_state`."""
    extra, entries, roles = state["extra"], state.get("entries", {}), list(roles)
    values.mapping("extra", extra)
    values.mapping("entries", entries)
    for role in extra:
        if role not in roles:
            raise ValueError(f"the checkpoint has state of a {role!r}, which this estimator has not; it has {roles}")
    for role in roles:
        if role not in extra:
            raise ValueError(f"the checkpoint has no state of the {role}; it has that of {sorted(extra)}")
        values.mapping(f"extra of the {role}", extra[role])
        # torch.distributed.checkpoint loads only entries that exist before the load; an optimizer without steps has
        # none.
        given = sorted(extra[role])
        if entries.get(role, given) != given:
            raise ValueError(
                f"the checkpoint has the entries {entries[role]} of the {role}, {given} were read; with "
                f"torch.distributed.checkpoint save and load compopt.integrations.dcp.Stateful(est)"
            )
        engine.parts[role].check_state(extra[role])


def _compare_part(engine: Engine, role: str, state: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of part, or of a whole estimator."""
    needed, given, groups = config(engine, [role]), state["config"], state["sample_groups"]
    values.mapping("config", given)
    values.mapping("options", given.get("options", {}))
    if not isinstance(given.get("method"), Mapping) or list(given["method"]) != [role]:
        raise ValueError(
            f"the state must be that of one {role}, such as est.{role}.state_dict(); it has {given.get('method')}"
        )
    alone = given.get("mode") == "single"  # saved by a part that was used alone, with one value per sample
    for key in ("method", *(() if alone else ("mode",)), "n", "dtype", "columns"):
        _compare(key, needed[key], given.get(key))
    _compare(f"options.{role}", needed["options"].get(role), given.get("options", {}).get(role))
    if not isinstance(groups, list) or not values.equal(
        needed["n"], [isinstance(group, Mapping) and group.get("n") for group in groups]
    ):
        raise ValueError(f"sample_groups must be mappings with n of {needed['n']}, the checkpoint has {groups!r}")
    values.mapping("meaning", state.get("meaning", {}))


def _compare(where: str, expected: Any, given: Any) -> None:
    """Raise at the first entry that differs; the message has both values."""
    if isinstance(expected, Mapping) and isinstance(given, Mapping):
        for key in {**expected, **given}:
            _compare(f"{where}.{key}" if where else str(key), expected.get(key), given.get(key))
    elif not values.equal(expected, given):
        remedy = ""
        if where == "n" and isinstance(given, list) and all(isinstance(n, int) for n in given):
            first, *others = given
            added = f", add_sample_group for each of {others}" if others else ""
            remedy = (
                f"; load it into an estimator with n={[{'n': n} for n in given]}, or build one with n={first}{added}, "
                f"load, and append others with add_sample_group after that"
            )
        elif where.startswith(("options", "method")):
            remedy = (
                "; build the estimator with the arguments of the run that saved it (for compopt.recommended also the "
                "same n and batch_size)"
            )
        raise ValueError(f"{where} differs: the checkpoint has {given!r}, this estimator has {expected!r}{remedy}")
