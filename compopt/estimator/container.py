"""Estimator that holds other estimators."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from compopt import checks
from compopt.batch import Batch
from compopt.distributed.ranks import Ranks
from compopt.estimator.base import Estimator, Form
from compopt.estimator.groups import Groups, GroupView, as_groups, plain


class Container(Estimator):
    """Estimator whose methods apply to its parts, each of which owns its groups and its state.

    Example:
        >>> import compopt
        >>> isinstance(compopt.ISogCLREstimator(n=10), compopt.estimator.Container)
        True

    One part may be held by two containers, as a module may be shared; a step of either commits the part.

    Args:
        parts: the parts, by name. A commit commits them in this order.
        form: mode, width, dtype and placement; a part keeps a dtype or a placement of its own.
        sample_groups: one mapping per data set, which overrides hyper-parameters of the parts.

    State: that of the parts, and the number of commits. Communicates as its parts do, with one message for all of them
    per call.

    Raises:
        ValueError: parts of different sizes; a part with rows of another form; an unknown key.
    """

    def __init__(self, parts: Mapping[str, Estimator], form: Form, sample_groups: Groups | None = None) -> None:
        super().__init__(None, {})
        self._placement, self._dtype, self._ranks = form.placement, form.dtype, form.ranks
        self._parts, every = dict(parts), [key for part in parts.values() for key in part.defaults]
        # by key of the container, the name of the part and its key; keys that two parts share are prefixed
        self._names = {
            f"{name}.{key}" if every.count(key) > 1 else key: (name, key)
            for name, part in parts.items()
            for key in part.defaults
        }
        data = {part.data_fingerprint for part in parts.values()} - {None}
        if len(data) > 1:
            raise ValueError(f"data_fingerprint differs: the rows of the parts are of {sorted(map(repr, data))}")
        for part in parts.values():
            if part._unused:
                part._reset_form()
        groups, prepared = self._groups_of_parts(sample_groups), {}
        with ExitStack() as created:  # a refused composition leaves its parts as they were
            for name, part in parts.items():
                prepared[name] = part._prepare_form(replace(form, folder=name), groups[name])
                table = prepared[name]._table
                if table is not None and table is not part._table:
                    created.callback(table.remove)
            created.pop_all()
        for name, part in parts.items():
            part._apply_prepared(prepared[name])
        self._form = form

    _ranks: Ranks = cast(Ranks, None)  # an attribute, since every call reads it

    def _objects(self) -> dict[str, Estimator]:
        return self._parts

    def _tree(self) -> tuple[Estimator, ...]:
        return (*self._parts.values(), self)

    @property
    def data_fingerprint(self) -> str | None:
        """Fingerprint of the data set, which parts have in common, so that each may be saved alone."""
        return next((part.data_fingerprint for part in self._parts.values() if part.data_fingerprint is not None), None)

    @data_fingerprint.setter
    def data_fingerprint(self, value: str | None) -> None:
        for part in self._parts.values():
            part.data_fingerprint = value

    # -- groups ------------------------------------------------------------------------------------------------

    def _groups_of_parts(self, given: Groups | None) -> dict[str, list[dict[str, Any]]]:
        """Return the sample groups that the parts will have: with sizes, and with the given hyper-parameters."""
        sizes = {name: [group["n"] for group in part._groups] for name, part in self._parts.items() if part.n}
        if given is not None:
            sizes["sample_groups"] = [group["n"] for group in given]
        first, wanted = next(iter(sizes.items()), ("", []))
        for name, size in sizes.items():
            if size != wanted:
                raise ValueError(f"n differs: {first} has {wanted}, {name} has {size}; give both the same n")
        for number, changed in enumerate(given or ()):
            checks.known_keys(f"sample group {number}", changed, {"n", *self._names})
        groups = {}
        for name, part in self._parts.items():
            groups[name] = [dict(group) for group in part._groups]
            if wanted and part.n is None:
                if part._form is not None and part._form.mode != "single":
                    raise ValueError(
                        f"this {type(part).__name__} is part of an estimator without sample groups, and would get "
                        f"theirs, {wanted}; build a second one"
                    )
                groups[name] = [{"n": n, **group} for group in groups[name] for n in wanted]
            for group, changed in zip(groups[name], given or (), strict=False):
                new = {own: changed[key] for key, (of, own) in self._names.items() if of == name and key in changed}
                group |= part._checked_group(group | plain(new))
        return groups

    def _view(self, number: int) -> GroupView:
        groups = {name: part._groups[number] for name, part in self._parts.items()}
        places = {key: (groups[name], own) for key, (name, own) in self._names.items()}
        sized = next((group for group in groups.values() if "n" in group), None)
        return GroupView(places if sized is None else {"n": (sized, "n"), **places})

    @property
    def sample_groups(self) -> tuple[Any, ...]:
        """One view per data set, with ``n`` and the hyper-parameters of all parts; edits are written through.

        A key that two parts share is prefixed with the name of its part (``temperature.lr``).
        """
        return tuple(map(self._view, range(min(len(part._groups) for part in self._parts.values()))))

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of the hyper-parameters that a group leaves out (``None``: the default of the mode)."""
        return {key: self._parts[name].defaults[own] for key, (name, own) in self._names.items()}

    @property
    def n(self) -> int | None:
        """Number of samples in all groups; ``None`` without sizes."""
        return next((n for part in self._parts.values() if (n := part.n) is not None), None)

    def _new_groups(self, group: Mapping[str, Any]) -> list[tuple[Estimator, dict[str, Any]]]:
        (given,) = as_groups([group])
        checks.known_keys(f"sample group {len(self.sample_groups)}", given, {"n", *self._names})
        new: dict[str, dict[str, Any]] = {name: {"n": given["n"]} for name in self._parts}
        for key, (name, own) in self._names.items():
            if key in given:
                new[name][own] = given[key]
        return [pair for name, part in self._parts.items() for pair in part._new_groups(new[name])]

    # -- a call ------------------------------------------------------------------------------------------------

    def _deposit_parts(self, batch: Batch, proposals: Mapping[str, Mapping[str, Tensor]], valid: Tensor | None) -> None:
        """Deposit the proposals of a call, by the name of the part."""
        kept = [
            part.training and part._deposit_rows(batch, batch.of(name), proposals[name], valid)
            for name, part in self._parts.items()
        ]
        if any(kept) or self._followed:
            committed = any(kept) and all(part.pending == 1 for part in self._parts.values() if part.pending)
            self.pending = 1 if committed else self.pending + 1  # steps of the parts have committed earlier calls
            self._attachments.count_pending(self.pending)

    def described(self) -> dict[str, Any]:
        kinds = {name: type(part).__name__ for name, part in self._parts.items()}
        return {**kinds, **{key: value for part in self._parts.values() for key, value in part.described().items()}}
