"""Temperature that all anchors share: a constant, a tensor of the user, or CLIP's learned scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from compopt import checks
from compopt.checks import values
from compopt.checks.inputs import check_tau
from compopt.estimator.groups import Hyper
from compopt.estimator.parts import Temperature

LEARNED_TAU_MIN = 0.01  # CLIP caps its scale at 100


class FixedTemperature(Temperature):
    r"""Constant temperature ``tau``, shared by all anchors.

    Example:
        >>> import torch, compopt
        >>> tau = compopt.FixedTemperature(0.1, learn=True)
        >>> est = compopt.ContrastiveEstimator(compopt.BatchNormalizer(True), tau, multiply_tau=False)
        >>> optimizer = torch.optim.AdamW(est.parameters())  # beside the model's

    Args:
        tau: a number, which every sample group may override; or a 0-d tensor. If the tensor requires grad, it receives
            the derivative of the returned objective with ``alpha`` and ``w`` held constant (the mean of ``G`` with
            ``rho = 0``).
        learn: make ``log(1/tau)`` a parameter, part of ``est.parameters()``, for the user's optimizer, as in CLIP.
            ``tau`` is clamped to at least 0.01 when used; gradients that increase ``tau`` still pass below this bound.
            Use it with ``multiply_tau=False``, without which the gradient only increases ``tau``.
        dtype: dtype of that parameter.

    Hyper-parameters: ``tau``, if it is a number and not learned.

    State: nothing per sample; the parameter ``log_inverse``, 0-d, with ``learn=True`` (part of ``state_dict``). Nothing
    is communicated: every rank receives the whole gradient of a learned or 0-d ``tau``.

    Raises:
        ValueError: tau <= 0, a tensor that is not 0-d, or a tensor together with ``learn=True``.
        TypeError: tau is neither a number nor a floating-point tensor; ``learn`` is neither True nor False.

    References:
        Radford et al., CLIP, 2021 (the learned scale).
    """

    def __init__(self, tau: float | Tensor = 0.07, learn: bool = False, dtype: torch.dtype = torch.float32) -> None:
        checks.flag("learn", learn)
        if isinstance(tau, Tensor):
            if tau.dim() != 0:
                raise ValueError(
                    f"tau must be a number or a 0-d tensor, got shape {tuple(tau.shape)}; temperatures per anchor go "
                    f"into the call: est(z1, z2, index, tau=tau)"
                )
            check_tau(tau, batch=0)
            if learn:
                raise ValueError("tau is a tensor and learn=True; give a number, or drop learn")
            self.tensor = tau
        super().__init__(None, {} if isinstance(tau, Tensor) or learn else {"tau": tau})
        if learn:
            checks.positive("tau", tau)
            self.learnable = torch.nn.Module()
            self.learnable.log_inverse = torch.nn.Parameter(
                torch.tensor(-math.log(float(tau)), dtype=dtype, device="cpu")
            )

    @property
    def log_inverse(self) -> torch.nn.Parameter | None:
        """Learned ``log(1/tau)``, 0-d; ``None`` if nothing is learned."""
        return None if self.learnable is None else cast(torch.nn.Parameter, self.learnable.log_inverse)

    @property
    def wants_gradient(self) -> bool:
        return super().wants_gradient or (self.tensor is not None and self.tensor.requires_grad)

    def described(self) -> dict[str, Any]:
        if self.log_inverse is not None:
            return {"tau": f"{max(math.exp(-self.log_inverse.item()), LEARNED_TAU_MIN):.6g} (learned)"}
        return {} if self.tensor is None else {"tau": f"{self.tensor.item():.6g} (a tensor)"}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        super().check_state(state)
        if "log_inverse" in state:
            tau = torch.exp(-state["log_inverse"])
            values.bounded(type(self).__name__, {"tau of log_inverse": tau}, {"tau of log_inverse": ""})

    def check(self, group: Mapping[str, Any]) -> None:
        if "tau" in group:
            checks.positive("tau", group["tau"])

    def _shared(self) -> Tensor | None:
        if self.log_inverse is None:
            return None if self.tensor is None else self.tensor.clone()  # an optimizer may change the user's tensor
        return lower_bound(torch.exp(-self.log_inverse), LEARNED_TAU_MIN)

    def temperatures(self, rows: Mapping[str, Tensor], hyper: Hyper, training: bool) -> float | Tensor:
        shared = self._shared()
        if shared is not None:
            return shared
        tau = hyper("tau")
        return tau if isinstance(tau, Tensor) else float(tau)

    def constants(self) -> list[float] | None:
        shared = self._shared()
        return [float(group["tau"]) if shared is None else shared.item() for group in self._groups]


class _LowerBound(torch.autograd.Function):
    """Lower bound ``max(x, low)`` whose gradient below ``low`` still passes if a descent step would increase ``x``.

    The backward pass is itself differentiable by autograd.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float) -> Tensor:
        ctx.save_for_backward(x >= low)
        return x.clamp(min=low)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside | (grad_output < 0), grad_output, 0), None


def lower_bound(x: Tensor, low: float) -> Tensor:
    """Return ``max(x, low)`` for a learned quantity; unlike with ``clamp``, ``x`` can return from below ``low``."""
    return _LowerBound.apply(x, low)
