"""Parts of which an estimator is composed: normalizers and temperatures."""

from __future__ import annotations

import inspect
import os
import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from compopt.distributed.collectives import ProcessGroup
from compopt.estimator.base import Estimator
from compopt.estimator.call import Call, Estimate, Setting
from compopt.estimator.engine import FIRST_USE, Alone, Engine, PartHooks, check_dtype
from compopt.estimator.groups import GroupSpec, Hyper, SampleGroups
from compopt.pairs import PairPolicy
from compopt.stores import Offload
from compopt.stores.table import Placement


class Component(PartHooks, Estimator):
    """One part of an estimator, or an estimator by itself: hyper-parameters, columns, and state that is not rows.

    *As part* of a :class:`~compopt.ContrastiveEstimator` its columns are in the one table of that owner.
    :attr:`sample_groups`, :meth:`read`, :meth:`state_dict` and :meth:`load_state_dict` show what belongs to this part;
    what acts on rows or commits (:meth:`step`, :meth:`attach`, :meth:`to`, ...) is refused.

    *Alone* it is an :class:`~compopt.Estimator` with one value per column and sample. Its rows are made when they are
    first needed, or at construction if a placement is given.

    Args:
        n: number of samples, a list of sample groups, or ``None`` for a part without rows of its own.
        defaults: hyper-parameters that groups may override.
        process_group, offload, offload_dir, shard, dtype: where it is used alone, see
            :class:`~compopt.ContrastiveEstimator`. With a placement the rows are made here, so that a subclass calls
            this last.

    State: the columns of :meth:`columns` and the tensors of ``state``. A part does not keep its owner alive.

    Communicates: as :class:`~compopt.Estimator`.

    Raises:
        TypeError: ``n`` is neither an integer nor a list of mappings; a value that is no hyper-parameter.
        ValueError: ``n`` < 1, an unknown key, whatever :meth:`check` refuses.
        RuntimeError: as part, a method is called that only the owner has.
    """

    mode: str = "single"
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
        Estimator.__init__(self, None)
        PartHooks.__init__(self, n, defaults)
        if self._placement != Placement():
            self._engine.open()

    # -- alone, or part of an owner ----------------------------------------------------------------------------

    @property
    def owner(self) -> Estimator | None:
        """Estimator of which this is a part, or ``None``; a ``RuntimeError`` where that is gone, and its rows."""
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
        """Refuse to become a part, with a ``ValueError``, before anything is changed."""
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
        """Take hyper-parameters that were changed, and groups that were added, while it was used alone, to an owner."""
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

    def belong(self, owner: object) -> None:
        assert isinstance(owner, Estimator)
        if self._core is not None and self._core.t:
            warnings.warn(
                f"this {type(self).__name__} was used alone before it became a part: its rows of {self._core.t} "
                f"commits are dropped; build a second one to keep them",
                stacklevel=4,
            )
        self._core, self._owner = None, ref(owner)

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        if setting.owner is not None:
            self.belong(setting.owner)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the owner, which takes its parts along when it is copied itself."""
        return {**super().__getstate__(), "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def _role(self) -> str | None:
        if self._owner is None:
            return None
        for role, part in self._facts.parts.items():
            if part is self:
                return role
        raise RuntimeError(f"this {type(self).__name__} belongs to another part of its estimator; ask that")

    def _index(self, index: Tensor | None, count: int) -> Tensor:
        if index is None and self.n is not None and self._engine.table is None:
            return torch.zeros(count, dtype=torch.int64, device="cpu")  # no rows: all are of the first sample group
        return super()._index(index, count)

    def _described(self) -> dict[str, Any]:
        return self.described()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.learned()

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except RuntimeError as error:  # the owner is gone, or another part stands between
            return f"{type(self).__name__} ({error})"


class Normalizer(Component):
    """Base class of normalizers: they compute ``alpha_i``, the log-normalizer of each anchor, or its pairs' weights.

    A subclass defines :meth:`~compopt.estimator.Component.check`, :meth:`estimate` and, if it keeps something per
    sample, :meth:`~compopt.estimator.Component.columns`. Arguments, state, communication, errors: see ``Component``.

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

    @property
    def averages_views(self) -> bool:
        """True if, in unimodal mode, one ``alpha_i`` serves both views (SogCLR's objective V2, else V1)."""
        return any(column.name == "log_u" for column in self.columns(1, torch.float32))

    @property
    def outside(self) -> int:
        """Largest number of negatives that an anchor has from outside the batch."""
        return 0

    def check_encode(self, encode: Any, given: Collection[str]) -> None:
        """Refuse with a ``ValueError`` an ``encode`` that cannot be used (by default any), or its absence.

        ``given`` names the keys of the call: ``"index"``, ``"index2"``, ``"labels"``.
        """
        if encode is not None:
            raise ValueError(
                f"encode= serves samplers whose negatives lie outside the batch; {type(self).__name__} does not ask "
                f"for any"
            )

    def check_extra(self) -> None:
        """Refuse further candidates (``extra=``) with a ``ValueError``, where pairs have weights of their own."""

    def check_momentum(self, given: bool) -> None:
        """Refuse features of a momentum copy (``momentum_features=``), or their absence, with a ``ValueError``."""
        if given:
            raise ValueError(
                f"momentum_features= serves a memory of past features, and {type(self).__name__} has none; leave it "
                f"out, or take compopt.MemoryEstimator"
            )

    def check_pairs(self, policy: PairPolicy) -> None:
        """Refuse a policy of pairs with a ``ValueError``, where it has no meaning."""
        if policy.expects:
            raise ValueError(
                f"{type(self).__name__} compares candidates with the one positive of an anchor, and pairs={policy} "
                f"has others; take BatchNormalizer() or MovingAverageEstimator"
            )

    @abstractmethod
    def estimate(self, call: Call) -> Estimate:
        """Return log-normalizers of this batch and the rows that they propose.

        It runs without a graph and writes no committed state; ``call.training`` is true if proposals may be committed.
        Every rank gets the global batch and must return the same.
        """

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor | None:
        """Return the log-normalizers of the committed state for given features, for diagnostics.

        Args:
            rows: committed columns of all samples, ``(n, D)`` each.
            features: of both modalities or views, ``(n, d)`` each.
            tau: temperatures, a number or broadcastable to ``(n, 2)``.
            hyper: this part's hyper-parameters for these rows.

        Returns:
            ``(n, A)`` or ``(n, 1)``; ``None``: nothing is kept.
        """
        return None


