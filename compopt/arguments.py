"""Checks of the arguments of a call of :class:`~compopt.ContrastiveEstimator`, and preparation for the kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from compopt import accelerator, checks
from compopt.batch import Batch
from compopt.checks import Directions, inputs
from compopt.checks.context import refuse_derivatives
from compopt.distributed.handshake import NOTHING, fingerprint, tau_facts
from compopt.distributed.ranks import Ranks
from compopt.estimator.component import Normalizer, Temperature
from compopt.estimator.engine import Engine
from compopt.kernel.features import Encoder, Features, prepare, working_dtype
from compopt.kernel.pairs import Negatives
from compopt.pairs import NO_POLICY, BoundPolicy, PairPolicy

E = TypeVar("E")
P = ParamSpec("P")
R = TypeVar("R")
# Directions with anchors, by the value of directions=.
DIRECTIONS = {"both": ("forward", "backward"), "forward": ("forward",)}


@dataclass(frozen=True)
class Given:
    """Checked arguments of one call on one rank.

    Attributes:
        keys: ``index`` and, if given, ``index2`` and ``labels``, ``(b,)`` int64.
        own: the features of this rank.
        tau: result of :func:`~compopt.checks.inputs.check_tau`; ``None``: the estimator's temperature.
        negatives, positions: further candidates (``negatives=``) and their data-set positions, or ``None``.
        encoder: encoder of samples outside the batch, or ``None``.
        facts: integers that must be equal on all ranks.
        policy: policy of pairs, or ``None``.
        values: tensors that the policy requires: ``guide1`` and ``guide2``, ``(b, g)``, and ``within1``, ``(b,)``.
        of_negatives: the same for the further candidates: ``guide``, ``(M, g)``, and ``within``, ``(M,)``.
        momentum: prepared features of a momentum encoder (``keys=``), ``(2, b, d)``, or ``None``.
        named: ``index`` was passed.
        graph: autograd is enabled in the caller.
    """

    keys: dict[str, Tensor]
    own: Features
    tau: float | Tensor | None
    negatives: Features | None
    positions: Tensor | None
    encoder: Encoder | None
    facts: dict[str, int]
    policy: PairPolicy | None
    values: dict[str, Tensor]
    of_negatives: dict[str, Tensor]
    momentum: Tensor | None
    named: bool
    graph: bool = field(default_factory=torch.is_grad_enabled)

    def wants(self, temperature: float | Tensor) -> bool:
        """Return whether a temperature requires a gradient from this call."""
        return self.graph and isinstance(temperature, Tensor) and temperature.requires_grad

    @property
    def guides(self) -> list[Tensor]:
        """Features of the guide."""
        given = (*self.values.items(), *self.of_negatives.items())
        return [value for name, value in given if name.startswith("guide")]

    def gather_negatives(self, batch: Batch, ranks: Ranks) -> Negatives | None:
        """Return the further candidates of all ranks. Collective."""
        if self.negatives is None:
            return None
        own = self.negatives.unit[0]
        values = {"features": own, **self.of_negatives}
        if self.positions is not None:
            values["positions"] = accelerator.to_device(self.positions, own.device)
        gathered = ranks.gather([*values.values()], batch.more) if max(batch.more) else values.values()
        found, first = dict(zip(values, gathered, strict=True)), sum(batch.more[: ranks.rank])
        positive, at = batch.keys.get("index2", batch.keys["index"]), slice(first, first + len(own))
        positions, guide, key = (found.get(name) for name in ("positions", "guide", "within"))
        return Negatives(own, found["features"], positive, positions, at, guide, key)

    @property
    def want_gradients(self) -> bool:
        """Return whether any features require a gradient."""
        return self.graph and (
            self.own.want_gradients or (self.negatives is not None and self.negatives.want_gradients)
        )


class Called(Protocol):
    """Protocol of the estimator against which arguments are checked."""

    normalize: bool
    normalizer: Normalizer
    temperature: Temperature
    mode: str
    directions: Directions
    pairs: PairPolicy | None
    _anchors: int
    _at_first: int | None

    @property
    def _engine(self) -> Engine: ...
    def _index(self, index: Tensor | None, count: int) -> Tensor: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


def three_by_position(call: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Refuse a call with more positional arguments, usually an unpacked output of a model, and name the remedy."""

    @functools.wraps(call)
    def checked(self: E, *args: P.args, **given: P.kwargs) -> R:
        if len(args) > 3:
            raise TypeError(
                f"a call has up to three arguments by position, z1, z2 and index, got {len(args)}"
                f"{inputs.remedy_for(args[0])}"
            )
        return call(self, *args, **given)

    return checked


