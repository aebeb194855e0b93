r"""Prototypes with a log-sum-exp: predictions of log-normalizers, training, and the queue from which they restart.

Letters (shapes): ``D`` networks (one per direction of anchors; 1 in unimodal mode, shared by both views), ``P``
anchors per network, ``d`` their dimension, ``m`` prototypes. A network maps unit features ``e_i`` to

.. math:: \ell_i \approx \log \tfrac{1}{n} \sum_j e^{s_{ij}/\tau_i}

so that ``l_i - s_ii / tau_i`` is the log-normalizer. Gradients are computed in closed form: an update costs two matrix
products, and autograd records nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from compopt import functional as F
from compopt.distributed.ranks import Ranks
from compopt.functional import Scalar
from compopt.kernel.features import NORM_MIN, through_normalization
from compopt.kernel.pairs import MAX_UNSHIFTED_SCALE, pull_positives
from compopt.pairs import MASKED

PREFIX = "optimizer.prototypes."  # prefix of the names of the optimizer's tensors in a state
WINDOW = "window"  # in a pending state: slots filled since the last commit with the positions of their samples
# The square of exp of a larger number overflows float32 in the optimizer's sums.
MAX_EXPONENT = 40.0
FINITE_EXPONENT = 85.0  # its exponential is finite in float32
# Largest excess of log(eps + ghat) over alpha in nats: no anchor's weights sum to more than its exponential, 30.
# The largest one in six runs on glyphs (batch 16 to 256, tau 0.07, or learned and 0.07 to 0.15) was 2.1; without the
# bound it was 7.8 where tau fell to 0.01, and is 12 to 24 with random features there.
MAX_EXCESS = math.log(30)
# Optimizers create step counters on the default device; reading a counter on the CPU needs no synchronisation.
HOST = torch.device("cpu")

State = Mapping[str, Tensor]


def on_host(name: str, value: Tensor) -> bool:
    """Return True for entries of a state that stay on the CPU, where every call reads them."""
    return name in ("queue_place", WINDOW) or (name.startswith(PREFIX) and value.dim() == 0)


class Prototypes:
    r"""``l_i = log 1/m sum_j exp(<e_i, W_j / |W_j|> / tau_i)`` over the active prototypes of all ranks (eq. 10, 11).

    Args:
        features: unit features of the anchors, ``(D, P, d)``.
        scale: ``1 / tau``, a number, or a value per anchor, ``(D, P)``.
        active: mask of the prototypes in use, ``(m,)``.
        ranks: the ranks, with ``m / K`` prototypes each. A prediction sums ``D P`` doubles over the ranks.
    """

    def __init__(self, features: Tensor, scale: Scalar, active: Tensor, ranks: Ranks) -> None:
        active = active.to(features.device)
        self.features, self.scale, self.ranks = features, scale, ranks
        # no maximum must be subtracted from the exponents, as known on the host
        self.bounded = not isinstance(scale, Tensor) and scale <= MAX_UNSHIFTED_SCALE
        self.log_count = active.sum(dtype=features.dtype).log_()
        self._queries = features * (scale.unsqueeze(2) if isinstance(scale, Tensor) else scale)
        own = ranks.own(active)
        self._bias = features.new_full(own.shape, MASKED).masked_fill_(own, 0).expand(len(features), 1, -1)
        # work space, allocated by the first operation that writes to it
        self._logits: Tensor | None = None
        self._e: Tensor | None = None
        self._gradient: Tensor | None = None

    def predict(self, weights: Tensor) -> Tensor:
        """Return ``l_i + log_count``, ``(D, P)``, for prototypes ``(D, m_k, d)``."""
        if self.bounded:
            return self.partition(weights).log()
        logits = self._compare(weights)
        top = logits.amax(2)
        # not blocks.exp_, which drops small terms: an adaptive optimizer amplifies the gradient of a distant prototype
        self._e = torch.sub(logits, top.unsqueeze(2), out=self._e).exp_()
        total = self._e.sum(2)
        log_total = total.log().add_(top)
        # the softmax weights over all ranks are e_ij share_i
        if self.ranks.size == 1:
            self._share = total.reciprocal()
        else:  # some ranks may have no active prototype
            half = self.scale / 2
            centre = half if isinstance(half, Tensor) else log_total.new_full(log_total.shape, half)
            log_total = self.ranks.log_sum_exp(log_total, centre)
            self._share = (top - log_total).exp_()
        return log_total

    def partition(self, weights: Tensor) -> Tensor:
        """Return the exponential of :meth:`predict`; requires bounded exponents."""
        self._e = torch.exp(self._compare(weights), out=self._e)
        self._total = self.ranks.sum_in_doubles(self._e.sum(2))
        return self._total

    def _compare(self, weights: Tensor) -> Tensor:
        self._weights = weights
        norm = torch.linalg.vector_norm(weights, dim=2).unsqueeze(1)
        # a prototype of norm 0 gets the norm infinity: its cosine is 0 and it does not learn
        self._norm = torch.threshold_(norm, NORM_MIN, torch.inf)
        products = torch.bmm(self._queries, weights.mT, out=self._logits)
        # the products (P, m) are divided by |W_j|, here and below, not the prototypes (m, d): usually P < d
        self._logits = torch.addcdiv(self._bias, products, self._norm, out=products)
        return self._logits

    def _by_partition(self, weight: Tensor) -> Tensor:
        """Return the factor from ``e_ij`` to ``weight_i softmax_ij``."""
        return weight / self._total if self.bounded else weight * self._share

    def gradient(self, weight: Tensor) -> Tensor:
        """Return the gradient of ``sum_i weight_i l_i`` by the prototypes; overwrites the last prediction's tensors."""
        return self.gradient_by_partition(self._by_partition(weight))

    def gradient_by_partition(self, quotient: Tensor) -> Tensor:
        """Return :meth:`gradient` of the weights ``quotient_i partition_i``."""
        # q_ij = weight_i softmax_ij / tau_i:  (sum_i q_ij (e_i - cos_ij W_j / |W_j|)) / |W_j|
        assert self._logits is not None and self._e is not None
        quotient = quotient.sum_to_size(self.features.shape[:2])
        e = self._e.div_(self._norm)
        along = torch.bmm(quotient.unsqueeze(1), self._logits.mul_(e)).div_(self._norm)  # sum_i q_ij cos_ij / |W_j|^2
        self._gradient = torch.bmm(e.mT, self._queries * quotient.unsqueeze(2), out=self._gradient)
        return self._gradient.addcmul_(along.mT, self._weights, value=-1)

    def mean_cosine(self) -> Tensor:
        """Return ``sum_j softmax_ij cos_ij`` of the last prediction, ``(D, P)``; call before :meth:`gradient`.

        ``d l_i / d tau_i`` is this times ``-1 / tau_i^2``. With several ranks an all-reduce of ``D P`` doubles.
        """
        assert self._logits is not None and self._e is not None
        total = torch.linalg.vecdot(self._logits, self._e)  # logits are cosines divided by tau
        return self.ranks.sum_in_doubles(self._by_partition(total)).div_(self.scale)

    def feature_gradients(self, weight: Tensor) -> Tensor:
        """Return the gradient of ``sum_i weight_i l_i`` by the features, ``(D, P, d)``; before :meth:`gradient`."""
        assert self._e is not None
        factor = self._by_partition(weight * self.scale).sum_to_size(self.features.shape[:2])
        return self.ranks.sum(torch.bmm(self._e / self._norm, self._weights).mul_(factor.unsqueeze(2)))


