"""Command that runs open_clip's own trainer with an estimator in place of its loss.

``python -m compopt.integrations.open_clip --estimator sogclr --index shards.json -- <flags of open_clip>`` runs
open_clip's command line. Functions in ``open_clip_train.main`` are wrapped while it runs; no file of open_clip is
modified. Two versions are supported: the released one (3.3.0: tuples, ``create_loss``) and the rebuilt main branch
(4.2.0.dev0: dictionaries, ``create_task``).

This module contains the run and the loss of an update; :mod:`~compopt.integrations.open_clip.options` the flags before
``--``; :mod:`~compopt.integrations.open_clip.rows` the row of each sample and the rows next to checkpoints.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from compopt.contrastive import ContrastiveEstimator
from compopt.integrations import amp
from compopt.integrations.open_clip.options import Flags, parse_flags
from compopt.integrations.open_clip.rows import IndexedLoader, RowCheckpoints, add_index, open_index
from compopt.kernel.features import with_gradients
from compopt.schedules import CosineGamma

# Functions in open_clip_train.main to wrap, and parameters of train_one_epoch to read.
WRAPPED = ["parse_args", "create_model_and_transforms", "get_data", "train_one_epoch"]
RELEASED = ("create_loss", ["model", "data", "epoch", "optimizer", "scaler", "args"])
REBUILT = ("create_task", ["state", "data", "args"])
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the command with flags of the estimator, ``--``, flags of open_clip; return the result of its ``main``."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse_flags(arguments[:at])
    import open_clip_train.main as trainer

    return Run(options, trainer).start(arguments[at + 1 :])


class Run:
    """One run of ``open_clip_train.main.main``; methods replace functions of that module with the same name."""

    loss: EstimatorLoss  # set once open_clip has parsed its flags
    est: ContrastiveEstimator  # set once the data are known, with the rows next to checkpoints
    rows: RowCheckpoints | None = None

    def __init__(self, options: Flags, trainer: Any) -> None:
        self.options, self.trainer = options, trainer
        self.index = open_index(options.index)
        self.rebuilt = is_rebuilt(trainer)
        self._attached = False

    def start(self, arguments: Sequence[str]) -> Any:
        names = [*WRAPPED, REBUILT[0] if self.rebuilt else RELEASED[0]]
        wrapped: dict[str, Any] = {
            name: functools.partial(getattr(self, name), getattr(self.trainer, name)) for name in names
        }
        with mock.patch.multiple(self.trainer, **wrapped):
            result = self.trainer.main(list(arguments))
        if self.rows is not None and result is None:
            self.rows.prune(self.args.epochs)
        return result

    def parse_args(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Parse open_clip's flags; raise for flags that are incompatible with an estimator."""
        self.args = original(*args, **kwargs)
        check_flags(self.args, self.options.wants_rows)
        self.loss = EstimatorLoss(self.args.accum_freq, self.options.tau_of_model)
        return self.args

    def create_model_and_transforms(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Freeze the scale unless it is learned, before DDP wraps the model and expects a gradient of the scale."""
        result = original(*args, **kwargs)
        model = result[0]
        if getattr(model, "logit_bias", None) is not None:
            raise ValueError(
                f"--model {self.args.model}: it has a logit_bias, which belongs to the sigmoid loss; an estimator "
                f"would leave it untrained. Take a model without init_logit_bias"
            )
        if not isinstance(getattr(model, "logit_scale", None), nn.Parameter):
            raise ValueError(f"--model {self.args.model}: expected a parameter logit_scale in {type(model).__name__}")
        model.logit_scale.requires_grad_(self.options.tau_of_model)
        return result

    def get_data(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add the index to the data before any worker starts, and build the estimator after the process group."""
        import open_clip

        data = original(*args, **kwargs)
        if "train" not in data:
            return data
        n, fingerprint = None, None
        if self.options.wants_rows:
            n, fingerprint = add_index(data["train"], self.index, self.args)
        loader = data["train"].dataloader
        dim = (open_clip.get_model_config(self.args.model) or {}).get("embed_dim")
        size = self.args.batch_size * self.args.world_size * self.args.accum_freq  # of an update, which is one call
        est = self.est = self.loss.est = self.options.build(n, dim, loader.num_samples, size)
        est.data_fingerprint = fingerprint
        if n is not None:
            if est.n is not None and "offload" in self.options.given and self.args.accum_freq == 1:
                loader = est.prefetch(loader, index="index" if self.rebuilt else -1)
            data["train"].dataloader = IndexedLoader(loader, self.loss.indices)
        self.rows = RowCheckpoints(est, self.args)
        _log.info(f"Loss: {est}")
        if self.args.local_loss or self.args.gather_with_grad:
            _log.info("--local-loss and --gather-with-grad change nothing: the estimator gathers by itself.")
        return data

    def create_loss(self, original: Callable[..., Any], args: Any) -> nn.Module:
        return self.loss

    def create_task(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the loss of a task, in the rebuilt version."""
        task = original(*args, **kwargs)
        if type(task).__name__ != "CLIPTask" or not isinstance(getattr(task, "loss", None), nn.Module):
            raise ValueError(
                f"open_clip trains this model as a {type(task).__name__}; an estimator takes the place of the loss "
                f"of a CLIPTask, of one image and one text, and of no other"
            )
        task.loss = self.loss
        return task

    def train_one_epoch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Train one epoch; save rows before open_clip writes its file, so that no file is left without rows."""
        rows, call = self.rows, call_of(original, args, kwargs)
        assert rows is not None  # get_data was called
        if not self._attached:
            self._attach(call, rows)
        self.loss.begin()
        rows.prune(call["epoch"])
        self._show_temperature(call["model"])
        self._call = call
        result = original(*args, **kwargs)
        self._show_temperature(call["model"])
        rows.save(call["epoch"] + 1)
        return result

    def _attach(self, call: Mapping[str, Any], rows: RowCheckpoints) -> None:
        """Load rows if open_clip has resumed, then attach. All checks precede the first update."""
        self._attached, args = True, self.args
        if call["epoch"] > 0:
            rows.load(call["epoch"])
        amp.attach(self.est, call["optimizer"], call["scaler"])
        if self.options.method.decays:  # gamma decays with the commits
            total = call["data"]["train"].dataloader.num_batches // args.accum_freq * args.epochs
            steps = max(1, round(self.options.gamma_decay * total))
            schedule = CosineGamma(self.est, steps, gamma_min=self.options.gamma_min)
            schedule.load_state_dict({"t": self.est.t})
            self.est.register_step_post_hook(lambda *_: schedule.step())
        call["optimizer"].register_step_post_hook(lambda *_: self._report())

    def _show_temperature(self, model: Any) -> None:
        """Write the current temperature to the model's scale, for evaluation and checkpoints.

        For learned temperatures the median over the last batch is used, before the first batch the initial
        temperature. After a resume the scale of the checkpoint is kept until the first batch.
        """
        if self.options.tau_of_model:
            return
        group: Any = self.est.sample_groups[0]
        median = self.est.metrics.get("tau_median")
        if not self.est.temperature.learns:
            tau = float(group["tau"])
        elif median is not None:
            tau = median.item()
        elif self.est.t == 0:
            tau = float(group["tau_init"])
        else:
            return
        with torch.no_grad():
            unwrapped(model).logit_scale.fill_(math.log(1 / tau))

    def _report(self) -> None:
        call, args, number = self._call, self.args, self.loss.updates - 1
        updates = call["data"]["train"].dataloader.num_batches // args.accum_freq
        if args.rank != 0 or (number % args.log_every_n_steps and number + 1 != updates):
            return
        values = {name: value.item() for name, value in self.est.metrics.items()}
        _log.info("Estimator: " + " ".join(f"{name} {value:.5g}" for name, value in values.items()))
        values, step = {f"train/{name}": value for name, value in values.items()}, updates * call["epoch"] + number
        if call.get("tb_writer") is not None:
            for name, value in values.items():
                call["tb_writer"].add_scalar(name, value, step)
        board = self.trainer.get_wandb_backend(args) if self.rebuilt else args.wandb and self.trainer.wandb
        if board:
            board.log(values, step=step)


class EstimatorLoss(nn.Module):
    """Loss of open_clip, with one call of the estimator for each update of the model. It has no parameters.

    open_clip accumulates features: it encodes ``k`` batches without a graph, then each of them again, and computes the
    loss ``k`` times, of all features of the window with the graph of one batch. The estimator is called the first time
    only, with the whole window, and its gradient is stored. The loss with the graph of batch ``j`` back-propagates the
    part of the gradient that belongs to batch ``j``, so that the ``k`` backward passes together compute the gradient of
    the window once, and the samples of the window are deposited once.
    """

    est: ContrastiveEstimator

    def __init__(self, batches: int, tau_of_model: bool) -> None:
        super().__init__()
        self.batches, self.tau_of_model = batches, tau_of_model  # k; the temperature is 1 / logit_scale
        self.indices: deque[Tensor] = deque()  # of batches read from the loader since the last update
        self.begin()

    def begin(self) -> None:
        """Discard an unfinished window at the beginning of an epoch."""
        self.updates, self._asked = 0, 0
        self.indices.clear()

    @torch.compiler.disable
    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, output_dict: bool = False
    ) -> dict[str, Tensor] | Tensor:
        """Return the estimated objective of the window, 0-d; features are ``(k B, d)``, the scale one number."""
        inputs = (image_features, text_features, logit_scale)[: 3 if self.tau_of_model else 2]
        if self._asked == 0:
            index = torch.cat([self.indices.popleft() for _ in range(self.batches)]) if self.indices else None
            with torch.enable_grad():
                # in float32, since the k backward passes and a scaler multiply the gradients later
                leaves = [z.detach().to(torch.promote_types(z.dtype, torch.float32)).requires_grad_() for z in inputs]
                tau = 1 / leaves[2].reshape(()) if self.tau_of_model else None
                value = self.est(leaves[0], leaves[1], index, tau=tau)
                self._gradients = [*torch.autograd.grad(value, leaves)]
            if self.tau_of_model:  # each of the k passes has the scale in its graph
                self._gradients[2] /= self.batches
            self._value = value.detach()
        self._asked += 1
        if self._asked == self.batches:
            self._asked, self.updates = 0, self.updates + 1
        pairs = zip(inputs, self._gradients, strict=True)
        loss = with_gradients(self._value, [(z, g) for z, g in pairs if z.requires_grad])
        return {"contrastive_loss": loss} if output_dict else loss

    def extra_repr(self) -> str:
        return repr(vars(self).get("est"))


def is_rebuilt(trainer: Any) -> bool:
    """Return True for open_clip's rebuilt main branch and False for its released version; raise for others."""
    rebuilt = hasattr(trainer, "create_task")
    factory, parameters = REBUILT if rebuilt else RELEASED
    missing = [name for name in ("main", *WRAPPED, factory) if not callable(getattr(trainer, name, None))]
    if "train_one_epoch" not in missing:
        has = inspect.signature(trainer.train_one_epoch).parameters
        missing += [f"{name} of train_one_epoch" for name in parameters if name not in has]
    if missing:
        import open_clip

        raise RuntimeError(
            f"open_clip {getattr(open_clip, '__version__', 'of unknown version')} has neither form of trainer that is "
            f"known here, of 3.3.0 and of 4.2.0.dev0: open_clip_train.main lacks {', '.join(missing)}"
        )
    return rebuilt


def call_of(train_one_epoch: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the names of the released version; ``epoch`` counts from 0."""
    call = inspect.signature(train_one_epoch).bind(*args, **kwargs).arguments
    if "state" in call:
        state = call["state"]
        call |= {name: getattr(state, name) for name in ("epoch", "optimizer", "scaler")}
        call["model"] = state.task.trainable_module
    return call


def unwrapped(model: Any) -> Any:
    """Return the model without wrappers of DDP and ``torch.compile``."""
    while (inner := getattr(model, "module", None) or getattr(model, "_orig_mod", None)) is not None:
        model = inner
    return model


def check_flags(args: Any, indexed: bool) -> None:
    """Raise for flags of open_clip that are incompatible with an estimator; ``indexed``: samples need an index."""
    flag = vars(args).get  # some flags exist in one version of open_clip only
    generative = any(kind in args.model.lower() for kind in ("coca", "genlip", "genlap"))
    step = flag("torchcompile") and flag("torchcompile_strategy") == "step"
    teacher = args.distill_model is not None or args.distill_pretrained is not None
    for found, name, why in (
        (teacher, "--distill-model", "a teacher's features are no part of an estimator's objective; train without it"),
        (args.siglip, "--siglip", "a sigmoid for each pair has no normalizer to estimate; train without it"),
        (flag("horovod"), "--horovod", "ranks are torch.distributed's; start with torchrun"),
        (generative, f"--model {args.model}", "its loss is generative too; take a CLIP model"),
        (
            indexed and flag("use_naflex"),
            "--use-naflex",
            "its batches keep patches and texts only; take an estimator without rows",
        ),
        (step, "--torchcompile-strategy step", "commits run outside of compiled code; use model or task"),
    ):
        if found:
            raise ValueError(f"{name}: {why}")
