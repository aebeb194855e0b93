"""One training run of open_clip with an estimator: what is done at each seam."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compopt.contrastive import ContrastiveEstimator
from compopt.integrations import amp
from compopt.integrations.open_clip.flags import parse, split
from compopt.integrations.open_clip.options import Options
from compopt.integrations.open_clip.pipeline import IndexedLoader, add_index, open_index
from compopt.integrations.open_clip.rows import Rows
from compopt.integrations.open_clip.seams import Epoch, Seams, check_flags, unwrapped
from compopt.integrations.open_clip.window import EstimatorLoss, Window, temperature
from compopt.schedules import CosineGamma

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> Any:
    """The command: flags of the estimator, ``--``, flags of open_clip.

    Returns:
        What open_clip's ``main`` returns.
    """
    ours, theirs = split(sys.argv[1:] if arguments is None else arguments)
    options = parse(ours)
    import open_clip_train.main as trainer

    return Run(options, Seams(trainer)).start(theirs)


class Run:
    """A run of ``open_clip_train.main.main``.

    Args:
        options: of the estimator.
        seams: of the installed open_clip.

    Attributes:
        est: the estimator, once the data are known.
    """

    def __init__(self, options: Options, seams: Seams) -> None:
        self.options, self.seams = options, seams
        self.index = open_index(options.index)
        self.est: ContrastiveEstimator | None = None
        self._attached = False

    def start(self, arguments: Sequence[str]) -> Any:
        """Run open_clip's command line."""
        trainer = self.seams.trainer
        name, factory = self.seams.factory(lambda: EstimatorLoss(self.window))
        names = {
            "parse_args": self._after(trainer.parse_args, self._parsed),
            "create_model_and_transforms": self._after(trainer.create_model_and_transforms, self._made),
            "get_data": self._after(trainer.get_data, self._read),
            "train_one_epoch": self._around(trainer.train_one_epoch),
            name: factory,
        }
        with self.seams.replaced(names):
            result = trainer.main(list(arguments))
        if self.est is not None and result is None:
            self.rows.prune(self.args.epochs)
        return result

    @staticmethod
    def _after(function: Callable[..., Any], look: Callable[[Any], None]) -> Callable[..., Any]:
        """A function whose result is looked at."""

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            look(result)
            return result

        return wrapped

    # -- before training ---------------------------------------------------------------------------------------

    def _parsed(self, args: Any) -> None:
        check_flags(args, self.options.wants_rows)
        self.args = args
        self.window = Window(args.accum_freq, self.options.tau_of_model)

    def _made(self, result: Any) -> None:
        """The model, before anything wraps it: DDP waits for the gradient of every parameter that may have one."""
        model = result[0]
        if getattr(model, "logit_bias", None) is not None:
            raise ValueError(
                f"--model {self.args.model}: it has a logit_bias, which belongs to the sigmoid loss; an estimator "
                f"would leave it untrained. Take a model without init_logit_bias"
            )
        if not isinstance(getattr(model, "logit_scale", None), torch.nn.Parameter):
            raise ValueError(f"--model {self.args.model}: expected a parameter logit_scale in {type(model).__name__}")
        model.logit_scale.requires_grad_(self.options.tau_of_model)

    def _read(self, data: dict[str, Any]) -> None:
        """The data, before any worker starts; ranks have met by now."""
        if "train" not in data:
            return
        n, fingerprint = None, None
        if self.options.wants_rows:
            n, fingerprint = add_index(data["train"], self.index, self.args)
        loader, args = data["train"].dataloader, self.args
        size = args.batch_size * args.world_size * args.accum_freq  # of an update, which is one call
        est = self.est = self.window.est = self.options.build(n, self._dim(), loader.num_samples, size)
        est.data_fingerprint = fingerprint
        if n is not None:
            if est.n is not None and "offload" in self.options.given and self.args.accum_freq == 1:
                loader = est.prefetch(loader, index="index" if self.seams.rebuilt else -1)
            data["train"].dataloader = IndexedLoader(loader, self.window.indices)
        self.rows = Rows(est, self.args)
        _log.info(f"Loss: {est}")
        if self.args.local_loss or self.args.gather_with_grad:
            _log.info("--local-loss and --gather-with-grad change nothing: the estimator gathers by itself.")

    def _dim(self) -> int | None:
        """Size of the model's features."""
        import open_clip

        config = open_clip.get_model_config(self.args.model)
        return None if config is None else config.get("embed_dim")

    # -- while training ----------------------------------------------------------------------------------------

    def _around(self, train_one_epoch: Callable[..., Any]) -> Callable[..., Any]:
        """An epoch, with what comes before and after it."""

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            epoch = self.seams.epoch(arguments, keywords)
            self._before(epoch)
            result = train_one_epoch(*arguments, **keywords)
            self._show_temperature(epoch)
            self.rows.save(epoch.number + 1)
            return result

        return wrapped

    def _before(self, epoch: Epoch) -> None:
        if not self._attached:
            self._attach(epoch)
        self.window.begin()
        self.rows.prune(epoch.number)
        self._show_temperature(epoch)
        self._reports = (epoch, epoch.data["train"].dataloader.num_batches // epoch.args.accum_freq)

    def _attach(self, epoch: Epoch) -> None:
        """Rows, if open_clip has resumed, then the optimizer; whatever is refused is refused before any update."""
        est = self._estimator()
        self._attached = True
        if epoch.number > 0:
            self.rows.load(epoch.number)
        if epoch.scaler is None:
            est.attach(epoch.optimizer)
        else:
            amp.attach(est, epoch.optimizer, epoch.scaler)
        if self.options.method.decays:
            self._decay(est, epoch)
        epoch.optimizer.register_step_post_hook(lambda *_: self._report())

    def _decay(self, est: ContrastiveEstimator, epoch: Epoch) -> None:
        """Gamma falls with the commits."""
        total = epoch.data["train"].dataloader.num_batches // epoch.args.accum_freq * epoch.args.epochs
        steps = max(1, round(self.options.gamma_decay * total))
        schedule = CosineGamma(est, steps, gamma_min=self.options.gamma_min)
        schedule.load_state_dict({"t": est.t})
        est.register_step_post_hook(lambda *_: schedule.step())

    def _estimator(self) -> ContrastiveEstimator:
        if self.est is None:
            raise RuntimeError("open_clip trains, and its get_data was not called: there is no estimator")
        return self.est

    def _show_temperature(self, epoch: Epoch) -> None:
        """Let the model's scale be the temperature in use: evaluation and checkpoints then mean something."""
        tau = None if self.options.tau_of_model else temperature(self._estimator())
        if tau is not None:
            with torch.no_grad():
                unwrapped(epoch.model).logit_scale.fill_(math.log(1 / tau))

    def _report(self) -> None:
        """The estimator's metrics, as often as open_clip's own."""
        epoch, updates = self._reports
        args, number = epoch.args, self.window.updates - 1
        if args.rank != 0 or (number % args.log_every_n_steps and number + 1 != updates):
            return
        values = {name: value.item() for name, value in self._estimator().metrics.items()}
        _log.info("Estimator: " + " ".join(f"{name} {value:.5g}" for name, value in values.items()))
        step = updates * epoch.number + number
        for name, value in values.items():
            if epoch.writer is not None:
                epoch.writer.add_scalar(f"train/{name}", value, step)
        board = self.seams.board(args)
        if board is not None:
            board.log({f"train/{name}": value for name, value in values.items()}, step=step)
