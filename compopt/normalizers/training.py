"""What one batch does to a neural normalizer: queue, restart, updates, and predictions before and after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from compopt import functional as F
from compopt.distributed.ranks import Part
from compopt.estimator.call import Call
from compopt.functional import Scalar
from compopt.kernel.features import NORM_MIN, through_normalization
from compopt.normalizers.functional_optimizer import FunctionalOptimizer
from compopt.normalizers.networks import Network, PrototypeSweep, Sweep, is_bounded
from compopt.normalizers.queue import Queue

QUEUE = ("queue", "queue_active", "queue_place")
State = Mapping[str, Tensor]


class Learner(Protocol):
    """The normalizer that learns: its settings, and how it arranges samples, directions and ranks."""

    network: Network
    optimizer: FunctionalOptimizer
    objective: str
    reset_optimizer: bool
    through_alpha: bool
    unit_features: bool

    @property
    def part(self) -> Part:
        """This rank's prototypes."""

    def anchors(self, features: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Unit features of the anchors by network, and those that their prototypes stand for."""

    def per_anchor(self, value: Any, like: Tensor) -> Tensor:
        """A number, ``(B, 1)`` or ``(B, 2)`` -> ``(D, P)``."""

    def per_sample(self, value: Tensor, like: Tensor) -> Tensor:
        """``(D, P)`` -> ``(B, 2)``."""

    def sweep(self, state: State, anchors: Tensor, scale: Scalar, bounded: bool) -> Sweep:
        """Anchors before the network."""

    def working_state(self, training: bool) -> dict[str, Tensor]:
        """The pending copy if there is one, else the committed state."""

    def state_on(self, device: torch.device, state: State) -> dict[str, Tensor]:
        """The state with its tensors on the device."""

    def knows_something(self, state: State) -> bool:
        """Whether a prediction means anything."""

    def choose(self, good: Tensor, new: State, old: State) -> dict[str, Tensor]:
        """``new`` where a flag on the device is true, else ``old``."""


# exp of more, squared, would leave float32 in the optimizer's sums.
MAX_EXPONENT = 40.0


def unified_slope(gap: Tensor, most: float) -> Tensor:
    """Slope of ``exp(-alpha)(eps + ghat) + alpha``, from how far its optimum is above ``alpha``; overwrites that."""
    return (gap if most <= MAX_EXPONENT else gap.clamp_(max=MAX_EXPONENT)).expm1_()


def separate_slope(gap: Tensor, most: float) -> Tensor:
    """Slope of ``(alpha - log(eps + ghat))^2 / 2``: AmorLIP's way to train the network."""
    del most
    return gap


def unified_quotient(goal: Tensor, factor: Scalar) -> Callable[[Tensor], Tensor]:
    """``factor_i slope_i / partition_i`` by the partition, whose logarithm should be ``goal``; overwrites that.

    Of an objective without eps ``slope_i = exp(goal_i) / partition_i - 1``: no logarithm, and two operations.
    """
    optimum = goal.exp_().mul_(factor)
    less = -factor if isinstance(factor, Tensor) else goal.new_full((), -factor)
    return lambda partition: torch.addcdiv(less, optimum, partition).div_(partition)


class Slope(NamedTuple):
    """How an anchor's term falls with its ``alpha``.

    Attributes:
        of_gap: the negative derivative, from ``log(eps + ghat) - alpha`` and the most that this can be.
        times_tau: the term is multiplied by ``tau``.
        of_partition: the same where the partition can be had as it is, see :func:`unified_quotient`; ``None``: not so.
    """

    of_gap: Callable[[Tensor, float], Tensor]
    times_tau: bool
    of_partition: Callable[[Tensor, Scalar], Callable[[Tensor], Tensor]] | None = None


OBJECTIVES = {
    "unified": Slope(unified_slope, True, unified_quotient),
    "separate": Slope(separate_slope, False),
}


@dataclass
class Anchors:
    """The anchors of a batch as the networks see them: numbers, where they are the same for all, or ``(D, P)``.

    Attributes:
        anchors: unit features, ``(D, P, d)``; of a sample that is not finite they are NaN, and so is what it gets.
        finite: 0-d, the whole batch is.
        shift: ``s_ii / tau_i``.
        target: ``log(eps + ghat_i)``.
        tau: temperatures.
        weight: of each anchor in the objective.
        eps: inside the logarithms.
        most: what the host knows of ``target - alpha``: not more, where both are of cosines over ``tau``.
    """

    anchors: Tensor
    finite: Tensor
    shift: Tensor
    target: Tensor
    tau: Scalar
    weight: Scalar
    eps: Scalar
    most: float

    @classmethod
    def of(cls, normalizer: Learner, call: Call, anchors: Tensor) -> Anchors:
        """From the statistics of a call."""
        pairs, like = call.pairs, call.pairs.positive

        def per_anchor(value: Scalar) -> Scalar:
            return normalizer.per_anchor(value, like) if isinstance(value, Tensor) else value

        tau, eps = per_anchor(call.tau), per_anchor(call.hyper("eps"))
        log_ghat = normalizer.per_anchor(pairs.log_ghat, like)
        return cls(
            anchors,
            F.all_finite(torch.cat([log_ghat.flatten(), *(z.flatten() for z in call.batch.features)])),
            normalizer.per_anchor(like, like) / tau,
            F.add_eps(log_ghat, eps),
            tau,
            per_anchor(pairs.factor(1.0 / anchors.shape[1])),
            eps,
            2 / tau if normalizer.unit_features and isinstance(tau, float) else math.inf,
        )

    @property
    def exact(self) -> bool:
        """There is no eps, known on the host: ``alpha`` is the log-partition but for a shift."""
        return not isinstance(self.eps, Tensor) and self.eps == 0

    def alpha(self, relative: Tensor) -> Tensor:
        """``log(eps + partition / exp(s_ii / tau_i))`` from the logarithm of the latter."""
        return F.add_eps(relative, self.eps)

    def through_eps(self, weight: Tensor, relative: Tensor) -> Tensor:
        """Derivatives with respect to ``alpha`` -> those with respect to the log-partition: the same but for eps."""
        return weight if self.exact else weight * (relative - self.alpha(relative)).exp_()


class Prediction:
    """A network's log-normalizers of a batch.

    Attributes:
        alpha: ``(B, A)``.
    """

    def __init__(self, normalizer: Learner, call: Call, batch: Anchors, sweep: Sweep, parameters: list[Tensor]) -> None:
        self._normalizer, self._call, self._batch, self._sweep = normalizer, call, batch, sweep
        self._relative = sweep.predict(parameters) - (batch.shift + sweep.log_count)
        self.alpha = self._per_sample(batch.alpha(self._relative))

    def _per_sample(self, value: Tensor) -> Tensor:
        return self._normalizer.per_sample(value, self._call.pairs.positive)

    @property
    def target(self) -> Tensor:
        """``log(eps + ghat)``, ``(B, A)``."""
        return self._per_sample(self._batch.target)

    def through_alpha(self, alpha: Tensor) -> Callable[[Tensor], Tensor] | None:
        """How the objective at ``alpha``, this prediction's but for a constant, reaches the features through it.

        ``exp(-alpha)(eps + ghat) + alpha`` has the derivative ``1 - exp(-alpha)(eps + ghat)``: what the weights of the
        batch's negatives leave of one.
        """
        if not self._normalizer.through_alpha:
            return None
        rest = self._normalizer.per_anchor((self.target - alpha).expm1_().neg_(), alpha)
        return lambda slope: self._feature_gradients(self._normalizer.per_anchor(slope, alpha) * rest)

    def _feature_gradients(self, weight: Tensor) -> Tensor:
        """Gradients of ``sum_i weight_i alpha_i`` with respect to the features of the whole batch, ``(2, B, d)``."""
        normalizer, batch = self._normalizer, self._batch
        features = self._call.batch.features
        weight = batch.through_eps(weight, self._relative)
        gradients = self._sweep.feature_gradients(weight).reshape(-1, *features[0].shape).to(features[0].dtype)
        if not normalizer.unit_features:
            for gradient, z in zip(gradients, features, strict=False):  # features that are no anchors have none
                norm = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_(min=NORM_MIN)
                through_normalization(gradient, z / norm, norm)
        if len(gradients) == 1:
            gradients = torch.cat([gradients, torch.zeros_like(gradients)])
        pull = self._per_sample(weight / batch.tau).sum(1, keepdim=True)
        for gradient, other in zip(gradients, features[::-1], strict=True):
            F.minus_product(gradient, other, pull, out=gradient)
        return gradients


class Training:
    """One batch seen by a :class:`~compopt.NeuralNormalizer`.

    A batch with a value that is not finite teaches nothing: the state stays as it was. On a device, where the host
    cannot know of it, the host's own counters (of the queue, of the optimizer) advance.

    Args:
        normalizer, call: whose and which.
        look_first: predict before the batch enters the queue.

    Attributes:
        state: the normalizer's state after the batch.
        before: the prediction asked for (of the very first batch, that of the queue with it), or ``None``.
    """

    def __init__(self, normalizer: Learner, call: Call, look_first: bool = False) -> None:
        self._normalizer, self._call = normalizer, call
        hyper = call.hyper.of_first_group()
        self.state: State = normalizer.state_on(call.batch.features[0].device, normalizer.working_state(call.training))
        anchors, others = normalizer.anchors(call.batch.features)
        self._batch = Anchors.of(normalizer, call, anchors)
        skip = anchors.device.type == "cpu" and not self._batch.finite
        self._met: Sweep | None = None
        self.before = self._predict() if look_first and normalizer.knows_something(self.state) else None
        self._met = None
        old = self.state
        if normalizer.network.restarts and not skip and others.shape[1]:
            self._enqueue(others, hyper("restart_every"))
        if look_first and self.before is None:
            self.before = self._predict()
        updates = 0 if skip else hyper("updates")
        if updates:
            self._update(updates, hyper("lr"))
        if anchors.device.type != "cpu":
            self.state = normalizer.choose(self._batch.finite, self.state, old)

    def after(self) -> Prediction:
        """What the network predicts after the updates."""
        return self._predict()

    def _sweep(self) -> Sweep:
        """The batch before the network; the same one, until the prototypes in use are others."""
        if self._met is None:
            batch = self._batch
            self._met = self._normalizer.sweep(self.state, batch.anchors, 1 / batch.tau, is_bounded(self._call.tau))
        return self._met

    def _predict(self) -> Prediction:
        parameters = [self.state[name] for name in self._normalizer.network.names]
        sweep, self._met = self._sweep(), None  # whose last prediction this stays
        return Prediction(self._normalizer, self._call, self._batch, sweep, parameters)

    def _enqueue(self, others: Tensor, restart_every: int | None) -> None:
        """The batch enters the queue; prototypes start again, or take the places that the queue just filled."""
        queue = Queue(*(self.state[name] for name in QUEUE))
        pushed, written = queue.push(others, self._batch.finite, self._normalizer.part)
        if queue.is_due(self._call.t, restart_every) or (pushed.full and not queue.full):
            prototypes, pushed = pushed.features, pushed.restarted(self._call.t)
            if self._normalizer.reset_optimizer:
                self.state = {name: value for name, value in self.state.items() if not FunctionalOptimizer.owns(name)}
        else:
            prototypes = queue.fill(self.state["prototypes"], written, self._normalizer.part)
        entries = zip(QUEUE, (pushed.features, pushed.active, pushed.place), strict=True)
        self.state = {**self.state, "prototypes": prototypes, **dict(entries)}

    def _update(self, updates: int, lr: float) -> None:
        """Take ``updates`` steps of the network's optimizer on this batch."""
        parameters = {name: self.state[name] for name in self._normalizer.network.names}
        steps = self._normalizer.optimizer.start(parameters, self.state, lr)
        gradients = self._gradients()
        for _ in range(updates):  # of a batch that is not finite NaN: nothing of it is kept
            steps.step(gradients(steps.parameters))
        self.state = {**self.state, **steps.finish()}

    def _gradients(self) -> Callable[[list[Tensor]], list[Tensor]]:
        """The objective's gradients with respect to a network's parameters, as a function of these."""
        batch, sweep, slope = self._batch, self._sweep(), OBJECTIVES[self._normalizer.objective]
        shift = batch.shift + sweep.log_count
        goal, factor = batch.target + shift, -batch.weight * (batch.tau if slope.times_tau else 1.0)
        moderate = batch.exact and batch.most <= MAX_EXPONENT
        if slope.of_partition is not None and isinstance(sweep, PrototypeSweep) and sweep.bounded and moderate:
            quotient = slope.of_partition(goal, factor)
            return lambda parameters: sweep.gradients_by_partition(quotient(sweep.partition(parameters)))

        def gradients(parameters: list[Tensor]) -> list[Tensor]:
            log_total = sweep.predict(parameters)
            if batch.exact:
                return sweep.gradients(slope.of_gap(goal - log_total, batch.most).mul_(factor))
            relative = log_total - shift
            weight = slope.of_gap(batch.target - batch.alpha(relative), batch.most).mul_(factor)
            return sweep.gradients(batch.through_eps(weight, relative))

        return gradients
