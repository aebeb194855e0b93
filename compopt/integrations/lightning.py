"""Lightning: commits under any strategy and precision, and rows in its checkpoints."""

from __future__ import annotations

import os
from operator import attrgetter
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import CombinedLoader
except ImportError as error:
    raise ImportError("this needs Lightning: pip install -e '.[lightning]' in the checkout of compopt") from error

from compopt.checkpoint import save
from compopt.estimator.base import Estimator
from compopt.integrations import amp
from compopt.integrations.refusals import load_rows, refuse_last_batch, refuse_ranks, warn_alone

KEY = "compopt"


class EstimatorCallback(Callback):
    """Commit after each real update of a Lightning ``Trainer``, and keep the rows of all ranks in its checkpoints.

    Accumulated batches join one commit; a step that is skipped for overflow (``16-mixed``, DeepSpeed) commits nothing.
    Whenever Lightning logs, ``info_nce`` of the last batch is logged as well, see :attr:`ContrastiveEstimator.metrics`;
    of an attribute other than ``est`` as ``<attribute>/info_nce``.

    *Rows inside the checkpoint*, the default: ``save_top_k``, remote paths, directories of FSDP and DeepSpeed, and
    ``ckpt_path`` apply to the rows too. Meanwhile every rank has a copy of the whole table in memory, which takes as
    long as writing so many bytes: fine up to some ten million samples.

    *Rows in* ``directory``, for larger tables: each rank writes its own with :func:`compopt.save`, and the checkpoint
    has the name of that save. Lightning has no hook for checkpoints that it removes: the last ``keep`` saves stay,
    independently of ``save_top_k``; loading a checkpoint whose rows are gone raises an error.

    Checkpoints with ``save_weights_only=True`` have no rows. ``validate``, ``test`` and ``predict`` load none.

    Args:
        est: path of the estimator in the ``LightningModule``, ``"loss.est"`` for example: an attribute that its
            ``setup`` makes, when the process group is there. Several estimators have a callback each.
        optimizer: position, in the result of ``configure_optimizers``, of the optimizer whose step commits. ``None``:
            there is only one.
        directory: on a file system that all ranks see; of this estimator and this run alone.
        keep: number of saves that ``directory`` keeps.

    Raises:
        ValueError: when fitting begins: several optimizers and none chosen, a loader with ``drop_last=False`` on
            several ranks, an estimator that was built too early; with ``ckpt_path``: a checkpoint without rows.
        TypeError: the attribute ``est`` of the module is no estimator.
        FileNotFoundError: the rows of the checkpoint are no longer in ``directory``.
        ValueError, OSError, RuntimeError: when rows are saved or loaded, see :func:`compopt.save` and
            :func:`compopt.load`.

    Warns:
        UserWarning: a launcher started several processes, and the Trainer knows of one.

    Communicates: collective when saving and loading with a ``directory``, and, without, where the state is
    :attr:`~compopt.Estimator.split`; commits communicate nothing.

    Example:
        >>> import torch, lightning, compopt
        >>> from compopt.integrations.lightning import EstimatorCallback
        >>> class Encoder(lightning.LightningModule):
        ...     def setup(self, stage):
        ...         self.layer, self.est = torch.nn.Linear(4, 4), compopt.SogCLREstimator(n=16)
        ...     def training_step(self, batch, number):
        ...         x, index = batch
        ...         return self.est(self.layer(x), x, index)
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters())
        >>> data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16))
        >>> quiet = dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        >>> trainer = lightning.Trainer("cpu", max_epochs=1, callbacks=[EstimatorCallback()], logger=False, **quiet)
        >>> trainer.fit(module := Encoder(), torch.utils.data.DataLoader(data, batch_size=8))
        >>> module.est.t
        2
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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizer, scaler or engine, which exist by now."""
        est = self._estimator(pl_module)
        refuse_ranks(est, trainer.world_size, f"in setup() of the LightningModule, as self.{self.est}")
        warn_alone(trainer.world_size, "tell it how many devices there are: Trainer(devices=...)")
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
        """Check the loaders, which exist by now; a ``ValueError`` for ``drop_last=False`` on several ranks."""
        for loader in CombinedLoader(trainer.train_dataloader).flattened:
            drop_last = getattr(getattr(loader, "batch_sampler", None), "drop_last", True)
            refuse_last_batch(trainer.world_size, drop_last, "DataLoader(..., drop_last=True)")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the cross-entropy of the batch when Lightning is about to log."""
        if trainer._logger_connector.should_update_logs:  # as Lightning's own callbacks ask
            value = self._estimator(pl_module).metrics.get("info_nce")
            if value is not None:
                pl_module.log("info_nce" if self.est == "est" else f"{self.est}/info_nce", value)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the rows, or the name of their checkpoint, into Lightning's; on every rank, before it writes."""
        est = self._estimator(pl_module)
        saved = checkpoint.setdefault(KEY, {}).setdefault(self.est, {})
        if self.directory is None:
            saved["state"] = est.state_dict()
        else:
            saved["checkpoint"] = save(est, self.directory, keep=self.keep).name

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load the rows of a checkpoint to fit from, on every rank."""
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
            raise ValueError(f"the rows of this checkpoint are in a directory, as {saved['checkpoint']}: directory=")
        else:
            load_rows(
                self._estimator(pl_module),
                self.directory / saved["checkpoint"],
                f"directory= has the last {self.keep} saves; resume from a later checkpoint, and let keep= be what "
                f"ModelCheckpoint keeps",
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
