"""The newest features as further negatives, moved along with the mean of what the encoders give now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compopt import checks
from compopt.estimator.call import Call, Estimate, Setting
from compopt.estimator.component import Normalizer
from compopt.estimator.groups import Hyper, SampleGroups
from compopt.functional import all_finite

KEYS = ("index", "index2", "labels")
UNKNOWN = torch.iinfo(torch.int64).min  # a key that was not given, equal to none
STORED_CHUNK = 1024  # anchors at a time when a whole data set is asked for


class MemoryNormalizer(Normalizer):
    r"""The batch's negatives and the ``m`` newest features of past batches, in one softmax without the positive.

    .. math::
        \alpha_i = \log \frac{\sum_{j \in N_i} e^{h_{ij}/\tau_i} + \sum_{q} e^{h_{iq}/\tau_i}}{|N_i| + m}, \qquad
        w_{ij} = \frac{e^{h_{ij}/\tau_i - \alpha_i}}{|N_i| + m}, \qquad
        z_q = z_q^{then} - \bar z^{then} + \bar z^{now}

    A queue of features fails in training for two reasons, and both are mended here:

    * *Drift.* Encoders move all features together. Anchors are pulled to where positives are now and pushed from where
      negatives were, so that they run away from their own past. The queue keeps each feature less the mean of its
      batch, and adds the mean of the present batch: what all anchors together are pulled to is then what they are
      pushed from, as it is within a batch. A running mean lags behind, and does not do.
    * *Balance.* A past feature takes no gradient, so its share of the weights, ``1 - sum_j w_ij``, pushes the anchor
      alone. The anchor's positive is then pulled by ``sum_j w_ij`` only, and the anchor towards it by 1: on each
      feature as much pull as push. With the whole pull on both sides all features meet in a point.

    Args:
        dim: of the features.
        length: ``m``, samples whose features are kept (unimodal: of both views, which are one queue of ``2 m``).

    There are no hyper-parameters. ``m`` decides how old the oldest feature is, ``m / B`` steps: 8 to 16 did well in
    trials, 32 did harm.

    A sample is no negative of itself here either: the queue keeps ``index``, ``index2`` and ``labels``, as far as the
    calls give them.

    State: features ``(2, m, dim)`` in the rows' dtype (``directions="forward"``: of the second modality only), three
    integers and a flag for each slot; nothing per sample. Every rank has all of it. It follows the rule of all state: a
    call works on a copy, committed by ``step()``. Within an accumulation window the copy has the earlier batches'
    features, which are exact.

    Cost: two products of the global batch's anchors with the queue, on every rank.

    Communicates: nothing of its own.

    Raises:
        ValueError: dim or length < 1; at the call features of another dimension.

    References:
        Queues of features: MoCo (He et al., CVPR 2020), cross-batch memory (Wang et al., CVPR 2020). Moving them to
        the moments of now: Ajanthan et al., Adaptive Cross Batch Normalization for Metric Learning, 2023. Without the
        positive: DCL (Yeh et al., ECCV 2022). The balance of the forces is ours.

    Example:
        >>> import torch, compopt
        >>> est = compopt.ContrastiveEstimator(compopt.MemoryNormalizer(16, length=64), compopt.FixedTemperature(0.07))
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()
    """

    def __init__(self, dim: int, length: int = 128) -> None:
        self.dim, self.length = checks.count("dim", dim), checks.count("length", length)
        super().__init__(None, {})

    def check(self, group: Mapping[str, Any]) -> None:
        del group  # it has no hyper-parameters

    def structure(self) -> dict[str, Any]:
        return {"dim": self.dim, "length": self.length}

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        super().joined(groups, setting)
        self._views, self._directions = setting.mode == "unimodal", setting.directions
        self.state = {
            "queue": torch.zeros(setting.directions, self.length, self.dim, dtype=setting.dtype, device="cpu"),
            "keys": torch.full((len(KEYS), self.length), UNKNOWN, device="cpu"),
            "kept": torch.zeros(self.length, dtype=torch.bool, device="cpu"),
        }

    # -- the call ----------------------------------------------------------------------------------------------

    def estimate(self, call: Call) -> Estimate:
        z = self._stack(call.batch.features)
        new = (z if self._views else z.flip(0))[: self._directions]  # the candidates of direction 1 come first
        state = {name: value.to(z.device) for name, value in self.working_state(call.training).items()}
        keys = known_keys(call.batch.keys)
        mean = self._mean(new)
        if call.training:
            entries = {"queue": new - mean, "keys": keys, "kept": torch.ones_like(keys[0], dtype=torch.bool)}
            self._pending_state = pushed(state, entries, all_finite(mean))
        return self._estimate(call, z, self._queue(state, mean, z.dtype), self._equal(keys, state))

    def _estimate(self, call: Call, z: Tensor, queue: Tensor, masked: Tensor) -> Estimate:
        pairs, positive = call.pairs, call.pairs.positive
        scale = 1 / call.tau if isinstance(call.tau, Tensor) else positive.new_full((), 1 / call.tau)
        scale = scale.to(positive.dtype).expand_as(positive)
        h = self._relative(z, queue, positive, scale).masked_fill(masked, -math.inf)
        log_total = torch.logaddexp(pairs.log_sum, self._by_sample(h.logsumexp(2), positive))
        weights = (h - self._by_queue(log_total).unsqueeze(2)).exp()
        count = pairs.count + self._by_sample(masked.logical_not().sum(2, dtype=positive.dtype), positive)
        outside: Tensor | None = None
        if pairs.mean_h is not None:
            outside = self._by_sample((weights * h.masked_fill(masked, 0)).sum(2), positive) / scale
        return Estimate(
            log_total - count.clamp(min=1).log(),
            weight_alpha=log_total - pairs.log_count,
            outside_wh=outside,
            through_alpha=partial(self._feature_gradients, z, queue, weights, scale),
            metrics={"queue_share": partial(share, weights)},
        )

    def _feature_gradients(self, z: Tensor, queue: Tensor, weights: Tensor, scale: Tensor, slope: Tensor) -> Tensor:
        """``slope_i sum_q w_iq (z_q - z_partner) / tau_i`` of every anchor; the queue moves nothing else."""
        push = torch.bmm(weights, queue)
        push -= weights.sum(2, keepdim=True) * self._anchors(z.flip(0))
        gradient = (self._by_queue(slope * scale).unsqueeze(2) * push).view(-1, *z.shape[1:])
        return gradient if len(gradient) == 2 else torch.cat([gradient, torch.zeros_like(gradient)])

    def _mean(self, new: Tensor) -> Tensor:
        """Mean of a batch's candidates, ``(D, 1, d)``; both views have one."""
        mean = new.mean(1, keepdim=True)
        return mean.mean(0, keepdim=True).expand_as(mean) if self._views else mean

    def _queue(self, state: Mapping[str, Tensor], mean: Tensor, dtype: torch.dtype) -> Tensor:
        """The features as they would be now, ``(Q, M, d)``."""
        moved = (state["queue"] + mean).to(dtype)
        return moved.view(1, -1, self.dim) if self._views else moved

    def _equal(self, keys: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Which slots are no negatives of which anchors: of the same sample, or empty; ``(Q or 1, P, M)``."""
        stored = state["keys"]
        equal = ((keys[:, :, None] == stored[:, None, :]) & (stored != UNKNOWN)[:, None, :]).any(0)
        equal |= ~state["kept"]
        return (equal.repeat(2, 2) if self._views else equal).unsqueeze(0)

    def _relative(self, z: Tensor, queue: Tensor, positive: Tensor, scale: Tensor) -> Tensor:
        """``h_iq / tau_i``, ``(Q, P, M)``."""
        similar = torch.bmm(self._anchors(z), queue.mT)
        similar -= self._by_queue(positive).unsqueeze(2)
        return similar.mul_(self._by_queue(scale).unsqueeze(2))

    # -- arrangement: by sample (B, A), by queue (Q, P) --------------------------------------------------------

    def _stack(self, features: tuple[Tensor, Tensor]) -> Tensor:
        if features[0].shape[1] != self.dim:
            raise ValueError(
                f"dim is {self.dim}, the features have {features[0].shape[1]} dimensions; build it with theirs"
            )
        return torch.stack(features)

    def _anchors(self, z: Tensor) -> Tensor:
        """``(2, B, d)`` -> ``(Q, P, d)``: both views meet one queue."""
        return z.view(1, -1, self.dim) if self._views else z[: self._directions]

    def _by_queue(self, value: Tensor) -> Tensor:
        return value.T.reshape(1, -1) if self._views else value.T

    def _by_sample(self, value: Tensor, like: Tensor) -> Tensor:
        return value.expand(1 if self._views else self._directions, -1).reshape(like.shape[1], len(like)).T

    # -- what diagnostics ask ----------------------------------------------------------------------------------

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        device, dtype = features[0].device, features[0].dtype
        state = {name: value.to(device) for name, value in self.state.items()}
        both = self._stack(features)
        mean = self._mean((both if self._views else both.flip(0))[: self._directions])
        queue, count = self._queue(state, mean, dtype), state["kept"].sum(dtype=dtype) * (2 if self._views else 1)
        empty = ~state["kept"].repeat(2 if self._views else 1)
        chunks = []
        for first in range(0, len(features[0]), STORED_CHUNK):
            z = both[:, first : first + STORED_CHUNK]
            positive = torch.linalg.vecdot(*z).unsqueeze(1).expand(-1, self._directions)
            own = tau[first : first + STORED_CHUNK] if isinstance(tau, Tensor) and tau.dim() else tau
            scale = (1 / torch.as_tensor(own, dtype=dtype, device=device)).expand_as(positive)
            h = self._relative(z, queue, positive, scale).masked_fill(empty, -math.inf)
            chunks.append(self._by_sample(h.logsumexp(2), positive) - count.clamp(min=1).log())
        return torch.cat(chunks)


def known_keys(given: Mapping[str, Tensor]) -> Tensor:
    """``(3, B)``; where the caller gave no index, those that stand for it are negative."""
    index = given["index"]
    missing = torch.full_like(index, UNKNOWN)
    return torch.stack([torch.where(index < 0, UNKNOWN, index), *(given.get(name, missing) for name in KEYS[1:])])


def pushed(state: Mapping[str, Tensor], entries: Mapping[str, Tensor], usable: Tensor) -> dict[str, Tensor]:
    """The newest entries, oldest first, of flat tensors ``(m,)``, or along the axis of slots, 1; all, or none."""
    result = {}
    for name, new in entries.items():
        old, axis = state[name], min(1, new.dim() - 1)
        length = old.shape[axis]
        taken = min(length, new.shape[axis])
        new = new.to(old.dtype).narrow(axis, new.shape[axis] - taken, taken)
        moved = torch.cat([old.narrow(axis, taken, length - taken), new], dim=axis)
        result[name] = torch.where(usable, moved, old)
    return result


def share(weights: Tensor) -> Tensor:
    """What the queue has of the anchors' weights, 0-d."""
    return weights.sum(2).mean()
