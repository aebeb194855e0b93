"""The neural normalizer of NeuCLIP: a small network, current for every sample, instead of a row per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from compopt import checks
from compopt import functional as F
from compopt.component import Call, Estimate, Normalizer
from compopt.groups import GroupSpec, Hyper, SampleGroups
from compopt.normalizers.networks import ARCHITECTURES, Sweep, is_bounded
from compopt.normalizers.queue import Queue
from compopt.objective import through_normalization
from compopt.optim import Rule
from compopt.ranks import Part

QUEUE = ("queue", "queue_active", "queue_place")
STORED_CHUNK = 1024  # anchors at a time when a whole data set is asked for


def unified_slope(alpha: Tensor, target: Tensor, tau: Tensor) -> Tensor:
    """Derivative of ``tau (exp(-alpha)(eps + ghat) + alpha)`` with respect to ``alpha``; ``target`` is its optimum."""
    return tau * -torch.expm1(target - alpha)


def separate_slope(alpha: Tensor, target: Tensor, tau: Tensor) -> Tensor:
    """Derivative of ``(alpha - log(eps + ghat))^2 / 2``: AmorLIP's way to train the network."""
    del tau
    return alpha - target


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "unified": unified_slope,
    "separate": separate_slope,
}


class NeuralNormalizer(Normalizer):
    r"""A network predicts the log-normalizers; it learns from every batch, so every sample's is current.

    .. math::
        \alpha_i = \log\Big(\epsilon + \tfrac{1}{m} \sum_{j=1}^m e^{(\cos(e_i, W_j) - s_{ii}) / \tau_i}\Big), \qquad
        W \text{ descends } \tfrac{1}{B} \sum_i \tau_i \big(e^{-\alpha_i} (\epsilon + \hat g_i) + \alpha_i\big)

    One ``W`` per direction, ``m`` prototypes that stand for the features of the other modality. In each call in
    training mode: the batch's features enter a queue of the ``m`` newest; at every ``restart_every``-th commit (the
    first batch included) ``W`` becomes that queue; then ``updates`` steps are taken on this batch, and the network
    after them gives ``alpha``. While the queue is being filled only as many prototypes are in use, each new feature
    being one; when it is full for the first time, ``W`` restarts as well.

    *Unimodal*: one network serves both views, whose features it all summarises; ``alpha`` is per view (objective V1 of
    SogCLR).

    Args:
        dim: of the features.
        prototypes: ``m``; for ``architecture="mlp"`` the hidden units.
        lr: step size of the network's optimizer.
        updates: steps per batch, ``T_u``; 0 leaves the queue of features as the network.
        restart_every: commits between restarts, ``T_r``; ``None``: never after the queue was filled.
        eps: inside the logarithms.
        objective: ``"unified"`` as above (eq. 12); ``"separate"``: ``1/(2B) sum_i (alpha_i - log(eps + ghat_i))^2``.
        architecture: ``"prototype"``, or ``"mlp"``: one hidden layer that sees ``e_i``, random at first, never
            restarted, without a queue.
        optimizer: makes the network's optimizer when called with a list of tensors and ``lr=``: a class of
            ``torch.optim``, or ``functools.partial(torch.optim.SGD, momentum=0.9)``.
        reset_optimizer: forget the optimizer's sums at a restart. With AdaGrad and ``lr=1`` the next step then moves
            every coordinate by 1.
        through_alpha: also pass the gradient of the objective that reaches the encoders through ``alpha`` (second term
            of eq. 12's gradient); it vanishes where the network is exact. One more matrix product per direction.
        seed: of the perceptron's first weights.
        n: number of samples or sample groups; not needed for anything of its own.

    Hyper-parameters ``lr``, ``updates`` and ``restart_every`` are those of the first sample group.

    State: ``W``, the queue and the optimizer's tensors, in the rows' dtype, ``(D, m, d)`` each; nothing per sample.
    ``state_dict`` holds them whole. They follow the rule of all state: a call works on a copy, committed by ``step()``.

    Cost: ``2 updates + 1`` products of ``(B, d)`` with ``(d, m)`` per direction. With K ranks each holds ``m / K``
    prototypes, their part of the queue and of the optimizer's sums, and does ``1 / K`` of that work for the global
    batch.

    Communicates, with K ranks, per call: ``updates + 1`` all-reduces of ``2 B`` doubles (partial log-sum-exps; the
    magnitude of ``1/tau`` is limited to 1400 by their range); with ``through_alpha`` one of ``2 B d`` floats.
    ``state_dict`` and ``save`` are collective. A perceptron communicates nothing, every rank computes all of it.

    Raises:
        ValueError: dim or prototypes < 1, lr < 0, updates < 0, an unknown option; at the call features of another
            dimension.

    References:
        Wei et al., NeuCLIP, eq. 5 to 12, Algorithm 1, appendix B; Sun et al., AmorLIP, 2025 (separate, mlp).

    Example:
        >>> import torch, compopt
        >>> network = compopt.NeuralNormalizer(dim=16, prototypes=64)
        >>> est = compopt.ContrastiveEstimator(network, compopt.TemperatureDual(n=1000, rho=1.0, tau_init=0.1))
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()
    """

    def __init__(
        self,
        dim: int,
        prototypes: int = 4096,
        lr: float = 1.0,
        updates: int = 10,
        restart_every: int | None = 500,
        eps: float = 0.0,
        objective: str = "unified",
        architecture: str = "prototype",
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adagrad,
        reset_optimizer: bool = False,
        through_alpha: bool = False,
        seed: int = 0,
        n: GroupSpec | None = None,
    ) -> None:
        self.dim, self.prototypes = checks.count("dim", dim), checks.count("prototypes", prototypes)
        checks.one_of("objective", objective, OBJECTIVES)
        checks.one_of("architecture", architecture, ARCHITECTURES)
        checks.flag("reset_optimizer", reset_optimizer)
        checks.flag("through_alpha", through_alpha)
        self.objective, self.architecture = objective, architecture
        self.reset_optimizer, self.through_alpha = reset_optimizer, through_alpha
        self.seed = checks.whole("seed", seed)
        self._rule = Rule(optimizer)
        super().__init__(n, {"lr": lr, "updates": updates, "restart_every": restart_every, "eps": eps})

    def check(self, group: Mapping[str, Any]) -> None:
        checks.non_negative("lr", group["lr"])
        checks.non_negative("eps", group["eps"])
        checks.whole("updates", group["updates"])
        if group["restart_every"] is not None:
            checks.count("restart_every", group["restart_every"])

    def structure(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "prototypes": self.prototypes,
            "objective": self.objective,
            "architecture": self.architecture,
            "optimizer": self._rule.name,
            "reset_optimizer": self.reset_optimizer,
            "through_alpha": self.through_alpha,
        }

    def joined(self, groups: SampleGroups, owner: Any) -> None:
        super().joined(groups, owner)
        self._shared = owner.mode == "unimodal"  # one network for both views
        networks = 1 if self._shared else 2
        self._ranks, self._unit_features = owner._ranks, owner.normalize
        self._network = ARCHITECTURES[self.architecture](networks, self.dim, self.prototypes, self._ranks)
        self.state = dict(zip(self._network.names, self._network.initial(owner.dtype, self.seed), strict=True))
        if self._network.restarts:
            queue = Queue.empty(networks, self.prototypes, self.dim, self._part, owner.dtype)
            self.state |= zip(QUEUE, (queue.features, queue.active, queue.place), strict=True)

    @property
    def _part(self) -> Part:
        return self._ranks.part(self.prototypes)

    # -- the call ----------------------------------------------------------------------------------------------

    def estimate(self, call: Call) -> Estimate:
        return self.run(call).estimate()

    def run(self, call: Call) -> Training:
        """Queue, restart and updates of one batch; in training mode the new state is proposed."""
        training = Training(self, call)
        if call.training:
            self._pending_state = training.state
        return training

    def anchors(self, features: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Unit features of the anchors by network, and those that their prototypes stand for, ``(D, P, d)`` each."""
        both = torch.stack([feature.to(dtype) for feature in features])
        if both.shape[2] != self.dim:
            raise ValueError(f"dim is {self.dim}, the features have {both.shape[2]} dimensions; build it with theirs")
        if not self._unit_features:
            both = torch_functional.normalize(both, dim=2)
        others = both if self._shared else both.flip(0)
        return self.by_network(both), self.by_network(others)

    def by_network(self, by_direction: Tensor) -> Tensor:
        """``(2, B, ...)`` -> ``(D, P, ...)``."""
        return by_direction.reshape(-1, *by_direction.shape[2:]).unsqueeze(0) if self._shared else by_direction

    def per_anchor(self, value: Any, like: Tensor) -> Tensor:
        """A number, ``(B, 1)`` or ``(B, 2)`` -> ``(D, P)`` in the network's dtype; ``like`` is ``(B, 2)``."""
        value = torch.as_tensor(value, device=like.device, dtype=self.state[self._network.names[0]].dtype)
        return self.by_network(value.expand(len(like), 2).T)

    def per_sample(self, value: Tensor, like: Tensor) -> Tensor:
        """``(D, P)`` -> ``(B, 2)``."""
        return value.reshape(2, len(like)).T.to(like.dtype)

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        chunks = []
        count = len(features[0])
        for start in range(0, count, STORED_CHUNK):
            at = slice(start, min(start + STORED_CHUNK, count))
            own = (features[0][at], features[1][at])
            positive = torch.linalg.vecdot(*own).unsqueeze(1).expand(-1, 2)
            scale = 1 / self.per_anchor(tau[at] if isinstance(tau, Tensor) and tau.dim() else tau, positive)
            sweep = self.sweep(self.state, self.anchors(own, scale.dtype)[0], scale, is_bounded(tau))
            log_partition = sweep.predict([self.state[name] for name in self._network.names])
            alpha = log_partition - self.per_anchor(positive, positive) * scale
            eps = hyper("eps")
            eps = self.per_anchor(eps[at], positive) if isinstance(eps, Tensor) else eps
            chunks.append(self.per_sample(F.add_eps(alpha, eps), positive))
        return torch.cat(chunks)

    def sweep(self, state: Mapping[str, Tensor], anchors: Tensor, scale: Tensor, bounded: bool) -> Sweep:
        """Anchors before the network, with the prototypes that ``state`` has in use."""
        active = state.get("queue_active", torch.ones(0, dtype=torch.bool)).to(anchors.device)
        return self._network.sweep(anchors, scale, active, bounded)

    # -- state, split over the ranks ---------------------------------------------------------------------------

    def move(self, device: torch.device) -> None:
        self.state = {name: value if on_host(name, value) else value.to(device) for name, value in self.state.items()}

    def saved_state(self) -> dict[str, Tensor]:
        return {
            name: (self._ranks.join(value, self.prototypes, 1) if self._is_split(name, value) else value).clone()
            for name, value in self.state.items()
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        expected = {name: tuple(value.shape) for name, value in self.state.items() if not Rule.owns(name)}
        parameters = {name: self._whole_shape(name, self.state[name]) for name in self._network.names}
        expected |= {name: self._whole_shape(name, self.state[name]) for name in expected}
        for name in state:  # the optimizer's tensors exist from the first batch on
            if Rule.owns(name):
                expected[name] = self._rule.shape(name, parameters)
        missing = set(expected) ^ set(state)
        if missing:
            raise ValueError(
                f"the state of NeuralNormalizer must have the entries {sorted(expected)}, the checkpoint has "
                f"{sorted(state)}"
            )
        for name, shape in expected.items():
            if tuple(state[name].shape) != shape:
                raise ValueError(
                    f"{name} of NeuralNormalizer differs: the checkpoint has shape {tuple(state[name].shape)}, "
                    f"expected {shape}"
                )

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        first = self.state[self._network.names[0]]
        restored = {}
        for name, value in state.items():
            host = on_host(name, value)
            if self._is_split(name, value):
                value = self._part.of(value, dim=1)
            kept = value.dtype if host or not value.is_floating_point() else first.dtype
            restored[name] = value.to(device="cpu" if host else first.device, dtype=kept).clone()
        self.state = restored

    def _is_split(self, name: str, value: Tensor) -> bool:
        """Tensors ``(D, m, d)``: prototypes, their queue, and what the optimizer keeps of them."""
        return self._network.restarts and value.dim() == 3

    def _whole_shape(self, name: str, value: Tensor) -> tuple[int, ...]:
        shape = tuple(value.shape)
        return (shape[0], self.prototypes, shape[2]) if self._is_split(name, value) else shape


def on_host(name: str, value: Tensor) -> bool:
    """Whether the host reads it in every call, on whichever device the rest is."""
    return name == "queue_place" or (Rule.owns(name) and value.dim() == 0)


@dataclass
class _Batch:
    """What the updates of one batch have in common, ``(D, P)`` each."""

    shift: Tensor  # s_ii / tau_i
    target: Tensor  # log(eps + ghat_i)
    tau: Tensor
    weight: Tensor  # of each anchor in the objective
    eps: Any

    def alpha(self, log_partition: Tensor) -> Tensor:
        return F.add_eps(log_partition - self.shift, self.eps)

    def share(self, log_partition: Tensor, alpha: Tensor) -> Tensor:
        """Derivative of ``alpha`` with respect to the log-partition: 1 but for eps."""
        return (log_partition - self.shift - alpha).exp()


class Training:
    """One batch seen by a :class:`NeuralNormalizer`: its working state before and after the updates.

    A batch with a value that is not finite teaches nothing. On the CPU its state is the one before; on a device, where
    the host cannot know, its gradients are taken as zero and only the counters advance.

    Attributes:
        state: the state after the updates.
        before: log-normalizers of the network as it met the batch (queue and restart done), ``(B, 2)``.
        alpha: those after the updates, ``(B, 2)``.
    """

    def __init__(self, normalizer: NeuralNormalizer, call: Call) -> None:
        self.normalizer, self.call = normalizer, call
        hyper = call.hyper.of_first_group()
        state = normalizer.working_state(call.training)
        pairs, device = call.pairs, call.features[0].device
        self.state = {name: v if on_host(name, v) else v.to(device) for name, v in state.items()}
        self._names = normalizer._network.names
        dtype = self.state[self._names[0]].dtype
        anchors, others = normalizer.anchors(call.features, dtype)
        finite = pairs.log_ghat.isfinite().all() & anchors.isfinite().all()
        skip = device.type == "cpu" and not finite
        if normalizer._network.restarts and not skip:
            first_of_window = not (call.training and normalizer.has_pending_state)
            self._enqueue(others, finite, hyper("restart_every"), first_of_window)
        self._batch = self._describe(pairs, anchors)
        scale = 1 / self._batch.tau
        safe = torch.where(finite, anchors, 0)
        self._log_partition: Tensor
        self._sweep = normalizer.sweep(self.state, safe, scale, is_bounded(call.tau))
        self._update(finite, 0 if skip else hyper("updates"), hyper("lr"))
        self._log_partition = torch.where(anchors.isfinite().all(dim=2), self._log_partition, torch.nan)
        self.alpha = self._per_sample(self._batch.alpha(self._log_partition))

    def _per_sample(self, value: Tensor) -> Tensor:
        return self.normalizer.per_sample(value, self.call.pairs.positive)

    def _describe(self, pairs: Any, anchors: Tensor) -> _Batch:
        per_anchor, like = self.normalizer.per_anchor, pairs.positive
        tau = per_anchor(self.call.tau, like)
        eps = self.call.hyper("eps")
        eps = per_anchor(eps, like) if isinstance(eps, Tensor) else eps
        weight = per_anchor((pairs.count > 0).to(like.dtype) / anchors.shape[1], like)
        target = F.add_eps(per_anchor(pairs.log_ghat, like), eps)
        return _Batch(per_anchor(like, like) / tau, target, tau, weight, eps)

    def _enqueue(self, others: Tensor, finite: Tensor, restart_every: int | None, first_of_window: bool) -> None:
        """The batch enters the queue; prototypes start again, or take the places that the queue just filled."""
        queue = Queue(*(self.state[name] for name in QUEUE))
        was_full = queue.full
        queue, written = queue.push(others, finite, self.normalizer._part)
        due = restart_every is not None and self.call.t % restart_every == 0 and first_of_window
        restart = due or (queue.full and not was_full)
        prototypes = self.state["prototypes"]
        if restart:
            prototypes = queue.features
        elif not was_full:
            prototypes = prototypes.clone()
            for slots, features in written:
                prototypes[:, slots] = features
        self.state |= {"prototypes": prototypes}
        self.state |= zip(QUEUE, (queue.features, queue.active, queue.place), strict=True)
        if restart and self.normalizer.reset_optimizer:
            self.state = {name: value for name, value in self.state.items() if not Rule.owns(name)}

    def _update(self, finite: Tensor, updates: int, lr: float) -> None:
        """So many steps of the network's optimizer on this batch."""
        batch, slope = self._batch, OBJECTIVES[self.normalizer.objective]
        parameters = {name: self.state[name] for name in self._names}
        self._log_partition = first = self._sweep.predict(list(parameters.values()))
        if updates:
            steps = self.normalizer._rule.start(parameters, self.state, lr)
            for _ in range(updates):
                alpha = batch.alpha(self._log_partition)
                steepness = (
                    batch.weight * slope(alpha, batch.target, batch.tau) * batch.share(self._log_partition, alpha)
                )
                steps.step(self._sweep.gradients(torch.where(finite, steepness, 0)))
                self._log_partition = self._sweep.predict(steps.parameters)
            self.state = {**self.state, **steps.finish()}
        self.before = self._per_sample(batch.alpha(first))

    # -- what the estimator gets -------------------------------------------------------------------------------

    def estimate(self) -> Estimate:
        """The network's own answer."""
        target = self._per_sample(self._batch.target)
        return Estimate(
            self.alpha,
            slack=torch.expm1(target - self.alpha),
            through_alpha=self.through_alpha(self.alpha),
            metrics={"network_gap": (target - self.before).abs().mean()},
        )

    def through_alpha(self, alpha: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """How the objective at ``alpha``, the network's but for a constant, reaches the features through it."""
        if not self.normalizer.through_alpha:
            return None
        slack = self.normalizer.per_anchor(-torch.expm1(self._per_sample(self._batch.target) - alpha), alpha)
        return lambda coefficient: self._feature_gradients(self.normalizer.per_anchor(coefficient, alpha) * slack)

    def _feature_gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ``sum_i weight_i alpha_i`` with respect to the features, ``alpha`` the network's."""
        normalizer, batch = self.normalizer, self._batch
        a, b = self.call.features
        network = batch.alpha(self._log_partition)
        weight = weight * batch.share(self._log_partition, network)
        by_direction = self._sweep.feature_gradients(weight).reshape(2, *a.shape).to(a.dtype)
        if not normalizer._unit_features:
            for gradient, z in zip(by_direction, (a, b), strict=True):
                norm = torch.linalg.vector_norm(z, dim=1, keepdim=True)
                through_normalization(gradient, z / norm, norm)
        pull = self._per_sample(weight / batch.tau).sum(1, keepdim=True)
        return by_direction[0].addcmul(pull, b, value=-1), by_direction[1].addcmul(pull, a, value=-1)