def check_call(
    est: Called,
    z1: Tensor,
    z2: Tensor,
    index: Tensor | None,
    index2: Tensor | None,
    labels: Tensor | None,
    tau: Tensor | float | None,
    negatives: Any,
    keys: Sequence[Tensor] | None,
    pairs: PairPolicy | BoundPolicy | None,
) -> Given:
    """Check all arguments that one rank can check by itself, in their order, and prepare the features."""
    ranks, normalizer, unimodal = est._engine.ranks, est.normalizer, est.mode == "unimodal"
    further: Tensor | None = None
    positions: Tensor | None = None
    momentum: list[Tensor] = []
    values: dict[str, Tensor] = {}
    of_negatives: dict[str, Tensor] = {}
    policy = est.pairs if pairs is None else pairs
    with est._engine.handshake.guard():
        refuse_derivatives(("z1", z1), ("z2", z2))
        inputs.check_features(z1, z2, least=0 if ranks.size > 1 else 2)
        batch = z1.shape[0]
        of_samples = _check_samples(est, index, index2, labels, batch)
        if tau is not None:
            tau = _check_tau(est, tau, batch)
        if negatives is not None:
            further, positions = _check_negatives(est, negatives, of_samples, index is not None, z1)
        normalizer.check_momentum(keys is not None)
        if keys is not None:
            momentum = inputs.check_momentum(keys, z1)
        if policy is not None:
            more = None if further is None else len(further)
            policy, values, of_negatives = _check_pairs(policy, est, z1, more)
        encoder = normalizer.encoder(z1, of_samples, est.normalize, unimodal)
    with full_precision(z1.device):  # autocast cannot stack tensors of the other half-precision dtype
        own = Features.of(z1, z2, normalize=est.normalize)
        negatives = None if further is None else Features.of(further, normalize=est.normalize)
        copy = torch.stack(_units(momentum, z1, est.normalize)) if momentum else None
    if isinstance(tau, Tensor):
        tau = at_least(tau, own.unit.dtype)
    checked = (policy, values, of_negatives, copy, index is not None)
    given = Given(of_samples, own, tau, negatives, positions, encoder, {}, *checked)
    return _with_facts(est, given) if ranks.size > 1 else given


def _check_samples(
    est: Called, index: Tensor | None, index2: Tensor | None, labels: Tensor | None, batch: int
) -> dict[str, Tensor]:
    """Return the checked keys of the samples: ``index`` and, if given, ``index2`` and ``labels``."""
    keys = {"index": est._index(index, batch)}
    if index2 is not None:
        if est.mode == "unimodal":
            raise ValueError("index2 is for a second modality; in unimodal mode both views share the row of index")
        keys["index2"] = inputs.check_vector("index2", index2, batch)
    if labels is not None:
        keys["labels"] = inputs.check_vector("labels", labels, batch)
    return keys


def _check_tau(est: Called, tau: Tensor | float, batch: int) -> Tensor | float:
    """Return the checked temperature of a call."""
    if est.temperature.learns:
        raise ValueError("tau= must be left out: this estimator learns its own temperatures, see est.temperature")
    refuse_derivatives(("tau", tau))
    return inputs.check_tau(tau, batch, est._anchors)


