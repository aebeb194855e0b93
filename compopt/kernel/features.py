"""Features as the kernel takes them: normalised, without a graph, those of samples outside the batch included."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compopt.checks.context import refuse_tangent
from compopt.checks.inputs import check_features
from compopt.kernel.log_sum_exp import MASKED

NORM_MIN = 1e-12  # as F.normalize
# Similarities of rows below this norm stay above what stands for "not a pair".
NORM_MAX = math.sqrt(-MASKED)

Encode = Callable[[Tensor], "Tensor | tuple[Tensor, Tensor]"]


def working_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """In which features and rows of these dtypes are computed: float64 if one of them is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def prepare(z: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Features in working precision without their graph, normalised if asked for, and the norms they had.

    A bad row is NaN throughout: one with a NaN or an infinity, one whose norm overflows (it would be normalised to
    zero), or, not normalised, one whose norm reaches 1e15. A row too short to be normalised is a zero row.

    Args:
        z: ``(..., d)``, which may be overwritten.
        normalize: divide by the norm.
    """
    z = z.detach().to(working_dtype(z.dtype))
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    if not normalize:
        return torch.where(norm < NORM_MAX, z, torch.nan), None
    norm = norm.nan_to_num_(nan=torch.nan, posinf=torch.nan).clamp_(min=NORM_MIN)
    return z.div_(norm), norm


def nothing(*features: Tensor) -> Tensor:
    """Zero, or NaN if a row of some prepared features is bad, be it in a pair or not; ``(..., d)`` each."""
    return 0 * torch.stack([z[..., 0].sum() for z in features]).sum()


def through_normalization(gradient: Tensor, unit: Tensor, norm: Tensor) -> Tensor:
    """Gradient with respect to ``z`` from the one with respect to ``unit = z / |z|``; overwrites the latter."""
    radial = torch.linalg.vecdot(gradient, unit).unsqueeze(-1)
    return gradient.addcmul_(radial, unit, value=-1).div_(norm)


@dataclass(frozen=True)
class Features:
    """Features of some modalities or views, as the caller has them and as the kernel takes them: in one tensor.

    Attributes:
        node: where gradients enter the graph of all of them, ``(k, b, d)``: one tensor, which scales as one. Its values
            are not theirs any more.
        unit: all of them in working precision, without a graph, normalised if that was asked for, ``(k, b, d)``.
        norm: what they were divided by, ``(k, b, 1)``; ``None``: nothing.
    """

    node: Tensor
    unit: Tensor
    norm: Tensor | None

    @classmethod
    def of(cls, *given: Tensor, normalize: bool) -> Features:
        """What :func:`prepare` makes of features of one shape."""
        node = torch.stack(given)
        return cls(node, *prepare(node, normalize))

    @property
    def want_gradients(self) -> bool:
        """Whether any of them does."""
        return self.node.requires_grad

    def pull_back(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The node with its gradient, from that of ``unit``, ``(k, b, d)``, which is overwritten."""
        if self.norm is not None:
            through_normalization(gradient, self.unit, self.norm)
        return self.node, gradient


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
        enabled, autocast_dtype = self._autocast
        device = self._like.device
        with (
            torch.set_grad_enabled(self._grad),
            torch.autocast(device.type, dtype=autocast_dtype, enabled=enabled),
        ):
            given = self._checked(self._encode(indices), len(indices))
        with torch.set_grad_enabled(self._grad):
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
        for z in given:
            refuse_tangent("what encode returned", z)
        return given

    @property
    def wants_gradients(self) -> bool:
        """Whether anything that was encoded does."""
        return self.encoded is not None and self.encoded.want_gradients

    def receive(self, by_direction: tuple[Tensor, Tensor]) -> None:
        """Gradients with respect to what :meth:`__call__` returned, for the backward pass."""
        assert self.encoded is not None
        second, first = by_direction
        gradients = torch.stack([first + second] if self._unimodal else [first, second])
        pair = self.encoded.pull_back(gradients.to(self.encoded.unit.dtype))
        self.gradients = [pair] if self.wants_gradients else []
