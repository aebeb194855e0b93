"""Optimizers of the experiments, and schedules of their learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

OptimizerName = Literal["adamw", "sgd", "lars"]
ScheduleName = Literal["one-cycle", "cosine"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class LARS(torch.optim.Optimizer):
    r"""Layer-wise adaptive rate scaling (You et al., 2017, https://arxiv.org/abs/1708.03888, Algorithm 1).

    For a weight ``w`` with gradient ``g``, learning rate ``lr``, momentum ``m`` and weight decay ``beta``:

    .. math::
        \lambda = \eta \frac{\|w\|}{\|g\| + \beta \|w\|}, \qquad
        v \leftarrow m v + \lambda (g + \beta w), \qquad
        w \leftarrow w - lr \, v

    ``lambda`` is 1 if ``w`` or ``g`` is 0. As in SimCLR, one-dimensional parameters (biases, norms) are neither scaled
    nor decayed. In the paper ``lr`` is part of ``v``, which makes a difference while ``lr`` changes; here it is not, as
    in ``torch.optim.SGD``, timm and the code of SogCLR.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: ``m``.
        weight_decay: ``beta``.
        eta: trust coefficient.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0, eta: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                velocity = self.state[p]["momentum_buffer"]
                velocity.mul_(group["momentum"]).add_(_scaled(p, group["weight_decay"], group["eta"]))
                p.sub_(velocity, alpha=group["lr"])
        return loss


def _scaled(p: Tensor, decay: float, eta: float) -> Tensor:
    """Return ``lambda (g + beta w)``."""
    if p.ndim <= 1:
        return p.grad
    weight, gradient = p.norm(), p.grad.norm()
    trust = torch.where((weight > 0) & (gradient > 0), eta * weight / (gradient + decay * weight), 1.0)
    return trust * p.grad.add(p, alpha=decay)


class Kind(NamedTuple):
    """Optimizer with its default learning rate, a number or a rule of :data:`RULES`, and its default weight decay."""

    build: Callable[..., torch.optim.Optimizer]
    lr: float | str
    weight_decay: float


def _adamw(groups: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def _adam(groups: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=lr, fused=True)


def _sgd(groups: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


# AdamW: the rate of docs/which.md. LARS: SogCLR's rate and decay for ImageNet. SGD: iSogCLR's decay.
OPTIMIZERS: dict[OptimizerName, Kind] = {
    "adamw": Kind(_adamw, "root", 0.1),
    "adam": Kind(_adam, 1e-3, 0.0),
    "sgd": Kind(_sgd, "linear", 1e-4),
    "lars": Kind(LARS, "sqrt", 1e-6),
}
# For a batch of B samples; linear and sqrt are rates of SimCLR (Chen et al., 2020, section 2.2 and appendix B.1).
RULES: dict[str, Callable[[int], float]] = {
    "root": lambda batch: 0.002 * math.sqrt(batch),
    "linear": lambda batch: 0.3 * batch / 256,
    "sqrt": lambda batch: 0.075 * math.sqrt(batch),
}


def rate(text: str) -> float | str:
    """Parse a learning rate: a number, or the name of a rule."""
    return text if text in RULES else float(text)


def schedule(
    name: ScheduleName, optimizer: torch.optim.Optimizer, lr: float, steps: int, warmup: int = 0
) -> LRScheduler:
    """Return the schedule of the learning rate over a run.

    Args:
        name: ``"one-cycle"``: torch's, up to ``lr`` during three quarters of the run; ``"cosine"``: linear up to
            ``lr``, then half a cosine down to 0.
        optimizer: optimizer whose rate is scheduled.
        lr: highest rate.
        steps: number of updates of the run.
        warmup: number of updates until the highest rate, for ``"cosine"``.
    """
    if name == "one-cycle":
        return OneCycleLR(optimizer, max_lr=lr, total_steps=max(1, steps), pct_start=0.75)
    return LambdaLR(optimizer, lambda step: _cosine(step, steps, warmup))


def _cosine(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))
