"""Engine of one table of rows, and the hooks that it calls on the parts of an estimator."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from typing_extensions import Self

from compopt import accelerator, checks
from compopt.batch import COUNT
from compopt.checks import values
from compopt.checks.values import Range
from compopt.distributed.handshake import Handshake
from compopt.distributed.ranks import Ranks
from compopt.estimator.attach import Attachments
from compopt.estimator.call import Setting
from compopt.estimator.groups import Groups, GroupSpec, Hyper, SampleGroups, as_groups, plain
from compopt.estimator.reader import ROW_KEYS, AsyncChecks, BatchReader
from compopt.estimator.save_handle import SaveHandle
from compopt.functional import all_finite
from compopt.stores.layout import Column
from compopt.stores.table import Placement, RowTable

DIRECTIONS = {"bimodal": 2, "unimodal": 1, "single": 1}
FIRST_USE = threading.RLock()  # a part alone makes its engine and its rows when it is first used, by whichever thread


class PartHooks(ABC):
    """Hooks that an estimator calls on its parts.

    State that is not rows follows the same rule as rows: a forward pass in training mode works on a pending
    copy (:meth:`deposit_state`) that later passes of the window continue; only :meth:`commit_state` makes it the state.

    The estimator calls these methods in the thread of its own call. They communicate nothing unless they say so.

    Attributes:
        role: name of this kind of part, in state dicts and in prefixes of hyper-parameters.
        state: tensors by name, committed, that are not rows.
        learnable: module with the parameters that the user's own optimizer learns, always read from it, since wrappers
            may replace them; their names are those of :meth:`saved_state`.
    """

    role = "part"
    learnable: torch.nn.Module | None = None
    state_grows = False  # some of it is made later, so that its names are saved too

    def __init__(self, n: GroupSpec | None, defaults: Mapping[str, Any]) -> None:
        self.own_defaults = plain(defaults)
        self.state: dict[str, Tensor] = {}
        self._pending_state: dict[str, Tensor] | None = None
        self.own_groups: Groups = []
        for number, given in enumerate([] if n is None else as_groups(n)):
            checks.known_keys(f"sample group {number}", given, {"n", *self.own_defaults})
            group = plain({**self.own_defaults, **given})
            self.check(group)
            self.own_groups.append(group)
        self.check(self.own_defaults)

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse a bad hyper-parameter of one group, by the part's own names; ``None`` means "filled by mode"."""

    def fill(self, group: dict[str, Any], mode: str) -> None:
        """Replace ``None`` by the default of the mode (``"bimodal"``, ``"unimodal"`` or ``"single"``), in place."""

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        """Return the columns of this part, none by default: ``directions`` values each, floats in ``dtype``."""
        return []

    def structure(self) -> dict[str, Any]:
        """Return further plain values, by name, that decide the meaning of the state; a load refuses others."""
        return {}

    def described(self) -> dict[str, Any]:
        """Return facts that ``repr`` shows beside hyper-parameters, by name."""
        return self.structure()

    def learned(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters that the user's own optimizer learns."""
        return iter(()) if self.learnable is None else self.learnable.parameters()

    def _learned_by_name(self) -> dict[str, Tensor]:
        return {} if self.learnable is None else dict(self.learnable.named_parameters())

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        """Make the state whose shape depends on the estimator: at construction of the owner, or at the first use."""

    def belong(self, owner: object) -> None:
        """Become a part of ``owner``; called at construction of the owner and of its copies."""

    # -- moving between compositions ---------------------------------------------------------------------------

    def meaning(self) -> dict[str, Any]:
        """Return facts of the composition that this part's columns depend on, stored with a part's state."""
        return {}

    def check_meaning(self, state: Mapping[str, Any]) -> None:
        """Refuse, with a ``ValueError``, a part's state of another composition that would mean something else here.

        ``state`` has the ``"sample_groups"`` and the ``"meaning"`` of that composition.
        """

    def adapt_rows(self, rows: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Change columns, in place, where a load of a part has changed the number of visits of the owner's rows.

        Args:
            rows: a block of all columns, with this part's own visits as ``"count"``, and the owner's as ``"visits"``.
            hyper: this part's hyper-parameters for these rows.
        """

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
        """Deposit new values of entries of :attr:`state`; if any is not finite, none changes."""
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
        """Commit the pending copy; where the 0-d flag ``found_inf`` is positive, the state stays."""
        for name, new in (self._pending_state or {}).items():
            if found_inf is not None:
                new = torch.where(found_inf.to(new.device) > 0, self.state[name], new)
            self.state[name] = new
        self._pending_state = None

    def discard_state(self) -> None:
        """Drop the pending copy."""
        self._pending_state = None

    def move(self, device: torch.device) -> None:
        """Move committed state and learned parameters to the features' device; dtypes stay."""
        self.state = {name: accelerator.state_to_device(value, device) for name, value in self.state.items()}
        if self.learnable is not None and any(p.device != device for p in self.learnable.parameters()):
            self.learnable.to(device)  # parameters stay the same objects, as the user's optimizer has them

    def saved_state(self) -> dict[str, Tensor]:
        """Return a copy of the committed state and of learned parameters; collective where ranks split it."""
        return {name: value.detach().clone() for name, value in (self.state | self._learned_by_name()).items()}

    def expected_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return meta tensors of the names, shapes and dtypes that ``state`` must have to be restored here."""
        return {name: value.to("meta") for name, value in self.saved_state().items()}

    def state_values(self, names: Iterable[str]) -> dict[str, Range]:
        """Return the values that some of the saved entries ``names`` may hold: finite ones, if they are learned."""
        return dict.fromkeys(self._learned_by_name(), values.FINITE)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse saved state that does not fit, before anything is written: a ``TypeError`` or a ``ValueError``."""
        kind = type(self).__name__
        values.mapping(f"state of {kind}", state)
        expected = self.expected_state(state)
        for name, value in state.items():
            values.dense(f"{name} of {kind}", value, like=expected.get(name))
        self.check_form(state)
        for name, allowed in self.state_values(state).items():
            outside = allowed.outside(state[name])
            if outside is not None and outside.any():
                found = state[name][outside][0].item()
                raise ValueError(f"{name} of {kind} must be {allowed.describe(state[name].dtype)}, got {found}")

    def check_form(self, state: Mapping[str, Tensor]) -> None:
        """Refuse other names, shapes or dtypes; tensors may be on the meta device."""
        kind, expected = type(self).__name__, self.expected_state(state)
        if set(state) != set(expected):
            raise ValueError(
                f"the state of {kind} must have the entries {sorted(expected)}, the checkpoint has {sorted(state)}"
            )
        for name, needed in expected.items():
            differs, given = f"{name} of {kind} differs: the checkpoint has", state[name]
            if given.shape != needed.shape:
                raise ValueError(f"{differs} shape {tuple(given.shape)}, expected {tuple(needed.shape)}")
            if given.dtype != needed.dtype:
                raise ValueError(f"{differs} {given.dtype}, expected {needed.dtype}; it is not converted")

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore copies of checked state; the caller's tensors may be a mapped file."""
        with torch.inference_mode(False), torch.no_grad():  # state made inside it could not be changed outside
            self.restore_state({name: value.detach().clone() for name, value in state.items()})

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore checked state, whose tensors are this part's; dtype and device stay."""
        learned = self._learned_by_name()
        for name, value in state.items():
            if name in learned:
                learned[name].copy_(value)
            else:
                self.state[name] = value.to(self.state[name])


class Alone(WeakValueDictionary[str, PartHooks]):
    """Weak mapping of a role to the part that is used alone: the part holds the engine that has this mapping."""

    def __init__(self, part: PartHooks) -> None:
        super().__init__({part.role: part})

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return Alone(*(deepcopy(part, memo) for part in self.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Alone, tuple(self.values())


class Engine:
    """State and machinery of one estimator, which its parts share.

    Args:
        parts: by role; a part alone passes a weak mapping of itself.
        mode: ``"bimodal"`` (two values per column), ``"unimodal"`` or ``"single"`` (one).
        dtype: of the floating-point columns, float32 or float64.
        directions: number of directions with anchors: 1 makes the columns of bimodal mode one value wide.
        placement: where rows live.
        sample_groups: one mapping per data set, which overrides the hyper-parameters of the parts.
        options: plain values that decide the meaning of the state beside the parts, stored and compared.
        row_keys: keys of a call that name rows.

    Attributes:
        width: values per column and sample, ``D``.
        device: for rows that are made later.
        t, pending: commits so far; calls whose proposals wait for the next one.
    """

    def __init__(
        self,
        parts: Mapping[str, PartHooks],
        *,
        mode: str,
        dtype: torch.dtype,
        directions: int = 2,
        placement: Placement | None = None,
        sample_groups: Groups | None = None,
        options: Mapping[str, Any] | None = None,
        row_keys: Sequence[str] = ROW_KEYS,
    ) -> None:
        self.parts, self.mode, self.dtype = parts, mode, check_dtype(dtype)
        self.options = dict(options or {})
        self.placement, self._row_keys = placement or Placement(), row_keys
        self.width = min(directions, DIRECTIONS[mode])
        self.groups = SampleGroups(parts, mode, sample_groups)
        self.ranks = Ranks(self.placement.process_group)
        self.device = torch.device("cpu")
        self.table: RowTable | None = None
        self.t = self.pending = 0
        self.training = True
        self._make_own()

    def _make_own(self) -> None:
        """Make what copies and pickles have of their own."""
        self._reader: BatchReader | None = None
        self._lock, self._writing = threading.RLock(), False
        self.attachments = Attachments()
        self.saving: SaveHandle | None = None
        self.handshake, self.async_checks = Handshake(self.ranks), AsyncChecks()

    def open(self) -> Self:
        """Make the rows and their reader, once."""
        if self._reader is None:
            with FIRST_USE:
                self._reader = self._reader or self._make_reader()
        return self

    def _make_reader(self) -> BatchReader:
        columns = self.columns()
        if self.table is None and any(columns.values()):
            count = Column(COUNT, self.width, torch.int32, values=Range(least=0))
            every = [*(column for own in columns.values() for column in own), count]
            firsts = {own[0].name for own in columns.values() if own}
            with torch.inference_mode(False):  # rows made inside it could not be written outside
                table = RowTable(every, self.groups.n or 0, self.placement, self.ranks, firsts)
            table.store.to(self.device)
            self.table = table
        return BatchReader(
            self.groups, self.table, self.handshake, self.async_checks, self.dtype, columns, self._row_keys
        )

    @property
    def reader(self) -> BatchReader:
        """Reader of the rows of a call, made at the first use."""
        reader = self.open()._reader
        assert reader is not None
        return reader

    def columns(self) -> dict[str, list[Column]]:
        """Return the columns of each part, by role."""
        return {role: part.columns(self.width, self.dtype) for role, part in self.parts.items()}

    def forget_prefetched(self) -> None:
        """Drop rows that were read ahead."""
        if self._reader is not None and self._reader.prefetcher is not None:
            self._reader.prefetcher.drop_all()

    def await_save(self) -> None:
        """Wait for a save beside training, before what it reads is replaced."""
        if self.saving is not None:
            self.saving.settle()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Keep writers away, so that a state copied in a thread is of one commit.

        Raises:
            RuntimeError: this thread itself is in the middle of writing (a signal handler that saves).
        """
        with self._lock:
            if self._writing:
                raise RuntimeError(
                    "the estimator is in the middle of a commit, and its state is of none: let a signal handler set a "
                    "flag, and save after optimizer.step()"
                )
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep copies and other writers away; the thread that writes may enter it again."""
        with self._lock:
            before, self._writing = self._writing, True
            try:
                yield
            finally:
                self._writing = before

    def discard(self) -> None:
        """Drop everything pending."""
        with self.writing():
            self.pending = 0
            if self.table is not None:
                self.table.discard()
            for part in self.parts.values():
                part.discard_state()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_reader", "_lock", "_writing", "saving", "handshake", "async_checks", "attachments")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_own()


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """Refuse a dtype that rows cannot have."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype of the rows must be a torch.dtype such as torch.float32, got {dtype!r}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype of the rows must be torch.float32 or torch.float64, got {dtype}")
    return dtype
