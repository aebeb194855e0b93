"""The parts an estimator is composed of: normalizers and temperatures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt.estimator.call import Call, Estimate, Setting
from compopt.estimator.groups import Groups, GroupSpec, Hyper, SampleGroups, parse, plain
from compopt.functional import all_finite
from compopt.stores.layout import Column

# What parts of the user's own may still define.
RENAMED = {"propose_state": "deposit_state", "promote": "commit_state", "forget": "discard_state"}


class Component(ABC):
    """One part of an estimator: hyper-parameters per sample group, columns, and state that is not rows.

    State that is not rows follows the same rule as rows: a forward pass in training mode works on a pending
    copy (:meth:`deposit_state`) that later passes of the window continue; only :meth:`commit_state` makes it the state.

    Its methods are called by the estimator, in the thread that calls that; users of an estimator need none of them.
    They communicate nothing unless they or their class say so.

    Args:
        n: number of samples, a list of sample groups, or ``None`` for a part without rows of its own.
        defaults: hyper-parameters that groups may override.

    Raises:
        TypeError: ``n`` is neither an integer nor a list of mappings; a value that is no hyper-parameter; a subclass
            that defines a method under a name of before.
        ValueError: ``n`` < 1, an unknown key, whatever :meth:`check` refuses.

    Attributes:
        state: tensors by name, committed, that are not rows.
        learnable: module with the parameters that the user's own optimizer learns, used by way of it (wrappers may
            replace them there); their names are those of :meth:`saved_state`.
    """

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
        self.owner: object | None = None
        self.own_groups: Groups = [] if n is None else parse(n)
        for number, group in enumerate(self.own_groups):
            checks.known_keys(f"sample group {number}", group, {"n", *self.own_defaults})
            for key, value in self.own_defaults.items():
                group.setdefault(key, value)
            plain(group)
            self.check(group)
        self.check(self.own_defaults)

    def check_free(self) -> None:
        """Refuse to become a part twice: two estimators would write the same state.

        Raises:
            ValueError: this part is already in an estimator.
        """
        if self.owner is not None:
            raise ValueError(f"this {type(self).__name__} is already part of an estimator; build a second one")

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        """Become a part of ``setting.owner``; state whose shape depends on the setting is made here.

        Args:
            groups: the estimator's, into which this part's are merged.
            setting: what a part may know of the estimator.
        """
        self.owner = setting.owner
        self.own_groups = groups.groups

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
        """The columns this part keeps per sample; none by default.

        Args:
            directions: values per sample and column, ``D``.
            dtype: of floating-point columns.
        """
        del directions, dtype
        return []

    def structure(self) -> dict[str, Any]:
        """What decides the meaning of the state beside hyper-parameters and columns: plain values, by name.

        A checkpoint is refused by an estimator where they differ.
        """
        return {}

    def described(self) -> dict[str, Any]:
        """What the estimator's ``repr`` shows of it beside hyper-parameters, by name."""
        return self.structure()

    def learned(self) -> Iterator[torch.nn.Parameter]:
        """Parameters that the user's own optimizer learns."""
        return iter(()) if self.learnable is None else self.learnable.parameters()

    # -- state that is not rows --------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether anything is kept, committed, that is not rows."""
        return bool(self.state)

    @property
    def split_state(self) -> bool:
        """Ranks hold different parts of this state, so that :meth:`saved_state` is collective."""
        return False

    @property
    def has_pending_state(self) -> bool:
        """A pending copy waits for :meth:`commit_state`."""
        return self._pending_state is not None

    def working_state(self, training: bool) -> dict[str, Tensor]:
        """The pending copy if there is one (training), else the committed state."""
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
        """Take committed state to the features' device; dtypes stay."""
        self.state = {name: accelerator.moved(value, device) for name, value in self.state.items()}

    def saved_state(self) -> dict[str, Tensor]:
        """Committed state that is not rows, copied, whole; collective where ranks split it."""
        return {name: value.clone() for name, value in self.state.items()}

    def expected_shapes(self, state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Names and shapes that saved state must have to be restored here."""
        del state
        return {name: tuple(value.shape) for name, value in self.saved_state().items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse saved state that does not fit, before anything is written.

        Args:
            state: as :meth:`saved_state` returned it.

        Raises:
            ValueError: other names or shapes, with both.
        """
        expected = self.expected_shapes(state)
        if set(state) != set(expected):
            raise ValueError(
                f"the state of {type(self).__name__} must have the entries {sorted(expected)}, the checkpoint has "
                f"{sorted(state)}"
            )
        for name, shape in expected.items():
            if tuple(state[name].shape) != shape:
                raise ValueError(
                    f"{name} of {type(self).__name__} differs: the checkpoint has shape {tuple(state[name].shape)}, "
                    f"expected {shape}"
                )

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`saved_state` returned, ``state``; keeps dtype and device."""
        for name, value in state.items():
            self.state[name] = value.to(self.state[name])


class Normalizer(Component):
    """Decides ``alpha_i``, the log-normalizer of each anchor, or the weights of its pairs themselves.

    A subclass defines :meth:`~compopt.estimator.Component.check`, :meth:`estimate` and, if it keeps something per
    sample, :meth:`~compopt.estimator.Component.columns`. Arguments, state, communication and errors: as of
    :class:`~compopt.estimator.Component`.

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

    @property
    def averages_views(self) -> bool:
        """In unimodal mode one ``alpha_i`` serves both views (SogCLR's objective V2, else V1): that of a ``log_u``.

        Diagnostics ask this. A normalizer that averages views and keeps something else says so.
        """
        return any(column.name == "log_u" for column in self.columns(1, torch.float32))

    @property
    def outside(self) -> int:
        """Negatives of an anchor that come from outside the batch, at most."""
        return 0

    def check_encode(self, encode: Any, given: Collection[str]) -> None:
        """Refuse an ``encode`` that cannot be used, or its absence.

        Args:
            encode: what came with the call, or ``None``.
            given: names of the keys that came along: ``"index"``, ``"index2"``, ``"labels"``.

        Raises:
            ValueError: by default for any ``encode``.
        """
        del given
        if encode is not None:
            raise ValueError(
                f"encode= serves samplers whose negatives lie outside the batch; {type(self).__name__} does not ask "
                f"for any"
            )

    def check_extra(self) -> None:
        """Refuse further candidates (``extra=``) with a ``ValueError``, where pairs have weights of their own."""

    @abstractmethod
    def estimate(self, call: Call) -> Estimate:
        """Log-normalizers of this batch and the rows they propose.

        It runs without a graph and writes no committed state; ``call.training`` says whether proposals may be
        committed. With several ranks every rank gets the global batch and must answer the same.

        Args:
            call: the batch, its pairs, temperatures and hyper-parameters.
        """

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor | None:
        """Log-normalizers as the committed state has them, for the features of now: what diagnostics judge.

        Args:
            rows: committed columns of all samples, ``(n, D)`` each.
            features: of both modalities or views as the kernel takes them, ``(n, d)`` each.
            tau: temperatures, a number or broadcastable to ``(n, 2)``.
            hyper: this part's hyper-parameters for these rows.

        Returns:
            ``(n, A)`` or ``(n, 1)``; ``None``: nothing is kept.
        """
        del rows, features, tau, hyper
        return None


class Temperature(Component):
    """Decides ``tau_i``.

    A subclass defines :meth:`~compopt.estimator.Component.check` and :meth:`value`; one that learns on the side also
    :attr:`learns`, :meth:`update` and :meth:`~compopt.estimator.Component.columns`. Arguments, state, communication
    and errors: as of :class:`~compopt.estimator.Component`.

    Example:
        >>> import torch, compopt
        >>> class Constant(compopt.Temperature):
        ...     def __init__(self):
        ...         super().__init__(None, {})
        ...     def check(self, group):
        ...         pass
        ...     def value(self, rows, hyper, training):
        ...         return 0.1
        >>> z1, z2 = torch.randn(2, 8, 4)
        >>> est = compopt.ContrastiveEstimator(compopt.BatchNormalizer(), Constant())
        >>> torch.equal(est(z1, z2), compopt.DCLEstimator(tau=0.1)(z1, z2))
        True
    """

    @property
    def learns(self) -> bool:
        """Whether :meth:`update` wants the gradients ``G``."""
        return False

    @abstractmethod
    def value(self, rows: Mapping[str, Tensor], hyper: Hyper, training: bool) -> float | Tensor:
        """Temperatures of a batch.

        Args:
            rows: committed columns of the batch, ``(B, D)`` each.
            hyper: this part's hyper-parameters for these rows.
            training: the call deposits, so that a pending state counts.

        Returns:
            A number > 0, or a tensor broadcastable to ``(B, 2)``; with a graph, it gets a gradient.
        """

    def rho(self, hyper: Hyper) -> Any:
        """Radius of the KL constraint in nats, added to ``alpha`` in the objective: a number, or one per row."""
        del hyper
        return 0.0

    def update(self, call: Call, gradient: Tensor) -> dict[str, Tensor]:
        """New values of this part's columns.

        Args:
            call: the batch, with the temperature's hyper-parameters.
            gradient: ``G`` of every anchor, ``(B, A)``, see :func:`~compopt.functional.temperature_gradient`.

        Returns:
            By column, ``(B, D)`` each; state that is not rows goes to
            :meth:`~compopt.estimator.Component.deposit_state` instead.
        """
        del call, gradient
        return {}
