"""Base classes of the parts of an estimator (normalizers and temperatures), and the data that the parts receive."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt.batch import Batch
from compopt.checks import values
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.estimator.base import Estimator
from compopt.estimator.engine import FIRST_USE, Alone, Engine, check_dtype
from compopt.estimator.groups import Groups, GroupSpec, Hyper, SampleGroups, as_groups, plain
from compopt.functional import Scalar, all_finite
from compopt.kernel.features import Encoder
from compopt.kernel.pairs import Pairs, SampledPairs
from compopt.pairs import PairPolicy
from compopt.stores import Offload
from compopt.stores.layout import Column
from compopt.stores.table import Placement


@dataclass
class Call:
    """Inputs of a component in one forward pass.

    Attributes:
        batch: the samples of all ranks with their features, ``(B, d)`` each, and their committed rows.
        pairs: statistics of all pairs of anchor and negative, ``(B, A)`` each: ``log_ghat``, ``log_sum`` (in nats),
            ``positive``, ...; ``A`` counts the directions with anchors.
        tau: temperatures of this call without a graph: a number, 0-d, ``(B, 1)`` or ``(B, A)``.
        hyper: hyper-parameters of the component for these rows.
        chunk_size: largest number of anchors to process at a time; ``None``: no limit.
        encoder: encoder of samples outside the batch, if the normalizer has one.
        t: number of commits so far.
        window: number of calls since the last commit.
        unimodal: both views share one row.
        policy: the policy of pairs, or ``None``.
    """

    batch: Batch
    pairs: Pairs
    tau: float | Tensor
    hyper: Hyper
    chunk_size: int | None
    encoder: Encoder | None
    t: int
    window: int
    unimodal: bool
    policy: PairPolicy | None = None

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """Committed columns by name, ``(B, 2)``, or ``(B, 1)`` in unimodal mode and with one direction."""
        return self.batch.columns

    @property
    def count(self) -> Tensor:
        """Number of visits so far, int32, with the shape of the columns."""
        return self.batch.count

    def unseen(self, column: str) -> Tensor:
        """Return a mask, with the shape of the columns, of rows that the part with this column has never visited."""
        return self.batch.unseen(column)

    @property
    def training(self) -> bool:
        """Return whether the proposals of this call are deposited."""
        return self.batch.depositing


@dataclass(frozen=True)
class Setting:
    """Configuration of the estimator that a component becomes a part of.

    Attributes:
        owner: the estimator; ``None`` for a component that is used alone.
        mode: ``"bimodal"``, ``"unimodal"`` or ``"single"``.
        dtype: dtype of the rows.
        normalize: features are L2-normalised.
        ranks: the ranks of the global batch.
        directions: number of directions (in unimodal mode: views) with anchors, 1 or 2.
    """

    owner: object
    mode: str
    dtype: torch.dtype
    normalize: bool
    ranks: Ranks
    directions: int = 2


@dataclass
class Estimate:
    """Result of a normalizer.

    Attributes:
        alpha: log-normalizers, ``(B, A)`` for ``A`` directions of anchors, or ``(B, 1)``.
        proposals: new values of all of the normalizer's columns, by name, in the shape of the columns.
        target: ``log(eps + ghat)``, ``(B, A)``, if ``alpha`` is not an average of it and the gradient ``G`` of a
            temperature depends on their difference.
        weight_alpha: replacement of ``alpha`` in the weights of the pairs, if candidates from outside the batch
            contribute to an anchor's weights.
        outside_wh: ``sum w h`` over candidates from outside the batch, ``(B, A)``; for the gradient of temperatures.
        outside_count: number of negatives from outside the batch, ``(B, A)``; an anchor with any contributes to the
            value even if it has no negative in the batch.
        weights: weights of the pairs, if they are not ``exp(h_ij / tau_i - alpha_i) / |N_i|``.
        positive_weight: weight of each anchor's positive, a number or ``(B, A)``, if it is not ``sum_j w_ij``.
        through_alpha: function ``f(slope, gradient)`` that adds, in place, the gradient through ``alpha`` to that of
            this rank's features, ``(2, b, d)``; ``slope`` is the derivative of the value with respect to ``alpha``,
            a number or ``(B, A)``. It is called at most once. With ``gradient=None`` it only takes part in the
            communication with ranks whose features need a gradient. ``None``: ``alpha`` is held constant.
        learned: pairs of a 0-d parameter of the normalizer and the derivative of ``alpha`` with respect to it,
            ``(B, A)``.
        metrics: 0-d tensors, or picklable functions that compute them on demand, by name.
    """

    alpha: Tensor
    proposals: dict[str, Tensor] = field(default_factory=dict)
    target: Tensor | None = None
    weight_alpha: Tensor | None = None
    outside_wh: Tensor | None = None
    outside_count: Scalar = 0.0
    weights: SampledPairs | None = None
    positive_weight: Scalar | None = None
    through_alpha: Callable[[Scalar, Tensor | None], None] | None = None
    learned: Sequence[tuple[Tensor, Tensor]] = ()
    metrics: Mapping[str, Tensor | Callable[[], Tensor]] = field(default_factory=dict)


class Component(Estimator, ABC):
    """Part of an estimator, or an estimator by itself, with hyper-parameters, columns, and state that is not rows.

    *As a part* of a :class:`~compopt.ContrastiveEstimator`, the component keeps its columns in the table of that owner.
    :attr:`sample_groups`, :meth:`read`, :meth:`state_dict` and :meth:`load_state_dict` are restricted to this part.
    Methods that move or commit rows (:meth:`step`, :meth:`attach`, :meth:`to`, ...) raise an error.

    *Alone*, the component is an :class:`~compopt.Estimator` with one value per column and sample. Its rows are created
    at their first use, or at construction if a placement is given.

    Args:
        n: number of samples, a list of sample groups, or ``None`` for a part without rows of its own.
        defaults: hyper-parameters, which groups may override.
        process_group, offload, offload_dir, shard, dtype: for a component that is used alone, see
            :class:`~compopt.ContrastiveEstimator`. With a placement this constructor creates the rows, so that a
            subclass must call it last.

    Attributes:
        role: name of this kind of part, in state dicts and in prefixes of hyper-parameters.
        state: committed tensors that are not rows, by name.
        learnable: module with the parameters that the user's optimizer learns. Parameters are always read from the
            module, since wrappers may replace them. :meth:`saved_state` has their names in the module.

    State: the columns of :meth:`columns`, and the tensors of ``state``, which are updated like rows: a forward pass in
    training mode changes a pending copy (:meth:`deposit_state`), later passes of the window update that copy, and
    :meth:`commit_state` commits it. A part keeps only a weak reference to its owner.

    Communicates: as :class:`~compopt.Estimator`. The hooks that a subclass defines (:meth:`check` to
    :meth:`restore_state`) are called in the thread of the estimator's call and communicate nothing unless documented.

    Raises:
        TypeError: ``n`` is neither an integer nor a list of mappings; a value cannot be a hyper-parameter.
        ValueError: ``n`` < 1, an unknown key, or a value that :meth:`check` refuses.
        RuntimeError: on a part, a call of a method that only the owner supports.
    """

    mode: str = "single"
    role = "part"
    _fixed: tuple[str, ...] = ("dtype",)
    learnable: torch.nn.Module | None = None
    state_grows = False  # True if tensors are added to `state` later; their names are then saved too
    _owner: ref[Estimator] | None = None

    def __init__(
        self,
        n: GroupSpec | None,
        defaults: Mapping[str, Any],
        *,
        process_group: ProcessGroup | None = None,
        offload: Offload | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._placement, self.dtype = Placement(process_group, offload, offload_dir, shard), check_dtype(dtype)
        super().__init__(None)
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
        if self._placement != Placement():
            self._engine.open()

    # -- hooks ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse a bad hyper-parameter of one group, given by the part's own names; ``None``: :meth:`fill` sets it."""

    def fill(self, group: dict[str, Any], mode: str) -> None:
        """Replace ``None`` by the default of the mode (``"bimodal"``, ``"unimodal"`` or ``"single"``), in place."""

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        """Return the columns of this part, by default none: ``directions`` values each, floats in ``dtype``."""
        return []

    def structure(self) -> dict[str, Any]:
        """Return further plain values, by name, that determine the meaning of the state; a load compares them."""
        return {}

    def shared_options(self) -> dict[str, Any]:
        """Return further plain values, by name, that must be equal on all ranks and that no checkpoint depends on."""
        return {}

    def described(self) -> dict[str, Any]:
        """Return values to show in ``repr`` in addition to hyper-parameters, by name."""
        return self.structure()

    def learned(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters that the user's optimizer learns."""
        return iter(()) if self.learnable is None else self.learnable.parameters()

    def _learned_by_name(self) -> dict[str, Tensor]:
        return {} if self.learnable is None else dict(self.learnable.named_parameters())

    # -- alone, or part of an owner ----------------------------------------------------------------------------

    @property
    def owner(self) -> Estimator | None:
        """Estimator of which this is a part, or ``None``; a ``RuntimeError`` if that estimator no longer exists."""
        owner = None if self._owner is None else self._owner()
        if owner is None and self._owner is not None:
            kind = type(self).__name__
            raise RuntimeError(f"the estimator that this {kind} was a part of is gone; keep a reference to that")
        return owner

    @property
    def _engine(self) -> Engine:
        owner = self.owner
        if owner is not None:
            raise RuntimeError(
                f"this {type(self).__name__} is part of a ContrastiveEstimator ({type(owner).__name__}), which reads, "
                f"writes, saves and grows its rows; ask that"
            )
        return self._facts.open()

    @property
    def _facts(self) -> Engine:
        owner = self.owner
        if owner is not None:
            return owner._facts
        if self._core is None:
            with FIRST_USE:
                self._core = self._core or self._make_engine()
        return self._core

    def _make_engine(self) -> Engine:
        engine = Engine(Alone(self), mode="single", dtype=self.dtype, placement=self._placement)
        self.joined(engine.groups, Setting(None, "single", self.dtype, False, engine.ranks, 1))
        return engine

    def check_free(self) -> None:
        """Raise a ``ValueError`` if this component cannot become a part; called before anything is changed."""
        kind = type(self).__name__
        if self._owner is not None:
            raise ValueError(f"this {kind} is already part of an estimator; build a second one")
        if self._placement != Placement():
            raise ValueError(
                "process_group, offload, offload_dir and shard of a part have no effect: give them to the "
                "ContrastiveEstimator, whose rows hold the columns of all its parts"
            )
        attached = None if self._core is None else self._core.attachments.listening()
        if attached is not None:
            raise ValueError(
                f"this {kind} is attached to an {attached}; call remove() of the handle, and attach the estimator "
                f"instead"
            )

    def keep_edits(self) -> None:
        """Copy changed hyper-parameters and added groups from the use alone to ``own_defaults`` and ``own_groups``."""
        for number, group in enumerate(() if self._core is None else self._core.groups.groups):
            raw = {**self.own_defaults, **(self.own_groups[number] if number < len(self.own_groups) else {})}
            filled = dict(raw)
            self.fill(filled, "single")
            edited = {key: value for key, value in group.items() if filled.get(key) != value}
            if "n" not in group:
                self.own_defaults.update(edited)
            elif number < len(self.own_groups):
                self.own_groups[number].update(edited)
            else:
                self.own_groups.append({**raw, **edited})

    def belong(self, owner: Any) -> None:
        """Make this component a part of ``owner``; called at construction of the owner and of its copies."""
        if self._core is not None and self._core.t:
            warnings.warn(
                f"this {type(self).__name__} was used alone before it became a part: its rows of {self._core.t} "
                f"commits are dropped; build a second one to keep them",
                stacklevel=4,
            )
        self._core, self._owner = None, ref(owner)

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        """Create state with a shape that depends on the estimator; called by the owner, or at the first use alone."""
        if setting.owner is not None:
            self.belong(setting.owner)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the owner; a copy of the owner calls :meth:`belong` of its parts."""
        return {**super().__getstate__(), "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def _role(self) -> str | None:
        if self._owner is None:
            return None
        return next(role for role, part in self._facts.parts.items() if part is self)

    def _index(self, index: Tensor | None, count: int) -> Tensor:
        if index is None and self.n is not None and self._engine.table is None:
            return torch.zeros(count, dtype=torch.int64, device="cpu")  # no rows: use the first sample group for all
        return super()._index(index, count)

    def _described(self) -> dict[str, Any]:
        return self.described()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.learned()

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except RuntimeError as error:  # the owner is gone
            return f"{type(self).__name__} ({error})"

    def checked(self, proposals: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        """Return proposals for the rows of a batch; raise unless there is one for each of this part's columns."""
        engine, kind = self._facts, type(self).__name__
        own = {column.name for column in self.columns(engine.width, engine.dtype)}
        if proposals.keys() != own:
            raise ValueError(
                f"{kind} must propose values for its columns {sorted(own)}, got proposals for {sorted(proposals)}; "
                f"propose the committed values of a column that does not change"
            )
        for name, value in proposals.items():
            _check_shape(f"the proposal for {name} of {kind}", value, batch.columns[name].shape)
        return proposals

    def _deposit(self, batch: Batch, proposals: Mapping[str, Tensor], valid: Tensor | None = None) -> None:
        super()._deposit(batch, self.checked(proposals, batch), valid)

    # -- moving between compositions ---------------------------------------------------------------------------

    def meaning(self) -> dict[str, Any]:
        """Return the facts of the composition that this part's columns depend on; saved with the state of a part."""
        return {}

    def check_meaning(self, state: Mapping[str, Any]) -> None:
        """Refuse, with a ``ValueError``, a part's state that has another meaning in this composition.

        ``state`` contains the ``"sample_groups"`` and the ``"meaning"`` of the composition that saved it.
        """

    def adapt_rows(self, rows: Mapping[str, Tensor], hyper: Hyper) -> None:
        """Adapt columns, in place, after the load of a part has changed the number of visits of the owner's rows.

        Args:
            rows: a block of all columns; ``"count"`` has the visits of this part, and ``"visits"`` those of the owner.
            hyper: this part's hyper-parameters for these rows.
        """

    # -- state that is not rows --------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Return whether the component has committed state that is not rows."""
        return bool(self.state)

    @property
    def split_state(self) -> bool:
        """Return whether ranks hold different parts of this state, so that :meth:`saved_state` is collective."""
        return False

    @property
    def has_pending_state(self) -> bool:
        """Return whether a pending copy waits for :meth:`commit_state`."""
        return self._pending_state is not None

    def working_state(self, training: bool) -> dict[str, Tensor]:
        """Return the pending copy in training mode, if there is one; otherwise the committed state."""
        return self._pending_state if training and self._pending_state is not None else self.state

    def deposit_state(self, **tensors: Tensor) -> None:
        """Deposit new values for entries of :attr:`state`; if any value is not finite, change none of them."""
        before = self.working_state(True)
        new, old = list(tensors.values()), [before[name] for name in tensors]
        if len({(value.shape, value.dtype) for value in (*new, *old)}) == 1:  # alike: one stacked operation for all
            stacked = torch.stack(new)
            accepted = list(torch.where(all_finite(stacked), stacked, torch.stack(old)).unbind())
        else:
            finite = all_finite(torch.cat([value.flatten() for value in new if value.is_floating_point()]))
            accepted = [torch.where(finite, *values) for values in zip(new, old, strict=True)]
        self._pending_state = {**before, **dict(zip(tensors, accepted, strict=True))}

    def commit_state(self, found_inf: Tensor | None) -> None:
        """Commit the pending copy; if the 0-d flag ``found_inf`` is positive, keep the committed state."""
        for name, new in (self._pending_state or {}).items():
            if found_inf is not None:
                new = torch.where(found_inf.to(new.device) > 0, self.state[name], new)
            self.state[name] = new
        self._pending_state = None

    def discard_state(self) -> None:
        """Drop the pending copy."""
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

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore copies of checked state, since the caller's tensors may be views of a mapped file."""
        with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be changed outside inference mode
            self.restore_state({name: value.detach().clone() for name, value in state.items()})

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore checked state from tensors that this part may keep; dtype and device of the part do not change."""
        learned = self._learned_by_name()
        for name, value in state.items():
            if name in learned:
                learned[name].copy_(value)
            else:
                self.state[name] = value.to(self.state[name])


class Normalizer(Component):
    """Base class of normalizers, which compute the log-normalizer ``alpha_i`` or the pair weights of each anchor.

    A subclass defines :meth:`~compopt.estimator.Component.check`, :meth:`estimate` and, for per-sample state,
    :meth:`~compopt.estimator.Component.columns`. See ``Component`` for arguments, state, communication and errors.

    Example:
        >>> import torch, compopt
        >>> from compopt.estimator import Estimate
        >>> class Constant(compopt.Normalizer):  # alpha = 0 for every anchor; docs/extending.md has one with rows
        ...     def __init__(self):
        ...         super().__init__(None, {})
        ...     def check(self, group):
        ...         pass
        ...     def columns(self, directions, dtype):
        ...         return []
        ...     def estimate(self, call):
        ...         return Estimate(alpha=torch.zeros_like(call.pairs.log_ghat), proposals={})
        >>> est = compopt.ContrastiveEstimator(Constant(), compopt.FixedTemperature(0.1))
        >>> est(*torch.randn(2, 8, 4, requires_grad=True)).item()
        0.0
    """

    role = "normalizer"
    sums = True  # pairs have sums of exponentials; otherwise positives and counts only

    @property
    def averages_views(self) -> bool:
        """Return whether, in unimodal mode, both views share one ``alpha_i`` (SogCLR's objective V2; otherwise V1)."""
        return any(column.name == "log_u" for column in self.columns(1, torch.float32))

    @property
    def outside(self) -> int:
        """Largest number of negatives from outside the batch per anchor."""
        return 0

    def encoder(self, z1: Tensor, given: Collection[str], normalize: bool, unimodal: bool) -> Encoder | None:
        """Return the encoder of samples outside the batch for one call; ``None``: no such samples are encoded.

        ``given`` contains the names of the keys of the call: ``"index"``, ``"index2"``, ``"labels"``.
        """
        return None

    def check_negatives(self) -> None:
        """Refuse further candidates (``negatives=``) with a ``ValueError``, if the normalizer sets the pair weights."""

    def check_momentum(self, given: bool) -> None:
        """Refuse features of a momentum encoder (``keys=``), or missing ones, with a ``ValueError``."""
        if given:
            raise ValueError(
                f"keys= serves a memory of past features, and {type(self).__name__} has none; leave it out, or take "
                f"compopt.MemoryEstimator"
            )

    def check_pairs(self, policy: PairPolicy) -> None:
        """Refuse a policy of pairs that this normalizer does not support, with a ``ValueError``."""

    @abstractmethod
    def estimate(self, call: Call) -> Estimate:
        """Return the log-normalizers of this batch and the proposed new values of its rows.

        The method runs without a graph and must not write committed state. ``call.training`` is true if proposals are
        deposited. Every rank gets the global batch and must return the same values.
        """

    def estimated(self, call: Call) -> Estimate:
        """Return the result of :meth:`estimate` after a check of its type and of the shape of ``alpha``."""
        estimate, kind = self.estimate(call), type(self).__name__
        if not isinstance(estimate, Estimate):
            raise TypeError(f"estimate() of {kind} must return an Estimate, got {type(estimate).__name__}")
        shape = call.pairs.shape
        _check_shape(f"alpha of {kind}", estimate.alpha, shape, (shape[0], 1))
        return estimate

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor | None:
        """Return the log-normalizers of the committed state for the given features, for diagnostics.

        Args:
            rows: committed columns of all samples, ``(n, D)`` each.
            features: features of both modalities or views, ``(n, d)`` each.
            tau: temperatures, a number or broadcastable to ``(n, 2)``.
            hyper: this part's hyper-parameters for these rows.

        Returns:
            ``(n, A)`` or ``(n, 1)``; ``None`` for a normalizer without stored values.
        """
        return None


class Temperature(Component):
    """Base class of temperatures, which determine ``tau_i`` of each anchor.

    A subclass defines :meth:`~compopt.estimator.Component.check` and :meth:`temperatures`. A subclass that updates its
    own temperatures also defines :attr:`learns`, :meth:`proposals` and :meth:`~compopt.estimator.Component.columns`.
    Arguments, state, communication and errors: as for :class:`~compopt.estimator.Component`.

    Example:
        >>> import torch, compopt
        >>> class Constant(compopt.Temperature):
        ...     def __init__(self):
        ...         super().__init__(None, {})
        ...     def check(self, group):
        ...         pass
        ...     def temperatures(self, rows, hyper, training):
        ...         return 0.1
        >>> z1, z2 = torch.randn(2, 8, 4)
        >>> est = compopt.ContrastiveEstimator(compopt.BatchNormalizer(), Constant())
        >>> torch.equal(est(z1, z2), compopt.DCLEstimator(tau=0.1)(z1, z2))
        True
    """

    role = "temperature"

    @property
    def learns(self) -> bool:
        """Return whether :meth:`proposals` must be called with the gradients ``G``."""
        return False

    @property
    def wants_gradient(self) -> bool:
        """Return whether :meth:`temperatures` returns a tensor with a graph, which the user's optimizer learns."""
        return any(parameter.requires_grad for parameter in self.learned())

    @abstractmethod
    def temperatures(self, rows: Mapping[str, Tensor], hyper: Hyper, training: bool) -> float | Tensor:
        """Return the temperatures of a batch.

        Args:
            rows: committed columns of the batch, ``(B, D)`` each.
            hyper: this part's hyper-parameters for these rows.
            training: the call deposits, so that pending state is used.

        Returns:
            A number > 0, or a tensor broadcastable to ``(B, 2)``; a tensor with a graph receives a gradient.
        """

    def constants(self) -> list[float] | None:
        """Return the committed temperature of each sample group; ``None`` if temperatures are per sample."""
        return None

    def check_same(self, given: Sequence[float] | None, visits: Tensor) -> None:
        """Refuse, with a ``ValueError``, rows that were averaged at temperatures other than those of this part.

        ``given`` are the :meth:`constants` of the composition of these rows; ``visits`` are their visits, ``(n, D)``.
        """
        own = self.constants()
        if own is None or given is None or any(abs(a - b) > 0.01 * a for a, b in zip(given, own, strict=True)):
            raise other_temperature(given, f"tau={_tau_text(own)}")

    def rho(self, hyper: Hyper) -> Any:
        """Return the radius of the KL constraint in nats, added to ``alpha`` in the objective; one, or one per row."""
        return 0.0

    def look_at_negatives(self, least: int) -> None:
        """Warn about hyper-parameters that are too large for ``least`` negatives; called if :attr:`learns`."""

    def proposals(self, call: Call, gradient: Tensor) -> dict[str, Tensor]:
        """Return new values of this part's columns, ``(B, D)`` each.

        ``gradient`` is ``G`` of every anchor, ``(B, A)``, see :func:`~compopt.functional.temperature_gradient`. Pass
        state that is not rows to :meth:`~compopt.estimator.Component.deposit_state`.
        """
        return {}


def _check_shape(name: str, value: Any, *shapes: Sequence[int]) -> None:
    """Raise unless a value that a part returned is a tensor with one of some shapes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.shape not in shapes:
        wanted = " or ".join(str(tuple(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(value.shape)}")


def other_temperature(given: Sequence[float] | None, own: str) -> ValueError:
    """Return the error for rows that were averaged at other temperatures."""
    return ValueError(
        f"temperature differs: the rows were averaged at tau={_tau_text(given)}, this estimator has {own}, for which "
        f"log u means something else; build it with that temperature, or load the state of the temperature first"
    )


def _tau_text(constants: Sequence[float] | None) -> str:
    return "one per sample" if constants is None else ", ".join(f"{tau:.6g}" for tau in constants)