@dataclass(frozen=True)
class AnchorLayout:
    """Conversion between the shape ``(B, A)`` of samples and the shape ``(D, P)`` of the networks' anchors.

    ``shared``: one network for both views (unimodal mode). ``unit_features``: the estimator normalises features.
    """

    shared: bool
    directions: int
    dtype: torch.dtype
    unit_features: bool
    ranks: Ranks

    @property
    def networks(self) -> int:
        """Number of networks, ``D``."""
        return 1 if self.shared else self.directions

    def anchors(self, features: tuple[Tensor, ...], directions: int) -> tuple[Tensor, Tensor]:
        """Return unit features by network, of anchors and of candidates (which prototypes replace), ``(D, P, d)``."""
        units = [z.to(self.dtype) if self.unit_features else normalize(z.to(self.dtype), dim=1) for z in features]
        if self.shared:
            every = torch.cat(units).unsqueeze(0)
            return every, every
        return torch.stack(units[:directions]), torch.stack(units[::-1][:directions])

    def per_anchor(self, value: Scalar, like: Tensor) -> Any:
        """Rearrange ``(B, 1)`` or ``(B, A)``, the shape of ``like``, -> ``(D, P)``; a number stays a number."""
        if not isinstance(value, Tensor):
            return value
        by_direction = value.to(self.dtype).expand(like.shape).T
        return by_direction.reshape(1, -1) if self.shared else by_direction

    def per_sample(self, value: Tensor, like: Tensor) -> Tensor:
        """Rearrange ``(D, P)`` -> ``(B, A)``, in the shape and dtype of ``like``."""
        return value.reshape(like.shape[1], len(like)).T.to(like.dtype)


