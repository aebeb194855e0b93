"""Base class of all estimators: sample groups, rows, read / deposit / commit, hooks, checkpoints."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from compopt import accelerator, checks
from compopt.batch import COUNT, RANK_STRIDE, Batch, Rows
from compopt.checks import values
from compopt.checks.context import in_backward, in_checkpoint, outside_of_graphs
from compopt.checks.inputs import check_vector
from compopt.data.prefetch_loader import PrefetchLoader
from compopt.distributed.collectives import doing
from compopt.distributed.handshake import NULL_CONTEXT, Fingerprint, Handshake, fingerprint
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.estimator import state_dict as states
from compopt.estimator.attach import Attachments, HasOptimizer
from compopt.estimator.groups import GroupSpec, Hyper, SampleGroup, as_groups, count, plain
from compopt.estimator.reader import ROW_KEYS, AsyncChecks, Reader
from compopt.estimator.save_handle import SaveHandle
from compopt.functional import all_finite
from compopt.stores import Offload
from compopt.stores.rows import Column
from compopt.stores.table import Placement, RowTable

T = TypeVar("T")
Hook = Callable[..., Any]
FAMILIES = (
    *("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"),
    *("call", "discard"),
)
FIRST_USE = threading.RLock()  # an object that is used alone creates its rows at the first use, in any thread


@dataclass(frozen=True)
class Form:
    """Facts that the rows and the other state of an object depend on.

    Example:
        >>> import torch, compopt
        >>> class Queue(compopt.Normalizer):
        ...     def setup(self, form):  # part of a normalizer with state of its own
        ...         self.state["queue"] = torch.zeros(form.width, 64)

    Attributes:
        mode: ``"bimodal"``, ``"unimodal"`` or, for an object that is used alone, ``"single"``.
        width: number of values per column and sample, ``D``.
        dtype: dtype of the floating-point columns.
        placement: location of the rows.
        ranks: the ranks of the global batch.
        directions: number of directions (in unimodal mode: views) with anchors, 1 or 2.
        normalize: features are L2-normalised.
        within: the policy of pairs compares the keys ``within=``.
        folder: name of the object in its container; ``""`` for an object that is used alone.
    """

    mode: str
    width: int
    dtype: torch.dtype
    placement: Placement
    ranks: Ranks
    directions: int = 1
    normalize: bool = False
    within: bool = False
    folder: str = ""


class Fixed:
    """Attribute that determines the meaning of the rows: it is set once, and neither changed nor deleted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    # without __get__, so that reading the attribute costs nothing
    def __set__(self, est: Any, value: Any) -> None:
        if self.name in est.__dict__:
            raise fixed_attribute_error(est, self.name, value)
        est.__dict__[self.name] = value

    def __delete__(self, est: Any) -> None:
        raise AttributeError(f"{self.name} of {type(est).__name__} is fixed, since its state depends on it")


def fixed_attribute_error(est: Any, name: str, value: object) -> AttributeError:
    """Return the error for an attempt to change an attribute that determines the meaning of the rows."""
    plain_types = str | bool | int | torch.dtype | None
    old, new = (repr(x) if isinstance(x, plain_types) else type(x).__name__ for x in (getattr(est, name), value))
    kind, remedy = type(est).__name__, f"build another estimator with {name}={new}"
    return AttributeError(f"{name} of {kind} is fixed at {old}, since its state depends on it: {remedy}")


