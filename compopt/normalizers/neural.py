"""Neural normalizer of NeuCLIP: a small network instead of a row per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt.batch import Batch
from compopt.checks import values
from compopt.checks.context import outside_of_graphs, refuse_derivatives
from compopt.checks.inputs import check_dim, check_tau, check_values
from compopt.distributed.handshake import tau_facts
from compopt.distributed.ranks import Ranks
from compopt.estimator.base import Form
from compopt.estimator.groups import GroupSpec, Hyper
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.estimator.parts import STORED_CHUNK, Call, Estimate, Normalizer
from compopt.normalizers.network import (
    PREFIX,
    WINDOW,
    AnchorLayout,
    FunctionalOptimizer,
    NetworkBatch,
    Prediction,
    check_ring,
    empty_ring,
    on_host,
    push,
)
from compopt.pairs import NO_POLICY, PairPolicy

# Options of earlier versions with the values that are left: checkpoints have them, and others are refused by name.
REMOVED = {"objective": "unified", "architecture": "prototype", "reset_optimizer": False}


class NeuralNormalizer(Normalizer):
    r"""Network that predicts log-normalizers and is trained on every batch.

    Example:
        >>> import torch, compopt
        >>> network = compopt.NeuralNormalizer(dim=16, prototypes=64)
        >>> est = compopt.ContrastiveEstimator(network, compopt.TemperatureDual(n=1000, rho=1.0, tau_init=0.1))
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()

    .. math::
        \alpha_i = \log\Bigl(\epsilon + \tfrac{1}{m} \sum_{j=1}^m e^{(\cos(e_i, W_j) - s_{ii}) / \tau_i}\Bigr), \qquad
        W \text{ descends } \tfrac{1}{B} \sum_i \tau_i \bigl(e^{-\alpha_i} (\epsilon + \hat g_i) + \alpha_i\bigr)

    There is one ``W`` per direction: ``m`` prototypes that approximate the features of the other modality. In each call
    in training mode the features of the batch enter a queue of the ``m`` newest. At every ``restart_every``-th commit
    (including the first), and when the queue is full for the first time, ``W`` is set to that queue. Then ``updates``
    steps are taken on this batch, and the updated network predicts ``alpha``. While the queue is not full, only as many
    prototypes as it has features are used. A call that deposits nothing (``eval()``) discards the result of its steps.
    A sample that is evaluated again before the commit (SAM, LBFGS) keeps its slots in the queue if its ``index`` is
    passed, on the CPU.

    In a call ``alpha`` is at least ``log(eps + ghat) - log 30``, so that no anchor's weights sum to more than 30 if the
    network does not follow the features, as at small temperatures. At usual temperatures the sums stay below 8.

    *Unimodal*: both views share one network, which approximates the features of both; ``alpha`` is computed per view
    (objective V1 of SogCLR).

    Args:
        dim: dimension of the features.
        prototypes: number of prototypes, ``m``.
        lr: step size of the network's optimizer.
        updates: steps per batch, ``T_u``; with 0 the prototypes are the features of the queue.
        restart_every: commits between restarts, ``T_r``; ``None``: no restart after the queue was filled.
        eps: constant inside the logarithms, >= 0.
        optimizer: function of a list of tensors and ``lr=`` that returns the network's optimizer: a class of
            ``torch.optim``, or ``functools.partial(torch.optim.SGD, momentum=0.9)``.
        through_alpha: compute gradients with respect to features and temperatures as in eq. 12, including those of
            ``alpha`` (Algorithm 1, line 11), with the network constant. ``False``: ``alpha`` is constant, too. There is
            no difference if the network is exact. Costs one more matrix product per direction.
        seed: seed of the first prototypes of a network that is used alone.
        n: number of samples or sample groups; not needed, since nothing is kept per sample.
        process_group, offload, offload_dir, shard, dtype: placement and dtype of its own, see
            :class:`~compopt.Estimator`.

    Hyper-parameters: ``lr``, ``updates`` and ``restart_every`` (the values of the first sample group), and ``eps``.

    State: ``W``, the queue and the optimizer's tensors, in the rows' dtype, ``(D, m, d)`` each, with ``D`` networks (1
    in unimodal mode and with one direction, else 2); nothing per sample. ``state_dict`` contains the tensors of all
    ranks. A call modifies a copy, which ``step()`` commits. With ``offload=`` the state stays on the device, since a
    step reads and writes 1.8 GB of these 50 MB (m = 4096, d = 512; ``benchmarks/results/off_device.md``).

    Metrics: ``network_gap``, the mean of ``|log(eps + ghat_i) - alpha_i|`` in nats.

    Cost: ``2 updates + 1`` products of ``(B, d)`` with ``(d, m)`` per direction. With K ranks each rank has ``m / K``
    prototypes, with their part of the queue and of the optimizer's state, and does ``1 / K`` of that work for the
    global batch.

    Communicates, with K ranks, per call: ``updates + 1`` all-reduces of ``2 B`` doubles (partial log-sum-exps; their
    range limits ``1/tau`` to 490); with ``through_alpha`` one of ``2 B d`` floats, and one of ``2 B``
    doubles if a temperature needs a gradient.
    ``state_dict`` and ``save`` are collective.

    Raises:
        ValueError: dim or prototypes < 1, lr < 0, eps < 0, updates < 0, an unknown option; in an estimator
            fewer prototypes than ranks, or a policy of pairs with ``hardness``; at the call features of another
            dimension.
        TypeError: an argument that must be a number or a flag; an optimizer that cannot train a network.

    References:
        Wei et al., NeuCLIP, eq. 5 to 12, Algorithm 1, appendix B. Another objective and a perceptron (Tables
        14 to 16): ``benchmarks/results/normalizers.md``.
    """

    state_grows = True  # by the optimizer's tensors, at the first step

    @takes_options(Normalizer, PlacementOptions)
    def __init__(
        self,
        dim: int,
        prototypes: int = 4096,
        lr: float = 1.0,
        updates: int = 10,
        restart_every: int | None = 500,
        eps: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adagrad,
        through_alpha: bool = False,
        seed: int = 0,
        n: GroupSpec | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        self.dim, self.prototypes = checks.positive_int("dim", dim), checks.positive_int("prototypes", prototypes)
        checks.flag("through_alpha", through_alpha)
        self.through_alpha, self.seed = through_alpha, checks.non_negative_int("seed", seed)
        self.optimizer = FunctionalOptimizer(optimizer)
        super().__init__(n, {"lr": lr, "updates": updates, "restart_every": restart_every, "eps": eps}, **placement)

    def check(self, group: Mapping[str, Any]) -> None:
        checks.non_negative("lr", group["lr"])
        checks.non_negative("eps", group["eps"])
        checks.non_negative_int("updates", group["updates"])
        if group["restart_every"] is not None:
            checks.positive_int("restart_every", group["restart_every"])

    def check_pairs(self, policy: PairPolicy) -> None:
        if policy.hardness is not None:
            raise ValueError(
                f"hardness={policy.hardness} changes the terms that NeuralNormalizer predicts from unweighted "
                f"prototypes; leave it out, or take MovingAverageEstimator"
            )

    def structure(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "prototypes": self.prototypes,
            "optimizer": self.optimizer.name,
            "through_alpha": self.through_alpha,
            "seed": self.seed,
            **REMOVED,
        }

    def described(self) -> dict[str, Any]:
        return {key: value for key, value in self.structure().items() if key not in REMOVED}

    def shared_options(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.options}

    def setup(self, form: Form) -> None:
        ranks, shared = form.ranks, form.mode == "unimodal"
        if self.prototypes < ranks.size:
            raise ValueError(
                f"prototypes={self.prototypes} cannot be split over {ranks.size} ranks; give at least one to each"
            )
        self.layout = AnchorLayout(shared, form.directions, form.dtype, form.normalize, ranks)
        self.state = empty_ring(self.layout.networks, self.prototypes, self.dim, self.part, form.dtype)
        self.state["prototypes"] = self.state["queue"].clone()
        if form.mode == "single":  # used before any features: uniform on the sphere, equal for any number of ranks
            generator = torch.Generator().manual_seed(self.seed)
            shape = (self.layout.networks, self.prototypes, self.dim)
            drawn = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
            seeded = ranks.own(torch_functional.normalize(drawn, dim=2), dim=1).to(form.dtype)
            self.state |= {"prototypes": seeded, "queue": seeded.clone()}
            self.state["queue_active"].fill_(True)

    @property
    def part(self) -> range:
        """Range of this rank's prototypes."""
        return self.layout.ranks.part(self.prototypes)

    def estimate(self, call: Call) -> Estimate:
        check_dim(self.dim, call.batch.features[0])
        pairs, layout, features = call.pairs, self.layout, call.batch.features
        weight = pairs.factor(layout.networks / pairs.positive.numel())
        plain = call.policy is None or call.policy == NO_POLICY
        batch = NetworkBatch(
            layout, features, pairs.positive, call.tau, call.hyper("eps"), pairs.log_ghat, weight, plain
        )
        names, rows = None, call.batch.host_rows
        if call.batch.named and rows is not None:  # two positions also without index2, which calls may differ in
            names = np.tile(rows.numpy(), (len(features) if layout.shared else 1, 3 - rows.shape[1]))
        prediction = self._learn(batch, call.hyper.of_first_group(), call.t, call.training, names, pairs.lacking())
        alpha, own = prediction.bounded, call.batch.own
        return Estimate(
            alpha,
            target=prediction.target,
            outside_wh=prediction.outside_wh(alpha) if self.through_alpha and pairs.moments else None,
            through_alpha=partial(prediction.through_alpha, alpha, own) if self.through_alpha else None,
            metrics={"network_gap": partial(torch_functional.l1_loss, prediction.target, prediction.alpha)},
        )

    def _learn(
        self,
        batch: NetworkBatch,
        hyper: Hyper,
        t: int,
        training: bool,
        names: np.ndarray[Any, Any] | None = None,
        lacking: Tensor | None = None,
    ) -> Prediction:
        """Update queue and network with one batch, and return the prediction of the updated network.

        In training mode the new state is deposited. A batch with a value that is not finite does not change the
        network; on a device the counters on the host (of the queue, of the optimizer) are still incremented.
        """
        device = batch.features[0].device
        state = old = self._state_on(device, self.working_state(training))
        # On a device, reading the flag would synchronise: the step is always taken, and _choose reverts it if needed.
        usable = device.type != "cpu" or bool(batch.finite)
        if usable and batch.others.shape[1]:
            new = push(state, batch.others, batch.finite, self.part, t, hyper("restart_every"), names)
            state = {**state, **new}
        prototypes = None
        if usable and hyper("updates"):
            prototypes = batch.prototypes(state)
            gradient = batch.gradient(prototypes)
            state = {**state, **self.optimizer.run(state, hyper("lr"), hyper("updates"), gradient)}
        if device.type != "cpu":
            state = self._choose(batch.finite, state, old)
        if training:
            if lacking is None or device.type == "cpu":  # the CPU knows if there is no negative, and does not train
                self._pending_state = state
            else:
                self._pending_state = self._choose(~lacking, state, old)
        return Prediction(batch, state, prototypes)

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        check_dim(self.dim, features[0])
        state = self._state_on(features[0].device, self.saved_state())
        layout = replace(self.layout, ranks=Ranks.alone())  # whole state on every rank: features may differ by rank
        eps, chunks = hyper("eps"), []
        for start in range(0, len(features[0]), STORED_CHUNK):
            at = slice(start, start + STORED_CHUNK)
            own = (features[0][at], features[1][at])
            positive = torch.linalg.vecdot(*own).unsqueeze(1).expand(-1, layout.directions)
            tau_here, eps_here = (x[at] if isinstance(x, Tensor) and x.dim() else x for x in (tau, eps))
            chunks.append(Prediction(NetworkBatch(layout, own, positive, tau_here, eps_here), state).alpha)
        return torch.cat(chunks)

    @property
    def split_state(self) -> bool:
        return self.layout.ranks.size > 1

    def commit_state(self, found_inf: Tensor | None) -> None:
        if self._pending_state is None:
            return
        new, self._pending_state = {k: v for k, v in self._pending_state.items() if k != WINDOW}, None
        self.state = new if found_inf is None else self._choose(found_inf == 0, new, self.state)

    def _choose(self, good: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``new`` if ``good``, 0-d, else ``old``; counters on the host are always those of ``new``."""
        chosen = {}
        for name, value in new.items():
            if not on_host(name, value):
                before = old[name] if name in old else self.optimizer.initial(name, value)
                value = torch.where(good.to(value.device), value, before)
            chosen[name] = value
        return chosen

    def _state_on(self, device: torch.device, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value if on_host(name, value) else value.to(device) for name, value in state.items()}

    def move(self, device: torch.device) -> None:
        self.state = self._state_on(device, self.state)

    def saved_state(self) -> dict[str, Tensor]:
        ranks = self.layout.ranks
        ranks.barrier()
        return {
            name: (ranks.join(value, self.prototypes, 1) if _is_split(value) else value).clone()
            for name, value in sorted(self.state.items())  # the order may differ between ranks after loading
        }

    def expected_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        needed = {name: value.to("meta") for name, value in self.state.items() if not name.startswith(PREFIX)}
        whole = needed["queue"].new_empty(self.layout.networks, self.prototypes, self.dim)
        needed |= {"prototypes": whole, "queue": whole}
        # the optimizer's tensors exist from the first batch on
        if any(name.startswith(PREFIX) for name in state):
            needed |= self.optimizer.expected(whole, state)
        return needed

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        super().check_state(state)
        sums = dict.fromkeys(self.optimizer.never_negative & state.keys(), ">= 0")
        values.bounded(type(self).__name__, state, sums)
        check_ring(state)

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        like, restored = self.state["prototypes"], {}
        for name, value in state.items():
            host = on_host(name, value)
            if _is_split(value):
                value = self.layout.ranks.own(value, dim=1)
            kept = value.dtype if host or not value.is_floating_point() else like.dtype
            restored[name] = value.to(device="cpu" if host else like.device, dtype=kept).clone()
        self.state = restored

    @outside_of_graphs
    def update(self, anchors: Tensor, log_g: Tensor, tau: float | Tensor, candidates: Tensor | None = None) -> Tensor:
        r"""Train a network that is used alone on observed log-normalizers, and return the new prediction.

        .. math::
            \log g_i \approx \log \tfrac{1}{N} \sum_j e^{s_{ij} / \tau_i}, \qquad
            \alpha_i = \log\Bigl(\epsilon + \tfrac{1}{m} \sum_{j=1}^m e^{\cos(e_i, W_j) / \tau_i}\Bigr)

        The steps are those of the class, with ``s_ii = 0``, on L2-normalised inputs. The initial prototypes are drawn
        uniformly from the sphere (``seed``). In training mode with gradients enabled the new network is deposited
        until :meth:`step`.

        Args:
            anchors: features, ``(B, dim)``, floating point, of this rank's samples.
            log_g: observed log-normalizers in nats, ``(B,)``, for example ``logsumexp(scores) - log(N)``.
            tau: temperature, a number or ``(B,)``.
            candidates: features ``z_j`` of the sum, ``(M, dim)``; ``M`` may differ between ranks. They fill the queue
                from which prototypes restart; without candidates prototypes never restart.

        Returns:
            ``alpha_i`` after the updates, bounded as in a call, ``(B,)``, without a graph.

        Raises:
            TypeError, ValueError: invalid dtypes, shapes or temperatures.

        Communicates, with several ranks: one all-gather of the arguments, and the all-reduces of the class.
        """
        batch, tau = self._gather(anchors, tau, log_g, candidates)
        if not len(batch.rows):
            raise ValueError("anchors are empty on every rank; skip such a batch")
        with self._rollback_on_error(), torch.no_grad(), torch.autocast(anchors.device.type, enabled=False):
            log_g = batch.values["log_g"][:, None]
            hyper = self._hyper(batch)
            zero, weight = torch.zeros_like(log_g), 1 / len(log_g)
            observed = NetworkBatch(self.layout, batch.features, zero, tau, hyper("eps"), log_g, weight)
            prediction = self._learn(observed, hyper.of_first_group(), self.t, batch.depositing)
            if batch.depositing:
                self._deposit(batch, {})
            return prediction.bounded[:, 0][batch.own]

    @outside_of_graphs
    def predict(self, anchors: Tensor, tau: float | Tensor) -> Tensor:
        """Return log-normalizers from a network that is used alone, as committed; first, of the seeded prototypes.

        Args:
            anchors: features, ``(B, dim)``, floating point.
            tau: temperature, a number or ``(B,)``.

        Returns:
            ``alpha_i``, ``(B,)``, without a graph.

        Communicates, with several ranks: as :meth:`update`; it is collective.
        """
        with torch.no_grad():
            batch, tau = self._gather(anchors, tau)
        with torch.no_grad(), torch.autocast(anchors.device.type, enabled=False):
            z, eps = batch.values["z1"], self._hyper(batch)("eps")
            zero = z.new_zeros(len(z), 1, dtype=batch.dtype)
            asked = NetworkBatch(self.layout, (z, z), zero, tau, eps)
            return Prediction(asked, self._state_on(z.device, self.state)).alpha[:, 0][batch.own]

    def _gather(
        self, anchors: Tensor, tau: float | Tensor, log_g: Tensor | None = None, candidates: Tensor | None = None
    ) -> tuple[Batch, float | Tensor]:
        """Check the arguments and gather those of all ranks; the temperatures are a number or ``(B, 1)``."""
        refuse_derivatives()
        with self._guard():
            self._check_one_value("directions")
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
        facts = {"negatives": int(candidates is not None), **tau_facts(tau)}
        batch = self._read(keys, values, facts, more=len(others))
        (batch.values["z2"],) = self._ranks.gather([others], batch.more) if max(batch.more) else (others,)
        return batch, batch.values.get("tau", tau)

    def _features(self, name: str, value: Any, shape: str) -> Tensor:
        checked = check_values(name, value, shape, 2)
        if checked.shape[1] != self.dim:
            raise ValueError(f"{name} must have {self.dim} columns, the network's dim, got {tuple(checked.shape)}")
        return checked


def _is_split(value: Tensor) -> bool:
    """Return True for tensors ``(D, m, d)``: prototypes, their queue, or the optimizer's tensors for them."""
    return value.dim() == 3