class NetworkBatch:
    """Anchors of a call by network. Values that all anchors share are numbers, others ``(D, P)``.

    Features of a sample that are not finite are NaN, and the results for that sample are NaN, too.

    Args:
        layout: the arrangement.
        features: features of both modalities or views, ``(B, d)`` each.
        positive: ``s_ii``, ``(B, A)``; results have this shape and dtype.
        tau, eps: numbers, or broadcastable to ``(B, A)``.
        log_ghat: targets of the network, ``(B, A)``; ``None``: predict only.
        plain: ``log_ghat`` is a log-mean-exp of ``(s_ij - s_ii) / tau``, which no policy of pairs has changed.
        weight: weight of each anchor in the mean, a number or broadcastable to ``(B, A)``.
    """

    finite: Tensor  # 0-d bool: all values are finite
    target: Tensor  # log(eps + ghat_i)

    def __init__(
        self,
        layout: AnchorLayout,
        features: tuple[Tensor, ...],
        positive: Tensor,
        tau: Scalar,
        eps: Scalar,
        log_ghat: Tensor | None = None,
        weight: Scalar = 1.0,
        plain: bool = True,
    ) -> None:
        self.layout, self.features, self.like = layout, features, positive
        self.anchors, self.others = layout.anchors(features, positive.shape[1])
        self.tau, self.eps, self.weight = (self.per_anchor(value) for value in (tau, eps, weight))
        self.shift = self.per_anchor(positive) / self.tau
        if log_ghat is not None:
            log_ghat = self.per_anchor(log_ghat)
            self.finite = F.all_finite(torch.cat([log_ghat.flatten(), *(z.flatten() for z in features)]))
            self.target = F.add_eps(log_ghat, self.eps)
        # without eps, alpha is the log-partition minus a shift
        self.exact = not isinstance(self.eps, Tensor) and self.eps == 0
        # bound of target - alpha, known on the host, if both are log-mean-exps of cosines over tau
        known = plain and layout.unit_features and isinstance(self.tau, float)
        self.most = 2 / self.tau if known else math.inf

    def per_anchor(self, value: Scalar) -> Any:
        """Rearrange ``(B, 1)`` or ``(B, A)`` -> ``(D, P)``; a number stays a number."""
        return self.layout.per_anchor(value, self.like)

    def per_sample(self, value: Tensor) -> Tensor:
        """Invert :meth:`per_anchor`."""
        return self.layout.per_sample(value, self.like)

    def prototypes(self, state: State) -> Prototypes:
        """Return the predictor for these anchors with the active prototypes of a state."""
        return Prototypes(self.anchors, 1 / self.tau, state["queue_active"], self.layout.ranks)

    def through_eps(self, weight: Tensor, relative: Tensor) -> Tensor:
        """Turn derivatives by ``alpha`` into derivatives by the log-partition, which differ if eps is not 0."""
        return weight if self.exact else weight * (relative - F.add_eps(relative, self.eps)).exp_()

    def gradient(self, prototypes: Prototypes) -> Callable[[Tensor], Tensor]:
        """Return the gradient of ``sum_i weight_i tau_i (exp(-alpha_i)(eps + ghat_i) + alpha_i)`` by the prototypes.

        Its negative derivative by ``alpha`` is ``expm1(gap)`` with ``gap = log(eps + ghat) - alpha``.
        """
        shift = self.shift + prototypes.log_count
        goal, factor = self.target + shift, -self.weight * self.tau
        if prototypes.bounded and self.exact and self.most <= MAX_EXPONENT:
            # expm1(gap) = exp(goal) / partition - 1, two operations without a logarithm
            optimum = goal.exp_().mul_(factor)
            less = -factor if isinstance(factor, Tensor) else goal.new_full((), -factor)

            def by_partition(weights: Tensor) -> Tensor:
                partition = prototypes.partition(weights)
                return prototypes.gradient_by_partition(torch.addcdiv(less, optimum, partition).div_(partition))

            return by_partition

        def gradient(weights: Tensor) -> Tensor:
            log_total = prototypes.predict(weights)
            relative = log_total - shift
            gap = goal - log_total if self.exact else self.target - F.add_eps(relative, self.eps)
            if self.most > MAX_EXPONENT:
                gap = gap.clamp_(max=MAX_EXPONENT)
            return prototypes.gradient(self.through_eps(gap.expm1_().mul_(factor), relative))

        return gradient


