"""Features as the kernel takes them, normalised and without a graph, and gradients handed back to autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compopt.checks.context import refuse_tangents
from compopt.checks.inputs import check_features
from compopt.kernel.blocks import MASKED

NORM_MIN = 1e-12  # as F.normalize
# Similarities of rows below this norm stay above what stands for "not a pair".
NORM_MAX = math.sqrt(-MASKED)

Encode = Callable[[Tensor], "Tensor | tuple[Tensor, Tensor]"]


def working_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return float64 if one of these dtypes of features or rows is, else float32: what is computed in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def prepare(z: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Features in the working dtype without their graph, normalised if asked for, and the norms they had.

    A bad row is NaN throughout: one with a NaN or an infinity, one whose norm overflows (it would be normalised to
    zero), or, not normalised, one whose norm reaches 1e15. A row too short to be normalised is a zero row.

    Args:
        z: ``(..., d)``, which may be overwritten.
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


def zero_or_nan(*features: Tensor) -> Tensor:
    """Zero, or NaN if a row of some prepared features is bad, be it in a pair or not; ``(..., d)`` each."""
    return 0 * torch.stack([z[..., 0].sum() for z in features]).sum()


def through_normalization(gradient: Tensor, unit: Tensor, norm: Tensor) -> Tensor:
    """Gradient with respect to ``z`` from the one with respect to ``unit = z / |z|``; overwrites the latter."""
    radial = torch.linalg.vecdot(gradient, unit).unsqueeze(-1)
    return gradient.addcmul_(radial, unit, value=-1).div_(norm)


@dataclass(frozen=True)
class Features:
    """Features of some modalities or views, as the caller has them and as the kernel takes them.

    Attributes:
        given: tensors of the caller, perhaps with a graph, ``(b, d)`` each; or one with all views, ``(k, b, d)``.
        unit: all of them in the working dtype, without a graph, normalised if that was asked for, ``(k, b, d)``.
        norm: their norms, ``(k, b, 1)``; ``None``: they were not normalised.
    """

    given: tuple[Tensor, ...]
    unit: Tensor
    norm: Tensor | None

    @classmethod
    def of(cls, *given: Tensor, normalize: bool) -> Features:
        """Prepare features of one shape, see :func:`prepare`."""
        return cls(given, *prepare(torch.stack([z.detach() for z in given]).flatten(0, -3), normalize))

    @property
    def want_gradients(self) -> bool:
        """True if any of them does."""
        return any(z.requires_grad for z in self.given)

    def pull_back(self, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a given tensor and its gradient, from that of ``unit``, ``(k, b, d)``, which is overwritten."""
        if self.norm is not None:
            through_normalization(gradient, self.unit, self.norm)
        return list(zip(self.given, gradient.view(len(self.given), *self.given[0].shape).unbind(), strict=True))


class Encoder:
    """The user's ``encode`` as the estimator calls it: once, with the caller's autocast and gradient modes.

    Args:
        encode: from data-set positions, ``(m,)`` int64 on the CPU, to features ``(m, d)``; in bimodal mode to a pair of
            them, ``z1`` and ``z2`` of those samples.
        like: features of the batch, which those must match.
        normalize: L2-normalise them.
        unimodal: one tensor serves both directions.

    Attributes:
        encoded: what ``encode`` returned; ``None`` before it was called.
        gradients: pairs of what it returned and its gradient, where that wants one, once :meth:`receive` was called.
    """

    def __init__(self, encode: Encode, like: Tensor, normalize: bool, unimodal: bool) -> None:
        self._encode, self._like, self._normalize, self._unimodal = encode, like, normalize, unimodal
        device = like.device.type
        self._autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self._grad = torch.is_grad_enabled()
        self.encoded: Features | None = None
        self.gradients: list[tuple[Tensor, Tensor]] = []

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Features of these samples as anchors of direction 1 and 2 see them: of modality 2 and 1, without graph."""
        enabled, dtype = self._autocast
        with torch.set_grad_enabled(self._grad), torch.autocast(self._like.device.type, dtype=dtype, enabled=enabled):
            given = self._checked(self._encode(indices), len(indices))
        self.encoded = Features.of(*given, normalize=self._normalize)
        unit = self.encoded.unit.to(working_dtype(self._like.dtype))
        return unit[-1], unit[0]

    def _checked(self, made: object, count: int) -> list[Tensor]:
        """One tensor, or one per modality."""
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
        refuse_tangents(*(("what encode returned", z) for z in given))
        return given

    @property
    def wants_gradients(self) -> bool:
        """True if anything that was encoded does."""
        return self._grad and self.encoded is not None and self.encoded.want_gradients

    def receive(self, by_direction: tuple[Tensor, Tensor]) -> None:
        """Take gradients with respect to what :meth:`__call__` returned, for the backward pass."""
        assert self.encoded is not None
        second, first = by_direction
        gradients = torch.stack([first + second] if self._unimodal else [first, second])
        pairs = self.encoded.pull_back(gradients.to(self.encoded.unit.dtype))
        self.gradients = pairs if self.wants_gradients else []


# -- autograd ----------------------------------------------------------------------------------------------------------


class _ClosedForm(torch.autograd.Function):
    """A value whose gradients are already known; autograd stores those and nothing else."""

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, Sequence[Tensor]], *inputs: Tensor) -> Tensor:
        value, gradients = known  # in a tuple, which autograd does not look into: the value itself becomes the output
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # in backward: with create_graph=True, and only then
            raise RuntimeError(
                "backward through an estimator's loss with create_graph=True: a second derivative (gradient penalty, "
                "Hessian, hvp) is not available, since the pair weights are estimates that are held constant; call "
                "backward() or grad() without create_graph, and build a penalty on gradients of some other function"
            )
        # never in half precision for features, which a scaler's factor may overflow
        found: list[Tensor | None] = [None]
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            same = gradient.dtype == grad_output.dtype
            scaled = gradient * (grad_output if same else grad_output.to(gradient.dtype))
            found.append(scaled if scaled.dtype == dtype else scaled.to(dtype))
        return tuple(found)


def with_gradients(value: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """``value`` as a node of the graph of some tensors, given in pairs with their gradients.

    Tensors that require no gradient are left out; if none is left, the result is ``value`` itself. Gradients are cast
    to the tensors' dtypes only when scaled.

    A backward pass with ``create_graph=True`` raises: the weights are estimates, and their derivative is not that of
    the objective.
    """
    wanted = [pair for pair in pairs if pair[0].requires_grad]
    if not wanted:
        return value
    tensors, gradients = zip(*wanted, strict=True)
    return _ClosedForm.apply((value, gradients), *tensors)
