"""Features of samples that are not in the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compopt import objective
from compopt.context import refuse_tangent
from compopt.inputs import check_features

Encode = Callable[[Tensor], "Tensor | tuple[Tensor, Tensor]"]


class Encoder:
    """The user's ``encode`` as the estimator calls it: once, with the caller's autocast and gradient modes.

    Args:
        encode: from data-set positions, ``(m,)`` int64 on the CPU, to features ``(m, d)``; in bimodal mode to a pair of
            them, ``z1`` and ``z2`` of those samples.
        like: features of the batch, which those must match.
        normalize: L2-normalise them.
        unimodal: one tensor serves both directions.

    Attributes:
        outputs: what ``encode`` returned and wants gradients for.
        gradients: of each of them, once :meth:`receive` was called.
    """

    def __init__(self, encode: Encode, like: Tensor, normalize: bool, unimodal: bool) -> None:
        self._encode, self._like, self._normalize, self._unimodal = encode, like, normalize, unimodal
        device = like.device.type
        self._autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self._grad = torch.is_grad_enabled()
        self._prepared: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Features of these samples as anchors of direction 1 and 2 see them: of modality 2 and 1, without graph."""
        enabled, autocast_dtype = self._autocast
        device = self._like.device
        with (
            torch.set_grad_enabled(self._grad),
            torch.autocast(device.type, dtype=autocast_dtype, enabled=enabled),
        ):
            given = self._checked(self._encode(indices), len(indices))
        self._prepared = [(z, *objective.prepare(z, self._normalize)) for z in given]
        dtype = torch.promote_types(self._like.dtype, torch.float32)
        first, second = self._prepared[0][1], self._prepared[-1][1]
        return second.to(dtype), first.to(dtype)

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
    def features(self) -> list[Tensor]:
        """What was encoded, if anything, prepared: of every modality."""
        return [unit for _, unit, _ in self._prepared]

    @property
    def wants_gradients(self) -> bool:
        """Whether anything that was encoded does."""
        return any(z.requires_grad for z, _, _ in self._prepared)

    def receive(self, by_direction: tuple[Tensor, Tensor]) -> None:
        """Gradients with respect to what :meth:`__call__` returned, for the backward pass."""
        second, first = by_direction
        for (z, unit, norm), gradient in zip(
            self._prepared, [first + second] if self._unimodal else [first, second], strict=True
        ):
            if z.requires_grad:
                self.outputs.append(z)
                gradient = gradient.to(unit.dtype)
                self.gradients.append(
                    gradient if norm is None else objective.through_normalization(gradient, unit, norm)
                )
