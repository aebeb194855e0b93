"""One training run: configuration, loop, evaluations, and checkpoints from which it continues bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compopt import diagnostics
from compopt.integrations import accelerate as integration
from recipes import batches, checkpoints, launch, methods, optimizers
from recipes.batches import seeded
from recipes.tasks import ImageViews, Metrics, NamedImages

# Number of anchors whose log-normalizers are compared with the exact ones; all samples are their candidates.
ERROR_ANCHORS = 4096


@dataclass(frozen=True)
class Config:
    """Everything that determines a run's result. A run refuses a checkpoint with other fields."""

    method: str
    options: dict[str, Any]
    batch_size: int = 64  # samples per forward, over all ranks
    epochs: int = 2
    lr: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0
    data: str = ""  # description of data and split by the task
    accumulate: int = 1  # batches per update
    mixed_precision: str = "no"
    batches: dict[str, Any] = field(default_factory=dict)  # options of recipes/batches.py
    optimizer: optimizers.OptimizerName = "adamw"
    schedule: optimizers.ScheduleName = "one-cycle"
    warmup: float = 0.0  # epochs of the warm-up of "cosine"


@dataclass
class Control:
    """Schedule of measures, checkpoints and stop, and placement of data; nothing here changes the weights."""

    eval_every: int = 200  # steps; 0: at the end only
    error_every: int = 0  # steps between normalizer errors; 0: never
    checkpoint_every: int = 0  # steps; 0: at the end only
    max_steps: int | None = None  # stop after this step; schedules still span all epochs
    checkpoint: Path | None = None  # folder
    resume: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on_step: Callable[[Any], None] = lambda run: None  # called with the run after every update
    placement: dict[str, Any] = field(default_factory=dict)  # placement of rows: offload, offload_dir, shard
    prefetch: bool = False  # fetch the next batch's rows while this one trains
    deepspeed: Path | None = None  # a configuration file
    timeout: float = launch.TIMEOUT  # seconds that a rank waits for another one