class Prediction:
    """Log-normalizers ``alpha`` of a batch predicted by prototypes, ``(B, A)``."""

    def __init__(self, batch: NetworkBatch, state: State, prototypes: Prototypes | None = None) -> None:
        self._batch, self._prototypes = batch, batch.prototypes(state) if prototypes is None else prototypes
        self._relative = self._prototypes.predict(state["prototypes"]) - (batch.shift + self._prototypes.log_count)
        self.alpha = batch.per_sample(F.add_eps(self._relative, batch.eps))

    @property
    def target(self) -> Tensor:
        """``log(eps + ghat)``, ``(B, A)``."""
        return self._batch.per_sample(self._batch.target)

    @property
    def bounded(self) -> Tensor:
        """:attr:`alpha`, but at most :data:`MAX_EXCESS` below the batch's own estimate :attr:`target`."""
        return torch.maximum(self.alpha, self.target - MAX_EXCESS)

    def through_alpha(self, alpha: Tensor, own: slice, slope: Scalar, gradient: Tensor | None) -> None:
        """Add the gradient of the objective through ``alpha`` to that of the features ``own``, ``(2, b, d)``.

        ``alpha`` is :attr:`bounded`, ``slope`` the derivative of the value by ``alpha``, a number or ``(B, A)``.
        Collective if the prototypes are divided over the ranks, also without a gradient.
        """
        batch, features = self._batch, self._batch.features
        weight = self._through_alpha(alpha, slope)
        gradients = self._prototypes.feature_gradients(weight).reshape(-1, *features[0].shape).to(features[0].dtype)
        if gradient is None:
            return
        gradients, features = gradients[:, own], tuple(z[own] for z in features)
        if not batch.layout.unit_features:
            for of_view, z in zip(gradients, features, strict=False):  # features that are not anchors get none
                norm = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_(min=NORM_MIN)
                through_normalization(of_view, z / norm, norm)
        directions = len(gradients)
        gradient[:directions].add_(gradients)
        pull_positives(gradient, features, batch.per_sample(weight / batch.tau)[own], directions)

    def outside_wh(self, alpha: Tensor) -> Tensor:
        """Return the prototypes' part of ``sum w h``, ``(B, A)``, for the gradient of temperatures through ``alpha``.

        The weights are those of :meth:`through_alpha`, ``1 - exp(-alpha)(eps + ghat)`` times the softmax over the
        prototypes, and ``h`` is ``cos(e_i, W_j) - s_ii``.
        """
        batch = self._batch
        mean_h = F.minus_product(self._prototypes.mean_cosine(), batch.shift, batch.tau)
        return batch.per_sample(self._through_alpha(alpha, 1.0) * mean_h)

    def _through_alpha(self, alpha: Tensor, slope: Scalar) -> Tensor:
        """Return the derivative of ``slope (exp(-alpha)(eps + ghat) + alpha)`` by the log-partition, ``(D, P)``."""
        # the derivative by alpha is slope (1 - exp(-alpha)(eps + ghat)) = slope (1 - sum_j w_ij)
        batch, gap = self._batch, self.target - alpha
        if batch.most > FINITE_EXPONENT:  # the slope of an anchor without negatives is 0, and 0 * inf is NaN
            gap = gap.clamp_(max=FINITE_EXPONENT)
        rest = batch.per_anchor(gap.expm1_().neg_())
        return batch.through_eps(batch.per_anchor(slope) * rest, self._relative)


