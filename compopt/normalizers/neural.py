"""Neural normalizer of NeuCLIP: a small network, current for every sample, instead of a row per sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from compopt import checks
from compopt import functional as F
from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs, refuse_transforms
from compopt.checks.inputs import check_tau, check_values, tau_facts
from compopt.checks.values import FINITE, MOST, Range
from compopt.distributed.ranks import Part, ProcessGroup, Ranks
from compopt.estimator.call import Call, Estimate, Setting
from compopt.estimator.component import Normalizer
from compopt.estimator.groups import GroupSpec, Hyper, SampleGroups
from compopt.functional import Scalar
from compopt.kernel.statistics import PairStatistics
from compopt.normalizers.functional_optimizer import FunctionalOptimizer
from compopt.normalizers.networks import ARCHITECTURES, Sweep, is_bounded
from compopt.normalizers.queue import Queue
from compopt.normalizers.training import OBJECTIVES, QUEUE, Training
from compopt.stores import Offload

STORED_CHUNK = 1024  # anchors at a time when a whole data set is asked for


class NeuralNormalizer(Normalizer):
    r"""Network that predicts the log-normalizers; it learns from every batch, so every sample's is current.

    .. math::
        \alpha_i = \log\Bigl(\epsilon + \tfrac{1}{m} \sum_{j=1}^m e^{(\cos(e_i, W_j) - s_{ii}) / \tau_i}\Bigr), \qquad
        W \text{ descends } \tfrac{1}{B} \sum_i \tau_i \bigl(e^{-\alpha_i} (\epsilon + \hat g_i) + \alpha_i\bigr)

    One ``W`` per direction, ``m`` prototypes that stand for the features of the other modality. In each call in
    training mode: the batch's features enter a queue of the ``m`` newest; at every ``restart_every``-th commit (the
    first batch included) ``W`` becomes that queue; then ``updates`` steps are taken on this batch, and the network
    after them gives ``alpha``. While the queue is being filled only as many prototypes are in use, each new feature
    being one; when it is full for the first time, ``W`` restarts as well. A call that deposits nothing (``eval()``)
    does the same and forgets it.

    *Unimodal*: one network serves both views, whose features it all summarises; ``alpha`` is per view (objective V1 of
    SogCLR).

    Args:
        dim: of the features.
        prototypes: ``m``; for ``architecture="mlp"`` the hidden units.
        lr: step size of the network's optimizer.
        updates: steps per batch, ``T_u``; 0 leaves the queue of features as the network.
        restart_every: commits between restarts, ``T_r``; ``None``: never after the queue was filled.
        eps: inside the logarithms, >= 0.
        objective: ``"unified"`` as above (eq. 12); ``"separate"``: ``1/(2B) sum_i (alpha_i - log(eps + ghat_i))^2``.
        architecture: ``"prototype"``, or ``"mlp"``: one hidden layer that sees ``e_i``, random at first, never
            restarted, without a queue. It wants a smaller step, such as ``lr=0.01``: with 1 it diverges.
        optimizer: makes the network's optimizer when called with a list of tensors and ``lr=``: a class of
            ``torch.optim``, or ``functools.partial(torch.optim.SGD, momentum=0.9)``.
        reset_optimizer: forget the optimizer's sums at a restart. With AdaGrad and ``lr=1`` the next step then moves
            every coordinate by 1.
        through_alpha: also pass the gradient of the objective that reaches the encoders through ``alpha`` (second term
            of eq. 12's gradient); it vanishes where the network is exact. One more matrix product per direction.
        seed: of the perceptron's first weights, and of the first prototypes of a network that is used alone.
        n: number of samples or sample groups; not needed for anything of its own.
        process_group, offload, offload_dir, shard, dtype: when used alone, see :class:`~compopt.estimator.Component`.

    Hyper-parameters ``lr``, ``updates`` and ``restart_every`` are those of the first sample group.

    State: ``W``, the queue and the optimizer's tensors, in the rows' dtype, ``(D, m, d)`` each, ``D`` networks (1 in
    unimodal mode and with one direction, else 2); nothing per sample. ``state_dict`` holds them whole. A call works on
    a copy, committed by ``step()``. With ``offload=`` they stay on the device: a step reads and writes 1.8 GB of these
    50 MB (m = 4096, d = 512), which takes 0.9 ms at 2 TB/s; copies to and from the host would add 4.0 ms at 25 GB/s
    (``benchmarks/results/off_device.md``).

    Metrics: ``network_gap``, the mean of ``|log(eps + ghat_i) - alpha_i|`` in nats.

    Cost: ``2 updates + 1`` products of ``(B, d)`` with ``(d, m)`` per direction. With K ranks each holds ``m / K``
    prototypes, their part of the queue and of the optimizer's sums, and does ``1 / K`` of that work for the global
    batch.

    Communicates, with K ranks, per call: ``updates + 1`` all-reduces of ``2 B`` doubles (partial log-sum-exps; the
    ``1/tau`` is limited to 490 by their range); with ``through_alpha`` one of ``2 B d`` floats.
    ``state_dict`` and ``save`` are collective. A perceptron communicates nothing, every rank computes all of it.

    Raises:
        ValueError: dim or prototypes < 1, lr < 0, eps < 0, updates < 0, an unknown option; as a part, fewer prototypes
            than ranks; at the call features of another dimension.
        TypeError: a number or a flag that is none; an optimizer that cannot train a network.

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

    state_grows = True  # by the optimizer's

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
        *,
        process_group: ProcessGroup | None = None,
        offload: Offload | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dim, self.prototypes = checks.count("dim", dim), checks.count("prototypes", prototypes)
        checks.one_of("objective", objective, OBJECTIVES)
        checks.one_of("architecture", architecture, ARCHITECTURES)
        checks.flag("reset_optimizer", reset_optimizer)
        checks.flag("through_alpha", through_alpha)
        self.objective, self.architecture = objective, architecture
        self.reset_optimizer, self.through_alpha = reset_optimizer, through_alpha
        self.seed = checks.whole("seed", seed)
        self.optimizer = FunctionalOptimizer(optimizer)
        super().__init__(
            n,
            {"lr": lr, "updates": updates, "restart_every": restart_every, "eps": eps},
            process_group=process_group,
            offload=offload,
            offload_dir=offload_dir,
            shard=shard,
            dtype=dtype,
        )

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
            "optimizer": self.optimizer.name,
            "reset_optimizer": self.reset_optimizer,
            "through_alpha": self.through_alpha,
            "seed": self.seed,
        }

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        super().joined(groups, setting)
        self._shared = setting.mode == "unimodal"  # one network for both views
        self._directions = setting.directions
        networks = 1 if self._shared else self._directions
        self._ranks, self._dtype, self.unit_features = setting.ranks, setting.dtype, setting.normalize
        if self.architecture == "prototype" and self.prototypes < self._ranks.size:
            raise ValueError(
                f"prototypes={self.prototypes} cannot be split over {self._ranks.size} ranks; give at least one to each"
            )
        self.network = ARCHITECTURES[self.architecture](networks, self.dim, self.prototypes, self._ranks)
        alone = setting.owner is None
        parameters = (self.network.seeded if alone else self.network.initial)(setting.dtype, self.seed)
        self.state = dict(zip(self.network.names, parameters, strict=True))
        if self.network.restarts:
            empty = partial(Queue.empty, networks, self.prototypes, self.dim, self.part, setting.dtype)
            queue = Queue.of(parameters[0], self.prototypes) if alone else empty()
            self.state |= zip(QUEUE, (queue.features, queue.active, queue.place), strict=True)

    @property
    def part(self) -> Part:
        """Prototypes of this rank."""
        return self._ranks.part(self.prototypes)

    # -- the call ----------------------------------------------------------------------------------------------

    def estimate(self, call: Call) -> Estimate:
        prediction = self.learn_from(call).after()
        return Estimate(
            prediction.alpha,
            target=prediction.target,
            through_alpha=prediction.through_alpha(prediction.alpha),
            metrics={"network_gap": partial(mean_gap, prediction.target, prediction.alpha)},
        )

    def learn_from(self, call: Call, look_first: bool = False) -> Training:
        """Run queue, restart and updates on one batch; in training mode the new state is proposed.

        Args:
            call: the batch.
            look_first: also predict before its features and updates reach the network.
        """
        training = Training(self, call, look_first)
        if call.training:
            self._pending_state = dict(training.state)
        return training

    def anchors(self, features: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return unit features of the anchors by network, and those that prototypes stand for, ``(D, P, d)`` each.

        Args:
            features: of both modalities or views, ``(B, d)`` each.

        Raises:
            ValueError: ``d`` is not ``dim``.
        """
        if len(features[0]) != len(features[1]):  # used alone, with any number of candidates
            own, others = (self.anchors((z, z))[0] for z in features)
            return own, others
        both = torch.stack(features).to(self._dtype)
        if both.shape[2] != self.dim:
            raise ValueError(f"dim is {self.dim}, the features have {both.shape[2]} dimensions; build it with theirs")
        if not self.unit_features:
            both = torch_functional.normalize(both, dim=2)
        others = both if self._shared else both.flip(0)
        return self.by_network(both[: self._directions]), self.by_network(others[: self._directions])

    def by_network(self, by_direction: Tensor) -> Tensor:
        """Rearrange a value ``by_direction``, ``(A, B, ...)`` -> ``(D, P, ...)``: in unimodal mode ``P = 2 B``."""
        return by_direction.reshape(-1, *by_direction.shape[2:]).unsqueeze(0) if self._shared else by_direction

    def per_anchor(self, value: Any, like: Tensor) -> Tensor:
        """Rearrange a ``value``: a number, ``(B, 1)`` or ``(B, A)`` -> ``(D, P)`` in the network's dtype.

        Args:
            value: what is rearranged.
            like: of the shape ``(B, A)``.
        """
        value = value.to(self._dtype) if isinstance(value, Tensor) else like.new_full((), value, dtype=self._dtype)
        return self.by_network(value.expand(like.shape).T)

    def per_sample(self, value: Tensor, like: Tensor) -> Tensor:
        """Rearrange a ``value``, ``(D, P)`` -> ``(B, A)``, in the shape and dtype of ``like``."""
        return value.reshape(like.shape[1], len(like)).T.to(like.dtype)

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        state, alone = self.saved_state(), Ranks.alone()  # whole on every rank: each may ask for what it likes
        network = ARCHITECTURES[self.architecture](self.network.networks, self.dim, self.prototypes, alone)
        parameters = [state[name].to(features[0].device) for name in network.names]
        active = state.get("queue_active", torch.ones(0, dtype=torch.bool, device="cpu")).to(features[0].device)
        chunks, count = [], len(features[0])
        for start in range(0, count, STORED_CHUNK):
            at = slice(start, min(start + STORED_CHUNK, count))
            own = (features[0][at], features[1][at])
            positive = torch.linalg.vecdot(*own).unsqueeze(1).expand(-1, self._directions)
            scale = 1 / self.per_anchor(tau[at] if isinstance(tau, Tensor) and tau.dim() else tau, positive)
            sweep = network.sweep(self.anchors(own)[0], scale, active, is_bounded(tau))
            alpha = sweep.predict(parameters) - (self.per_anchor(positive, positive) * scale + sweep.log_count)
            eps = hyper("eps")
            eps = self.per_anchor(eps[at], positive) if isinstance(eps, Tensor) else eps
            chunks.append(self.per_sample(F.add_eps(alpha, eps), positive))
        return torch.cat(chunks)

    def sweep(self, state: Mapping[str, Tensor], anchors: Tensor, scale: Scalar, bounded: bool) -> Sweep:
        """Return anchors before the network, with the prototypes that ``state`` has in use.

        Args:
            state: where the queue says which are in use.
            anchors: unit features, ``(D, P, d)``.
            scale: ``1 / tau``, a number or ``(D, P)``.
            bounded: no exponent needs a maximum, as the host knows.
        """
        active = state[QUEUE[1]].to(anchors.device) if self.network.restarts else anchors.new_empty(0)
        return self.network.sweep(anchors, scale, active, bounded)

    # -- state, split over the ranks ---------------------------------------------------------------------------

    @property
    def split_state(self) -> bool:
        return self._ranks.size > 1 and self.network.restarts

    def commit_state(self, found_inf: Tensor | None) -> None:
        if self._pending_state is None:
            return
        new, self._pending_state = self._pending_state, None
        self.state = new if found_inf is None else self.choose(found_inf == 0, new, self.state)

    def choose(self, good: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``new`` where ``good`` (0-d, on the device), else ``old``; the host's counters are the new ones."""
        chosen = {}
        for name, value in new.items():
            if not on_host(name, value):
                before = old[name] if name in old else self.optimizer.initial(name, value)
                value = torch.where(good.to(value.device), value, before)
            chosen[name] = value
        return chosen

    def knows_something(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether a prediction from this ``state`` means anything (the host's count of the queue)."""
        return not self.network.restarts or state["queue_place"].tolist()[1] > 0

    def state_on(self, device: torch.device, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state with its tensors on the device, but for what the host reads in every call."""
        return {name: value if on_host(name, value) else value.to(device) for name, value in state.items()}

    def move(self, device: torch.device) -> None:
        self.state = self.state_on(device, self.state)

    def saved_state(self) -> dict[str, Tensor]:
        if self.network.restarts:
            self._ranks.barrier()
        return {
            name: (self._ranks.join(value, self.prototypes, 1) if self._is_split(value) else value).clone()
            for name, value in sorted(self.state.items())  # ranks that were loaded may have other orders
        }

    def expected_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: value for name, value in self.state.items() if not FunctionalOptimizer.owns(name)}
        needed = {name: value.new_empty(self._whole_shape(value), device="meta") for name, value in own.items()}
        # the optimizer's tensors exist from the first batch on
        if any(FunctionalOptimizer.owns(name) for name in state):
            needed |= self.optimizer.expected({name: needed[name] for name in self.network.names}, state)
        return needed

    def state_values(self, names: Iterable[str]) -> dict[str, Range]:
        found = {name: FINITE for name in names if name != "queue_active"}
        if self.network.restarts:  # next slot, slots filled, commits at the last restart
            found["queue_place"] = Range(least=(0, 0, -1), most=(self.prototypes - 1, self.prototypes, MOST))
        return found

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        first = self.state[self.network.names[0]]
        restored = {}
        for name, value in state.items():
            host = on_host(name, value)
            if self._is_split(value):
                value = self.part.of(value, dim=1)
            kept = value.dtype if host or not value.is_floating_point() else first.dtype
            restored[name] = value.to(device="cpu" if host else first.device, dtype=kept).clone()
        self.state = restored

    def _is_split(self, value: Tensor) -> bool:
        """Return whether this is ``(D, m, d)``: prototypes, their queue, or what the optimizer keeps of them."""
        return self.network.restarts and value.dim() == 3

    def _whole_shape(self, value: Tensor) -> tuple[int, ...]:
        shape = tuple(value.shape)
        return (shape[0], self.prototypes, shape[2]) if self._is_split(value) else shape

    # -- alone ---------------------------------------------------------------------------------------------------

    @outside_of_graphs
    def update(self, anchors: Tensor, log_g: Tensor, tau: float | Tensor, candidates: Tensor | None = None) -> Tensor:
        r"""Train the network on observed log-normalizers, and return its prediction.

        .. math::
            \log g_i \approx \log \tfrac{1}{N} \sum_j e^{s_{ij} / \tau_i}, \qquad
            \alpha_i = \log\Bigl(\epsilon + \tfrac{1}{m} \sum_{j=1}^m e^{\cos(e_i, W_j) / \tau_i}\Bigr)

        The steps are those of the class, with ``s_ii = 0``. The network starts from prototypes that are drawn uniformly
        from the sphere (``seed``). Inputs are L2-normalised. In training mode with gradients enabled the new network is
        deposited and waits for :meth:`step`; later updates before it go on from there.

        Args:
            anchors: features, ``(B, dim)``, floating point, of this rank's samples.
            log_g: observed log-normalizers in nats, ``(B,)``, for example ``logsumexp(scores) - log(N)``.
            tau: temperature, a number or ``(B,)``.
            candidates: features of what the sum runs over, ``(M, dim)``; another ``M`` on each rank. They fill the
                queue from which prototypes restart; without any, prototypes never restart.

        Returns:
            ``alpha_i`` after the updates, ``(B,)``, without a graph.

        Raises:
            RuntimeError: this is a part of an estimator, which trains it.
            TypeError, ValueError: bad dtypes, shapes or temperatures.

        Communicates, with several ranks: one all-gather of the arguments, and what the class says.
        """
        batch, tau = self._meet(anchors, tau, log_g, candidates)
        if not len(batch.rows):
            raise ValueError("anchors are empty, of every rank; skip such a batch")
        with torch.no_grad(), torch.autocast(anchors.device.type, enabled=False):
            prediction = self.learn_from(self._observed(batch, tau)).after()
        if batch.depositing:
            self._deposit(batch, {})
        return prediction.alpha[:, 0][batch.own]

    @outside_of_graphs
    def predict(self, anchors: Tensor, tau: float | Tensor) -> Tensor:
        """Return the committed network's log-normalizers; before any update those of the seeded prototypes.

        Args:
            anchors: features, ``(B, dim)``, floating point.
            tau: temperature, a number or ``(B,)``.

        Returns:
            ``alpha_i``, ``(B,)``, without a graph.

        Communicates, with several ranks: collective, as :meth:`update`.
        """
        with torch.no_grad():
            batch, tau = self._meet(anchors, tau)
        with torch.no_grad(), torch.autocast(anchors.device.type, enabled=False):
            unit, _ = self.anchors((batch.values["z1"], batch.values["z1"]))
            hyper = self._engine.groups.hyper(self.role, batch.rows, batch.dtype)
            scale = 1 / (tau[:, 0][None].to(self._dtype) if isinstance(tau, Tensor) else tau)
            sweep = self.sweep(self.state, unit, scale, is_bounded(tau))
            parameters = [self.state[name].to(unit.device) for name in self.network.names]
            alpha = F.add_eps(sweep.predict(parameters) - sweep.log_count, hyper("eps"))
            return alpha[0][batch.own].to(batch.dtype)

    def _meet(
        self, anchors: Tensor, tau: float | Tensor, log_g: Tensor | None = None, candidates: Tensor | None = None
    ) -> tuple[Batch, float | Tensor]:
        """Check the arguments and gather those of all ranks; temperatures of the batch, a number or ``(B, 1)``."""
        refuse_transforms()
        engine = self._engine
        with engine.handshake.guard():
            anchors = self._features("anchors", anchors, "(B, dim)")
            values = {"z1": anchors}
            if log_g is not None:
                values["log_g"] = check_values("log_g", log_g, f"({len(anchors)},)", 1)
                if len(log_g) != len(anchors):
                    raise ValueError(f"log_g has {len(log_g)} entries for {len(anchors)} anchors; pass one for each")
            tau = check_tau(tau, len(anchors), 1)
            if isinstance(tau, Tensor):
                values["tau"] = tau.detach().to(anchors).expand(len(anchors), 1)
            others = anchors[:0] if candidates is None else self._features("candidates", candidates, "(M, dim)")
            if others.dtype != anchors.dtype or others.device != anchors.device:
                got = f"{others.dtype} on {others.device} and {anchors.dtype} on {anchors.device}"
                raise ValueError(f"candidates must be like the anchors, got {got}; pass candidates.to(anchors)")
            keys = {"index": self._index(None, len(anchors))}
        facts = {"extra": int(candidates is not None), **tau_facts(tau)}
        batch = self._read(keys, values, facts, more=len(others))
        (batch.values["z2"],) = engine.ranks.gather([others], batch.more) if max(batch.more) else (others,)
        return batch, batch.values.get("tau", tau)

    def _observed(self, batch: Batch, tau: float | Tensor) -> Call:
        """Return a call with the observed log-normalizers in the place of pairs."""
        log_g = batch.values["log_g"][:, None]
        pairs = cast(PairStatistics, Observed(torch.zeros_like(log_g), log_g))
        engine = self._engine
        hyper = engine.groups.hyper(self.role, batch.rows, batch.dtype)
        return Call(batch, pairs, tau, hyper, None, None, engine.t, engine.pending, unimodal=False)

    def _features(self, name: str, value: Any, shape: str) -> Tensor:
        checked = check_values(name, value, shape, 2)
        if checked.shape[1] != self.dim:
            raise ValueError(f"{name} must have {self.dim} columns, the network's dim, got {tuple(checked.shape)}")
        return checked


@dataclass
class Observed:
    """Log-normalizers that a caller observed, in the place of a batch's pairs; every ``s_ii`` counts as 0.

    Attributes:
        positive: zeros, ``(B, 1)``.
        log_ghat: ``(B, 1)``.
    """

    positive: Tensor
    log_ghat: Tensor

    def factor(self, coefficient: Scalar) -> Scalar:
        """Return the coefficient: every anchor counts."""
        return coefficient


def mean_gap(target: Tensor, alpha: Tensor) -> Tensor:
    """Return the metric ``network_gap``."""
    return (target - alpha).abs().mean()


def on_host(name: str, value: Tensor) -> bool:
    """Return whether the host reads it in every call, on whichever device the rest is."""
    return name == "queue_place" or (FunctionalOptimizer.owns(name) and value.dim() == 0)