class Run:
    """Training of a model with an optimizer and an estimator."""

    def __init__(self, task: NamedImages | ImageViews, config: Config, control: Control | None = None) -> None:
        self.task, self.config, self.control = task, config, control or Control()
        self.accelerator = launch.accelerator(
            self.control.device,
            config.accumulate,
            config.mixed_precision,
            self.control.deepspeed,
            timeout=self.control.timeout,
        )
        self.part = self._part()
        self.steps_per_epoch = task.n // (config.batch_size * config.accumulate)
        self.total_steps = self.steps_per_epoch * config.epochs
        self.step = 0
        self.seconds = 0.0
        self.history: list[Metrics] = []
        self.loss_sum, self.loss_count = torch.zeros(()), 0
        self._build()

    def _part(self) -> slice:
        """Return this rank's slice of a batch."""
        batch, ranks = self.config.batch_size, launch.world_size()
        if self.task.n < batch * self.config.accumulate:
            raise ValueError(
                f"batch_size={batch} times accumulate={self.config.accumulate} exceeds the {self.task.n} "
                f"training samples"
            )
        if batch % ranks:
            raise ValueError(f"batch_size={batch} counts over all ranks and must be a multiple of {ranks}")
        size = batch // ranks
        return slice(launch.rank() * size, (launch.rank() + 1) * size)

    def _build(self) -> None:
        """Build all parts: the estimator after the accelerator, whose group it uses, and attached after ``prepare``."""
        config, device = self.config, self.control.device
        labels = self.task.group if config.options.get("group") else None
        per_epoch = self.steps_per_epoch * config.accumulate
        self.batches = batches.build(config.batches, self.task.n, config.batch_size, per_epoch, config.seed, labels)
        torch.manual_seed(config.seed)
        plain = self.task.model().to(device)
        if self.control.deepspeed:  # it broadcasts weights as flat bytes
            plain = plain.to(memory_format=torch.contiguous_format)
        options, placement = config.options, self.control.placement
        task = self.task
        est = methods.build(config.method, task.n, task.mode, options, placement, config.batch_size, task.dim)
        self.est = est.to(device)
        if options.get("encode"):
            est.normalizer.encode = self._encode
        launch.check_learned(self.accelerator, list(self.est.parameters()), config.method)
        self._build_optimizer(self._parameter_groups(plain))
        launch.set_micro_batch(self.accelerator, self.part.stop - self.part.start)
        self.prepared, self.stepper = self.accelerator.prepare(plain, self.optimizer)
        self.gamma_schedule = methods.build_schedule(self.est, config.options, self.total_steps)
        integration.attach(self.est, self.stepper, self.accelerator)
        integration.register_for_checkpointing(self.est, self.accelerator)
        self.accelerator.register_for_checkpointing(self)  # the state of this object, in addition to the prepared parts

    def _build_optimizer(self, groups: list[dict[str, Any]]) -> None:
        config = self.config
        launch.check_optimizer(self.accelerator, config.optimizer)
        self.optimizer = optimizers.OPTIMIZERS[config.optimizer].build(groups, lr=config.lr)
        rising = round(config.warmup * self.steps_per_epoch)
        self.scheduler = optimizers.schedule(config.schedule, self.optimizer, config.lr, self.total_steps, rising)

    @property
    def model(self) -> nn.Module:
        """Return the model without wrappers, for measures; with DeepSpeed a copy with all weights (on all ranks)."""
        if not launch.uses_deepspeed(self.accelerator):
            return self.accelerator.unwrap_model(self.prepared)
        with torch.random.fork_rng(devices=[]), launch.whole(self.prepared.module):
            copy = self.task.model().to(self.control.device)
            copy.load_state_dict(self.prepared.module.state_dict())
        return copy

    def _parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return parameter groups with weight decay for matrices only, not for biases, norms and temperatures."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.config.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            {"params": list(self.est.parameters()), "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    @property
    def samples(self) -> int:
        """Return the number of training samples seen so far."""
        return self.step * self.config.batch_size * self.config.accumulate

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    @property
    def recent_loss(self) -> float:
        """Return the mean training loss since the last measure."""
        return float(self.loss_sum) / max(1, self.loss_count)

    @property
    def final(self) -> Metrics:
        """Return the last measures ({} before the first)."""
        return next((record for record in reversed(self.history) if self.task.headline in record), {})

    def train(self) -> Run:
        """Train up to ``max_steps`` or to the end, with ``resume`` from the checkpoint; return the run itself."""
        if self.control.resume and self.control.checkpoint:
            checkpoints.load(self.accelerator, self.control.checkpoint)
        stop = min(self.total_steps, self.control.max_steps or self.total_steps)
        while self.step < stop:
            started = time.perf_counter()
            self._update(last=self.step + 1 == stop)
            self.seconds += time.perf_counter() - started
            self._after_step(stop)
        return self

    def _update(self, last: bool) -> None:
        """Train on a window of batches, and make their common update."""
        self.prepared.train()
        window = self.config.accumulate
        for number in range(self.step * window, (self.step + 1) * window):
            with self.accelerator.accumulate(self.prepared):
                self._train_batch(number)
            if self.control.prefetch and not (last and number + 1 == (self.step + 1) * window):
                self.est.prefetch(self.batches(number + 1)[self.part])
        self.scheduler.step()
        if self.gamma_schedule is not None:
            self.gamma_schedule.step()
        self.step += 1

    def _train_batch(self, number: int) -> None:
        index = self.batches(number)
        inputs = self.task.inputs(index, seeded("augment", self.config.seed, number))
        features = self.prepared(*(entry[self.part] for entry in inputs))
        options, own = self.config.options, index[self.part]
        labels = self.task.group[own] if options.get("group") else None
        loss = self.est(*features, index=own, labels=labels)
        self.batches.observe(own, *features[:2])
        self.accelerator.backward(loss)
        self.stepper.step()  # the attached estimator commits its rows here, after the window's last batch
        self.stepper.zero_grad()
        self.loss_sum = self.loss_sum + loss.detach()  # on the device; the loss of the global batch, on every rank
        self.loss_count += 1

    def _encode(self, index: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Encode samples outside the batch, with graph, in evaluation mode: they are too few for batch statistics."""
        inputs = self.task.inputs(index, seeded("encode", self.config.seed, self.step))
        model = self.accelerator.unwrap_model(self.prepared).eval()
        features = model(*inputs)
        model.train()
        return features if self.task.mode == methods.BIMODAL else features[0]

    def _after_step(self, stop: int) -> None:
        control, saves = self.control, self._due(self.control.checkpoint_every) or self.step == stop
        if saves or self._due(control.eval_every):
            self._check_finite()
        if self._due(control.eval_every):
            self._record().update(self._measure())
        if control.error_every and self._due(control.error_every):
            self._record()["normalizer_error"] = self.normalizer_error()
        if control.checkpoint and saves:
            checkpoints.save(self.accelerator, control.checkpoint)
        control.on_step(self)

    def _check_finite(self) -> None:
        """Exit before a measure or a checkpoint if a loss was NaN, and with it the weights; fp16 skips such updates."""
        if not math.isfinite(self.recent_loss) and self.config.mixed_precision != "fp16":
            raise SystemExit(
                f"step {self.step}: the mean loss since the last measure is {self.recent_loss}; training stops, and "
                f"nothing was saved since then"
            )

    def _due(self, every: int) -> bool:
        return self.finished or (every > 0 and self.step % every == 0)

    def _record(self) -> Metrics:
        """Return the history entry of this step."""
        if not self.history or self.history[-1]["step"] != self.step:
            self.history.append({"step": self.step, "samples": self.samples})
        return self.history[-1]

    def _measure(self) -> Metrics:
        """Measure on held-out data, on the main process; add the mean training loss since the last measure."""
        model = self.model.eval()
        metrics: Metrics = {}
        if launch.is_main():
            with torch.no_grad():
                metrics = self.task.evaluate(model, final=self.finished)
        metrics = launch.from_main(metrics)
        loss = self.recent_loss
        self.loss_sum, self.loss_count = torch.zeros(()), 0
        inside = {f"estimator/{name}": value.item() for name, value in self.est.metrics.items()}
        return {"loss": loss, **metrics, **inside}

    @torch.no_grad()
    def normalizer_error(self) -> float:
        """Return the mean squared error of the estimator's current log-normalizers; called on all ranks."""
        z1, z2 = self.task.training_features(self.model.eval())
        error = diagnostics.normalizer_error(
            self.est, z1, z2, batch_size=self.config.batch_size, anchors=min(self.task.n, ERROR_ANCHORS)
        )
        return float(error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that accelerate stores in addition to model, optimizer and estimator."""
        schedule = self.gamma_schedule
        groups = self.optimizer.param_groups
        return {
            "config": dict(vars(self.config)),
            "scheduler": self.scheduler.state_dict(),
            # DeepSpeed restores its partitions of the moments, but not the values that the scheduler has set here
            "groups": [{k: v for k, v in group.items() if k not in ("params", "name")} for group in groups],
            "gamma_schedule": None if schedule is None else schedule.state_dict(),
            "batches": self.batches.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "loss": (self.loss_sum, self.loss_count),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; raise ValueError for the state of another configuration."""
        saved = vars(Config(**state["config"]))  # fields missing from an older checkpoint have their defaults
        for name, value in vars(self.config).items():
            found = saved[name]
            if found != value:
                raise ValueError(f"the checkpoint has {name}={found!r}, this run {name}={value!r}")
        self.scheduler.load_state_dict(state["scheduler"])
        for group, values in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(values)
        if self.gamma_schedule is not None:
            self.gamma_schedule.load_state_dict(state["gamma_schedule"])
        self.batches.load_state_dict(state["batches"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], list(state["history"])
        self.loss_sum, self.loss_count = state["loss"]
