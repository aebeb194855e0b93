"""Hugging Face ``Trainer``: commits, rows in each ``checkpoint-N``, and the gradient cache."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

try:
    from transformers import TrainerCallback, TrainerState
except ImportError as error:
    raise ImportError(
        "this needs the Trainer of transformers: pip install -e '.[transformers]' in the checkout of compopt"
    ) from error

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from compopt.checkpoint import save
from compopt.curation import ScoreKeeper
from compopt.distributed.wrappers import TrainingStep, training_step
from compopt.estimator.base import Estimator
from compopt.integrations import accelerate
from compopt.integrations.refusals import load_rows, refuse_last_batch, refuse_ranks

NAME = "compopt"
LABELS = ("label", "labels", "label_ids")  # the Trainer keeps these columns, which usually contain classes
# Fields of a checkpoint's state that differ between runs, and that are unchanged at the start of a resumed training
_FIELDS = ("global_step", "epoch", "total_flos", "log_history")


class EstimatorCallback(TrainerCallback):
    """Commit after each update of a ``Trainer``, and save the rows of all ranks in its checkpoints.

    Example:
        >>> import tempfile, torch, compopt
        >>> from transformers import Trainer, TrainingArguments
        >>> from compopt.integrations.transformers import EstimatorCallback
        >>> class Contrastive(Trainer):
        ...     def compute_loss(self, model, inputs, **kwargs):
        ...         return est(model(inputs["x"]), inputs["x"], inputs["index"])
        >>> data = [{"x": torch.randn(4), "index": number} for number in range(16)]
        >>> plain = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        >>> plain |= {"remove_unused_columns": False, "use_cpu": True}
        >>> args = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=1, **plain)
        >>> est = compopt.SogCLREstimator(n=16)
        >>> trainer = Contrastive(torch.nn.Linear(4, 4), args, train_dataset=data)
        >>> trainer.add_callback(EstimatorCallback(est, trainer))
        >>> trainer.train().global_step == est.t
        {'train_runtime': ...}
        True

    Accumulated micro-batches are committed together; a step skipped after overflow (fp16, DeepSpeed) commits nothing.
    When the Trainer logs, the callback logs ``info_nce`` of the last batch, see :attr:`ContrastiveEstimator.metrics`.

    The loss of an estimator is a mean over one batch, which the Trainer has to divide by
    ``gradient_accumulation_steps``. The Trainer does not do so if the batch has a key ``labels`` and the model's
    ``forward`` accepts ``**kwargs`` (``CLIPModel``), nor with ``compute_loss_func``: it then expects a loss that is
    divided by the number of labels in the whole window. At the start of training the callback therefore sets
    ``loss_is_scaled_for_ga`` and ``model_accepts_loss_kwargs`` of the Trainer to ``False``, unless
    ``loss_is_scaled_for_ga`` is ``True``.

    Rows are saved in ``checkpoint-N/<name>``, so that ``save_total_limit`` removes both. The Trainer calls ``on_save``
    after it has written its own files and removed older checkpoints: a run killed in between leaves a checkpoint
    without rows, which cannot be resumed. Set ``save_total_limit`` to at least 2, so that an earlier checkpoint is
    available. Uploads by ``push_to_hub`` contain no rows.

    ``Trainer.train`` does not pass ``resume_from_checkpoint`` to callbacks. Rows are loaded from ``resume_from``, or
    else from ``args.resume_from_checkpoint`` or ``args.output_dir/checkpoint-<step>``, in each case only if the trainer
    state there equals the one that the Trainer has loaded. With ``load_best_model_at_end`` the rows of the best model
    are loaded too.

    Args:
        est: the estimator; it must be built after ``TrainingArguments``, which create the process group. Or a mapping
            of several, as for :class:`~compopt.integrations.sentence_transformers.EstimatorLoss`: the rows of each are
            in ``checkpoint-N/<name>/<key>``, and the logged value is ``<key>/info_nce``. A
            :class:`~compopt.ScoreKeeper` among them is only saved and loaded; attach it to its estimator before.
        trainer: the ``Trainer``; its ``compute_loss`` calls the estimators.
        name: folder inside the checkpoint; must be different for each callback.
        resume_from: the argument of ``train(resume_from_checkpoint=...)``, if it is in another ``output_dir``.

    Raises:
        ValueError: at the start of training: ``dataloader_drop_last=False`` on several ranks; an estimator that was
            built before the process group; ``remove_unused_columns=True`` removes the index that an estimator with rows
            needs; a hyper-parameter search (its trials would share one estimator); two estimators with one ``name``; a
            last batch of a single sample; ``compute_loss_func`` on several ranks with
            ``average_tokens_across_devices``, which multiplies the loss by the number of ranks. At construction: an
            empty mapping, or keys that are not names of folders.
        TypeError: ``est`` is neither an estimator nor a mapping of estimators.
        FileNotFoundError: the checkpoint to resume from has no rows, or was not found.
        ValueError, OSError, RuntimeError: in saving and loading of rows, see :func:`compopt.save` and
            :func:`compopt.load`.

    Warns:
        UserWarning: a launcher started several processes, but the Trainer's accelerator created no process group.

    Communicates: saving and loading are collective; commits communicate nothing.
    """

    def __init__(
        self,
        est: Estimator | Mapping[Any, Estimator],
        trainer: Any,
        name: str = NAME,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        self.est, self.trainer, self.name = est, trainer, name
        self._estimators = _by_folder(est, name)
        self.resume_from = None if resume_from is None else Path(resume_from)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Attach to the prepared optimizer; load rows if the Trainer resumes."""
        if state.is_hyper_param_search:
            raise ValueError("the trials of a hyper-parameter search would share one estimator; train them one by one")
        for est in self._estimators.values():
            refuse_ranks(est, args.world_size, "after TrainingArguments(...)")
        refuse_last_batch(args.world_size, args.dataloader_drop_last, "TrainingArguments(dataloader_drop_last=True)")
        self._check_folders()
        self._refuse_removed_index()
        self._check_last_batch(args)
        self._divide_loss_by_batches(args)
        for est in self._estimators.values():
            est.discard()  # deposits of an attempt that ran out of memory
            if not isinstance(est, ScoreKeeper):  # it commits with the estimator that it is attached to
                accelerate.attach(est, self.trainer.optimizer, self.trainer.accelerator)
        if state.global_step:
            self._load(self._resumed(args, state))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Log the cross-entropy of the last batch in steps in which the Trainer logs."""
        if control.should_log:
            found = {f"{folder}/info_nce": est.metrics.get("info_nce") for folder, est in self._estimators.items()}
            values = {key.removeprefix(f"{NAME}/"): value.item() for key, value in found.items() if value is not None}
            if values:
                self.trainer.log(values)
                control.should_log = True  # log() has reset the request

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the rows on every rank, after the Trainer has written its files. Collective."""
        for folder, est in self._estimators.items():
            save(est, _checkpoint(args, state) / folder, keep=1)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Load the rows of the best model if the Trainer has loaded the best model. Collective."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._load(Path(state.best_model_checkpoint))

    def _check_folders(self) -> None:
        """Raise if the callback of another estimator has the same folder and would overwrite its rows."""
        callbacks = self.trainer.callback_handler.callbacks
        others = [each._estimators for each in callbacks if isinstance(each, EstimatorCallback)]
        if any(other.get(folder, est) is not est for other in others for folder, est in self._estimators.items()):
            raise ValueError(
                f"two estimators would keep their rows in one folder; give one callback both, EstimatorCallback("
                f"{{'first': est, 'second': est2}}, trainer), or one of them name={self.name + '-2'!r}"
            )

    def _divide_loss_by_batches(self, args: Any) -> None:
        """Make the Trainer divide the loss by the number of batches of a window, for any batch and model."""
        trainer = self.trainer
        if getattr(trainer, "loss_is_scaled_for_ga", None):
            return
        averages = getattr(args, "average_tokens_across_devices", False)
        if getattr(trainer, "compute_loss_func", None) is not None and averages and args.world_size > 1:
            raise ValueError(
                f"with compute_loss_func the Trainer multiplies the loss by the {args.world_size} processes; override "
                f"compute_loss of a subclass instead, or set TrainingArguments(average_tokens_across_devices=False)"
            )
        trainer.loss_is_scaled_for_ga = trainer.model_accepts_loss_kwargs = False

    def _refuse_removed_index(self) -> None:
        """Raise if an estimator has rows, and the Trainer removes every column of integers that may be the index."""
        data, kept = self.trainer.train_dataset, getattr(self.trainer, "_signature_columns", None)
        rows = any(est.n is not None for est in self._estimators.values())
        if kept is None or not rows or isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            return  # None: the Trainer removes nothing
        with torch.random.fork_rng(devices=[]):  # augmentations of a data set may draw from it
            sample = data[0]
        integers = {name for name, value in sample.items() if _is_integer(value)} if isinstance(sample, dict) else set()
        removed = sorted(integers.difference(kept))
        if removed and not integers.intersection(kept).difference(LABELS):
            raise ValueError(
                f"the Trainer removes the columns {removed}, since forward of the model has no such arguments, and an "
                f"estimator with rows needs an index; set TrainingArguments(remove_unused_columns=False)"
            )

    def _check_last_batch(self, args: Any) -> None:
        """Raise for a last batch of one sample, which has no negatives and would raise an error later in training."""
        data = self.trainer.train_dataset
        for each in data.values() if isinstance(data, Mapping) else [data]:
            if not args.dataloader_drop_last and hasattr(each, "__len__") and len(each) % args.train_batch_size == 1:
                raise ValueError(
                    f"{len(each)} samples leave one for the last batch of {args.train_batch_size}, which would have no "
                    f"negatives; set TrainingArguments(dataloader_drop_last=True)"
                )

    def _resumed(self, args: Any, state: TrainerState) -> Path:
        own = [Path(str(args.resume_from_checkpoint)), _checkpoint(args, state)]
        places = own if self.resume_from is None else [self.resume_from]
        found = next((place for place in places if _is_of(state, place)), None)
        if found is None:
            raise FileNotFoundError(
                f"the Trainer resumed at step {state.global_step}, and its checkpoint is not {places[-1]}; give "
                f"EstimatorCallback(..., resume_from=) what train(resume_from_checkpoint=) got"
            )
        return found

    def _load(self, checkpoint: Path) -> None:
        for folder, est in self._estimators.items():
            load_rows(
                est,
                checkpoint / folder,
                "the checkpoint was saved without EstimatorCallback, or the run was killed before the rows were "
                "written. Resume from an earlier checkpoint; or, to begin with new rows, load its weights into the "
                "model and train without resume_from_checkpoint",
            )


