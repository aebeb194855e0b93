"""One training run: the loop, its evaluations, and checkpoints from which it continues bit for bit."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compopt import diagnostics
from recipes import methods

Metrics = dict[str, float]
# Anchors whose log-normalizers are compared with the exact ones; all samples are their candidates.
ERROR_ANCHORS = 4096


class Task(Protocol):
    """What is learned: data, encoders and measures.  The rest of the loop is the same for every task."""

    mode: str  # "bimodal" or "unimodal"
    n: int  # training samples; their data-set indices are 0 .. n-1
    headline: str  # the metric that the progress bar and the pictures show
    labels: Mapping[str, str]  # metric -> how a table calls it

    def model(self) -> nn.Module:
        """A freshly initialised model (torch's seed is set by the caller)."""

    def encode(self, model: nn.Module, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Both features (B, d) of a batch of training samples; augmentation draws from ``generator``."""

    def evaluate(self, model: nn.Module, final: bool) -> Metrics:
        """Measures on held-out data; ``final`` asks for the costly ones too."""

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Both features (n, d) of the whole training set, in the order of the data-set index."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result.  A checkpoint is refused by a run whose fields differ."""

    method: str
    options: dict[str, Any]
    batch_size: int = 64
    epochs: int = 2
    lr: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0
    data: str = ""  # the task's own words for its data and split


@dataclass
class Control:
    """When to measure, save and stop; none of it changes the weights."""

    eval_every: int = 200  # steps; 0: at the end only
    error_every: int = 0  # steps between normalizer errors; 0: never
    checkpoint_every: int = 0  # steps; 0: at the end only
    max_steps: int | None = None  # stop here, schedules still span all epochs
    checkpoint: Path | None = None
    resume: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on_step: Callable[[Run], None] = lambda run: None


class Run:
    """A model in training with an estimator beside its optimizer.

    Args:
        task: what is learned.
        config: method, hyper-parameters, seed.
        control: when to measure, save and stop.
    """

    def __init__(self, task: Task, config: Config, control: Control | None = None) -> None:
        self.task, self.config, self.control = task, config, control or Control()
        if task.n < config.batch_size:
            raise ValueError(f"batch_size={config.batch_size} exceeds the {task.n} training samples")
        self.steps_per_epoch = task.n // config.batch_size
        self.total_steps = self.steps_per_epoch * config.epochs
        self.step = 0
        self.seconds = 0.0
        self.history: list[Metrics] = []
        self.loss_sum, self.loss_count = torch.zeros(()), 0
        self._build()

    def _build(self) -> None:
        config, device = self.config, self.control.device
        torch.manual_seed(config.seed)
        self.model = self.task.model().to(device)
        self.est = methods.build(config.method, self.task.n, self.task.mode, config.options).to(device)
        self.optimizer = torch.optim.AdamW(self._parameter_groups(), lr=config.lr, fused=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=config.lr, total_steps=max(1, self.total_steps)
        )
        self.gamma_schedule = methods.build_schedule(self.est, config.options, self.total_steps)
        self.est.attach(self.optimizer)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Weight matrices decay; biases, norms and a learned temperature do not."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.config.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            {"params": list(self.est.parameters()), "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    @property
    def samples(self) -> int:
        """Training samples seen so far."""
        return self.step * self.config.batch_size

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    @property
    def recent_loss(self) -> float:
        """Mean training loss since the last measure."""
        return float(self.loss_sum) / max(1, self.loss_count)

    @property
    def final(self) -> Metrics:
        """The last measures taken ({} before the first)."""
        return next((record for record in reversed(self.history) if self.task.headline in record), {})

    def train(self) -> Run:
        """Train up to ``max_steps`` or to the end, from the checkpoint if asked to; return the run itself."""
        if self.control.resume and self.control.checkpoint and self.control.checkpoint.exists():
            self.load(self.control.checkpoint)
        stop = min(self.total_steps, self.control.max_steps or self.total_steps)
        order, order_epoch = None, -1
        while self.step < stop:
            started = time.perf_counter()
            epoch, batch = divmod(self.step, self.steps_per_epoch)
            if epoch != order_epoch:
                order, order_epoch = self._order(epoch), epoch
            self._train_step(order[batch * self.config.batch_size : (batch + 1) * self.config.batch_size])
            self.seconds += time.perf_counter() - started
            self._after_step(stop)
        return self

    def _order(self, epoch: int) -> Tensor:
        """The data order is a function of (seed, epoch), so that a resumed run finds it again."""
        return torch.randperm(self.task.n, generator=seeded("order", self.config.seed, epoch))

    def _train_step(self, index: Tensor) -> None:
        self.model.train()
        generator = seeded("augment", self.config.seed, self.step)
        loss = self.est(*self.task.encode(self.model, index, generator), index)
        loss.backward()
        self.optimizer.step()  # the attached estimator commits its rows here
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self.gamma_schedule is not None:
            self.gamma_schedule.step()
        self.step += 1
        self.loss_sum = self.loss_sum + loss.detach()  # stays on the device
        self.loss_count += 1

    def _after_step(self, stop: int) -> None:
        control = self.control
        if self._due(control.eval_every):
            self._record().update(self._measure())
        if control.error_every and self._due(control.error_every):
            self._record()["normalizer_error"] = self.normalizer_error()
        if control.checkpoint and (self._due(control.checkpoint_every) or self.step == stop):
            self.save(control.checkpoint)
        control.on_step(self)

    def _due(self, every: int) -> bool:
        return self.finished or (every > 0 and self.step % every == 0)

    def _record(self) -> Metrics:
        """This step's entry of the history."""
        if not self.history or self.history[-1]["step"] != self.step:
            self.history.append({"step": self.step, "samples": self.samples})
        return self.history[-1]

    def _measure(self) -> Metrics:
        """Held-out measures, and the mean training loss since the last time."""
        self.model.eval()
        with torch.no_grad():
            metrics = self.task.evaluate(self.model, final=self.finished)
        loss = self.recent_loss
        self.loss_sum, self.loss_count = torch.zeros(()), 0
        inside = {f"estimator/{name}": value.item() for name, value in self.est.metrics.items()}
        return {"loss": loss, **metrics, **inside}

    @torch.no_grad()
    def normalizer_error(self) -> float:
        """Mean squared error of the log-normalizers that the estimator would use now."""
        self.model.eval()
        z1, z2 = self.task.training_features(self.model)
        error = diagnostics.normalizer_error(
            self.est, z1, z2, batch_size=self.config.batch_size, anchors=min(self.task.n, ERROR_ANCHORS)
        )
        return float(error)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on."""
        schedule = self.gamma_schedule
        return {
            "config": vars(self.config),
            "model": self.model.state_dict(),
            "estimator": self.est.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "gamma_schedule": None if schedule is None else schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "loss": (self.loss_sum, self.loss_count),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; a differing configuration raises ValueError."""
        for name, value in vars(self.config).items():
            if state["config"].get(name) != value:
                raise ValueError(f"the checkpoint has {name}={state['config'].get(name)!r}, this run {name}={value!r}")
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        self.est.load_state_dict(state["estimator"])
        if self.gamma_schedule is not None:
            self.gamma_schedule.load_state_dict(state["gamma_schedule"])
        torch.set_rng_state(state["rng"].cpu())
        self.step, self.seconds, self.history = state["step"], state["seconds"], list(state["history"])
        self.loss_sum, self.loss_count = state["loss"]

    def save(self, path: Path) -> None:
        """Write beside the target, then rename: a kill leaves the previous or the new checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            torch.save(self.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Continue from the checkpoint at ``path``."""
        self.load_state_dict(torch.load(path, map_location=self.control.device, weights_only=True))


def seeded(*key: object) -> torch.Generator:
    """A CPU generator whose seed is a function of ``key``."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


@torch.no_grad()
def in_chunks(encode: Callable[[Tensor], Tensor], inputs: Tensor, size: int = 1024) -> Tensor:
    """Encode many inputs with bounded memory."""
    return torch.cat([encode(chunk) for chunk in inputs.split(size)])