class Estimator:
    r"""Object with state that is updated after each optimizer step; methods as in ``torch.optim``.

    Example:
        >>> import torch, compopt
        >>> est = compopt.SogCLREstimator(n=100)  # every preset is an Estimator
        >>> z1, z2 = torch.randn(2, 8, 4, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()  # reads rows, deposits proposals
        >>> est.step()  # commits; est.discard() forgets
        >>> est.t, est.read(torch.tensor([0, 50]))["count"].tolist()
        (1, [1, 0])

    An estimator owns its sample groups, its rows and its other state, as a module owns its parameters. It is used
    alone, or held by a :class:`~compopt.ContrastiveEstimator`, whose methods apply to all objects that it holds.

    *Read, deposit, commit.* A call in training mode reads committed rows and deposits proposals, as ``backward``
    deposits gradients. Only :meth:`step` writes: it commits all deposits since the last step (gradient accumulation).
    A row with several proposals is set to their mean (the mean of ``u``, where ``log u`` is stored). Under :meth:`eval`
    or ``torch.no_grad()`` nothing is deposited.

    Args:
        n: number of samples, a list of sample groups, or ``None`` for an object without rows.
        defaults: hyper-parameters, which groups may override.
        process_group: the ranks whose batches form the global batch; ``None``: the default group, if there is one.
        offload: storage of the rows. ``None``: the device of the features; ``"cpu"``: host memory; ``"disk"``: a file.
        offload_dir: folder of that file, on a local disk.
        shard: each of K ranks keeps ``n / K`` rows instead of all; implied by ``offload="disk"``.
        dtype: dtype of the rows, float32 or float64; ``None``: that of the container, or float32.

    With a placement the rows are created by this constructor, so that a subclass must call it last; otherwise at the
    first use, or when a container takes the object. A container gives its placement and its dtype to objects that have
    none of their own.

    Attributes:
        data_fingerprint: fingerprint of the index that maps samples to rows (``ShardIndex``, ``KeyIndex``,
            ``UidIndex``); set by the user. :func:`compopt.save` stores it, and :func:`compopt.load` refuses the rows of
            another fingerprint.
        t: number of commits so far.
        state: committed tensors that are not rows, by name.
        notes: plain values that are saved with the state and never compared, by name.
        learnable: module with the parameters that the user's optimizer learns. Parameters are always read from the
            module, since wrappers may replace them. :meth:`saved_state` has their names in the module.

    State: one row per sample with the columns of :meth:`columns` and ``count`` (int32, visits per direction), padded to
    a multiple of 16 bytes; the tensors of :attr:`state`, of which the calls of a window change one pending copy
    (:meth:`deposit_state`); :attr:`t`.

    Threads: one thread calls the estimator. Meanwhile another thread may call :meth:`state_dict`, :meth:`read` or
    :func:`compopt.save`, and gets the state between two commits. A commit waits for that thread, except for a save with
    ``blocking=False``. Methods that communicate must run in the thread that calls; another thread gets a
    ``RuntimeError``.

    Processes: a worker of a ``DataLoader`` may read an estimator, and must not commit. A forked worker has the state of
    its start. A worker that is spawned, also by a fork server, shares rows on the CPU with the process that trains, and
    has everything else as of its start; rows on the disk cannot be sent to it.

    Communicates, with several ranks: the creation of rows is collective with ``offload="disk"``. The first message
    forms a CPU group if the backend of the process group does not support CPU tensors. Methods that communicate
    document it; the others do not communicate.

    Raises:
        IndexError: an index on the CPU is outside the data set. After this and every other error the state is
            unchanged.
        TypeError, ValueError: bad types, shapes or hyper-parameters; a dtype of the rows other than float32 or float64.
        MemoryError, OSError: the memory or the disk has no room for the rows.
        RuntimeError: with several ranks, another rank refused the call, runs another operation, or did not respond.

    Warns:
        UserWarning: once each: no commit during three updates of a model, or during many calls; an index that is always
            ``0 .. B - 1``, the position in the batch.
    """

    data_fingerprint: str | None = None
    learnable: torch.nn.Module | None = None
    of_rows: tuple[str, ...] = ()  # hyper-parameters that say what the rows are; fixed after the first call
    state_grows = False  # True if tensors are added to `state` later; their names are then saved too
    _form: Form | None = None
    _row_keys: Sequence[str] = ROW_KEYS  # keys of a call that contain row numbers

    def __init__(
        self,
        n: GroupSpec | None,
        defaults: Mapping[str, Any],
        *,
        process_group: ProcessGroup | None = None,
        offload: Offload | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._placement = Placement(process_group, offload, offload_dir, shard)
        self._dtype = None if dtype is None else check_dtype(dtype)
        self._hooks: dict[str, OrderedDict[int, Hook]] = {family: OrderedDict() for family in FAMILIES}
        self._table: RowTable | None = None
        self.state: dict[str, Tensor] = {}
        self._pending_state: dict[str, Tensor] | None = None
        self.notes: dict[str, Any] = {}
        self._pending_notes: dict[str, Any] | None = None  # those of the latest call, which a commit makes the notes
        self.t = self.pending = self._committed = 0  # _committed: calls in the commits of this process
        self.training = True
        self._device = torch.device("cpu")  # of rows that are created later
        self._filled: list[dict[str, Any]] = []  # by group, the defaults of the mode
        self._init_unshared()
        self._defaults = plain(defaults)
        self.check(self._defaults)
        groups = [
            self._with_defaults(number, group) for number, group in enumerate([{}] if n is None else as_groups(n))
        ]
        self._groups = [SampleGroup(self._checked_group(group), self._checked_group) for group in groups]
        if self._placement != Placement():
            self._ensure_form()

    def _with_defaults(self, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group with defaults for missing keys."""
        checks.known_keys(f"sample group {number}", group, {"n", *self._defaults})
        return plain({**self._defaults, **group})

    def _checked_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the checked values of a group; values that are ``None`` become the defaults of the mode."""
        self.check(group)
        if self._form is not None:
            self.fill(group, self._form.mode)
        return group

    def _init_unshared(self) -> None:
        """Create the members that copies and pickles do not share."""
        self._made = time.monotonic()
        self._reader: Reader | None = None
        self._lock, self._busy = threading.RLock(), False
        _locked.add(self)
        self._attachments, self._async_checks = Attachments(), AsyncChecks()
        self._saving: SaveHandle | None = None

    # -- what a subclass defines -------------------------------------------------------------------------------

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse a bad hyper-parameter of a group; values may be ``None`` where :meth:`fill` sets them."""

    def fill(self, group: dict[str, Any], mode: str) -> None:
        """Replace ``None`` by the default of the mode (``"bimodal"``, ``"unimodal"`` or ``"single"``), in place."""

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        """Return the columns of a row, by default none: ``directions`` values each, floats in ``dtype``."""
        return []

    def setup(self, form: Form) -> None:
        """Set :attr:`state` and other members that depend on the form; change no member in place.

        Called before the first use, and again if a container takes an object that was used alone.
        """

    def structure(self) -> dict[str, Any]:
        """Return further plain values, by name, that determine the meaning of the state; a load compares them."""
        return {}

    def shared_options(self) -> dict[str, Any]:
        """Return further plain values, by name, that must be equal on all ranks and that no checkpoint depends on."""
        return {}

    def described(self) -> dict[str, Any]:
        """Return values to show in ``repr`` in addition to hyper-parameters, by name."""
        return self.structure()

    # -- form: alone, or in a container ------------------------------------------------------------------------

    def _ensure_form(self) -> Form:
        """Return the form; without one, take that of an object that is used alone, and create the rows."""
        if self._form is None:
            with FIRST_USE:
                if self._form is None:
                    dtype = self._dtype or torch.float32
                    self._set_form(Form("single", 1, dtype, self._placement, Ranks(self._placement.process_group)))
        assert self._form is not None
        return self._form

    @property
    def _unused(self) -> bool:
        """Return whether the form may still be replaced: no container has set it, and nothing was deposited."""
        return self._form is None or (self._form.mode == "single" and not (self.t or self.pending))

    def _set_form(self, form: Form) -> None:
        """Take a form, or raise if this object has rows of another one."""
        if self._unused:
            self._reset_form()
        self._apply_prepared(self._prepare_form(form, [dict(group) for group in self._groups]))

    def _reset_form(self) -> None:
        """Return an unused object to its state before the first use: without rows, and without defaults of a mode."""
        if self._table is not None:
            self._table.remove()
        for group, filled in zip(self._groups, self._filled, strict=False):
            dict.update(group, {key: None for key, value in filled.items() if group[key] == value})
        self._form = self._table = self._reader = None
        self._filled = []

    def _prepare_form(self, form: Form, groups: list[dict[str, Any]]) -> Self:
        """Return the object that this one will :meth:`_apply_prepared` with a form and sample groups, or raise.

        The rows and the other state of an unused object are created; those of another one must fit.
        """
        own, before = self._placement, self._form
        if self._dtype is not None:
            form = replace(form, dtype=self._dtype)
        if own != Placement():  # its own placement stays, for the ranks of the container
            form = replace(form, placement=replace(own, process_group=form.placement.process_group))
        prepared = object.__new__(type(self))
        prepared.__dict__ |= self.__dict__ | {"_groups": groups}
        if before is None:
            prepared._build(form)
            return prepared
        alone = before.mode == "single"
        for name in ("width", "dtype", "placement", *(() if alone else ("mode", "directions", "normalize", "within"))):
            if getattr(before, name) != getattr(form, name):
                raise ValueError(
                    f"this {type(self).__name__} is in use with {name}={getattr(before, name)!r}, the estimator has "
                    f"{getattr(form, name)!r}; build a second one"
                )
        prepared._form = replace(form, folder=before.folder)
        if alone:  # what depends on the form is made again
            prepared.setup(form)
            if any(name in self.state and self.state[name].shape != x.shape for name, x in prepared.state.items()):
                raise ValueError(
                    f"this {type(self).__name__} was used alone, and its state has another shape in this estimator; "
                    f"build a second one"
                )
            prepared.state = {**prepared.state, **self.state}
        return prepared

    def _build(self, form: Form) -> None:
        """Set defaults, rows and state of a form."""
        unset = [[key for key, value in group.items() if value is None] for group in self._groups]
        for group in self._groups:
            self.fill(group, form.mode)
        self._filled = [{key: group[key] for key in keys} for group, keys in zip(self._groups, unset, strict=True)]
        self._form = form
        self.setup(form)
        columns = self.columns(form.width, form.dtype)
        if columns:  # last: nothing raises when the file of a table exists
            counted = [*columns, Column(COUNT, form.width, torch.int32)]
            with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
                self._table = RowTable(counted, count(self._groups) or 0, form.placement, form.ranks, form.folder)
            self._table.store.to(self._device)

    def _apply_prepared(self, prepared: Estimator) -> None:
        """Take the attributes of a result of :meth:`_prepare_form`; the sample groups stay the same objects."""
        values, own = prepared._groups, self._groups
        for group, new in zip(own, values, strict=False):
            dict.update(group, new)
        own += [SampleGroup(new, self._checked_group) for new in values[len(own) :]]
        self.__dict__.update(prepared.__dict__ | {"_groups": own})  # at once: another thread may see the form

    def _check_one_value(self, of: str = "width") -> None:
        """Refuse an operation with one value per sample if this object has two, as part of an estimator with two."""
        if getattr(self._ensure_form(), of) != 1:
            raise ValueError(
                f"this {type(self).__name__} is part of an estimator with two directions, and an operation of its own "
                f"has one value per sample; build another one for it"
            )

    def _objects(self) -> dict[str, Estimator]:
        """Return the objects that own state, by name: this one, or the parts of a container."""
        return {"": self}

    def _tree(self) -> tuple[Estimator, ...]:
        """Return the objects of :meth:`_objects`, then this one."""
        return (self,)

    def _reading(self) -> Reader:
        """Return the reader of calls, which is created at the first use."""
        return self._reader or self._new_reader()

    def _new_reader(self) -> Reader:
        with FIRST_USE:
            if self._reader is None:
                handshake, every = Handshake(self._ensure_form().ranks), self._objects()
                objects = {name: (each._groups, each._table, each._columns()) for name, each in every.items()}
                dtype = max((each.dtype for each in every.values()), key=lambda dtype: dtype.itemsize)
                self._reader = Reader(objects, handshake, self._async_checks, dtype, self._row_keys)
            return self._reader

    def _columns(self) -> list[Column]:
        form = self._ensure_form()
        return self.columns(form.width, form.dtype)

    @property
    def _ranks(self) -> Ranks:
        return self._ensure_form().ranks

    def _guard(self) -> AbstractContextManager[None]:
        """Wrap the checks of this rank before the exchange with the others, see :meth:`Handshake.guard`."""
        reader = self._reading()
        return reader.handshake.guard() if reader.several else NULL_CONTEXT

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the floating-point columns."""
        return (self._dtype or torch.float32) if self._form is None else self._form.dtype

    @dtype.setter
    def dtype(self, value: object) -> None:
        raise fixed_attribute_error(self, "dtype", value)

    # -- locks -------------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self, copies: bool = False) -> Iterator[None]:
        """Block copies of the state and other writers; the thread that writes may enter the context again."""
        with ExitStack() as stack:
            for each in sorted(self._tree(), key=id):  # an order that does not depend on the container
                stack.enter_context(each._lock)
                if copies and each._busy:
                    raise RuntimeError(
                        "the estimator is in the middle of a commit and its state is incomplete; in a signal handler "
                        "only set a flag, and save after optimizer.step()"
                    )
                stack.callback(setattr, each, "_busy", each._busy)
                each._busy |= not copies
            yield

    def _copying(self) -> AbstractContextManager[None]:
        """Block writers, so that a copy of the state contains whole commits only; raise inside of one."""
        return self._writing(copies=True)

    @contextmanager
    def _rollback_on_error(self) -> Iterator[None]:
        """Drop what the block deposits if it raises; the deposits of earlier calls of the window stay pending."""
        every = (*self._tree(), *(self._followers() if self._hooks["call"] else ()))
        before = [(each, each.pending, each._pending_state, each._pending_notes) for each in every]
        try:
            yield
        except BaseException:
            for each, *pending in before:  # deposits replace the mappings, and leave what is in them as it is
                with each._writing():
                    each._forget(*pending)
            raise

    def _await_save(self) -> None:
        """Wait for background saves of this object and of its parts, before the state that they read is replaced."""
        for each in self._tree():
            if each._saving is not None:
                each._saving.settle()

    # -- groups ------------------------------------------------------------------------------------------------

    @property
    def sample_groups(self) -> tuple[Any, ...]:
        """One dict per data set, like ``param_groups``: ``n`` and every hyper-parameter.

        Values may be changed during training. A bad one raises at once, and ``None`` is the default of the mode.
        ``group.update(...)`` sets several values together, such as bounds. Keys can be neither added nor removed, and
        ``n`` is fixed; :meth:`add_sample_group` appends a group.
        """
        return tuple(self._groups)  # a list could be appended to without any effect

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of the hyper-parameters that a group leaves out (``None``: the default of the mode)."""
        return self._defaults

    @property
    def n(self) -> int | None:
        """Number of samples in all groups; ``None`` for an estimator without rows."""
        return count(self._groups)

    def add_sample_group(self, group: Mapping[str, Any]) -> None:
        """Append the rows of another data set; their indices follow all existing ones.

        Args:
            group: ``{"n": ..., key: value, ...}``; defaults replace missing keys.

        Raises:
            ValueError: an unknown key, a bad value, or an estimator without rows.
            TypeError: ``n`` is not an integer.

        Communicates: collective with several ranks.
        """
        self._ensure_form()
        self._await_save()
        with doing("add_sample_group()", self.t), self._writing():
            if self.n is None:
                raise ValueError("this estimator keeps no rows and has no n; there is nothing to add")
            new = self._new_groups(group)
            self._reading().forget_prefetched()
            with ExitStack() as grown, torch.inference_mode(False):  # inference tensors cannot be written outside of it
                for each, added in new:
                    if (table := each._table) is not None:
                        before = table.n
                        table.grow(before + added["n"])
                        grown.callback(table.grow, before)
                grown.pop_all()
            for each, added in new:
                each._groups.append(SampleGroup(added, each._checked_group))

    def _new_groups(self, group: Mapping[str, Any]) -> list[tuple[Estimator, dict[str, Any]]]:
        """Return the checked group that :meth:`add_sample_group` appends to each object."""
        (given,) = as_groups([group])
        return [(self, self._checked_group(self._with_defaults(len(self._groups), given)))]

    def _hyper(self, batch: Batch) -> Hyper:
        """Return the hyper-parameters for the samples of a batch."""
        return Hyper(self._groups, batch.rows, batch.dtype)

    # -- rows --------------------------------------------------------------------------------------------------

    def _configuration(self) -> Fingerprint:
        """Return the fact for what must be equal on all ranks: the configuration, the options and the sample groups."""
        config = states.config(self)
        for name, each in self._objects().items():
            shard = {"shard": each._ensure_form().placement.shard}
            (config["parts"][name] if name else config)["shared"] = each.shared_options() | shard
        return fingerprint({**config, "sample_groups": [dict(group) for group in self.sample_groups]})

    @property
    def _remembers_index(self) -> bool:
        return self.n is not None

    def _read(
        self,
        keys: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        facts: Mapping[str, int] | None = None,
        least: int = 1,
        more: int = 0,
    ) -> Batch:
        """Return the global batch of a call with its committed rows, see :meth:`Reader.read`."""
        reader, training = self._reader or self._reading(), self.training and torch.is_grad_enabled()
        depositing = training and self._commits()
        if (depositing or reader.several) and in_checkpoint():
            self._refuse_checkpoint(depositing)
        if depositing:
            if self._attachments.counting:
                self._drop_skipped()
            if self._attachments.unsure_of_positions:
                with self._guard():  # warning filters may turn a warning into an error
                    self._attachments.check_positions(keys["index"], self.n, self._remembers_index)
        progress = self._progress(training, facts or {}) if reader.several else {}
        batch = reader.read(keys, values, depositing, progress, least, more)
        if training:
            for each in self._objects().values():
                if each.state or each.learnable is not None:
                    each.move(batch.rows.device)
        return batch

    def _index(self, index: Tensor | None, size: int) -> Tensor:
        """Return the checked index of a call; without an index and rows, number each sample uniquely."""
        if index is not None:
            return check_vector("index", index, size)
        if self.n is None:
            return torch.arange(size, device="cpu") + (self._ranks.rank + 1) * RANK_STRIDE
        if not self._reading().tables and self._objects().keys() == {""}:
            return torch.zeros(size, dtype=torch.int64, device="cpu")  # no rows: the first sample group is that of all
        raise TypeError(f"index is None; pass data-set positions: {type(self).__name__} has rows for n={self.n}")

    def _progress(self, training: bool, facts: Mapping[str, int]) -> dict[str, int]:
        """Return the facts of a call that must be equal on all ranks."""
        progress = {"depositing": int(training), "t": self.t, "pending": self.pending, **facts}
        progress |= {"calls": self._committed + self.pending, "followers": len(self._hooks["call"])}
        progress["parts"] = fingerprint([(each.t, each.pending) for each in self._tree()])
        with self._guard():
            progress["configuration"] = self._configuration()
        return progress

    def _refuse_checkpoint(self, deposits: bool) -> None:
        """Refuse a call inside a checkpointed function, because the recomputation would deposit or gather twice."""
        if not deposits and not torch.is_grad_enabled() and not in_backward():
            return
        error = RuntimeError(
            f"{type(self).__name__} was called inside a checkpointed function (torch.utils.checkpoint, or "
            f"DeepSpeed's), which runs again in backward and would {'deposit' if deposits else 'gather'} the batch "
            f"twice; checkpoint the encoders alone and call the estimator on what they return: it keeps no B x B "
            f"matrix for backward"
        )
        if in_backward():  # the other ranks may not be in backward, and would not receive a message
            raise error
        with self._guard():
            raise error

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """Return a copy of committed values by column, on the rows' device.

        Args:
            index: data-set positions, ``(B,)``. On shards the call is collective, and ranks may pass different
                positions.

        Returns:
            Every column as stored, ``(B, 2)``, or ``(B, 1)`` in unimodal mode and with one direction; ``count`` is
            ``(B,)`` int64, the number of visits of the sample. Logarithms of a sample that was never visited (count 0)
            are 0. For a container: the columns of all its parts (names that two parts share are prefixed), and the
            largest of their counts.

        Raises:
            IndexError: an index is outside the data set.
            TypeError, ValueError: the index is not a 1-D tensor of integers.
            RuntimeError: the estimator has no rows.
        """
        columns, visits = self._read_rows(index)
        return {**columns, COUNT: visits.amax(dim=1).to(torch.int64)}

    def _read_rows(self, index: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the columns of :meth:`read` and the visits of each direction, ``(B, D)``."""
        reader = self._reading()
        if not reader.tables:
            raise RuntimeError(f"{type(self).__name__} keeps nothing per sample; there are no rows to read")
        with doing("read()", self.t), self._copying():
            rows = reader.agree(lambda: check_vector("index", index, None)).cpu()
            like = torch.zeros((), dtype=reader.dtype, device=self.device)
            read = reader.read_committed(rows, like).tables
        every = [column for each in read.values() for column in each.columns]
        dtypes = {name: {c.name: c.dtype for c in table.layout.columns} for name, table in reader.tables.items()}
        columns = {
            f"{name}.{column}" if every.count(column) > 1 else column: value.to(dtypes[name][column], copy=True)
            for name, each in read.items()
            for column, value in each.columns.items()
        }
        return columns, torch.stack([each.count for each in read.values()]).amax(dim=0)

    @overload
    def prefetch(self, source: Tensor, index: Any = -1, index2: Any = None) -> None: ...

    @overload
    def prefetch(self, source: Iterable[T], index: Any = -1, index2: Any = None) -> PrefetchLoader[T]: ...

    def prefetch(self, source: Any, index: Any = -1, index2: Any = None) -> PrefetchLoader[Any] | None:
        """Start reading the rows of a future batch, or wrap a loader that does so for every batch.

        The call of the batch uses the values committed at the time of that call. Prefetching helps only with
        ``offload=``: rows on the features' device are read in the call itself.

        Args:
            source: the ``index`` of a future batch, ``(B,)``; or a loader, from which one batch is read ahead.
            index: with a loader, place of the index in a batch: a position, a key, or a function of the batch.
            index2: with an index, the index of the second modality; with a loader, its place in a batch.

        Returns:
            ``None`` for an index; for a loader, a :class:`~compopt.data.PrefetchLoader` over its batches, or the loader
            itself if the estimator has no rows.

        Raises:
            IndexError: an index on the CPU is outside the data set.
            TypeError, ValueError: an index is not a 1-D tensor of integers, or there are two second indices; for a
                loader, see ``PrefetchLoader``.

        Communicates: nothing, except on shards with ``offload=`` (on all ranks): a background thread exchanges row
        numbers, so that all ranks must prefetch the same batches in the same order.
        """
        if isinstance(source, Tensor):
            if isinstance(index, Tensor) and index2 is not None:
                raise TypeError("index and index2 both hold the second index; pass prefetch(index, index2)")
            self._prefetch(source, index if isinstance(index, Tensor) else index2)
            return None
        if isinstance(source, np.ndarray) or (isinstance(source, Sequence) and source and isinstance(source[0], int)):
            raise TypeError(
                f"index must be a tensor of integers, got {type(source).__name__}; pass torch.as_tensor(index)"
            )
        if not any(each._reading().tables for each in (self, *self._followers())):
            # nothing to read: return the loader, whose batches need no index
            return cast(PrefetchLoader[Any], source)
        return PrefetchLoader(source, self._prefetch, self._forget_prefetched, index, index2)

    def _forget_prefetched(self) -> None:
        for each in (self, *self._followers()):
            each._reading().forget_prefetched()

    def _prefetch(self, index: Tensor, index2: Tensor | None = None) -> None:
        given = {"index": index} if index2 is None else {"index": index, "index2": index2}
        keys = {name: check_vector(name, value, None) for name, value in given.items()}
        if "index2" in keys:
            check_vector("index2", index2, len(keys["index"]))
        for each in (self, *self._followers()):
            each._reading().prefetch(keys)

    # -- deposit and commit ------------------------------------------------------------------------------------

    def _deposit(self, batch: Batch, proposals: Mapping[str, Tensor], valid: Tensor | None = None) -> None:
        """Deposit the proposals of a call of this object."""
        if self._deposit_rows(batch, batch.of(), proposals, valid):
            self._attachments.count_pending(self.pending)

    def _deposit_rows(self, batch: Batch, read: Rows, proposals: Mapping[str, Tensor], valid: Tensor | None) -> bool:
        """Keep proposals for the rows of a batch until the commit; return whether there is anything to commit."""
        if self._table is not None:
            self._table.deposit(batch, read, self.checked(proposals, read), valid)
        elif self._pending_state is None and not self._followed:
            return False
        self.pending += 1
        return True

    def checked(self, proposals: Mapping[str, Tensor], read: Rows) -> Mapping[str, Tensor]:
        """Return proposals for rows; raise unless there is one for each column."""
        kind = type(self).__name__
        if proposals.keys() != read.columns.keys():
            raise ValueError(
                f"{kind} must propose values for its columns {sorted(read.columns)}, got proposals for "
                f"{sorted(proposals)}; propose the committed values of a column that does not change"
            )
        for name, value in proposals.items():
            check_shape(f"the proposal for {name} of {kind}", value, read.columns[name].shape)
        return proposals

    def _commits(self) -> bool:
        """Return whether a call has anything to commit: rows, other state, or those of a follower."""
        objects = self._objects().values()
        return self._followed or any(each._table is not None or each.state for each in objects)

    @property
    def _followed(self) -> bool:
        """Return whether a hook or a follower waits for calls or commits, also of an object without state."""
        return bool(self._hooks["call"] or self._hooks["step_pre"] or self._hooks["step_post"])

    def _followers(self) -> list[Estimator]:
        """Return the estimators whose methods are call hooks (:class:`~compopt.ScoreKeeper`)."""
        owners = [getattr(hook, "__self__", None) for hook in self._hooks["call"].values()]
        return [each for each in owners if isinstance(each, Estimator)]

    def _begin_saving(self) -> None:
        self._attachments.check_before_save(self.t)
        for each in self._tree():
            each._run("state_dict_pre")

    @outside_of_graphs
    def step(self) -> None:
        """Write all pending proposals to the rows and increment :attr:`t`; with nothing pending, do nothing.

        An optimizer passed to :meth:`attach` calls it after each update. Step hooks run before and after the commit.
        Communicates nothing.

        Warns:
            RuntimeWarning: a background save (``compopt.save(..., blocking=False)``) has failed.
        """
        self._commit(None)

    def _commit(self, found_inf: Tensor | None) -> None:
        if self._saving is not None:
            self._saving.warn()
        if self._attachments.counting:
            self._drop_skipped()
        objects = [each for each in self._tree() if each.pending]
        if not objects:
            return
        if found_inf is not None:
            found_inf = found_inf.reshape(())  # a flag of shape (1,) would broadcast 0-d state to 1-D
            if found_inf.device.type == "cpu" and found_inf.item() > 0:
                self.discard()
                return
        for each in objects:
            if each._hooks["step_pre"]:
                each._run("step_pre", (), {})
        # On an accelerator the host does not wait for the flag: where it is positive, the device keeps the old values.
        self._attachments.end_window(self.pending)
        with self._writing(), torch.no_grad():
            # first the work that needs memory: an error in it leaves all objects as they are
            prepared = [None if each._table is None else each._table.prepare(found_inf) for each in objects]
            for each, rows in zip(objects, prepared, strict=True):
                each._commit_own(rows, found_inf)
        for each in objects:
            if each._hooks["step_post"]:
                each._run("step_post", (), {} if found_inf is None else {"found_inf": found_inf})

    def _commit_own(self, rows: tuple[Tensor, Tensor] | None, found_inf: Tensor | None) -> None:
        """Write what is pending in this object alone; ``rows``: the result of :meth:`RowTable.prepare`."""
        if self._table is not None:
            self._table.commit(rows)
        if self._pending_state is not None:
            self.commit_state(found_inf)
        if self._pending_notes is not None:
            self.notes, self._pending_notes = self._pending_notes, None
        self._committed, self.pending = self._committed + self.pending, 0
        self.t += 1

    def _drop_skipped(self) -> None:
        """Drop what is pending if an attached engine has skipped the update."""
        if self._attachments.skipped():
            self.discard()

    @outside_of_graphs
    def discard(self) -> None:
        """Drop all pending proposals, for example after a skipped update. Communicates nothing."""
        self._drop_pending()
        for each in self._tree():
            each._run("discard")

    def _drop_pending(self) -> None:
        """Drop all pending proposals; no hook runs."""
        self._attachments.end_window()
        with self._writing():
            for each in self._tree():
                each._forget()

    def _forget(self, first: int = 0, state: Any = None, notes: Any = None) -> None:
        """Drop the deposits of this object from number ``first`` on; ``state`` and ``notes`` are pending again."""
        self.pending, self._pending_state, self._pending_notes = first, state, notes
        if self._table is not None:
            self._table.discard(first)

    def attach(self, optimizer: torch.optim.Optimizer | HasOptimizer, *, checkpoint: bool = False) -> RemovableHandle:
        """Run :meth:`step` after each real ``optimizer.step()``, and :meth:`discard` after a step skipped for overflow.

        Call it after ``deepspeed.initialize`` (with the engine) or ``accelerator.prepare``, and again for every new
        optimizer. A ``GradScaler`` that skips an unfused step does not call the optimizer: the finite rows of that
        window are part of the next commit, which is harmless because the weights did not change.
        :func:`compopt.integrations.amp.attach` and :meth:`discard` drop these rows.

        With ``checkpoint=True``, code that saves the optimizer also saves the estimator. ``optimizer.state_dict()``
        contains :meth:`state_dict` under the key ``"compopt"`` (``"compopt.1"`` for the second estimator attached to
        the optimizer, and so on), and ``optimizer.load_state_dict()`` loads it after the state of the optimizer; if
        either is refused, neither is loaded. Attach before loading. The state must not exceed 1 GiB.

        Args:
            optimizer: a torch optimizer, or a wrapper or engine that keeps one in ``.optimizer``.
            checkpoint: include the state of the estimator in the optimizer's state dict.

        Returns:
            A handle; ``remove()`` detaches the estimator and removes its state from the optimizer's state dict.

        Raises:
            TypeError: ``optimizer`` contains no torch optimizer.
            ValueError: with ``checkpoint=True``, the state is :attr:`split`, on disk or larger than 1 GiB, or the
                optimizer is DeepSpeed's or overrides ``state_dict`` or ``load_state_dict``. At
                ``optimizer.state_dict()``: ``torch.distributed.checkpoint.state_dict`` or FSDP would drop the entry.

        Warns:
            UserWarning: with ``checkpoint=True``, the optimizer was loaded before attaching, or loads a state without
                the entry. DeepSpeed's engine clips gradients, and the loss is multiplied by tau.

        Communicates: nothing, neither at this call nor at a commit.
        """
        checks.flag("checkpoint", checkpoint)
        self._ensure_form()
        carried = self if checkpoint else None
        return self._attachments.add(optimizer, self._commit, carried, getattr(self, "multiply_tau", False))

    # -- state that is not rows --------------------------------------------------------------------------------

    @property
    def split_state(self) -> bool:
        """Return whether ranks hold different parts of this state, so that :meth:`saved_state` is collective."""
        return False

    def working_state(self, training: bool) -> dict[str, Tensor]:
        """Return the pending copy in training mode, if there is one; otherwise the committed state."""
        return self._pending_state if training and self._pending_state is not None else self.state

    def deposit_state(self, **tensors: Tensor) -> None:
        """Deposit new values for entries of :attr:`state`; if any value is not finite, change none of them."""
        before = self.working_state(True)
        new, old = list(tensors.values()), [before[name] for name in tensors]
        floats = [value.flatten() for value in new if value.is_floating_point()]
        if not floats:  # integers are finite
            accepted = new
        elif len({(value.shape, value.dtype) for value in (*new, *old)}) == 1:  # alike: one stacked operation for all
            stacked = torch.stack(new)
            accepted = list(torch.where(all_finite(stacked), stacked, torch.stack(old)).unbind())
        else:
            finite = all_finite(torch.cat(floats))
            accepted = [torch.where(finite, *values) for values in zip(new, old, strict=True)]
        self._pending_state = {**before, **dict(zip(tensors, accepted, strict=True))}

    def commit_state(self, found_inf: Tensor | None) -> None:
        """Commit the pending copy; if the 0-d flag ``found_inf`` is positive, keep the committed state."""
        for name, new in (self._pending_state or {}).items():
            if found_inf is not None:
                new = torch.where(found_inf.to(new.device) > 0, self.state[name], new)
            self.state[name] = new
        self._pending_state = None

    def move(self, device: torch.device) -> None:
        """Move committed state and learned parameters to the features' device; keep dtypes."""
        self.state = {name: accelerator.state_to_device(value, device) for name, value in self.state.items()}
        if self.learnable is not None and any(p.device != device for p in self.learnable.parameters()):
            self.learnable.to(device)  # keeps the Parameter objects, which the user's optimizer refers to

    def saved_state(self) -> dict[str, Tensor]:
        """Return a copy of the committed state and of learned parameters; collective with :attr:`split_state`."""
        return {name: value.detach().clone() for name, value in (self.state | self._learned_by_name()).items()}

    def expected_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return meta tensors with the names, shapes and dtypes that ``state`` must have to be restored here."""
        return {name: value.to("meta") for name, value in self.saved_state().items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse saved state that does not fit, with a ``TypeError`` or ``ValueError``, before anything is written."""
        kind = type(self).__name__
        values.mapping(f"state of {kind}", state)
        values.tensors(kind, state, self.expected_state(state))
        values.bounded(kind, state, {name: values.bound(name) for name in state})

    def check_form(self, state: Mapping[str, Tensor]) -> None:
        """Check names, shapes and dtypes of saved state; tensors may be on the meta device."""
        values.form(type(self).__name__, state, self.expected_state(state))

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore checked state from tensors that this object may keep; its dtypes and device do not change."""
        learned = self._learned_by_name()
        for name, value in state.items():
            if name in learned:
                learned[name].copy_(value)
            else:
                self.state[name] = value.to(self.state[name])

    def check_load(self, state: Mapping[str, Any]) -> None:
        """Refuse a ``state_dict`` whose rows have another meaning, with a ``ValueError``; its form is checked."""

    # -- modes, devices, parameters ----------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set whether calls deposit proposals (the default); equal on all ranks. Return the estimator."""
        for each in self._tree():
            each.training = bool(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode: calls read committed state and deposit nothing. Pending deposits are kept.

        Return the estimator.
        """
        return self.train(False)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Self:
        """Move rows and other state to a device, and return the estimator; the meta device is a ``ValueError``.

        Rows and state are created on the CPU and move to the device of the features at the first training call. Rows
        with ``offload=`` are not moved. Dtypes do not change: ``dtype`` is a ``TypeError``. ``non_blocking`` has no
        effect.
        """
        if dtype is not None or isinstance(device, torch.dtype):
            raise TypeError(
                f"rows keep the dtype of the constructor, dtype=, got {dtype or device}; pass features of any "
                f"floating-point dtype as they are"
            )
        device = self.device if device is None else torch.device(device)
        if device.type == "meta":
            raise ValueError("device must be one that holds values, got 'meta'; rows that are moved there are lost")
        with self._writing():
            for each in self._tree():
                each._device = device
                each.move(device)
                if each._table is not None:
                    each._table.store.to(device)
        return self

    @property
    def device(self) -> torch.device:
        """Device of the rows; without rows, of the other state; without state, the CPU or the target of :meth:`to`."""
        objects = self._objects().values()
        tables = [each._table.store.device for each in objects if each._table is not None]
        states = (value.device for each in objects for value in each.state.values())
        return tables[0] if tables else next(states, self._device)

    @property
    def split(self) -> bool:
        """Return whether ranks hold different parts of the state, so that :meth:`state_dict` is collective."""
        self._ensure_form()
        objects = self._objects().values()
        return any(each.split_state or (each._table is not None and each._table.sharded) for each in objects)

    def learned(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this object that the user's optimizer learns."""
        return iter(()) if self.learnable is None else self.learnable.parameters()

    def _learned_by_name(self) -> dict[str, Tensor]:
        return {} if self.learnable is None else dict(self.learnable.named_parameters())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters to pass to the user's optimizer (a learned temperature); usually none."""
        for each in self._objects().values():
            yield from each.learned()

    @property
    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors that describe the last call, by name; empty before the first call. Communicates nothing."""
        return {}

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all committed state: rows by column, groups, state that is not rows; no pending deposits.

        For another thread, see the class; the optimizer may change a temperature that it learns meanwhile.

        Returns:
            Plain containers and tensors: ``"version"``, ``"config"`` (which must equal that of the loading estimator),
            ``"t"``, ``"sample_groups"``, ``"rows"`` (every column, ``(n, 2)`` or ``(n, 1)``) and ``"state"`` (state
            that is not rows); ``"entries"``, the names in ``state``, if state is created during training. For a
            container: ``"version"``, ``"config"``, ``"t"`` and ``"parts"``, the states of its parts by name.

        Raises:
            MemoryError: a copy of the rows needs more memory than is available; use :func:`compopt.save`.

        Warns:
            UserWarning: more than 1 GiB of rows is gathered from other ranks (``shard=True``).

        Communicates: collective if the state is :attr:`split` (shards, or a network that is split across ranks). Every
        rank gets the complete state. Otherwise nothing.
        """
        self._begin_saving()
        self._ensure_form()
        with doing("state_dict()", self.t), self._copying():
            state = states.state_dict(self)
        for name, own in state.get("parts", {}).items():
            state["parts"][name] = self._objects()[name]._run("state_dict_post", own)
        replaced: dict[str, Any] = self._run("state_dict_post", state)
        return replaced

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` into an estimator of the same configuration; drop pending deposits.

        A state of a part, such as ``est.normalizer.state_dict()``, can be loaded into a part of the same kind and
        configuration in another composition.

        The dtype and the device of this estimator do not change, and all values are copied. If any check fails, nothing
        is written. No other thread may call the estimator meanwhile. States of version 0.3 are converted. An object
        that was never used takes the form of the state, and its dtype, unless it was built with one.

        Args:
            state_dict: result of :meth:`state_dict`.

        Raises:
            ValueError: another n (with rows), mode, method or dtype (dtypes are never converted); missing or unknown
                entries; tensors that are sparse or on the meta device; values that no run writes, such as NaN or a
                count below 0; values with another meaning (another ``reference``).
            TypeError: ``state_dict`` is not a mapping, or an entry has another type.

        Communicates: nothing.
        """
        self._load_checked(self._checked_state(state_dict))

    def _take_form_of(self, config: Any) -> None:
        """Take the form of a saved state, if this object was never used: mode, number of values, and dtype."""
        config = config if isinstance(config, Mapping) else {}
        columns, mode = config.get("columns"), config.get("mode")
        width = columns.get(COUNT) if isinstance(columns, Mapping) else None
        if self._unused and mode in ("bimodal", "unimodal") and width in ([1, "torch.int32"], [2, "torch.int32"]):
            directions, ranks = 2 if mode == "unimodal" else width[0], Ranks(self._placement.process_group)
            dtype = torch.float64 if config.get("dtype") == "torch.float64" else self.dtype
            self._set_form(Form(mode, width[0], dtype, self._placement, ranks, directions, normalize=True))

    def _checked_state(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state as the pre-hooks of a load leave it, or raise if it cannot be loaded; change nothing."""
        if isinstance(state_dict, Mapping):
            state_dict = self._run("load_state_dict_pre", dict(state_dict))
            self._take_form_of(state_dict.get("config"))
        self._ensure_form()
        with doing("load_state_dict()", self.t):
            return states.checked(self, state_dict)

    def _load_checked(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`_checked_state`."""
        self._await_save()
        with doing("load_state_dict()", self.t), self._writing():
            states.load(self, state)
        self._end_loading()

    def _end_loading(self) -> None:
        for each in self._tree():
            each._run("load_state_dict_post")

    # -- hooks -------------------------------------------------------------------------------------------------

    # Hooks run without the estimator's lock: they may read, save, or wait for a thread that does.

    def _register(self, family: str, hook: Hook, prepend: bool = False) -> RemovableHandle:
        handle = RemovableHandle(self._hooks[family])
        self._hooks[family][handle.id] = hook
        if prepend:
            self._hooks[family].move_to_end(handle.id, last=False)
        return handle

    def _run(self, family: str, *args: Any) -> Any:
        """Run hooks; a hook with a single argument, a state, may return another state, which is passed on."""
        for hook in list(self._hooks[family].values()):
            result = hook(self, *args)
            args = (result,) if len(args) == 1 and result is not None else args
        return args[0] if args else None

    def register_step_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator, args, kwargs)`` before each commit, until ``remove()`` of the handle."""
        return self._register("step_pre", hook)

    def register_step_post_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator, args, kwargs)`` after each commit.

        ``kwargs`` has ``found_inf`` if a ``GradScaler`` gave it: where it is positive, the commit changed nothing.
        """
        return self._register("step_post", hook)

    def register_call_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator, batch, pairs)`` at the end of each call of a contrastive estimator.

        ``batch`` contains the samples of all ranks, and ``pairs`` the statistics of their pairs, which must not be
        changed. With such a hook, :meth:`step` also commits calls of an estimator without state. If the hook is a
        method of an estimator, :meth:`prefetch` reads its rows too, and a call that raises drops its deposits.
        """
        return self._register("call", hook)

    def register_discard_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook(estimator)`` after each :meth:`discard`."""
        return self._register("discard", hook)

    def register_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator)`` before :meth:`state_dict`; with ``prepend``, before all other hooks."""
        return self._register("state_dict_pre", hook, prepend)

    def register_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator, state_dict)`` with the finished dict; the hook may return another dict."""
        return self._register("state_dict_post", hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator, state_dict)`` before all checks and writes; the hook may return another dict."""
        return self._register("load_state_dict_pre", hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call ``hook(estimator)`` after a successful load."""
        return self._register("load_state_dict_post", hook, prepend)

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(torch.nn.Module, name):
                raise AttributeError(
                    f"{type(self).__name__} is no torch.nn.Module and has no {name}(): est.to(device) moves it, as the "
                    f"first training call does by itself, est.parameters() are its learned scalars, and "
                    f"compopt.as_module(est) is a module",
                    name=name,
                    obj=self,
                )
            object.__getattribute__(self, name)  # raises, also what a property has raised

    # -- copies and repr ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the state and pending deposits without hooks, as torch optimizers do."""
        own = ("_made", "_reader", "_lock", "_busy", "_attachments", "_async_checks", "_saving")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**state, "_hooks": {family: OrderedDict() for family in self._hooks}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_unshared()
        self._groups = [SampleGroup(group, self._checked_group) for group in self._groups]

    def __copy__(self) -> Self:
        """Return a deep copy, because two estimators must not write the same rows."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        lines += [f"    {key}: {value}" for key, value in self.described().items()]
        for number, group in enumerate(self.sample_groups):
            lines.append(f"Sample Group {number}")
            lines += [f"    {key}: {group[key]}" for key in sorted(group)]
        return "\n".join([*lines, ")"])


_locked: WeakSet[Estimator] = WeakSet()


def _unlock() -> None:
    """Give every estimator of a forked process a new lock: another thread may have held the old one."""
    for each in _locked:
        each._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that rows can have; refuse any other."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype of the rows must be a torch.dtype such as torch.float32, got {dtype!r}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype of the rows must be torch.float32 or torch.float64, got {dtype}")
    return dtype


def check_shape(name: str, value: Any, *shapes: Sequence[int]) -> None:
    """Raise unless a value that an object returned is a tensor with one of some shapes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.shape not in shapes:
        wanted = " or ".join(str(tuple(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(value.shape)}")
