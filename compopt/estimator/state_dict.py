"""Functions that build, check, load and convert the ``state_dict`` of an estimator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compopt.batch import COUNT
from compopt.checks import values
from compopt.checks.context import warn
from compopt.stores import base

Estimator = Any  # the class imports this module

FORMAT_VERSION = 2
KEYS = ("version", "config", "t")  # of every state; an object also has LEAF, a container PARTS
LEAF, PARTS = ("sample_groups", "rows", "state"), ("parts",)
GATHERED = 1 << 30  # bytes of sharded rows above which state_dict() warns


def is_container(est: Estimator) -> bool:
    """Return whether the state of an estimator is that of its parts."""
    return "" not in est._objects()


def config(est: Estimator) -> dict[str, Any]:
    """Return the configuration that a checkpoint and its reader must share, as a tree."""
    if is_container(est):
        objects = est._objects()
        return {
            "mode": est._ensure_form().mode,
            "method": {name: type(each).__name__ for name, each in objects.items()},
            "options": est.structure(),
            "parts": {name: config(each) for name, each in objects.items()},
        }
    form, columns = est._ensure_form(), est._columns()
    return {
        "mode": form.mode,
        "method": type(est).__name__,
        "dtype": str(form.dtype),
        "n": [group.get("n") for group in est._groups],
        # before the columns, which follow from them: a load names the first entry that differs
        "options": est.structure(),
        "columns": {c.name: [c.width, str(c.dtype)] for c in columns}
        | ({COUNT: [form.width, "torch.int32"]} if columns else {}),
    }


def metadata(est: Estimator) -> dict[str, Any]:
    """Return the state without tensors, as a tree; what a manifest contains."""
    own: dict[str, Any] = {"config": config(est), "t": est.t}
    if is_container(est):
        del own["config"]["parts"]  # the parts contain their own
        return {**own, "parts": {name: metadata(each) for name, each in est._objects().items()}}
    notes = {"notes": dict(est.notes)} if est.notes else {}
    return {**own, "sample_groups": [dict(group) for group in est._groups], **notes}


def state_dict(est: Estimator) -> dict[str, Any]:
    """Return the whole state; no hook runs."""
    check_room(est)
    return _state_dict(est)


def check_room(est: Estimator, share: int = 1) -> None:
    """Raise if a copy of all rows (of one of ``share`` parts) exceeds the memory; warn before a large gathering."""
    tables = [each._table for each in est._objects().values() if each._table is not None]
    sharded = any(table.sharded for table in tables)
    rows = [table.n * table.layout.column_bytes for table in tables if sharded or table.store.device.type == "cpu"]
    size, remedy = sum(rows) // share, "compopt.save(est, directory) writes every rank's rows in pieces"

    def check() -> None:
        if size > (left := base.available_memory()):
            raise MemoryError(f"a copy of the rows needs {size:,} bytes of memory, {left:,} are available; {remedy}")

    est._ranks.agree(check) if sharded else check()
    if sharded and size > GATHERED:
        warn(f"state_dict() gathers {size:,} bytes of rows of all ranks on every rank; {remedy}")


def _state_dict(est: Estimator) -> dict[str, Any]:
    state = {"version": FORMAT_VERSION, **metadata(est)}
    if is_container(est):
        return {**state, "parts": {name: _state_dict(each) for name, each in est._objects().items()}}
    own = est.saved_state()
    rows = {} if est._table is None else est._table.state_dict()
    return {**state, "rows": rows, "state": own, **({"entries": sorted(own)} if est.state_grows else {})}


def checked(est: Estimator, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a whole state for :func:`load`; refuse one that cannot be loaded."""
    state = upgraded(est, state)
    values.entries("state_dict", state, PARTS if is_container(est) else LEAF)
    check_metadata(est, state)
    if is_container(est):
        parts = {name: each._checked_state(state["parts"][name]) for name, each in est._objects().items()}
        return {**state, "parts": parts}
    values.mapping("rows", state["rows"])
    if est._table is not None:
        est._table.check_state(state["rows"])
    elif state["rows"]:
        raise ValueError(f"the checkpoint has the columns {sorted(state['rows'])}, this estimator has no rows")
    check_tensors(est, state)
    return state