class GradientCacheMixin:
    r"""Mixin with which :func:`compopt.gradient_cache` can be called in ``compute_loss`` of a ``Trainer``.

    Example:
        >>> import tempfile, torch, compopt
        >>> from transformers import Trainer, TrainingArguments
        >>> from compopt.integrations.transformers import EstimatorCallback, GradientCacheMixin
        >>> class Contrastive(GradientCacheMixin, Trainer):
        ...     def compute_loss(self, model, inputs, **kwargs):
        ...         index, texts = inputs.pop("index"), (inputs["a"], inputs["b"])
        ...         return compopt.gradient_cache(est, (model, model), texts, index, micro_batch_size=4)
        >>> data = [{"a": torch.randn(4), "b": torch.randn(4), "index": number} for number in range(32)]
        >>> plain = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        >>> plain |= {"remove_unused_columns": False, "use_cpu": True}
        >>> args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=16, **plain)
        >>> est = compopt.SogCLREstimator(n=32)
        >>> trainer = Contrastive(torch.nn.Linear(4, 4), args, train_dataset=data)
        >>> trainer.add_callback(EstimatorCallback(est, trainer))
        >>> trainer.train().global_step == est.t
        {'train_runtime': ...}
        True

    The gradients are those of one forward and backward pass of the whole batch of all ranks. A ``Trainer`` calls
    ``backward`` on the result of ``compute_loss``; a gradient cache back-propagates in its own call, once per
    micro-batch. The mixin passes the trainer's backward pass, its division by the accumulated batches and its loss
    scale to the cache, reduces gradients once per update (in each micro-batch with ZeRO 2 and 3, which require it), and
    leaves out the trainer's own call. Losses that require a gradient are treated as without the mixin.

    One process, ``DistributedDataParallel``, FSDP2 and DeepSpeed (ZeRO 0 to 3), with ``gradient_accumulation_steps``,
    ``bf16``, ``fp16`` and ``gradient_checkpointing``. :class:`EstimatorCallback` is used in addition. With
    ``SentenceTransformerTrainer``, ``CachedEstimatorLoss`` uses this gradient cache, also inside ``MatryoshkaLoss``.
    """

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the trainer; see :meth:`transformers.Trainer.training_step`."""
        trainer = cast(Any, self)
        accelerator, reduce, ran = trainer.accelerator, trainer.accelerator.sync_gradients, False
        theirs, scale = accelerator.backward, 1 / getattr(trainer, "current_gradient_accumulation_steps", 1)
        engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        backward = theirs if engine is None else None
        if engine is not None:
            engine.set_gradient_accumulation_boundary(reduce)
            scale *= engine.gradient_accumulation_steps()  # by which its backward divides

        def once(loss: Tensor, **options: Any) -> None:
            nonlocal ran
            ran = loss.requires_grad
            if ran:  # of another loss than a gradient cache
                theirs(loss, **options)

        accelerator.backward = once
        try:
            with training_step(TrainingStep(backward, reduce, scale)):
                loss = cast(Any, super()).training_step(model, inputs, *args, **kwargs)
        finally:
            del accelerator.backward
        if engine is not None and reduce and not ran:
            engine.step()  # accelerate calls it in backward
        return loss


def _by_folder(est: Estimator | Mapping[Any, Estimator], name: str) -> dict[str, Estimator]:
    found: dict[str, Any] = {name: est}
    if isinstance(est, Mapping):
        found = {f"{name}/{key}": each for key, each in est.items()}
        named = all(key not in ("", "..") and Path(str(key)).name == str(key) for key in est)
        if not named or not len(found) == len(est) > 0:
            raise ValueError(f"each key of est names a folder inside the checkpoint, got {list(est)}")
    for folder, each in found.items():
        if not isinstance(each, Estimator):
            raise TypeError(f"{folder}: est must be an estimator or a mapping of them, got {type(each).__name__}")
    return found


def _is_integer(value: Any) -> bool:
    """Return whether a value may be an index: an integer, or a single one in a list or an array."""
    if isinstance(value, list | tuple) or getattr(value, "shape", ()) == (1,):
        value = value[0] if len(value) == 1 else None
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _checkpoint(args: Any, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _is_of(state: TrainerState, checkpoint: Path) -> bool:
    """Compare the Trainer's state with that of a checkpoint, as JSON, since NaN equals NaN there."""
    file = checkpoint / "trainer_state.json"
    if not file.is_file():
        return False
    saved = TrainerState.load_from_json(os.fspath(file))
    mine, theirs = ([getattr(each, name) for name in _FIELDS] for each in (state, saved))
    return json.dumps(mine) == json.dumps(theirs)
