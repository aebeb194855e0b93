"""Other packages' losses as methods of the recipe: the same encoders, batches, optimizer and schedule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compopt
from benchmarks.history.peers import packages
from recipes.methods import METHODS, Method


class Foreign(compopt.InfoNCEEstimator, ABC):
    """A loss where the recipe expects an estimator. Whatever it keeps, it keeps as its package does."""

    def __call__(
        self,
        z1: Tensor,
        z2: Tensor,
        index: Tensor | None = None,
        index2: Tensor | None = None,
        group: Tensor | None = None,
        encode: Any = None,
        *,
        tau: Tensor | float | None = None,
    ) -> Tensor:
        if index is None or any(option is not None for option in (index2, group, encode, tau)):
            raise ValueError(f"{type(self).__name__} takes features and index alone")
        return self.loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), index)

    @abstractmethod
    def loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """The loss of the package."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        return {}


class OpenClip(Foreign):
    """``ClipLoss`` or ``SigLipLoss`` with the learned scale, and bias, of open_clip's models."""

    def __init__(self, name: str, tau: float, bias: float | None = None) -> None:
        super().__init__()
        self._loss = getattr(packages.open_clip(), name)()
        self._scale = nn.Parameter(torch.tensor(math.log(1 / tau)))
        self._bias = None if bias is None else nn.Parameter(torch.tensor(bias))

    def parameters(self) -> Iterator[nn.Parameter]:
        yield self._scale
        if self._bias is not None:
            yield self._bias

    def loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        scale = self._scale.clamp(max=math.log(100)).exp()
        return self._loss(z1, z2, scale) if self._bias is None else self._loss(z1, z2, scale, self._bias)


class LibAUC(Foreign):
    """``GCLoss_v2``, told of every epoch as its documentation asks."""

    def __init__(self, n: int, **options: Any) -> None:
        super().__init__()
        self._n, self._steps, self._options = n, 0, options
        self._steps_per_epoch = 0  # known with the first batch; the recipe drops what is left of the samples
        self._loss = packages.gcl_bimodal(n, **options)

    def resume(self) -> None:
        """Stop and continue with what ``state_dict()`` holds, in the epoch that has come."""
        state = self._loss.state_dict()
        self._loss = packages.gcl_bimodal(self._n, **self._options)
        self._loss.load_state_dict(state)
        packages.quiet(self._loss.adjust_gamma, self._steps // self._steps_per_epoch)

    def loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        self._steps_per_epoch = self._steps_per_epoch or self._n // len(index)
        if self._steps % self._steps_per_epoch == 0:
            packages.quiet(self._loss.adjust_gamma, self._steps // self._steps_per_epoch)
        self._steps += 1
        return self._loss(z1, z2, index)[0]


def _sogclr(n: int, mode: str, o: SimpleNamespace) -> compopt.ContrastiveEstimator:
    return LibAUC(n, tau=o.tau, gamma=o.gamma)


def _isogclr(n: int, mode: str, o: SimpleNamespace) -> compopt.ContrastiveEstimator:
    bounds = {"tau_min": o.tau_min, "tau_max": o.tau_max}
    return LibAUC(
        n, tau=o.tau, gamma=o.gamma, rho=o.rho, eta=o.tau_lr, temperature_scheme="individual_learnable", **bounds
    )


def register() -> None:
    """Add the other packages' losses to the recipe's methods, in this process."""
    METHODS.update(
        {
            "open_clip-clip": Method(
                "open_clip ClipLoss", lambda n, mode, o: OpenClip("ClipLoss", o.tau), {"tau": 0.07}
            ),
            "open_clip-siglip": Method(
                "open_clip SigLipLoss",
                lambda n, mode, o: OpenClip("SigLipLoss", o.tau, o.bias),
                {"tau": 0.1, "bias": -10.0},
            ),
            "libauc-sogclr": Method("LibAUC SogCLR (GCLoss_v2)", _sogclr, {"tau": 0.07, "gamma": 0.8}),
            "libauc-isogclr": Method(
                "LibAUC iSogCLR (GCLoss_v2)",
                _isogclr,
                {"tau": 0.07, "gamma": 0.8, "rho": 1.0, "tau_lr": 0.01, "tau_min": 0.01, "tau_max": 0.5},
            ),
        }
    )