def check_metadata(est: Estimator, state: Mapping[str, Any]) -> None:
    """Refuse the state, or the manifest, of another estimator; tensors are not checked here."""
    _compare_configs(est, state["config"])
    values.integer("t", state["t"], 0, values.INT64_MAX)
    if not is_container(est):
        values.mapping("notes", state.get("notes", {}))
        check_groups(est, state["sample_groups"], state["config"].get("n"))
        est.check_load(state)
        return
    values.entries("state_dict", state, PARTS)
    parts, own = values.mapping("parts", state["parts"]), est._objects()
    if parts.keys() != own.keys():
        raise ValueError(f"parts must be those of this estimator, {[*own]}, the checkpoint has {[*parts]}")


def entries_of(state: Mapping[str, Any], name: str) -> Any:
    """Return the entries of one object in a state, or in a manifest; ``""`` is an object that is saved alone."""
    return state["parts"][name] if name else state


def check_tree(est: Estimator, state: Mapping[str, Any]) -> None:
    """Check the state, or the manifest, of an estimator and of all its parts, see :func:`check_metadata`."""
    check_metadata(est, state)
    if is_container(est):
        for name, each in est._objects().items():
            check_metadata(each, state["parts"][name])


def check_groups(est: Estimator, given: Any, sizes: Any) -> None:
    """Refuse sample groups that cannot replace those of an object; ``sizes`` are those of the configuration."""
    own = est._groups
    mappings = isinstance(given, list | tuple) and all(isinstance(group, Mapping) for group in given)
    if not mappings or len(given) != len(own):
        raise ValueError(f"sample_groups must be {len(own)} mappings, the checkpoint has {given!r}")
    if not values.equal([group.get("n") for group in given], sizes):
        raise ValueError(f"n of the sample groups must be that of config, {sizes}, the checkpoint has {given!r}")
    for number, (group, other) in enumerate(zip(own, given, strict=True)):
        if hyper(group).keys() != hyper(other).keys():
            raise ValueError(
                f"sample group {number} must have {sorted(group)}, the checkpoint has {sorted(other)}; build "
                f"the estimator as the one that was saved"
            )
        group.completed(hyper(other))


def hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample group without its size, which an object without rows takes from its container."""
    return {key: value for key, value in group.items() if key != "n"}


def check_tensors(est: Estimator, state: Mapping[str, Any]) -> None:
    """Check state that is not rows: its entries, and its tensors by :meth:`Estimator.check_state`."""
    values.mapping("state", state["state"])
    # torch.distributed.checkpoint loads only entries that exist before the load; an optimizer without steps has none.
    given = sorted(state["state"])
    if state.get("entries", given) != given:
        raise ValueError(
            f"the checkpoint has the entries {state['entries']} of the {type(est).__name__}, {given} were read; with "
            f"torch.distributed.checkpoint save and load compopt.integrations.dcp.Stateful(est)"
        )
    est.check_state(state["state"])


def load(est: Estimator, state: Mapping[str, Any]) -> None:
    """Load a whole state that :func:`checked` has accepted."""
    for name, each in est._objects().items():
        own, table = entries_of(state, name), each._table
        load_object(each, own, (lambda: None) if table is None else partial(table.load_state_dict, own["rows"]))
    reset_progress(est, state)


def load_object(est: Estimator, state: Mapping[str, Any], load_rows: Callable[[], None]) -> None:
    """Load checked state into one object; ``load_rows`` overwrites its rows."""
    with est._writing():
        est._reading().forget_prefetched()
        for own, group in zip(est._groups, state["sample_groups"], strict=True):
            own.update(hyper(group))
        load_rows()
        with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be changed outside of it
            # copies, since the caller's tensors may be views of a mapped file
            est.restore_state({name: value.detach().clone() for name, value in state["state"].items()})
        est.notes = dict(state.get("notes", {}))
        reset_progress(est, state)


def reset_progress(est: Estimator, state: Mapping[str, Any]) -> None:
    """Set the number of commits, and drop what is pending."""
    est._reading().forget_prefetched()
    est.t, est._committed = int(state["t"]), 0
    est._drop_pending()


# -- version 0.3 ---------------------------------------------------------------------------------------------------


def upgraded(est: Estimator, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state, or a manifest, in the present form; refuse a newer one."""
    values.entries("state_dict", state, KEYS)
    version = values.integer("version", state["version"], 1, values.INT64_MAX)
    if version > FORMAT_VERSION:
        raise ValueError(f"version {version} is newer than this library understands ({FORMAT_VERSION}); update compopt")
    return convert_0_3(est, state) if version == 1 else state


