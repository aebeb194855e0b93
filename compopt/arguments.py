"""Checks of the arguments of a call of :class:`~compopt.ContrastiveEstimator`, and preparation for the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compopt import accelerator
from compopt.batch import Batch
from compopt.checks import Mode, inputs
from compopt.checks.context import refuse_derivatives
from compopt.distributed.handshake import add_facts
from compopt.distributed.ranks import Ranks
from compopt.estimator.parts import Normalizer, Temperature
from compopt.kernel.features import Encoder, Features, full_precision, other_units, promote_tau
from compopt.kernel.pairs import Negatives
from compopt.pairs import NO_POLICY, BoundPolicy, PairPolicy


@dataclass
class CallArguments:
    """Checked arguments of one call on one rank.

    Attributes:
        keys: ``index`` and, if given, ``index2`` and ``labels``, ``(b,)`` int64.
        tau: result of :func:`~compopt.checks.inputs.check_tau`; ``None``: the estimator's temperature.
        negatives: further candidates (``negatives=``), or ``None``.
        policy: policy of pairs, or ``None``.
        values: tensors of the samples, see :attr:`~compopt.batch.Batch.values`.
        of_negatives: tensors of the further candidates: ``positions`` in the data set, ``(M,)``, and what the policy
            requires, ``guide``, ``(M, g)``, and ``within``, ``(M,)``.
        named: ``index`` was passed.
        graph: autograd is enabled in the caller.
        own: the features of this rank.
        encoder: encoder of samples outside the batch, or ``None``.
        facts: integers that must be equal on all ranks.
    """

    keys: dict[str, Tensor]
    tau: float | Tensor | None
    negatives: Features | None
    policy: PairPolicy | None
    values: dict[str, Tensor]
    of_negatives: dict[str, Tensor]
    named: bool
    graph: bool
    own: Features
    encoder: Encoder | None
    facts: dict[str, int]

    @property
    def want_gradients(self) -> bool:
        """Return whether any features require a gradient."""
        return self.own.wanted or (self.negatives is not None and self.negatives.wanted)

    @property
    def of_others(self) -> list[Tensor]:
        """Features of other models, of the batch and of further candidates."""
        named = (*self.values.items(), *self.of_negatives.items())
        return [value for name, value in named if name in ("k1", "k2", "guide1", "guide2", "guide")]

    def gather_negatives(self, batch: Batch, ranks: Ranks) -> Negatives | None:
        """Return the further candidates of all ranks. Collective."""
        if self.negatives is None:
            return None
        own = self.negatives.unit[0]
        values = {"features": own, **self.of_negatives}
        gathered = ranks.gather([*values.values()], batch.more) if max(batch.more) else values.values()
        of, first = dict(zip(values, gathered, strict=True)), sum(batch.more[: ranks.rank])
        positive, at = batch.keys.get("index2", batch.keys["index"]), slice(first, first + len(own))
        return Negatives(own, of["features"], positive, of.get("positions"), at, of.get("guide"), of.get("within"))


class CheckedEstimator(Protocol):
    """Protocol of the estimator against which arguments are checked."""

    normalize: bool
    normalizer: Normalizer
    temperature: Temperature
    mode: Mode
    pairs: PairPolicy | None
    _anchors: int

    @property
    def n(self) -> int | None: ...
    @property
    def _ranks(self) -> Ranks: ...
    def _guard(self) -> AbstractContextManager[None]: ...
    def _index(self, index: Tensor | None, count: int) -> Tensor: ...


def check_call(
    est: CheckedEstimator,
    z1: Tensor,
    z2: Tensor,
    index: Tensor | None,
    index2: Tensor | None,
    labels: Tensor | None,
    tau: Tensor | float | None,
    negatives: Any,
    keys: Sequence[Tensor] | None,
    pairs: PairPolicy | BoundPolicy | None,
) -> CallArguments:
    """Check all arguments that one rank can check by itself, in their order, and prepare the features."""
    ranks, normalizer, policy = est._ranks, est.normalizer, est.pairs if pairs is None else pairs
    further: Tensor | None = None
    values, of_negatives = dict[str, Tensor](), dict[str, Tensor]()
    with est._guard():
        refuse_derivatives(("z1", z1), ("z2", z2))
        inputs.check_features(z1, z2, least=0 if ranks.size > 1 else 2)
        of_samples = {"index": est._index(index, len(z1))}
        if index2 is not None:
            of_samples["index2"] = _check_index2(est, index2, len(z1))
        if labels is not None:
            of_samples["labels"] = inputs.check_vector("labels", labels, len(z1))
        if tau is not None:
            tau = _check_tau(est, tau, len(z1))
        if negatives is not None:
            further, of_negatives = _check_negatives(est, negatives, of_samples, index is not None, z1)
        normalizer.check_momentum(keys is not None)
        if keys is not None:
            values |= zip(("k1", "k2"), other_units(inputs.check_momentum(keys, z1), z1, est.normalize), strict=True)
        if policy is not None:
            policy = _check_pairs(policy, est, z1, None if further is None else len(further), values, of_negatives)
        encoder = normalizer.encoder(z1, of_samples, est.normalize, est.mode == "unimodal")
    with full_precision(z1.device):  # autocast cannot stack tensors of the other half-precision dtype
        own = Features.of(z1, z2, normalize=est.normalize)
        prepared = None if further is None else Features.of(further, normalize=est.normalize)
    values = {"z1": own.unit[0], "z2": own.unit[1], **values}
    if isinstance(tau, Tensor):
        tau = promote_tau(tau, own.unit.dtype)
        if tau.dim():  # one per sample: gathered from all ranks
            values["tau"] = tau.detach().to(own.unit.device)
    options = (policy, values, of_negatives, index is not None, torch.is_grad_enabled())
    given = CallArguments(of_samples, tau, prepared, *options, own, encoder, {})
    if ranks.size > 1:
        add_facts(est, given)
    return given


def _check_index2(est: CheckedEstimator, index2: Tensor, batch: int) -> Tensor:
    """Return the checked positions in the second modality."""
    if est.mode == "unimodal":
        raise ValueError("index2 is for a second modality; in unimodal mode both views share the row of index")
    return inputs.check_vector("index2", index2, batch)


def _check_tau(est: CheckedEstimator, tau: Tensor | float, batch: int) -> Tensor | float:
    """Return the checked temperature of a call."""
    if est.temperature.learns:
        raise ValueError("tau= must be left out: this estimator learns its own temperatures, see est.temperature")
    refuse_derivatives(("tau", tau))
    return inputs.check_tau(tau, batch, est._anchors)


def _check_negatives(
    est: CheckedEstimator, negatives: Any, keys: dict[str, Tensor], named: bool, like: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the features of further candidates, and their positions, by name, if there are any."""
    est.normalizer.check_negatives()
    further, positions = inputs.check_negatives(negatives, like)
    assert further is not None
    refuse_derivatives(("negatives", further))
    if positions is None:
        return further, {}
    if "index2" not in keys:
        if not named:
            raise TypeError("negatives[1] has positions in the modality of index or index2; pass one of them")
        inputs.check_range("negatives[1]", positions, est.n, remedy=inputs.EXTRA_REMEDY)
    return further, {"positions": accelerator.to_device(positions, like.device)}