class FunctionalOptimizer:
    """Functional form of a ``torch.optim`` optimizer: maps prototypes and optimizer state to updated ones.

    ``make`` is called with a list of tensors and ``lr=``. Raises a ``TypeError`` for optimizers with a state other than
    tensors of the parameters' shapes and 0-d tensors, and for those that change their own options.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.make = make
        self._made_for: tuple[str, float] = ("", 0.0)
        self._optimizer: torch.optim.Optimizer | None = None  # reused by all batches; keeps no tensors between them
        try:
            with HOST:
                self._try()
        except Exception as error:
            raise TypeError(
                f"optimizer={make!r} cannot train a network: {error}; give a class such as torch.optim.Adagrad, "
                f"Adam or SGD, or functools.partial of one"
            ) from error

    def _try(self) -> None:
        """Take two steps on a small tensor to find out the state of the optimizer."""
        tensor = torch.zeros(2, 3, 4, dtype=torch.float32)
        trial = self._made(tensor, 1.0)
        self.name = type(trial).__name__
        # some optimizers, such as AdaGrad, initialise their state before the first step
        self._initial = {key: value.flatten()[0].item() for key, value in trial.state.get(tensor, {}).items()}
        self.options = options = {key: value for key, value in trial.param_groups[0].items() if key != "params"}
        signs = torch.ones_like(tensor)
        signs[0] = -1
        for _ in range(2):
            tensor.grad = signs.clone()
            trial.step()
        if {key: value for key, value in trial.param_groups[0].items() if key != "params"} != options:
            raise TypeError("it keeps state among its options")
        self._kept = {key: value for key, value in trial.state[tensor].items() if value is not None}
        for key, value in self._kept.items():
            if not isinstance(value, Tensor) or value.shape not in (tensor.shape, ()):
                raise TypeError(f"its state {key!r} is neither a 0-d tensor nor one of the parameter's shape")
        # sums of squares and counters, which a step divides by or takes the root of
        self.never_negative = {PREFIX + key for key, value in self._kept.items() if bool((value >= 0).all())}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizer": None}

    def _made(self, tensor: Tensor, lr: float) -> torch.optim.Optimizer:
        # torch fuses AdaGrad on the CPU only, and only if asked to
        fused = self.make is torch.optim.Adagrad and tensor.device.type == "cpu"
        made = self.make([tensor], lr=lr, **({"fused": True} if fused else {}))
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"it makes no torch.optim.Optimizer but an object of type {type(made).__name__}")
        return made

    def run(self, state: State, lr: float, updates: int, gradient: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Take steps on copies of the ``prototypes`` and the optimizer's tensors in ``state``; return the copies."""
        weights = state["prototypes"].clone()
        kept = {name.removeprefix(PREFIX): value.clone() for name, value in state.items() if name.startswith(PREFIX)}
        made_for = (weights.device.type, lr)
        if self._optimizer is None or self._made_for != made_for or not kept:  # a new one initialises its state
            with HOST:
                self._optimizer, self._made_for = self._made(weights, lr), made_for
        optimizer = self._optimizer
        optimizer.param_groups[0]["params"] = [weights]
        if kept:
            optimizer.state.clear()
            optimizer.state[weights] = kept
        for _ in range(updates):
            weights.grad = gradient(weights)
            with nullcontext() if optimizer.state else HOST:
                optimizer.step()
        weights.grad = None
        kept = optimizer.state.pop(weights, {})
        optimizer.param_groups[0]["params"] = []
        return {"prototypes": weights, **{PREFIX + key: v for key, v in kept.items() if isinstance(v, Tensor)}}

    def expected(self, prototypes: Tensor, state: State) -> dict[str, Tensor]:
        """Return the optimizer's tensors after a step, by name, on the meta device, for checks of a saved state."""
        found = {}
        for key, value in self._kept.items():
            dtype = prototypes.dtype if value.dim() and value.is_floating_point() else value.dtype
            saved = getattr(state.get(PREFIX + key), "dtype", dtype)
            # a counter has the default dtype of the run that created it
            if not value.dim() and {saved, dtype} <= {torch.float32, torch.float64}:
                dtype = saved
            shape = prototypes.shape if value.dim() else ()
            found[PREFIX + key] = torch.empty(shape, dtype=dtype, device="meta")
        return found

    def initial(self, name: str, like: Tensor) -> Tensor:
        """Return the value of a tensor of the optimizer before its first step."""
        return torch.full_like(like, self._initial.get(name.removeprefix(PREFIX), 0))


