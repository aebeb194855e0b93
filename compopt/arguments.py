"""Checks of the arguments of a call of :class:`~compopt.ContrastiveEstimator`, and preparation for the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

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
from compopt.kernel.features import Encode, Encoder, Features, prepare, working_dtype
from compopt.kernel.pairs import Extra
from compopt.pairs import NO_POLICY, PairPolicy

# Directions with anchors, by the value of directions=.
DIRECTIONS = {"both": ("forward", "backward"), "forward": ("forward",)}
# Arguments of a call that an option of a policy requires, and the option as shown in error messages.
OPTIONS = {"guide": "guided=True", "within": "within=True"}


@dataclass(frozen=True)
class Given:
    """Checked arguments of one call on one rank.

    Attributes:
        keys: ``index`` and, if given, ``index2`` and ``labels``, ``(b,)`` int64.
        own: the features of this rank.
        tau: result of :func:`~compopt.checks.inputs.check_tau`; ``None``: the estimator's temperature.
        extra, positions: further candidates and their data-set positions, or ``None``.
        encoder: encoder of samples outside the batch, or ``None``.
        facts: integers that must be equal on all ranks.
        policy: policy of pairs, or ``None``.
        values: tensors that the policy requires: ``guide1`` and ``guide2``, ``(b, g)``, and ``within1``, ``(b,)``.
        of_extra: the same for the further candidates: ``guide``, ``(M, g)``, and ``within``, ``(M,)``.
        momentum: prepared features of a momentum encoder, ``(2, b, d)``, or ``None``.
        named: ``index`` was passed.
        graph: autograd is enabled in the caller.
    """

    keys: dict[str, Tensor]
    own: Features
    tau: float | Tensor | None
    extra: Features | None
    positions: Tensor | None
    encoder: Encoder | None
    facts: dict[str, int]
    policy: PairPolicy | None
    values: dict[str, Tensor]
    of_extra: dict[str, Tensor]
    momentum: Tensor | None
    named: bool
    graph: bool = field(default_factory=torch.is_grad_enabled)

    def wants(self, temperature: float | Tensor) -> bool:
        """Return whether a temperature requires a gradient from this call."""
        return self.graph and isinstance(temperature, Tensor) and temperature.requires_grad

    @property
    def guides(self) -> list[Tensor]:
        """Features of the guide."""
        given = (*self.values.items(), *self.of_extra.items())
        return [value for name, value in given if name.startswith("guide")]

    def gather_extra(self, batch: Batch, ranks: Ranks) -> Extra | None:
        """Return the further candidates of all ranks. Collective."""
        if self.extra is None:
            return None
        own = self.extra.unit[0]
        values = {"features": own, **self.of_extra}
        if self.positions is not None:
            values["positions"] = accelerator.to_device(self.positions, own.device)
        gathered = ranks.gather([*values.values()], batch.more) if max(batch.more) else values.values()
        found, first = dict(zip(values, gathered, strict=True)), sum(batch.more[: ranks.rank])
        positive, at = batch.keys.get("index2", batch.keys["index"]), slice(first, first + len(own))
        positions, guide, key = (found.get(name) for name in ("positions", "guide", "within"))
        return Extra(own, found["features"], positive, positions, at, guide, key)

    @property
    def want_gradients(self) -> bool:
        """Return whether any features require a gradient."""
        return self.graph and (self.own.want_gradients or (self.extra is not None and self.extra.want_gradients))


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


def check_call(est: Called, z1: Tensor, z2: Tensor, asked: Mapping[str, Any]) -> Given:
    """Check all arguments that one rank can check by itself, and prepare the features.

    ``asked`` contains the arguments other than ``z1`` and ``z2``, by name.
    """
    encode, tau, extra, policy = (asked[name] for name in ("encode", "tau", "extra", "pairs"))
    engine = est._engine
    several = engine.ranks.size > 1
    with engine.handshake.guard():
        refuse_derivatives(("z1", z1), ("z2", z2), ("tau", tau), ("extra", extra))
        inputs.check_features(z1, z2, least=0 if several else 2)
        batch = z1.shape[0]
        keys = _check_keys(est, asked, batch)
        if tau is not None:
            if est.temperature.learns:
                raise ValueError(
                    "tau= must be left out: this estimator learns its own temperatures, see est.temperature"
                )
            tau = inputs.check_tau(tau, batch, est._anchors)
        est.normalizer.check_encode(encode, keys)
        positions = _check_extra(est, extra, asked["extra_index"], keys, z1)
        if positions is not None and asked["index"] is None and asked["index2"] is None:
            raise TypeError("extra_index= has positions in the modality of index or index2; pass one of them")
        policy = est.pairs if policy is None else policy
        if policy is not None:  # also one that the constructor checked: hyper-parameters may have been edited
            check_policy(policy, est.normalizer)
            policy = None if policy == NO_POLICY else policy
        more = None if extra is None else len(extra)
        _refuse_arguments(policy, asked)
        values, of_extra = _check_asked(policy or NO_POLICY, est.normalize, asked, z1, more)
        momentum = _check_momentum(est, asked["momentum_features"], z1)
    facts: dict[str, int] = {}
    if several:
        given = {"named": asked["index"], "encode": encode, "momentum": momentum}
        facts = {name: int(value is not None) for name, value in given.items()}
        facts |= {"extra": 0 if extra is None else 1 if positions is None else 2, **tau_facts(tau)}
        wants = tau.requires_grad if isinstance(tau, Tensor) else tau is None and est.temperature.wants_gradient
        facts["parameters"] = _parameters(est)
        facts["learning"] = int(wants and torch.is_grad_enabled())
        if policy is not None:  # a fingerprint, since facts are single integers
            widths = [value.shape[1:] for value in values.values()]
            facts["policy"] = fingerprint({"pairs": policy, "dimensions": dict(zip(values, widths, strict=True))})
        numbers = [*_shared(est), *([tau] if isinstance(tau, Tensor) and tau.dim() == 0 else [])]
        there = [number.detach().flatten().float() for number in numbers if number.device.type != "cpu"]
        if there:
            values["shared"] = torch.cat([number.to(z1.device) for number in there]).expand(batch, -1)
    encoder = None if encode is None else Encoder(encode, z1, est.normalize, est.mode == "unimodal")
    with full_precision(z1.device):  # autocast cannot stack tensors of the other half-precision dtype
        own = Features.of(z1, z2, normalize=est.normalize)
        further = None if extra is None else Features.of(extra, normalize=est.normalize)
    if isinstance(tau, Tensor):
        tau = at_least(tau, own.unit.dtype)
    named, checked = asked["index"] is not None, (policy, values, of_extra, momentum)
    return Given(keys, own, tau, further, positions, encoder, facts, *checked, named)


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


def _check_keys(est: Called, asked: Mapping[str, Any], batch: int) -> dict[str, Tensor]:
    """Return the checked keys of the samples: ``index`` and, if given, ``index2`` and ``labels``."""
    keys = {"index": est._index(asked["index"], batch)}
    if asked["index2"] is not None:
        if est.mode == "unimodal":
            raise ValueError("index2 is for a second modality; in unimodal mode both views share the row of index")
        keys["index2"] = inputs.check_vector("index2", asked["index2"], batch)
    if asked["labels"] is not None:
        keys["labels"] = inputs.check_vector("labels", asked["labels"], batch)
    return keys


def check_cached(
    est: Called,
    z1: Tensor,
    z2: Tensor,
    encode: Encode | None,
    tau: Tensor | float | None,
    extra: Tensor | None,
    extra_index: Tensor | None,
) -> None:
    """Refuse arguments that a call with detached leaves in place of the features would not detect."""
    if encode is not None:
        raise ValueError("encode= needs a backward pass of its own features; call the estimator, not this")
    if isinstance(tau, Tensor) and tau.requires_grad:
        raise ValueError(
            "tau= requires a gradient, which this does not return; call the estimator on z1.detach()"
            ".requires_grad_() and tau.detach().requires_grad_(), and take all three gradients from there"
        )
    refuse_derivatives(("z1", z1), ("z2", z2), ("extra", extra))
    with est._engine.handshake.guard():
        inputs.check_features(z1, z2, least=0)
        if extra is not None:
            inputs.check_extra(extra, extra_index, z1)


def check_options(mode: str, directions: str, normalize: bool, multiply_tau: bool) -> None:
    """Refuse unknown options of an estimator, and options that exclude each other."""
    checks.one_of("mode", mode, ("bimodal", "unimodal"))
    checks.one_of("directions", directions, DIRECTIONS)
    if directions == "forward" and mode == "unimodal":
        raise ValueError('directions="forward" is for two modalities; in mode="unimodal" both views are anchors')
    checks.flag("normalize", normalize)
    checks.flag("multiply_tau", multiply_tau)


def check_policy(policy: PairPolicy, normalizer: Normalizer) -> None:
    """Refuse a policy that the normalizer of an estimator does not support."""
    if not isinstance(policy, PairPolicy):
        raise TypeError(f"pairs must be a compopt.PairPolicy, got {type(policy).__name__}")
    normalizer.check_pairs(policy)


def _check_extra(
    est: Called, extra: Tensor | None, extra_index: Tensor | None, keys: dict[str, Tensor], like: Tensor
) -> Tensor | None:
    """Check further candidates; return their positions, or ``None`` if there are no positions."""
    if extra is None:
        if extra_index is not None:
            raise TypeError("extra_index= has the positions of extra=, which is None")
        return None
    est.normalizer.check_extra()
    _, positions = inputs.check_extra(extra, extra_index, like)
    if positions is not None and "index2" not in keys:
        inputs.check_range("extra_index", positions, est._engine.groups.n, remedy=inputs.EXTRA_REMEDY)
    return positions


def _check_momentum(est: Called, features: Sequence[Tensor] | None, like: Tensor) -> Tensor | None:
    """Return the checked and prepared features of a momentum encoder, ``(2, b, d)``; ``None`` if there are none."""
    est.normalizer.check_momentum(features is not None)
    if features is None:
        return None
    with full_precision(like.device):
        return torch.stack(_units(inputs.check_momentum(features, like), like, est.normalize))


def _refuse_arguments(policy: PairPolicy | None, given: Mapping[str, Any]) -> None:
    """Refuse a call without an argument that the policy requires, or with one that has no effect."""
    for name, option in OPTIONS.items():
        wanted = policy is not None and name in policy.asks
        if wanted and given[name] is None:
            raise ValueError(f"{name} is missing, which PairPolicy({option}) asks for; pass {name}= in every call")
        if given[name] is not None and not wanted:
            remedy = f"give the estimator or this call pairs=PairPolicy({option}, ...)"
            raise ValueError(f"{name}= has no effect here: {remedy}")


def _check_asked(
    policy: PairPolicy, normalize: bool, given: Mapping[str, Any], like: Tensor, more: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that the policy requires, for the batch and for ``more`` further candidates."""
    values: dict[str, Tensor] = {}
    of_extra: dict[str, Tensor] = {}
    if policy.guided:
        features = inputs.check_guide(given["guide"], len(like), None if policy.spare_extra else more)
        if policy.spare_extra and more is not None:  # placeholders: the guide does not decide about extra=
            features.append(features[0].new_zeros(more, features[0].shape[1]))
        values["guide1"], values["guide2"], *further = _units(features, like, normalize)
        of_extra |= zip(("guide",), further, strict=False)
    if policy.within:
        checked = inputs.check_within(given["within"], len(like), more)
        values["within1"], *further = (accelerator.to_device(key, like.device) for key in checked)
        of_extra |= zip(("within",), further, strict=False)
    return values, of_extra


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
