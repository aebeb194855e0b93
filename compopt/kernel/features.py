"""Preparation of features for the kernel (dtype, normalisation, no graph), and connection of gradients to autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator
from compopt.checks.context import refuse_derivatives
from compopt.checks.inputs import check_features
from compopt.distributed.handshake import NULL_CONTEXT
from compopt.pairs import MASKED

NORM_MIN = 1e-12  # as F.normalize
# Similarities of rows below this norm stay above MASKED, which marks entries that are not pairs.
NORM_MAX = math.sqrt(-MASKED)

Encode = Callable[[Tensor], "Tensor | tuple[Tensor, Tensor]"]
# A tensor and its gradient, or tensors of one shape and dtype and their gradients, stacked.
TensorGradient = tuple[Tensor | tuple[Tensor, ...], Tensor]


def working_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of computations: float64 if any of these dtypes of features or rows is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def prepare(z: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Return features in the working dtype without a graph, normalised if ``normalize``, and their former norms.

    All entries of a bad row become NaN. A row is bad if it contains a NaN or an infinity, if its norm overflows
    (normalisation would return zeros), or, without normalisation, if its norm reaches 1e15. A row whose norm is below
    1e-12 is divided by 1e-12.

    Args:
        z: features, ``(..., d)``, which may be overwritten.
        normalize: divide by the norm.
    """
    dtype = working_dtype(z.dtype)
    z = z.detach() if z.requires_grad else z
    z = z if z.dtype == dtype else z.to(dtype)
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    if not normalize:
        return torch.where(norm < NORM_MAX, z, torch.nan), None
    norm = norm.nan_to_num_(nan=torch.nan, posinf=torch.nan).clamp_(min=NORM_MIN)
    return z.div_(norm), norm


def other_units(features: Sequence[Tensor], like: Tensor, normalize: bool) -> list[Tensor]:
    """Return prepared features of another model, on the device of ``like`` and in its working dtype."""
    there = (accelerator.to_device(z.detach(), like.device) for z in features)
    return [prepare(z.to(working_dtype(like.dtype), copy=True), normalize)[0] for z in there]


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast, which would compute similarities in half precision."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else NULL_CONTEXT