def _check_negatives(
    est: Called, negatives: Any, keys: dict[str, Tensor], named: bool, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the features of further candidates and their positions, or ``None`` if there are no positions."""
    est.normalizer.check_negatives()
    further, positions = inputs.check_negatives(negatives, like)
    assert further is not None
    refuse_derivatives(("negatives", further))
    if positions is not None and "index2" not in keys:
        if not named:
            raise TypeError("negatives[1] has positions in the modality of index or index2; pass one of them")
        inputs.check_range("negatives[1]", positions, est._engine.groups.n, remedy=inputs.EXTRA_REMEDY)
    return further, positions


def _check_pairs(
    pairs: PairPolicy | BoundPolicy, est: Called, like: Tensor, more: int | None
) -> tuple[PairPolicy | None, dict[str, Tensor], dict[str, Tensor]]:
    """Return a policy, ``None`` if it has no effect, and its tensors for the batch and for ``more`` candidates."""
    policy, guide, within = pairs if isinstance(pairs, BoundPolicy) else (pairs, None, None)
    check_policy(policy, est.normalizer)  # also one that the constructor checked: hyper-parameters may be edited
    values: dict[str, Tensor] = {}
    of_negatives: dict[str, Tensor] = {}
    if policy.guided and guide is None or policy.within and within is None:
        raise ValueError(
            f"{policy} needs tensors of the batch; pass pairs=policy.bind(guide=..., within=...) in every call"
        )
    if guide is not None:
        features = inputs.check_guide(guide, len(like), None if policy.spare_negatives else more)
        if policy.spare_negatives and more is not None:  # placeholders: the guide does not decide about negatives=
            features.append(features[0].new_zeros(more, features[0].shape[1]))
        values["guide1"], values["guide2"], *further = _units(features, like, est.normalize)
        of_negatives |= zip(("guide",), further, strict=False)
    if within is not None:
        checked = inputs.check_within(within, len(like), more)
        values["within1"], *further = (accelerator.to_device(key, like.device) for key in checked)
        of_negatives |= zip(("within",), further, strict=False)
    return None if policy == NO_POLICY else policy, values, of_negatives


def check_cached(est: Called, z1: Tensor, z2: Tensor, tau: Any, negatives: Any) -> tuple[Tensor | None, Tensor | None]:
    """Refuse what a call with detached leaves would not detect; return the features of ``negatives`` and positions."""
    if getattr(est.normalizer, "encode", None) is not None:
        raise ValueError("encode of the sampler needs a backward pass of its features; call the estimator, not this")
    if isinstance(tau, Tensor) and tau.requires_grad:
        raise ValueError(
            "tau= requires a gradient, which this does not return; call the estimator on z1.detach()"
            ".requires_grad_() and tau.detach().requires_grad_(), and take all three gradients from there"
        )
    with est._engine.handshake.guard():
        inputs.check_features(z1, z2, least=0)
        further, positions = inputs.check_negatives(negatives, z1)
        refuse_derivatives(("z1", z1), ("z2", z2), ("negatives", further))
    return further, positions


def check_policy(policy: PairPolicy, normalizer: Normalizer) -> None:
    """Refuse a policy that the normalizer of an estimator does not support."""
    if not isinstance(policy, PairPolicy):
        raise TypeError(f"pairs must be a compopt.PairPolicy, got {type(policy).__name__}")
    normalizer.check_pairs(policy)


def check_options(mode: str, directions: str, normalize: bool, multiply_tau: bool) -> None:
    """Refuse unknown options of an estimator, and options that exclude each other."""
    checks.one_of("mode", mode, ("bimodal", "unimodal"))
    checks.one_of("directions", directions, DIRECTIONS)
    if directions == "forward" and mode == "unimodal":
        raise ValueError('directions="forward" is for two modalities; in mode="unimodal" both views are anchors')
    checks.flag("normalize", normalize)
    checks.flag("multiply_tau", multiply_tau)


# -- facts that must be equal on all ranks -----------------------------------------------------------------------------


def _with_facts(est: Called, given: Given) -> Given:
    """Return the arguments with the facts that all ranks compare; tensors on a device are compared there."""
    tau, facts = given.tau, {"named": int(given.named), "encode": int(given.encoder is not None)}
    facts["momentum"] = int(given.momentum is not None)
    facts["negatives"] = 0 if given.negatives is None else 1 if given.positions is None else 2
    facts |= {**tau_facts(tau), "parameters": _parameters(est)}
    wants = tau.requires_grad if isinstance(tau, Tensor) else tau is None and est.temperature.wants_gradient
    facts["learning"] = int(wants and given.graph)
    values = dict(given.values)
    if given.policy is not None:  # a fingerprint, since facts are single integers
        widths = {name: value.shape[1:] for name, value in values.items()}
        facts["policy"] = fingerprint({"pairs": given.policy, "dimensions": widths})
    numbers = [*_shared(est), *([tau] if isinstance(tau, Tensor) and tau.dim() == 0 else [])]
    on_device = [number.detach().flatten().float() for number in numbers if number.device.type != "cpu"]
    if on_device:
        unit = given.own.unit
        values["shared"] = torch.cat([number.to(unit.device) for number in on_device]).expand(unit.shape[1], -1)
    return replace(given, facts=facts, values=values)


def _shared(est: Called) -> list[Tensor]:
    """Return the tensors that all samples share and that may change between calls: parameters, and a given ``tau``."""
    tensor = getattr(est.temperature, "tensor", None)
    return [*est.parameters(), *([] if tensor is None else [tensor])]


def _parameters(est: Called) -> int:
    """Return the fact for these tensors on the host; on a device, and for a dual, for their values at the first call.

    The host would wait for a device, where :meth:`AsyncChecks.alike` compares them in later calls.
    """
    shared = _shared(est)
    if est._at_first is not None and (est.temperature.learns or any(x.device.type != "cpu" for x in shared)):
        return est._at_first
    values = [f"{x.detach().cpu().tolist()} {x.dtype}" for x in shared]
    return fingerprint({"parameters": values, "tau": est.temperature.constants()})


# -- features of other models, and dtypes ------------------------------------------------------------------------------


def _units(features: Sequence[Tensor], like: Tensor, normalize: bool) -> list[Tensor]:
    """Return prepared features of another model, on the device of ``like`` and in its working dtype."""
    there = (accelerator.to_device(z.detach(), like.device) for z in features)
    return [prepare(z.to(working_dtype(like.dtype), copy=True), normalize)[0] for z in there]


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast, which would compute similarities in half precision."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else NOTHING


def at_least(tau: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``tau`` to at least the working dtype, since ``1 / tau`` in half precision has only three digits."""
    wanted = working_dtype(tau.dtype, dtype)
    return tau if tau.dtype == wanted else tau.to(wanted)
