"""Lightning: commits under any strategy and precision, and rows in checkpoints."""

from __future__ import annotations

import os
import warnings
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
    from lightning.pytorch.utilities import CombinedLoader
except ImportError as error:
    raise ImportError("this needs Lightning: pip install -e '.[lightning]' in the checkout of compopt") from error

from compopt.checkpoint import save
from compopt.curation import ScoreKeeper
from compopt.estimator.base import Estimator
from compopt.integrations import amp
from compopt.integrations.refusals import load_rows, refuse_last_batch, refuse_ranks, warn_alone

KEY = "compopt"


class EstimatorCallback(Callback):
    """Commit after each update of a Lightning ``Trainer``, and save the rows in its checkpoints.

    Example:
        >>> import torch, lightning, compopt
        >>> from compopt.integrations.lightning import EstimatorCallback
        >>> class Encoder(lightning.LightningModule):
        ...     def setup(self, stage):
        ...         if not hasattr(self, "est"):  # setup runs in every fit, validate and test
        ...             self.layer, self.est = torch.nn.Linear(4, 4), compopt.SogCLREstimator(n=16)
        ...     def training_step(self, batch, number):
        ...         x, index = batch
        ...         return self.est(self.layer(x), x, index)
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters())
        >>> data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16))
        >>> quiet = dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        >>> quiet |= {"logger": False, "callbacks": [EstimatorCallback()]}
        >>> trainer = lightning.Trainer("cpu", max_epochs=1, **quiet)
        >>> trainer.fit(module := Encoder(), torch.utils.data.DataLoader(data, batch_size=8))
        >>> module.est.t
        2

    Accumulated batches are committed together; a step skipped after overflow (``16-mixed``, DeepSpeed) commits nothing.
    Whenever Lightning logs, the callback logs ``info_nce`` of the last batch, see :attr:`ContrastiveEstimator.metrics`;
    for an attribute other than ``est`` under the name ``<attribute>/info_nce``.

    *Rows inside the checkpoint* (default): ``save_top_k``, remote paths, directories of FSDP and DeepSpeed, and
    ``ckpt_path`` apply to the rows too. While saving, every rank holds a copy of the whole table in memory; creating
    the copy takes the time to write its bytes. Suitable for up to about ten million samples.

    *Rows in* ``directory``, for larger tables: each rank writes its own rows with :func:`compopt.save`, and the
    checkpoint contains the name of that save. Lightning has no hook for checkpoints that it removes: the last ``keep``
    saves are kept, independently of ``save_top_k``; loading a checkpoint without its rows raises an error.

    *Searches* (``Tuner.lr_find``, ``scale_batch_size``) run without callbacks: this one attaches before them, so that
    they train with the estimator's state, and loads the state from before the search when training starts.

    Checkpoints with ``save_weights_only=True`` have no rows. ``validate``, ``test`` and ``predict`` load no rows.

    Args:
        est: path of the estimator in the ``LightningModule``, for example ``"loss.est"``: an attribute that its
            ``setup`` creates once, when the process group exists. Use one callback per estimator, and one for a
            :class:`~compopt.ScoreKeeper`, which is only saved and loaded; attach it to its estimator before.
        optimizer: position, in the result of ``configure_optimizers``, of the optimizer that commits with its step.
            ``None``: the only optimizer.
        directory: folder on a file system shared by all ranks, used by this estimator and this run only.
        keep: number of saves to keep in ``directory``.

    Raises:
        ValueError: at the start of fitting: there are several optimizers and ``optimizer`` is ``None``, a loader has
            ``drop_last=False`` on several ranks, or the estimator was built before the process group; with
            ``ckpt_path``: the checkpoint has no rows.
        TypeError: the attribute ``est`` of the module is not an estimator.
        FileNotFoundError: the rows of the checkpoint are no longer in ``directory``.
        RuntimeError: in saving: ``setup`` has replaced the estimator since training.
        ValueError, OSError, RuntimeError: in saving and loading of rows, see :func:`compopt.save` and
            :func:`compopt.load`.

    Warns:
        UserWarning: a launcher started several processes, but the Trainer uses one process; at the start of fitting:
            ``setup`` has replaced the estimator that the module was trained with.

    Communicates: saving and loading are collective with a ``directory``, and also without if the state is
    :attr:`~compopt.Estimator.split`; commits communicate nothing.
    """

    def __init__(
        self,
        est: str = "est",
        optimizer: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        keep: int = 2,
    ) -> None:
        self.est, self.optimizer, self.keep = est, optimizer, keep
        self.directory = None if directory is None else Path(directory)
        self._before_search: dict[str, Any] | None = None
        self._trained: tuple[ReferenceType[Any], ReferenceType[Estimator]] | None = None  # module and its estimator

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trained": None}  # weak references cannot be pickled

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move this callback before those that search a learning rate or batch size, which run without the others."""
        trainer.callbacks.insert(0, trainer.callbacks.pop(trainer.callbacks.index(self)))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizer, scaler or engine, and keep the state if a search follows."""
        est = self._estimator(pl_module)
        if self._replaced(pl_module, est) and not est.t:
            warnings.warn(f"{self._setup_again}; this training begins with the state of a new one", stacklevel=2)
        self._trained = ref(pl_module), ref(est)
        if any(isinstance(each, BatchSizeFinder | LearningRateFinder) for each in trainer.callbacks):
            self._before_search = est.state_dict()
        self._attach(trainer, est)

    def _attach(self, trainer: Any, est: Estimator) -> None:
        refuse_ranks(est, trainer.world_size, f"in setup() of the LightningModule, as self.{self.est}")
        warn_alone(trainer.world_size, "set Trainer(devices=...)")
        if isinstance(est, ScoreKeeper):  # it commits with the estimator that it is attached to
            return
        if hasattr(trainer.strategy, "deepspeed_engine"):
            est.attach(trainer.strategy.deepspeed_engine)
            return
        if self.optimizer is None and len(trainer.optimizers) > 1:
            raise ValueError(
                f"there are {len(trainer.optimizers)} optimizers: say whose step commits the rows, EstimatorCallback("
                f"optimizer=0) for the first"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        amp.attach(est, trainer.optimizers[self.optimizer or 0], scaler)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the loaders; raise a ``ValueError`` for ``drop_last=False`` on several ranks. Undo a search."""
        state, self._before_search = self._before_search, None
        if state is not None:
            est = self._estimator(pl_module)
            est.load_state_dict(state)  # Lightning has restored the model
            self._attach(trainer, est)  # a search may have made the optimizer anew
        for loader in CombinedLoader(trainer.train_dataloader).flattened:
            drop_last = getattr(getattr(loader, "batch_sampler", None), "drop_last", True)
            refuse_last_batch(trainer.world_size, drop_last, "DataLoader(..., drop_last=True)")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the cross-entropy of the batch in steps in which Lightning logs."""
        if trainer._logger_connector.should_update_logs:  # the condition that Lightning's own callbacks use
            value = self._estimator(pl_module).metrics.get("info_nce")
            if value is not None:
                pl_module.log("info_nce" if self.est == "est" else f"{self.est}/info_nce", value)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the rows, or the name of their save, to Lightning's checkpoint, on every rank before it is written."""
        est = self._estimator(pl_module)
        if self._replaced(pl_module, est):
            raise RuntimeError(f"{self._setup_again}; the rows of the training are lost, and are not saved")
        saved = checkpoint.setdefault(KEY, {}).setdefault(self.est, {})
        if self.directory is None:
            saved["state"] = est.state_dict()
        else:
            saved["checkpoint"] = save(est, self.directory, keep=self.keep).name

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load the rows of the checkpoint from which fitting resumes, on every rank."""
        if trainer.state.fn != "fit":
            return
        saved = checkpoint.get(KEY, {}).get(self.est)
        if saved is None:
            raise ValueError(
                f"the checkpoint has no rows of {self.est!r}: it was saved without this EstimatorCallback. To begin "
                f"with its weights and new rows, load its state_dict into the module and fit without ckpt_path"
            )
        if "state" in saved:
            self._estimator(pl_module).load_state_dict(saved["state"])
        elif self.directory is None:
            raise ValueError(
                f"the rows of this checkpoint are in a directory, as {saved['checkpoint']}; pass it as directory="
            )
        else:
            load_rows(
                self._estimator(pl_module),
                self.directory / saved["checkpoint"],
                f"directory= has the last {self.keep} saves; resume from a later checkpoint, and set keep= to the "
                f"number of checkpoints that ModelCheckpoint keeps",
            )

    def _replaced(self, pl_module: Any, est: Estimator) -> bool:
        """Return whether the module was trained with another estimator."""
        return self._trained is not None and self._trained[0]() is pl_module and self._trained[1]() is not est

    @property
    def _setup_again(self) -> str:
        return (
            f"setup() has replaced the module's {self.est!r}: it runs in every fit, validate, test and predict, so let "
            f"it create the estimator once (if not hasattr(self, ...))"
        )

    def _estimator(self, pl_module: Any) -> Estimator:
        try:
            est = attrgetter(self.est)(pl_module)
        except AttributeError:
            est = None
        if not isinstance(est, Estimator):
            raise TypeError(
                f"{type(pl_module).__name__}.{self.est} must be an estimator, made in setup(); got {type(est).__name__}"
            )
        return est
