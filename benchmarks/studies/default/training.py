"""Training of one run: encoders from scratch, AdamW, one cycle, the same number of samples at every batch size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.studies.default.tasks import SAMPLES, Task
from recipes import batches, cache
from recipes.batches import seeded

WARMUP, DECAY = 0.1, 0.01


class Loss(Protocol):
    """Loss with state: an estimator, or another method with the same interface."""

    def __call__(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the loss of a batch."""

    def step(self) -> None:
        """Commit; called after the optimizer's step."""

    def parameters(self) -> Any:
        """Return the parameters that the optimizer learns in addition to the model."""


@dataclass(frozen=True)
class Setting:
    """Settings of a run apart from its loss.

    Attributes:
        batch: samples per call of the loss.
        accumulate: calls per update.
        forward: samples per forward pass; a value below ``batch`` gives the same batches as a gradient cache.
        batches: ``"random"``, or another kind of :mod:`recipes.batches`.
        lr: highest learning rate.
        samples: number of training samples seen.
        warmup: share of the run in which the learning rate rises.
        seed: seed of weights and batches.
    """

    batch: int
    lr: float
    accumulate: int = 1
    forward: int = 0
    batches: str = batches.RANDOM
    samples: int = SAMPLES
    warmup: float = WARMUP
    seed: int = 0


def train(
    task: Task,
    loss_of: Callable[[Task], Loss],
    setting: Setting,
    start: nn.Module | None = None,
    order: batches.Shuffled | None = None,
) -> tuple[nn.Module, Loss, float]:
    """Train a model; return it, its loss, and the seconds of training.

    Args:
        task: data and encoders.
        loss_of: function that creates the loss, called after the weights are seeded.
        setting: settings of the run.
        start: model to continue from, in its current mode.
        order: batches to use instead of those of the setting.
    """
    torch.manual_seed(setting.seed)
    model = task.model() if start is None else start
    loss, learned = loss_of(task), [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in learned if p.ndim <= 1] + list(loss.parameters()), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=setting.lr, fused=True)
    updates = setting.samples // (setting.batch * setting.accumulate)
    order = order or batches.build(how(setting), task.n, setting.batch, task.n // setting.batch, setting.seed)
    getattr(loss, "watch", lambda model: None)(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setting.lr, updates, pct_start=setting.warmup)
    started = time.perf_counter()
    for update in range(updates):
        for number in range(update * setting.accumulate, (update + 1) * setting.accumulate):
            index = order(number)
            inputs = task.inputs(index, seeded("augment", setting.seed, number))
            z1, z2 = features(model, inputs, setting.forward or setting.batch)
            order.observe(index, z1.detach(), z2.detach())
            loss(z1, z2, index).div(setting.accumulate).backward()
        optimizer.step()
        schedule.step()
        loss.step()
        optimizer.zero_grad()
    return model.eval(), loss, time.perf_counter() - started


def how(setting: Setting) -> dict[str, Any]:
    """Return the options of the batches; about a thousand samples are clustered at a time."""
    clustered = {"cluster_group": max(2, 1024 // setting.batch)} if setting.batches == batches.SPECTRAL else {}
    return {"kind": setting.batches, **clustered}


def features(model: nn.Module, inputs: tuple[Tensor, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Return the features of both sides, computed for ``size`` samples at a time with their own batch statistics."""
    parts = [model(*part) for part in zip(*(side.split(size) for side in inputs), strict=True)]
    return (torch.cat([one for one, _ in parts]), torch.cat([two for _, two in parts])) if len(parts) > 1 else parts[0]


def trained(task: Task, loss_of: Callable[[Task], Loss], setting: Setting, name: str) -> nn.Module:
    """Return a trained model in evaluation mode, from the cache file ``name`` if it exists, else train and cache it."""
    path, key = cache.file(None, name), f"{setting} {task.n} {torch.__version__}"
    model = task.model()
    known = cache.read(path, key, list(model.state_dict()))
    if known is None:
        model = train(task, loss_of, setting)[0]
        cache.write(path, key, {entry: value.numpy() for entry, value in model.state_dict().items()})
    else:
        model.load_state_dict({entry: torch.from_numpy(value) for entry, value in known.items()})
    return model.eval()
