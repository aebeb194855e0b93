"""Queue of the newest features as further negatives, shifted to the mean of the current batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt.batch import Batch
from compopt.checks.context import warn
from compopt.checks.inputs import check_dim
from compopt.distributed.handshake import KEYS
from compopt.estimator.base import Form
from compopt.estimator.groups import Hyper
from compopt.estimator.parts import STORED_CHUNK, Call, Estimate, Normalizer
from compopt.functional import Scalar, add_positive, all_finite, log
from compopt.kernel.block import exp_
from compopt.kernel.pairs import MAX_UNSHIFTED_SCALE, SPREAD_ANCHORS, Pairs, is_uniform, scale_of
from compopt.pairs import NO_POLICY, PairPolicy

UNKNOWN = torch.iinfo(torch.int64).min + 1  # stored for a key that was not passed; excludes no pairs
WINDOW = "window."  # prefix of the names, in a pending copy of the state, of the samples since the last commit
LARGEST_SCALE = MAX_UNSHIFTED_SCALE / 2  # of 1 / tau without a shift: |h_iq| <= 4, since a shifted feature is at most 3


class MemoryNormalizer(Normalizer):
    r"""Softmax over the negatives of the batch and the newest features of past batches.

    Example:
        >>> import torch, compopt
        >>> memory = compopt.MemoryNormalizer(16, length=64)
        >>> est = compopt.ContrastiveEstimator(memory, compopt.FixedTemperature(0.07))
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()

    .. math::
        \alpha_i = \log \frac{\sum_{j \in N_i} e^{h_{ij}/\tau_i} + \sum_{q} e^{h_{iq}/\tau_i}}{|N_i| + m}, \qquad
        w_{ij} = \frac{e^{h_{ij}/\tau_i - \alpha_i}}{|N_i| + m}, \qquad
        z_q = z_q^{then} - \bar z^{then} + \bar z^{now}

    Training with a queue of past features requires two corrections:

    * *Drift.* Updates of the encoders shift all features together, so that anchors would be pushed away from their own
      past. The queue stores each feature minus the mean of its batch, and the mean of the current batch is added.
    * *Balance.* A past feature gets no gradient, so that its share of the weights, ``1 - sum_j w_ij``, acts on the
      anchor only. The weight of the gradient of the anchor's positive is therefore ``sum_j w_ij``, and the weight of
      the positive in the gradient of the anchor is 1. Attraction and repulsion then balance for each anchor, and for
      all candidates together. Otherwise all features collapse to a point.

    Args:
        dim: dimension of the features.
        length: number of samples in the queue, ``m`` (unimodal: both views of these samples, in one queue of ``2 m``
            features).
        momentum: require ``keys=`` in every call; otherwise they are optional.
        candidates: count the positive in the denominator, ``1 / k + mean_j e^{h_ij / tau_i}`` with the mean over batch
            and queue, ``k`` the larger one of ``candidates`` and the number of negatives; ``None``: do not.

    These arguments cannot differ between sample groups. The oldest feature is ``m / B`` steps old: 8 to 16 were good in
    trials, 32 was harmful. In the equations, ``m`` is the number of slots that are negatives of an anchor: filled, and
    not of its own sample (the queue stores ``index``, ``index2`` and ``labels``, if the calls pass them); in unimodal
    mode there are two per sample. An anchor without negatives in its batch has those in the queue.
    A :class:`~compopt.PairPolicy` selects and weights the queue like the batch; with ``within`` each slot has a key.

    *Momentum.* With ``keys=(k1, k2)`` of a slowly moving copy of the encoders
    (:class:`~compopt.MomentumEncoder`) the candidates of the batch, the positives and the stored features are ``k``:

    .. math::
        h_{ij} = \langle z_i, k_j \rangle - \langle z_i, k_i \rangle, \qquad
        k_q = k_q^{then} - \bar k^{then} + \bar k^{now}

    Only anchors get a gradient, ``sum_j w_ij (k_j - k_i) + sum_q w_iq (k_q - k_i)``. With ``directions="forward"``
    ``z2`` therefore gets none: use that only with one encoder for both sides. Pass features of the copy as
    ``negatives=`` too: features of the model would be the only candidates with a gradient, which pushes them away from
    the anchors and is balanced by no positive. Either all calls of a run should pass momentum features, or none.

    State: features ``(2, m, dim)`` in the rows' dtype (``directions="forward"``: of the second modality only), three
    integers (four with ``within``) and a flag for each slot; nothing per sample. Every rank has the whole state. A call
    modifies a copy, which ``step()`` commits; within an accumulation window the copy also contains the features of
    earlier batches. With ``offload=`` the state stays on the device (``benchmarks/results/off_device.md``).

    *Several evaluations per step* (SAM, LBFGS, a symmetric loss) need an ``index``. A batch does not see the features
    that its own samples (equal ``index`` and, if passed, ``index2``) have stored since the last step, and replaces
    them. Without an index they are negatives of their own samples; the second call since a step then warns, once.

    Cost: a product of the global batch's anchors with the queue on every rank, and one of the rank's own anchors for
    their gradient; one to three matrices ``(D B, m)``, which ``chunk_size`` does not split. With
    ``directions="forward"`` candidates only learn from the batch's share of the weights, and
    :class:`~compopt.DCLEstimator` is better (benchmarks/results/text.md). In ``eval()`` do not pass the index of
    validation data, since equal numbers would mask the slots of training samples.

    Metrics: ``queue_share``, the mean of ``1 - sum_j w_ij``, the queue's share of an anchor's weights;
    ``effective_negatives`` includes the queue. Communicates nothing itself; with momentum features the pairs of the
    batch need one gather of statistics per direction (unimodal: two per view) instead of one in total.

    Raises:
        ValueError: dim, length or candidates < 1; a policy of pairs with ``guided``; at the call features of another
            dimension, a policy with another ``within``, no ``keys`` with ``momentum=True``.
        TypeError: dim, length or candidates is not an integer, momentum is neither True nor False.

    References:
        Queues of features, momentum: MoCo (He et al., CVPR 2020). Queues: cross-batch memory (Wang et al., CVPR 2020).
        Adjusting queues to the current moments: Ajanthan et al., Adaptive Cross Batch Normalization for Metric
        Learning, 2023. Without the positive: DCL (Yeh et al., ECCV 2022). The balance of the gradients is
        not from these papers.
    """

    _warned = False  # of a second call without an index
    _normalized, _views = True, False  # facts of the composition

    def __init__(self, dim: int, length: int = 128, momentum: bool = False, candidates: int | None = None) -> None:
        self.dim, self.length = checks.positive_int("dim", dim), checks.positive_int("length", length)
        checks.flag("momentum", momentum)
        self.momentum = momentum
        self.candidates = None if candidates is None else checks.positive_int("candidates", candidates)
        self._within: bool | None = None  # whether slots store the keys of ``within=``
        super().__init__(None, {})

    def check(self, group: Mapping[str, Any]) -> None:
        del group  # it has no hyper-parameters

    def check_pairs(self, policy: PairPolicy) -> None:
        if self._within is not None and self._within != policy.within:
            raise ValueError(
                f"within={policy.within} differs from within={self._within} at construction, which decides "
                f"the keys that the memory keeps; build the estimator with pairs=PairPolicy(within={policy.within})"
            )
        if policy.guided:
            raise ValueError(
                "guided=True uses features of the batch's candidates, and the memory has others; leave it out, or use "
                "an estimator without a memory, such as compopt.DCLEstimator"
            )

    def check_momentum(self, given: bool) -> None:
        if self.momentum and not given:
            raise ValueError(
                "keys= is missing, and momentum=True requires it in every call; pass the features of a "
                "compopt.MomentumEncoder, or build the estimator without momentum=True"
            )

    def structure(self) -> dict[str, Any]:
        # earlier checkpoints have no entry for what is not usual
        unusual = {"momentum": True} if self.momentum else {}
        unusual |= {} if self._normalized else {"normalize": False}
        return {"dim": self.dim, "length": self.length, **unusual}

    def shared_options(self) -> dict[str, Any]:
        return {"candidates": self.candidates}

    def described(self) -> dict[str, Any]:
        return {**self.structure(), **({} if self.candidates is None else self.shared_options())}

    def setup(self, form: Form) -> None:
        self._normalized, self._within = form.normalize, form.within
        self._views, self._directions = form.mode == "unimodal", form.directions
        self.outside = self.length * (2 if self._views else 1)
        kept = len(KEYS) + self._within
        self.state = {
            "queue": torch.zeros(form.directions, self.length, self.dim, dtype=form.dtype, device="cpu"),
            "keys": torch.full((kept, self.length), UNKNOWN, device="cpu"),
            "kept": torch.zeros(self.length, dtype=torch.bool, device="cpu"),
        }

    def estimate(self, call: Call) -> Estimate:
        pairs, policy = call.pairs, call.policy or NO_POLICY
        check_dim(self.dim, call.batch.views)
        z, keys = call.batch.views, self._keys(call.batch)
        state, window = self._seen(call, keys)
        scale = scale_of(call.tau, z, *pairs.shape)
        centred, partners = self._centred(torch.stack(call.batch.momentum) if call.batch.momentum else z)
        queue = self._queue(state, z.dtype)
        logits = self._logits(z, queue, partners, scale)
        included = self._negatives(call, keys, state, logits, scale)
        uniform = is_uniform(call.tau, pairs.options) and scale <= LARGEST_SCALE
        if uniform and included is not None:
            included = included.to(logits.dtype)  # once, for the product and for the count
        count = (
            float(queue.shape[1]) if included is None else self._by_sample(included.sum(2, dtype=z.dtype), pairs.shape)
        )
        log_sum = pairs.log_sum
        if isinstance(pairs.count, Tensor):  # it is 0 for an anchor without negatives in the batch
            log_sum = log_sum.masked_fill((pairs.count == 0) & (count > 0), -math.inf)
        # one softmax over batch and queue: the kernel's weights are divided by the sum over both
        of_batch = others = self._by_queue(log_sum)
        if self.candidates is not None:
            others = self._by_queue(add_positive(log_sum, log(pairs.count + count), self.candidates))
        if uniform:
            e, share, total, log_total = bounded_sums(logits, included, others)
        else:
            if included is not None:
                logits.masked_fill_(~included, -math.inf)
            weighted = self._hardened(logits, pairs, scale, policy.hardness)
            e, share, total, log_total = shifted_sums(weighted, others, keep=pairs.moments)
        outside_wh: Tensor | None = None
        if pairs.moments:
            of_slots = logits if included is None else logits.masked_fill(~included, 0)
            outside_wh = self._by_sample((e * of_slots).sum(2).div_(total.squeeze(2)), pairs.shape) / scale
        by_queue, log_total = log_total, self._by_sample(log_total, pairs.shape)
        if call.training:
            self._keep(call, state, window, centred, keys, log_total, pairs.lacking(count))
        first = slice(call.batch.own.start, min(call.batch.own.stop, call.batch.own.start + SPREAD_ANCHORS))
        norms = torch.linalg.vector_norm(e.view(self._directions, -1, e.shape[2])[:, first], dim=2)
        effective = partial(effective_negatives, pairs.effective, first, norms, (share, total, of_batch, by_queue))
        all_count = pairs.count + count
        return Estimate(
            log_total - log(all_count.clamp(min=1) if isinstance(all_count, Tensor) else all_count),
            weight_alpha=log_total - pairs.log_count,
            outside_wh=outside_wh,
            outside_count=count,
            through_alpha=partial(through_alpha, (e, share, total), queue, partners, scale, call.batch.own),
            metrics={"queue_share": partial(mean_quotient, share, total), "effective_negatives": effective},
        )

    def _seen(self, call: Call, keys: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the queue for a batch, and the samples since the last commit, without those of the batch.

        These are empty, or the newest of the queue with the flag ``kept``, in the form of a state.
        """
        device, batch = call.batch.rows.device, call.batch
        pending, state = self._state_on(device, call.training), self._state_on(device, False)
        if WINDOW + "keys" not in pending:
            return pending, {}
        window = {name: pending[WINDOW + name] for name in state}
        if batch.named:
            same = [keys[name][:, None] == window["keys"][row] for row, name in enumerate(KEYS[:2]) if name in keys]
            window["kept"] = window["kept"] & ~torch.stack(same).all(0).any(0)
        elif not self._warned:
            self._warned = True
            warn(
                "a memory was called twice without an index since the last commit; if both calls have the same samples "
                "(SAM, LBFGS, a symmetric loss), pass their index: without it, features of the first are negatives of "
                "their own samples in the second. If they have different samples (gradient accumulation), ignore this"
            )
        # those left out come first and are dropped; on a device the host does not know their number
        order = torch.argsort(torch.cat([torch.ones_like(state["kept"]), window["kept"]]).to(torch.uint8), stable=True)
        joined = {name: torch.cat([old, window[name]], dim=_axis(old)) for name, old in state.items()}
        joined = {name: value.index_select(_axis(value), order) for name, value in joined.items()}
        size = len(window["kept"])
        window = {name: _newest(value, size) for name, value in joined.items()} | {"kept": window["kept"].sort().values}
        return {name: _newest(value, self.length) for name, value in joined.items()}, window

    def _keep(
        self,
        call: Call,
        state: Mapping[str, Tensor],
        window: Mapping[str, Tensor],
        centred: Tensor,
        keys: Mapping[str, Tensor],
        log_total: Tensor,
        lacking: Tensor | None,
    ) -> None:
        """Store the newest features in the queue, without the mean of their batch.

        A later call adds the mean of its own batch, so that the queue follows the encoders. A batch without negatives
        (``lacking``) is not stored, nor one with a feature that is not finite.
        """
        if lacking is not None and lacking.device.type == "cpu" and lacking:
            return
        batch = call.batch
        # a bad feature of a sample without pairs is in no sum, but in the mean; it must not enter the queue
        usable = all_finite(log_total + centred.sum() if call.pairs.may_lack_negatives else log_total)
        usable = usable if lacking is None else usable & ~lacking
        names = stored_names(keys, batch.keys["index"])[:, -self.length :]
        if batch.momentum:  # the queue stores the copy's features; the others may be bad, too
            usable = usable & all_finite(batch.views) & all_finite(torch.stack(batch.momentum))
        if batch.bad is not None:
            usable = usable & ~batch.bad
        queue = centred[:, -self.length :].to(state["queue"].dtype)
        entries = {"queue": queue, "keys": names, "kept": usable.expand(names.shape[1])}
        before = self._state_on(usable.device, True)
        self._pending_state = pushed(state, entries, usable, before)
        for name, new in entries.items():
            if window:
                new = torch.cat([torch.where(usable, window[name], before[WINDOW + name]), new], dim=_axis(new))
            self._pending_state[WINDOW + name] = _newest(new, self.length)

    def commit_state(self, found_inf: Tensor | None) -> None:
        if self._pending_state is not None:
            self._pending_state = {name: self._pending_state[name] for name in self.state}
        super().commit_state(found_inf)

    def _centred(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return features without their mean, as the queues store them, and those of the anchors' positives.

        The mean is that of each modality, in unimodal mode of both views.
        """
        if self._views:
            centred = k - k.mean((0, 1), keepdim=True)
            return centred, centred.flip(0)
        of_candidates = k.flip(0)[: self._directions]  # the candidates of direction 1 are the second modality
        centred = of_candidates - of_candidates.mean(1, keepdim=True)
        return centred, centred

    def _queue(self, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the queue as it is stored, ``(Q, M, d)``."""
        queue = state["queue"].to(dtype)
        return queue.reshape(1, -1, self.dim) if self._views else queue

    def _keys(self, batch: Batch) -> dict[str, Tensor]:
        """Return the keys of a batch that slots also store, if they are passed."""
        keys = {name: key for name, key in batch.keys.items() if name != "index" or batch.named}
        return {**keys, "within": batch.values["within1"]} if self._within else keys

    def _included(
        self, keys: Mapping[str, Tensor], state: Mapping[str, Tensor], size: int, directions: int
    ) -> Tensor | None:
        """Return a mask of the slots that are negatives of an anchor: filled, and of other samples; ``(1, P, M)``.

        ``None`` if the host knows that all slots are.
        """
        stored, included = state["keys"], state["kept"].expand(size, -1)
        for row, name in enumerate(KEYS):
            if name in keys:  # no other key equals UNKNOWN
                included = included & (keys[name][:, None] != stored[row])
        if self._within:
            included = included & (keys["within"][:, None] == stored[-1])
        if included.device.type == "cpu" and included.all():
            return None
        return (included.repeat(directions, 2) if self._views else included).unsqueeze(0)

    def _negatives(
        self,
        call: Call,
        keys: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        logits: Tensor,
        scale: Scalar,
    ) -> Tensor | None:
        """Return the mask of :meth:`_included` without the slots that the policy takes for false negatives."""
        included = self._included(keys, state, *call.pairs.shape)
        if call.policy is None or call.policy.false_negatives is None:
            return included
        positive = call.pairs.positive
        kept = logits <= self._column((cast(Tensor, call.policy.threshold(positive)) - positive) * scale)
        return kept if included is None else included & kept

    def _logits(self, z: Tensor, queue: Tensor, partners: Tensor, scale: Scalar) -> Tensor:
        """Return ``h_iq / tau_i`` of all slots, ``(Q, P, M)``; the batch's mean is in neither term of ``h_iq``."""
        anchors, alpha = z[: self._directions], 1.0
        if isinstance(scale, Tensor):
            anchors = anchors * scale.T.unsqueeze(2)  # the narrow matrix
        else:
            alpha = scale
        own = torch.linalg.vecdot(anchors, partners[: self._directions])
        if self._views:  # both views share one queue
            anchors, own = anchors.view(1, -1, self.dim), own.view(1, -1)
        return torch.baddbmm(own.unsqueeze(2), anchors, queue.mT, beta=-alpha, alpha=alpha)

    def _hardened(self, logits: Tensor, pairs: Pairs, scale: Scalar, beta: float | None) -> Tensor:
        """Return ``h_iq / tau_i + beta s_iq``."""
        if beta is None:
            return logits
        return logits * self._column(1 + beta / scale) + self._column(beta * pairs.positive)

    def _state_on(self, device: torch.device, training: bool) -> dict[str, Tensor]:
        return {
            name: accelerator.state_to_device(value, device) for name, value in self.working_state(training).items()
        }

    # -- arrangement: by sample (B, a), by queue (Q, P) --------------------------------------------------------

    def _by_queue(self, value: Tensor) -> Tensor:
        return value.T.reshape(1, -1) if self._views else value.T

    def _column(self, value: Scalar) -> Any:
        """Rearrange ``(B, a)`` -> ``(Q, P, 1)``; a number for all anchors stays a number."""
        return self._by_queue(value).unsqueeze(2) if isinstance(value, Tensor) else value

    def _by_sample(self, value: Tensor, shape: tuple[int, int]) -> Tensor:
        return value.expand(1 if self._views else self._directions, -1).reshape(shape[1], shape[0]).T

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        """Return the queue's part of ``alpha``, ``(n, A)``; row ``i`` is sample ``i``. NaN without negatives."""
        check_dim(self.dim, features[0])
        z, state = torch.stack(features), self._state_on(features[0].device, False)
        queue, (_, partners) = self._queue(state, z.dtype), self._centred(z)
        chunks = []
        for names in torch.arange(z.shape[1], device=z.device).split(STORED_CHUNK):
            of_names, shape = (
                tau[names] if isinstance(tau, Tensor) and tau.dim() else tau,
                (len(names), self._directions),
            )
            logits = self._logits(z[:, names], queue, partners[:, names], scale_of(of_names, z, *shape))
            included, log_count = self._included({"index": names}, state, *shape), log(float(queue.shape[1]))
            if included is not None:
                logits.masked_fill_(~included, -math.inf)
                log_count = included.sum(2, dtype=logits.dtype).log()
            log_sum = logits.logsumexp(2)
            if self.candidates is not None:
                log_sum = add_positive(log_sum, log_count, self.candidates)
            chunks.append(self._by_sample(log_sum - log_count, shape))
        return torch.cat(chunks)


def through_alpha(
    sums: tuple[Tensor, Tensor, Tensor],
    queue: Tensor,
    partners: Tensor,
    scale: Scalar,
    own: slice,
    slope: Scalar,
    gradient: Tensor | None,
) -> None:
    """Add ``slope_i sum_q w_iq (z_q - z_partner) / tau_i`` of this rank's anchors, ``own``, to ``gradient``.

    ``sums``: ``e``, ``share`` and ``total`` of :func:`shifted_sums` or :func:`bounded_sums`, so that
    ``sum_q w_iq z_q = (e @ queue) / total`` and ``sum_q w_iq = share / total``.
    """
    if gradient is None:
        return
    directions, factor = partners.shape[0], slope * scale
    mine, share, total = (x.view(directions, -1, x.shape[2])[:, own] for x in sums)
    pull = torch.bmm(mine, queue.expand(directions, -1, -1)).addcmul_(share, partners[:, own], value=-1)
    if isinstance(factor, Tensor):
        pull.mul_(factor.T[:, own].unsqueeze(2))
    gradient[:directions].addcdiv_(pull, total, value=1.0 if isinstance(factor, Tensor) else factor)


def shifted_sums(logits: Tensor, log_sum: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return exponentials along the last axis, relative to a maximum, with their sum and a sum with other terms.

    Args:
        logits: logits, ``(Q, P, M)``; overwritten, unless ``keep``.
        log_sum: log-sum-exp of the other terms, ``(Q, P)``.
        keep: do not overwrite the logits.

    Returns:
        The exponentials ``(Q, P, M)``, their sums and those with the other terms, ``(Q, P, 1)`` each, and the
        log-normalizers ``(Q, P)``.
    """
    shift = torch.maximum(logits.amax(2), log_sum)
    e = exp_(torch.sub(logits, shift.unsqueeze(2), out=None if keep else logits))
    share = e.sum(2, keepdim=True)
    total = (log_sum - shift).exp_().unsqueeze(2).add_(share)
    return e, share, total, total.squeeze(2).log().add_(shift)


def bounded_sums(logits: Tensor, included: Tensor | None, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return :func:`shifted_sums` of logits whose exponentials need no shift; overwrites the logits.

    ``included`` is 1 for the logits that are candidates and 0 for the others; ``None``: all are.
    """
    e = logits.exp_()
    if included is not None:
        e.mul_(included)  # faster on a CPU than masked_fill_, and than exponentials of -inf
    share = e.sum(2, keepdim=True)
    total = log_sum.exp().unsqueeze(2).add_(share)
    return e, share, total, total.squeeze(2).log()


def mean_quotient(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean of ``x / y``."""
    return (x / y).mean()


def effective_negatives(
    of_batch: Callable[[], list[Tensor]], own: slice, norms: Tensor, sums: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    """Return ``(sum w)^2 / sum w^2`` over batch and queue, averaged over the anchors ``own`` of each direction.

    ``of_batch`` returns it over the batch alone; ``norms`` are the roots of the sums of squares of the queue's
    exponentials, ``(D, b)``; ``sums`` are those of all anchors: of the queue's exponentials and in total, and the logs
    of the batch's sum and of the total.
    """
    share, total, log_batch, log_total = (value.reshape(len(norms), -1)[:, own] for value in sums)
    found = []
    values = zip(of_batch(), share / total, norms / total, (log_batch - log_total).exp(), strict=True)
    for number, queue, norm, batch in values:
        found.append((batch + queue).square() / (batch.square() / number + norm.square()))
    return torch.cat(found).nanmean()


def stored_names(given: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return keys for the slots, ``(3, B)``, or ``(4, B)`` with ``within``; :data:`UNKNOWN` for keys not passed."""
    if set(given) == {"index"}:  # one operation
        return torch.constant_pad_nd(given["index"][None], (0, 0, 0, len(KEYS) - 1), UNKNOWN)
    missing = torch.full_like(like, UNKNOWN)
    within = [given["within"]] if "within" in given else []
    return torch.stack([*(given.get(name, missing) for name in KEYS), *within])


def pushed(
    state: Mapping[str, Tensor], entries: Mapping[str, Tensor], usable: Tensor, otherwise: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Append entries, at most one per slot, and drop the oldest; if they are not ``usable``, return ``otherwise``."""
    on_host = usable.device.type == "cpu"  # the flag can be read without a synchronisation
    if on_host and not usable:
        return dict(otherwise)
    result = {}
    for name, new in entries.items():
        old, axis = state[name], _axis(new)
        taken = new.shape[axis]
        moved = torch.cat([old.narrow(axis, taken, old.shape[axis] - taken), new.to(old.dtype)], dim=axis)
        result[name] = moved if on_host else torch.where(usable, moved, otherwise[name])
    return result


def _axis(value: Tensor) -> int:
    """Return the axis of slots, the second of several."""
    return min(1, value.dim() - 1)


def _newest(value: Tensor, count: int) -> Tensor:
    """Return the last slots, at most ``count``."""
    size = value.shape[_axis(value)]
    return value.narrow(_axis(value), max(0, size - count), min(size, count))