def promote_tau(tau: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``tau`` to at least the working dtype, since ``1 / tau`` in half precision has only three digits."""
    wanted = working_dtype(tau.dtype, dtype)
    return tau if tau.dtype == wanted else tau.to(wanted)


def zero_or_nan(*features: Tensor) -> Tensor:
    """Return zero, or NaN if any row of some prepared features is bad, also if it is in no pair; ``(..., d)`` each."""
    return 0 * torch.stack([z[..., 0].sum() for z in features]).sum()


def through_normalization(gradient: Tensor, unit: Tensor, norm: Tensor) -> Tensor:
    """Turn the gradient with respect to ``unit = z / |z|`` into that with respect to ``z``, in place."""
    radial = torch.linalg.vecdot(gradient, unit).unsqueeze(-1)
    return gradient.addcmul_(radial, unit, value=-1).div_(norm)


@dataclass(frozen=True)
class Features:
    """Features of some modalities or views: the tensors of the caller, and their prepared form for the kernel.

    Attributes:
        given: tensors of the caller, with or without a graph, ``(b, d)`` each.
        unit: all features in the working dtype, without a graph, normalised if requested, ``(k, b, d)``.
        norm: norms of the features, ``(k, b, 1)``; ``None`` if they were not normalised.
        wanted: autograd is enabled, and one of the tensors of the caller requires a gradient.
    """

    given: tuple[Tensor, ...]
    unit: Tensor
    norm: Tensor | None
    wanted: bool

    @classmethod
    def of(cls, *given: Tensor, normalize: bool) -> Features:
        """Prepare features of one shape, see :func:`prepare`."""
        stacked = torch.stack(given)
        return cls(given, *prepare(stacked, normalize), stacked.requires_grad)

    def pull_back(self, gradient: Tensor) -> TensorGradient:
        """Return the given tensors and their gradients, from that of ``unit``, ``(k, b, d)``, which is overwritten."""
        if self.norm is not None:
            through_normalization(gradient, self.unit, self.norm)
        return self.given, gradient


class Encoder:
    """Wrapper of the user's ``encode``, which is called once, with the caller's autocast and gradient modes.

    Args:
        encode: function from data-set positions, ``(m,)`` int64 on the CPU, to features ``(m, d)``; in bimodal mode to
            a pair of tensors, ``z1`` and ``z2`` of those samples.
        like: features of the batch; the encoded features must have the same dimension and device.
        normalize: L2-normalise the encoded features.
        unimodal: one tensor is used for both directions.

    Attributes:
        encoded: the encoded features; ``None`` before the call.
        gradients: tensors that ``encode`` returned and their gradients, set by :meth:`receive`; empty if no tensor
            requires one.
    """

    def __init__(self, encode: Encode, like: Tensor, normalize: bool, unimodal: bool) -> None:
        self._encode, self._like, self._normalize, self._unimodal = encode, like, normalize, unimodal
        device = like.device.type
        self._autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self._grad = torch.is_grad_enabled()
        self.encoded: Features | None = None
        self.gradients: list[TensorGradient] = []

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of these samples as candidates of directions 1 and 2 (modalities 2 and 1), no graph."""
        enabled, dtype = self._autocast
        with torch.set_grad_enabled(self._grad):
            with torch.autocast(self._like.device.type, dtype=dtype, enabled=enabled):
                given = self._checked(self._encode(indices), len(indices))
            self.encoded = Features.of(*given, normalize=self._normalize)
        unit = self.encoded.unit.to(working_dtype(self._like.dtype))
        return unit[-1], unit[0]

    def _checked(self, made: object, count: int) -> list[Tensor]:
        """Return the encoded tensors, one or one per modality, after checks of type, shape and device."""
        given: list[Tensor] = [made] if isinstance(made, Tensor) else []
        if not self._unimodal:
            given = list(made) if isinstance(made, (tuple, list)) else []
        if len(given) != (1 if self._unimodal else 2) or not all(isinstance(z, Tensor) for z in given):
            wanted = "a tensor (m, d)" if self._unimodal else "a pair of tensors (m, d), z1 and z2 of those samples,"
            mode = "unimodal" if self._unimodal else "bimodal"
            raise TypeError(f"encode must return {wanted} in {mode} mode, got {type(made).__name__}")
        for z in given:
            if z.shape != (count, self._like.shape[1]):
                wanted = f"{count} features of dimension {self._like.shape[1]}"
                raise ValueError(f"encode must return {wanted}, got shape {tuple(z.shape)}")
            if z.device != self._like.device:
                raise ValueError(f"encode returned features on {z.device}, the batch is on {self._like.device}")
        check_features(given[0], given[-1], least=0)
        refuse_derivatives(*(("what encode returned", z) for z in given))
        return given

    @property
    def wants_gradients(self) -> bool:
        """Return whether any encoded tensor requires a gradient."""
        return self.encoded is not None and self.encoded.wanted

    def receive(self, by_direction: tuple[Tensor, Tensor]) -> None:
        """Store gradients with respect to the features that :meth:`__call__` returned, for the backward pass."""
        assert self.encoded is not None
        second, first = by_direction
        gradients = torch.stack([first + second] if self._unimodal else [first, second])
        slope = self.encoded.pull_back(gradients.to(self.encoded.unit.dtype))
        self.gradients = [slope] if self.wants_gradients else []


# -- autograd ----------------------------------------------------------------------------------------------------------


SECOND_DERIVATIVE = (
    "backward through an estimator's loss with create_graph=True: a second derivative (gradient penalty, Hessian, hvp) "
    "is not available, since the pair weights are estimates that are held constant; call backward() or grad() without "
    "create_graph, and build a penalty on gradients of some other function"
)


class _ClosedForm(torch.autograd.Function):
    """Node of the graph with known gradients, which are all that autograd stores."""

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, Sequence[Tensor], list[torch.dtype]], *inputs: Tensor) -> Tensor:
        del inputs
        # in a tuple, which autograd does not inspect, so that the value itself is the output
        value, gradients, ctx.dtypes = known
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # in backward: with create_graph=True, and only then
            raise RuntimeError(SECOND_DERIVATIVE)
        # multiplied in the working dtype, since the factor of a gradient scaler may overflow half precision
        found: list[Tensor | None] = [None]
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            found += (gradient * grad_output.to(gradient.dtype)).to(dtype).unbind()
        return tuple(found)


def reaches_others(value: Tensor, *own: Tensor) -> bool:
    """Return whether the graph of ``value`` has leaves other than ``own``, for example parameters inside a function."""
    nodes, seen = [value.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is each for each in own):
            return True
        nodes.extend(function for function, _ in node.next_functions)
    return False


def _wanted(tensors: Tensor | tuple[Tensor, ...], gradient: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the first to the last tensor that requires a gradient, none if none does, and gradients, ``(k, ...)``."""
    if isinstance(tensors, Tensor):
        tensors, gradient = (tensors,), gradient[None]
    found = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
    part = slice(found[0], found[-1] + 1) if found else slice(0)
    return tensors[part], gradient[part]


def with_gradients(value: Tensor, slopes: Sequence[TensorGradient]) -> Tensor:
    """Return ``value`` as a node of the graph of some tensors, passed in pairs with their gradients.

    Tensors that do not require a gradient are ignored; if none does, the result is ``value`` itself. Gradients are
    cast to the tensors' dtypes after they are multiplied by the incoming gradient. The result is NaN if a gradient is
    not finite in the dtype of its tensor, without a synchronisation of the device.

    A backward pass with ``create_graph=True`` raises an error: the weights are estimates, and their derivative is not
    that of the objective.
    """
    wide = value.dtype if value.dtype.itemsize >= 4 else torch.float32  # sums in half precision would overflow
    inputs: list[Tensor] = []
    gradients: list[Tensor] = []
    dtypes: list[torch.dtype] = []
    total: Tensor | None = None
    for slope in slopes:
        tensors, gradient = _wanted(*slope)
        if tensors:
            inputs += tensors
            gradients.append(gradient)
            dtypes.append(tensors[0].dtype)
            found = gradient.to(dtypes[-1]).sum(dtype=wide)
            total = found if total is None else total + found
    if total is None:
        return value
    # 0 times inf is NaN
    value = torch.add(value, total, alpha=0) if wide == value.dtype else value + (0 * total).to(value.dtype)
    return _ClosedForm.apply((value, gradients, dtypes), *inputs)