def empty_ring(networks: int, width: int, dim: int, part: range, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return an empty ring buffer for the newest features, as entries of a normalizer's state.

    ``queue``: this rank's slots, ``(D, m_k, d)``. ``queue_active``: mask of the filled slots of all ranks, ``(m,)``.
    ``queue_place``: next slot to fill, number of filled slots, and number of commits at the last restart (-1: none),
    ``(3,)`` int64 on the host. These counters are incremented even if the device finds later that the batch is not
    usable; the slots then keep their features.
    """
    return {
        "queue": torch.zeros(networks, len(part), dim, dtype=dtype, device="cpu"),
        "queue_active": torch.zeros(width, dtype=torch.bool, device="cpu"),
        "queue_place": torch.tensor([0, 0, -1], device="cpu"),
    }


def check_ring(state: State) -> None:
    """Refuse a saved ring with places outside, or with features of which none is in use: their mean would be NaN."""
    place, filled, _ = state["queue_place"].tolist()
    if not (0 <= place < len(state["queue_active"]) and 0 <= filled <= len(state["queue_active"])):
        raise ValueError(f"queue_place must be below the {len(state['queue_active'])} slots, got {place}, {filled}")
    if filled > 0 and not state["queue_active"].any():
        raise ValueError("queue_active must be True for a slot of a queue with features, got False for all")


def push(
    state: State,
    new: Tensor,
    usable: Tensor,
    part: range,
    t: int,
    restart_every: int | None,
    names: np.ndarray[Any, Any] | None = None,
) -> dict[str, Tensor]:
    """Add features ``(D, P, d)`` of a batch, if it is ``usable``, and restart the prototypes if due.

    A sample that has been added since the last commit keeps its slots; ``names`` are the positions of the samples in
    both modalities, ``(P, 2)``, or ``None`` if they are not known on the host.

    A restart is due every ``restart_every`` commits, and when the ring is full for the first time. Returns new values
    of ``prototypes`` and of the ring's entries, copies, since a batch may be discarded.
    """
    queue, active, prototypes = state["queue"].clone(), state["queue_active"].clone(), state["prototypes"]
    width = len(active)
    start, filled, restarted_at = state["queue_place"].tolist()
    window = state.get(WINDOW)
    if new.shape[1] >= width:
        new, start = new[:, -width:], 0
        names = None if names is None else names[-width:]
        window = None if window is None else window[:0]  # all slots are replaced
    added = size = new.shape[1]
    # slices of slots, since a selection by mask would synchronise the host; the second slice wraps around
    runs = [(start, min(start + size, width), 0), (0, start + size - width, width - start)]
    if window is not None:
        runs, added, window = _replacing(window, [None] * size if names is None else names.tolist(), start, width)
    elif names is not None:
        window = torch.from_numpy(np.column_stack([(np.arange(size) + start) % width, names]))
    now_filled = min(width, filled + added)
    restart = filled < width == now_filled
    if restart_every is not None:
        restart = restart or t // restart_every != restarted_at // restart_every
    known = state["queue_active"][part.start : part.stop]
    # On an accelerator the host cannot find out without a synchronisation whether every slot is filled.
    fill = not restart and not (known.device.type == "cpu" and known.all())
    if fill:
        prototypes = prototypes.clone()
    for first, stop, taken in runs:
        if first >= stop:
            continue
        active[first:stop].logical_or_(usable)
        low, high = max(first, part.start), min(stop, part.stop)
        if low >= high:
            continue
        own = slice(low - part.start, high - part.start)
        features = new[:, taken + low - first : taken + high - first].to(queue.dtype)
        torch.where(usable, features, queue[:, own], out=queue[:, own])
        if fill:  # the prototype of a slot that was empty is its feature
            prototypes[:, own] = torch.where(known[own, None], prototypes[:, own], queue[:, own])
    place = [(start + added) % width, now_filled, t if restart else restarted_at]
    return {
        "prototypes": queue if restart else prototypes,
        "queue": queue,
        "queue_active": active,
        "queue_place": torch.tensor(place, device="cpu"),
        **({} if window is None else {WINDOW: window}),
    }


def _replacing(
    window: Tensor, names: Sequence[Any], start: int, width: int
) -> tuple[list[tuple[int, int, int]], int, Tensor]:
    """Return the slices of slots for new features, the number of slots taken from ``start`` on, and the new window.

    A slice is its first slot, its end, and its first feature. A sample of the window gets the slots that it has there.
    """
    free: dict[tuple[int, ...] | None, list[int]] = {}
    for slot, *name in window.tolist():
        free.setdefault(tuple(name), []).append(slot)
    owners = {slot: name for name, slots in free.items() for slot in slots}
    wanted = [None if name is None else tuple(name) for name in names]
    kept = [slots.pop(0) if (slots := free.get(name)) else None for name in wanted]
    following, reserved = count(start), set(kept)
    runs: list[tuple[int, int, int]] = []
    taken = [
        next(at % width for at in following if at % width not in reserved) if slot is None else slot for slot in kept
    ]
    owners.update(zip(taken, wanted, strict=True))
    for slot, number in sorted(zip(taken, range(len(taken)), strict=True)):
        first, stop, since = runs[-1] if runs else (0, 0, 0)
        if stop == slot and number - since == slot - first:
            runs[-1:] = [(first, slot + 1, since)]
        else:
            runs.append((slot, slot + 1, number))
    named = [[slot, *name] for slot, name in owners.items() if name is not None]
    return runs, next(following) - start, torch.tensor(named, dtype=torch.int64, device="cpu")