def convert_0_3(est: Estimator, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state, or a manifest, of 0.3 in the present form.

    All parts had one table: columns are split by part, and each part gets the visits. A sample that a part had not
    visited had a mark in the part's first column, and gets no visits in that part.
    """
    old = values.mapping("config", state["config"])
    method = old.get("method")
    method = method if isinstance(method, Mapping) else {}
    if not is_container(est):
        return _convert_object(est, old_role(est, method), state)
    if "scores" in method:
        warn(
            "the checkpoint has scores, which are rows of a keeper now: attach a compopt.ScoreKeeper(n) to the "
            "estimator, and pass the checkpoint to keeper.load_state_dict() or compopt.load(keeper, directory)"
        )
    options = values.mapping("options", old.get("options", {}))
    kept = {key: value for key, value in options.items() if key not in (*method, "scores")}
    if "pairs" in kept:  # named spare_extra before
        kept["pairs"] = str(kept["pairs"]).replace("spare_extra", "spare_negatives")
    own = {"mode": old.get("mode"), "method": {k: v for k, v in method.items() if k != "scores"}, "options": kept}
    parts = {name: _convert_object(each, name, state) for name, each in est._objects().items()}
    return {"version": FORMAT_VERSION, "config": own, "t": state["t"], "parts": parts}


def _convert_object(est: Estimator, role: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one object, whose part was named ``role``, from the whole state of 0.3."""
    names, old = {c.name for c in est._columns()}, state["config"]

    def own(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in columns.items() if name in names or (names and name == COUNT)}

    method = old.get("method")
    keys = [*(("n",) if est.n is not None else ()), *est.defaults]
    groups = state.get("sample_groups")
    groups = groups if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups) else []
    found: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "config": {
            "mode": old.get("mode"),
            "method": method.get(role) if isinstance(method, Mapping) else None,
            "dtype": old.get("dtype"),
            "n": old.get("n") if isinstance(old.get("n"), list) and est.n is not None else [None],
            "options": values.mapping("options", old.get("options", {})).get(role, {}),
            "columns": own(values.mapping("columns", old.get("columns", {}))),
        },
        "t": state["t"],
        "sample_groups": [
            {key: group[name] for key in keys for name in (f"{role}.{key}", key) if name in group} for group in groups
        ],
    }
    taus = values.mapping("meaning", state.get("meaning", {})).get("tau") or []
    if len(set(taus)) == 1:
        found["notes"] = {"tau": taus[0]}
    if "rows" in state:
        found["rows"] = split_rows(est, own(values.mapping("rows", state["rows"])))
    if "extra" in state:
        found["state"] = values.mapping("extra", state["extra"]).get(role)
        if role in state.get("entries", {}):
            found["entries"] = state["entries"][role]
    return found


def old_role(est: Estimator, method: Any) -> str:
    """Return the name of an object's part in a state of 0.3."""
    kinds = method if isinstance(method, Mapping) else {}
    return next((role for role, kind in kinds.items() if kind == type(est).__name__), next(iter(kinds), ""))


def split_rows(est: Estimator, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns of one object from rows of 0.3, without the marks of samples that it has not visited."""
    columns, rows = est._columns(), dict(rows)
    if not columns or any(not isinstance(rows.get(name), Tensor) for name in (columns[0].name, COUNT)):
        return rows
    first = columns[0]
    blank = -math.inf if first.dtype.is_floating_point else torch.iinfo(first.dtype).min
    unvisited = rows[first.name] == blank
    if rows[COUNT].shape == unvisited.shape and unvisited.any():
        rows |= {name: rows[name].masked_fill(unvisited, 0) for name in (first.name, COUNT)}
    return rows


# -- refusals ------------------------------------------------------------------------------------------------------


def _compare_configs(est: Estimator, given: Any) -> None:
    """Raise at the first entry that differs; the message has both values."""
    given, expected = values.mapping("config", given), config(est)
    free = {"parts"}
    if "single" in (given.get("mode"), expected["mode"]):  # used alone, or in a container
        free.add("mode")
    if not expected.get("columns", True):  # without rows the size is that of other parts
        free.add("n")
    own, other = ({key: value for key, value in each.items() if key not in free} for each in (expected, given))
    _compare("", own, other)


def _compare(where: str, expected: Any, given: Any) -> None:
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