def _check_pairs(
    pairs: PairPolicy | BoundPolicy,
    est: CheckedEstimator,
    like: Tensor,
    more: int | None,
    values: dict[str, Tensor],
    of_negatives: dict[str, Tensor],
) -> PairPolicy | None:
    """Return a policy, ``None`` if it has no effect; add its tensors for the batch and for ``more`` candidates."""
    policy, guide, within = pairs if isinstance(pairs, BoundPolicy) else (pairs, None, None)
    check_policy(policy, est.normalizer)  # also one that the constructor checked: hyper-parameters may be edited
    if policy.guided and guide is None or policy.within and within is None:
        raise ValueError(
            f"{policy} needs tensors of the batch; pass pairs=policy.bind(guide=..., within=...) in every call"
        )
    if guide is not None:
        features = inputs.check_guide(guide, len(like), None if policy.spare_negatives else more)
        if policy.spare_negatives and more is not None:  # placeholders: the guide does not decide about negatives=
            features.append(features[0].new_zeros(more, features[0].shape[1]))
        values["guide1"], values["guide2"], *further = other_units(features, like, est.normalize)
        of_negatives |= zip(("guide",), further, strict=False)
    if within is not None:
        checked = inputs.check_within(within, len(like), more)
        values["within1"], *further = (accelerator.to_device(key, like.device) for key in checked)
        of_negatives |= zip(("within",), further, strict=False)
    return None if policy == NO_POLICY else policy


def check_cached(
    est: CheckedEstimator, z1: Tensor, z2: Tensor, tau: Any, negatives: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Refuse what a call with detached leaves would not detect; return the features of ``negatives`` and positions."""
    if getattr(est.normalizer, "encode", None) is not None:
        raise ValueError("encode of the sampler needs a backward pass of its features; call the estimator, not this")
    held = est.temperature.tensor
    if any(isinstance(x, Tensor) and x.requires_grad for x in (tau, None if held is None or held.is_leaf else held)):
        raise ValueError(
            "tau= requires a gradient, which this does not return; call the estimator on z1.detach()"
            ".requires_grad_() and tau.detach().requires_grad_(), and take all three gradients from there"
        )
    with est._guard():
        inputs.check_features(z1, z2, least=0)
        further, positions = inputs.check_negatives(negatives, z1)
        refuse_derivatives(("z1", z1), ("z2", z2), ("negatives", further))
    return further, positions


def check_policy(policy: PairPolicy, normalizer: Normalizer) -> None:
    """Refuse a policy that the normalizer of an estimator does not support."""
    if not isinstance(policy, PairPolicy):
        raise TypeError(f"pairs must be a compopt.PairPolicy, got {type(policy).__name__}")
    normalizer.check_pairs(policy)
