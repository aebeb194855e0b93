"""The parts of a run: the task it learns, what decides its result, and what only controls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recipes import launch

Metrics = dict[str, float]


class Task(Protocol):
    """Data, encoders and measures.  The rest of the loop is the same for every task."""

    mode: str  # "bimodal" or "unimodal"
    n: int  # training samples; their data-set indices are 0 .. n-1
    group: Tensor  # (n,) samples with equal entries mean the same
    headline: str  # the metric that the progress bar and the pictures show
    labels: Mapping[str, str]  # metric -> how a table calls it
    description: str  # the data and their split, in words

    def model(self) -> nn.Module:
        """A freshly initialised model (torch's seed is set by the caller)."""

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The inputs of the model's forward for a batch of training samples, one entry per sample in each.

        Called with the batch of all ranks, so that what augmentation draws from ``generator`` is the same on one
        rank and on many; the model returns both features (B, d) of the part that its rank takes.
        """

    def evaluate(self, model: nn.Module, final: bool) -> Metrics:
        """Measures on held-out data; ``final`` asks for the costly ones too."""

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Both features (n, d) of the whole training set, in the order of the data-set index."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result.  A checkpoint is refused by a run whose fields differ."""

    method: str
    options: dict[str, Any]
    batch_size: int = 64  # samples per forward, over all ranks
    epochs: int = 2
    lr: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0
    data: str = ""  # the task's own words for its data and split
    accumulate: int = 1  # batches per update
    mixed_precision: str = "no"
    batches: dict[str, Any] = field(default_factory=dict)  # which samples share one, as recipes/batches.py reads it


@dataclass
class Control:
    """When to measure, save and stop, and where things live; none of it changes the weights."""

    eval_every: int = 200  # steps; 0: at the end only
    error_every: int = 0  # steps between normalizer errors; 0: never
    checkpoint_every: int = 0  # steps; 0: at the end only
    max_steps: int | None = None  # stop here, schedules still span all epochs
    checkpoint: Path | None = None  # folder
    resume: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on_step: Callable[[Any], None] = lambda run: None  # called with the run after every update
    placement: dict[str, Any] = field(default_factory=dict)  # where rows live: offload, offload_dir, shard
    prefetch: bool = False  # fetch the next batch's rows while this one trains
    deepspeed: Path | None = None  # a configuration file
    timeout: float = launch.TIMEOUT  # seconds that a rank waits for another one
