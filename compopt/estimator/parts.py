"""Base classes of normalizers and temperatures, and the data that they receive and return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compopt.batch import Batch, Rows
from compopt.estimator.base import Estimator, check_shape
from compopt.estimator.groups import Hyper
from compopt.functional import Scalar
from compopt.kernel.features import Encoder
from compopt.kernel.pairs import Pairs, SampledPairs
from compopt.pairs import PairPolicy

STORED_CHUNK = 1024  # anchors per chunk in Normalizer.stored(), which computes a whole data set


@dataclass
class Call:
    """Inputs of a normalizer, or of a temperature, in one forward pass.

    Example:
        >>> import torch, compopt
        >>> class Softer(compopt.Normalizer):  # computes its estimate from the call
        ...     def estimate(self, call):
        ...         return compopt.estimator.Estimate(alpha=call.pairs.log_ghat + 0.1, proposals={})

    Attributes:
        batch: the samples of all ranks with their features, ``(B, d)`` each.
        read: the object's committed rows of these samples.
        pairs: statistics of all pairs of anchor and negative, ``(B, A)`` each: ``log_ghat``, ``log_sum`` (in nats),
            ``positive``, ...; ``A`` counts the directions with anchors.
        tau: temperatures of this call without a graph: a number, 0-d, ``(B, 1)`` or ``(B, A)``.
        hyper: hyper-parameters of the object for these rows.
        chunk_size: largest number of anchors to process at a time; ``None``: no limit.
        encoder: encoder of samples outside the batch, if the normalizer has one.
        t: number of commits of the object so far.
        window: number of its calls since the last commit.
        unimodal: both views share one row.
        policy: the policy of pairs, or ``None``.
        deposits: the object is in training mode.
    """

    batch: Batch
    read: Rows
    pairs: Pairs
    tau: float | Tensor
    hyper: Hyper
    chunk_size: int | None
    encoder: Encoder | None
    t: int
    window: int
    unimodal: bool
    policy: PairPolicy | None = None
    deposits: bool = True

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """Committed columns by name, ``(B, 2)``, or ``(B, 1)`` in unimodal mode and with one direction."""
        return self.read.columns

    @property
    def count(self) -> Tensor:
        """Number of visits so far, int32, with the shape of the columns."""
        return self.read.count

    @property
    def unseen(self) -> Tensor:
        """Mask of rows that were never visited, with the shape of the columns."""
        return self.read.unseen

    @property
    def training(self) -> bool:
        """Return whether the proposals of this call are deposited."""
        return self.batch.depositing and self.deposits


@dataclass
class Estimate:
    """Result of a normalizer.

    Example:
        >>> import torch, compopt
        >>> estimate = compopt.estimator.Estimate(alpha=torch.zeros(8, 2), proposals={})  # no state

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


class Normalizer(Estimator, ABC):
    """Base class of normalizers, which compute the log-normalizer or the pair weights of each anchor.

    Example:
        >>> import torch, compopt
        >>> from compopt.estimator import Estimate
        >>> class Constant(compopt.Normalizer):  # alpha = 0 for every anchor
        ...     def __init__(self):
        ...         super().__init__(None, {})
        ...     def estimate(self, call):
        ...         return Estimate(alpha=torch.zeros_like(call.pairs.log_ghat), proposals={})
        >>> est = compopt.ContrastiveEstimator(Constant(), compopt.FixedTemperature(0.1))
        >>> est(*torch.randn(2, 8, 4, requires_grad=True)).item()
        0.0

    A subclass defines :meth:`estimate`, :meth:`~compopt.Estimator.check` if it has hyper-parameters, and, for state per
    sample, :meth:`~compopt.Estimator.columns` (``docs/extending.md``). Arguments, state, communication and errors: as
    for :class:`~compopt.Estimator`.
    """

    sums = True  # pairs have sums of exponentials; otherwise positives and counts only
    outside: int = 0  # largest number of negatives from outside the batch per anchor; may be a property

    @property
    def averages_views(self) -> bool:
        """Return whether, in unimodal mode, both views share one ``alpha_i`` (SogCLR's objective V2; otherwise V1)."""
        return any(column.name == "log_u" for column in self.columns(1, torch.float32))

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

    def check_temperature(self, temperature: Temperature) -> None:
        """Refuse a temperature that this normalizer does not support, with a ``ValueError``."""

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
        check_shape(f"alpha of {kind}", estimate.alpha, shape, (shape[0], 1))
        return estimate

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor | None:
        """Return the log-normalizers of the committed state for the given features, for diagnostics.

        Args:
            rows: committed columns of all samples, ``(n, D)`` each.
            features: features of both modalities or views, ``(n, d)`` each.
            tau: temperatures, a number or broadcastable to ``(n, 2)``.
            hyper: hyper-parameters for these rows.

        Returns:
            ``(n, A)`` or ``(n, 1)``; ``None`` for a normalizer without stored values.
        """
        return None


class Temperature(Estimator, ABC):
    """Base class of temperatures, which determine the temperature of each anchor.

    Example:
        >>> import torch, compopt
        >>> class Constant(compopt.Temperature):
        ...     def __init__(self):
        ...         super().__init__(None, {})
        ...     def temperatures(self, rows, hyper, training):
        ...         return 0.1
        >>> z1, z2 = torch.randn(2, 8, 4)
        >>> est = compopt.ContrastiveEstimator(compopt.BatchNormalizer(), Constant())
        >>> torch.equal(est(z1, z2), compopt.DCLEstimator(tau=0.1)(z1, z2))
        True

    A subclass defines :meth:`temperatures`, and :meth:`~compopt.Estimator.check` if it has hyper-parameters. A subclass
    that updates its own temperatures also defines :attr:`learns`, :meth:`proposals` and
    :meth:`~compopt.Estimator.columns`. Arguments, state, communication and errors: as for :class:`~compopt.Estimator`.
    """

    learns: bool = False  # whether proposals() must be called with the gradients G; may be a property
    tensor: Tensor | None = None  # a tensor of the user, 0-d, which all anchors share

    @property
    def wants_gradient(self) -> bool:
        """Return whether :meth:`temperatures` returns a tensor with a graph, which the user's optimizer learns."""
        return any(parameter.requires_grad for parameter in self.learned())

    @abstractmethod
    def temperatures(self, rows: Mapping[str, Tensor], hyper: Hyper, training: bool) -> float | Tensor:
        """Return the temperatures of a batch.

        Args:
            rows: committed columns of the batch, ``(B, D)`` each.
            hyper: hyper-parameters for these rows.
            training: the call deposits, so that pending state is used.

        Returns:
            A number > 0, or a tensor broadcastable to ``(B, 2)``; a tensor with a graph receives a gradient.
        """

    def constants(self) -> list[float] | None:
        """Return the committed temperature of each sample group; ``None`` if temperatures are per sample."""
        return None

    def rho(self, hyper: Hyper) -> Any:
        """Return the radius of the KL constraint in nats, added to ``alpha`` in the objective; one, or one per row."""
        return 0.0

    def look_at_negatives(self, least: int) -> None:
        """Warn about hyper-parameters that are too large for ``least`` negatives; called if :attr:`learns`."""

    def proposals(self, call: Call, gradient: Tensor) -> dict[str, Tensor]:
        """Return new values of this part's columns, ``(B, D)`` each.

        ``gradient`` is ``G`` of every anchor, ``(B, A)``, see :func:`~compopt.functional.temperature_gradient`. Pass
        state that is not rows to :meth:`~compopt.Estimator.deposit_state`.
        """
        return {}