class Temperature(Component):
    """Base of what decides the temperatures ``tau_i``.

    A subclass defines :meth:`~compopt.estimator.Component.check` and :meth:`temperatures`; one that learns on the side
    also :attr:`learns`, :meth:`proposals` and :meth:`~compopt.estimator.Component.columns`. Arguments, state,
    communication and errors: as of :class:`~compopt.estimator.Component`.

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

    def __init_subclass__(cls, **options: Any) -> None:
        """Take hooks under their former names, ``value`` and ``update``, which have other arguments alone."""
        for old, new, arguments in (("value", "temperatures", 4), ("update", "proposals", 3)):
            names = list(inspect.signature(cls.__dict__[old]).parameters) if callable(cls.__dict__.get(old)) else []
            if new not in cls.__dict__ and len(names) == arguments and names[-1] != "index":
                setattr(cls, new, cls.__dict__[old])
                warnings.warn(f"{cls.__name__}.{old} is called {new} now; rename it", DeprecationWarning, stacklevel=2)
        super().__init_subclass__(**options)

    @property
    def learns(self) -> bool:
        """True if :meth:`proposals` wants the gradients ``G``."""
        return False

    @property
    def wants_gradient(self) -> bool:
        """True if :meth:`temperatures` returns a tensor with a graph: one that the user's optimizer learns."""
        return any(parameter.requires_grad for parameter in self.learned())

    @abstractmethod
    def temperatures(self, rows: Mapping[str, Tensor], hyper: Hyper, training: bool) -> float | Tensor:
        """Return the temperatures of a batch.

        Args:
            rows: committed columns of the batch, ``(B, D)`` each.
            hyper: this part's hyper-parameters for these rows.
            training: the call deposits, so that a pending state counts.

        Returns:
            A number > 0, or a tensor broadcastable to ``(B, 2)``; with a graph, it gets a gradient.
        """

    def constants(self) -> list[float] | None:
        """Return the committed temperature of each sample group; ``None`` if each sample has its own."""
        return None

    def check_same(self, given: Sequence[float] | None, visits: Tensor) -> None:
        """Refuse, with a ``ValueError``, rows that were averaged at other temperatures than this part has now.

        ``given`` are the :meth:`constants` of their composition, ``visits`` those of the rows, ``(n, D)``.
        """
        own = self.constants()
        if own is None or given is None or any(abs(a - b) > 0.01 * a for a, b in zip(given, own, strict=True)):
            raise other_temperature(given, f"tau={_tau_text(own)}")

    def rho(self, hyper: Hyper) -> Any:
        """Return the radius of the KL constraint in nats, added to ``alpha`` in the objective: one, or one per row."""
        return 0.0

    def look_at_negatives(self, least: int) -> None:
        """Warn of hyper-parameters that have no meaning with so few negatives; called where :attr:`learns`."""

    def proposals(self, call: Call, gradient: Tensor) -> dict[str, Tensor]:
        """Return new values of this part's columns, ``(B, D)`` each.

        ``gradient`` is ``G`` of every anchor, ``(B, A)``, see :func:`~compopt.functional.temperature_gradient`. State
        that is not rows goes to :meth:`~compopt.estimator.Component.deposit_state`.
        """
        return {}


def other_temperature(given: Sequence[float] | None, own: str) -> ValueError:
    """Return the refusal of rows that were averaged at other temperatures."""
    return ValueError(
        f"temperature differs: the rows were averaged at tau={_tau_text(given)}, this estimator has {own}, for which "
        f"log u means something else; build it with that temperature, or load the state of the temperature first"
    )


def _tau_text(constants: Sequence[float] | None) -> str:
    return "one per sample" if constants is None else ", ".join(f"{tau:.6g}" for tau in constants)
