"""Hooks of a part of an estimator: hyper-parameters, columns, and state that is not rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt.checks import values
from compopt.checks.values import Range
from compopt.estimator.call import Setting
from compopt.estimator.groups import Groups, GroupSpec, Hyper, SampleGroups, parse, plain
from compopt.functional import all_finite
from compopt.stores.layout import Column

# Former names of hooks, which classes of users may still define.
RENAMED = {
    "propose_state": "deposit_state",
    "promote": "commit_state",
    "forget": "discard_state",
    "expected_shapes": "expected_state",
}


class PartHooks(ABC):
    """Hooks that an estimator calls on its parts; :class:`Component` adds the use alone.

    State that is not rows follows the same rule as rows: a forward pass in training mode works on a pending
    copy (:meth:`deposit_state`) that later passes of the window continue; only :meth:`commit_state` makes it the state.

    The estimator calls these methods, in the thread of its own call; users of an estimator need none of them. They
    communicate nothing unless they or their class say so.

    Args and errors: as of :class:`Component`.

    Attributes:
        role: name of this kind of part, in state dicts and in prefixes of hyper-parameters.
        state: tensors by name, committed, that are not rows.
        learnable: module with the parameters that the user's own optimizer learns, used by way of it (wrappers may
            replace them there); their names are those of :meth:`saved_state`.
    """

    role = "part"
    learnable: torch.nn.Module | None = None
    state_grows = False  # some of it is made later, so that its names are saved too

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse methods that are never called any more, since they have other names."""
        super().__init_subclass__(**options)
        for old, new in RENAMED.items():
            if old in cls.__dict__:
                raise TypeError(f"{cls.__name__}.{old} is called {new} now; rename it")

    def __init__(self, n: GroupSpec | None, defaults: Mapping[str, Any]) -> None:
        self.own_defaults = dict(defaults)
        plain(self.own_defaults)
        self.state: dict[str, Tensor] = {}
        self._pending_state: dict[str, Tensor] | None = None
        self.own_groups: Groups = [] if n is None else parse(n)
        for number, group in enumerate(self.own_groups):
            checks.known_keys(f"sample group {number}", group, {"n", *self.own_defaults})
            for key, value in self.own_defaults.items():
                group.setdefault(key, value)
            plain(group)
            self.check(group)
        self.check(self.own_defaults)

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse a bad hyper-parameter of one group.

        Args:
            group: values by the part's own names; ``None`` means "filled by mode".

        Raises:
            ValueError, TypeError: with the name, the value and the remedy.
        """

    def fill(self, group: dict[str, Any], mode: str) -> None:
        """Replace ``None`` by the default of the mode, in place.

        Args:
            group: values by the part's own names.
            mode: ``"bimodal"``, ``"unimodal"`` or ``"single"``.
        """
        del group, mode

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        """Return the columns that this part keeps per sample; none by default.

        Args:
            directions: values per sample and column, ``D``.
            dtype: of floating-point columns.
        """
        del directions, dtype
        return []

    def structure(self) -> dict[str, Any]:
        """Return plain values, by name, that decide the meaning of the state beside hyper-parameters and columns.

        A checkpoint is refused by an estimator where they differ.
        """
        return {}

    def described(self) -> dict[str, Any]:
        """Facts that ``repr`` shows beside hyper-parameters, by name."""
        return self.structure()

    def learned(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters that the user's own optimizer learns."""
        return iter(()) if self.learnable is None else self.learnable.parameters()

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        """Make the state whose shape depends on the setting: at construction of the owner, or at the first use alone.

        Args:
            groups: the estimator's, into which this part's are merged.
            setting: what a part may know of the estimator.
        """
        del groups, setting

    def belong(self, owner: object) -> None:
        """Become a part of ``owner``; called at construction of the owner and of its copies."""

    # -- moving between compositions ---------------------------------------------------------------------------

    def meaning(self) -> dict[str, Any]:
        """Return facts of the composition that this part's columns depend on, stored with a part's state."""
        return {}

    def check_meaning(self, state: Mapping[str, Any]) -> None:
        """Refuse a part's state of another composition whose values would mean something else here.

        Args:
            state: with the ``"sample_groups"`` and the ``"meaning"`` of where it comes from.

        Raises:
            ValueError: with both values and the remedy.
        """
        del state

    def adapt_rows(self, rows: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Change columns, in place, where a load of a part has changed the number of visits of the owner's rows.

        Args:
            rows: a block of all columns, with this part's own visits as ``"count"``, and the owner's as ``"visits"``.
            hyper: this part's hyper-parameters for these rows.
        """
        del rows, hyper

    # -- state that is not rows --------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """True if committed state that is not rows is kept."""
        return bool(self.state)

    @property
    def split_state(self) -> bool:
        """True if ranks hold different parts of this state, so that :meth:`saved_state` is collective."""
        return False

    @property
    def has_pending_state(self) -> bool:
        """True if a pending copy waits for :meth:`commit_state`."""
        return self._pending_state is not None

    def working_state(self, training: bool) -> dict[str, Tensor]:
        """Return the pending copy if there is one (training), else the committed state."""
        return self._pending_state if training and self._pending_state is not None else self.state

    def deposit_state(self, **tensors: Tensor) -> None:
        """Deposit new values; if any of them is not finite, all keep their previous values.

        Args:
            **tensors: entries of :attr:`state`, in their shapes and dtypes. The test runs on the device.
        """
        before = self.working_state(True)
        new, old = list(tensors.values()), [before[name] for name in tensors]
        if len({(value.shape, value.dtype) for value in (*new, *old)}) == 1:  # some numbers: one operation for all
            stacked = torch.stack(new)
            accepted = list(torch.where(all_finite(stacked), stacked, torch.stack(old)).unbind())
        else:
            finite = all_finite(torch.cat([value.flatten() for value in new if value.is_floating_point()]))
            accepted = [torch.where(finite, *values) for values in zip(new, old, strict=True)]
        self._pending_state = {**before, **dict(zip(tensors, accepted, strict=True))}

    def commit_state(self, found_inf: Tensor | None) -> None:
        """Commit the pending copy.

        Args:
            found_inf: 0-d or ``(1,)`` flag on the device; where it is positive the state stays. ``None``: no flag.
        """
        if self._pending_state is None:
            return
        for name, new in self._pending_state.items():
            if found_inf is not None:
                new = torch.where(found_inf.to(new.device) > 0, self.state[name], new)
            self.state[name] = new
        self._pending_state = None

    def discard_state(self) -> None:
        """Drop the pending copy."""
        self._pending_state = None

    def move(self, device: torch.device) -> None:
        """Move committed state to the features' device; dtypes stay."""
        self.state = {name: accelerator.moved(value, device) for name, value in self.state.items()}

    def saved_state(self) -> dict[str, Tensor]:
        """Return a copy of all committed state that is not rows; collective where ranks split it."""
        return {name: value.clone() for name, value in self.state.items()}

    def expected_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return meta tensors of the names, shapes and dtypes that ``state`` must have to be restored here."""
        del state
        return {name: value.to("meta") for name, value in self.saved_state().items()}

    def state_values(self, names: Iterable[str]) -> dict[str, Range]:
        """Return the values that saved entries may hold, by name; those that are left out may hold any.

        Args:
            names: of the entries that were saved.
        """
        del names
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse saved state that does not fit, before anything is written.

        Args:
            state: as :meth:`saved_state` returned it.

        Raises:
            TypeError: no mapping of names to tensors.
            ValueError: other names, shapes or dtypes, with both; tensors without values; values outside of
                :meth:`state_values`.
        """
        kind = type(self).__name__
        values.mapping(f"state of {kind}", state)
        expected = self.expected_state(state)
        for name, value in state.items():
            values.dense(f"{name} of {kind}", value, like=expected.get(name))
        self.check_form(state)
        for name, allowed in self.state_values(state).items():
            place = allowed.first_outside(state[name])
            if place is not None:
                found = state[name].flatten()[place].item()
                raise ValueError(f"{name} of {kind} must be {allowed.describe(state[name].dtype)}, got {found}")

    def check_form(self, state: Mapping[str, Tensor]) -> None:
        """Refuse other names, shapes or dtypes; of the tensors nothing else is looked at.

        Args:
            state: by name; tensors may be on the meta device.

        Raises:
            ValueError: with both.
        """
        expected = self.expected_state(state)
        if set(state) != set(expected):
            raise ValueError(
                f"the state of {type(self).__name__} must have the entries {sorted(expected)}, the checkpoint has "
                f"{sorted(state)}"
            )
        for name, needed in expected.items():
            given = state[name]
            if given.shape != needed.shape:
                raise ValueError(
                    f"{name} of {type(self).__name__} differs: the checkpoint has shape {tuple(given.shape)}, "
                    f"expected {tuple(needed.shape)}"
                )
            if given.dtype != needed.dtype:
                raise ValueError(
                    f"{name} of {type(self).__name__} differs: the checkpoint has {given.dtype}, expected "
                    f"{needed.dtype}; it is not converted"
                )

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore copies of checked state: the caller's tensors may be a mapped file that is overwritten later.

        Args:
            state: checked by :meth:`check_state`.
        """
        with torch.inference_mode(False), torch.no_grad():  # state made inside it could not be changed outside
            self.restore_state({name: value.detach().clone() for name, value in state.items()})

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`saved_state` returned; dtype and device stay.

        Args:
            state: checked by :meth:`check_state`; tensors that this part may keep, see :meth:`take_state`.
        """
        for name, value in state.items():
            self.state[name] = value.to(self.state[name])
