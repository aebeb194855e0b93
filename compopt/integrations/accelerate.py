"""Hugging Face accelerate: commits, and rows in ``save_state``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from compopt.checkpoint import SaveHandle, load, save
from compopt.estimator.base import Estimator
from compopt.integrations import amp
from compopt.integrations.refusals import warn_alone


def attach(est: Estimator, optimizer: Any, accelerator: Any) -> RemovableHandle:
    """Commit after each real update that accelerate makes; a skipped one discards. Call it after ``prepare``.

    The hook is on the object that reports skips: DeepSpeed's engine, which counts them (the update, and so the commit,
    then happens inside ``accelerator.backward``), or the optimizer and the scaler of ``mixed_precision="fp16"``.
    Micro-batches inside ``accelerator.accumulate`` join one commit.

    Args:
        est: the estimator; built after the ``Accelerator``, so that it sees the process group.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        accelerator: the ``accelerate.Accelerator``.

    Returns:
        A handle with ``remove()``.

    Raises:
        TypeError: no torch optimizer is inside ``optimizer``.

    Communicates: nothing.

    Warns:
        UserWarning: a launcher started several processes, and accelerate made no group of them: each trains alone.

    Example:
        >>> import accelerate, torch, compopt
        >>> from compopt.integrations.accelerate import attach
        >>> accelerator, x = accelerate.Accelerator(cpu=True), torch.randn(4, 4)
        >>> est, weight = compopt.SogCLREstimator(10), torch.nn.Parameter(torch.ones(4, 4))
        >>> optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
        >>> handle = attach(est, optimizer, accelerator)
        >>> accelerator.backward(est(x @ weight, x, torch.arange(4)))
        >>> optimizer.step()
        >>> est.t
        1
    """
    warn_alone(
        accelerator.num_processes,
        "on a machine without accelerators build Accelerator(cpu=True), or start with accelerate launch --cpu",
    )
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is not None:
        return est.attach(wrapped.engine)
    return amp.attach(est, optimizer, getattr(accelerator, "scaler", None))


def register_for_checkpointing(
    est: Estimator, accelerator: Any, name: str = "compopt", blocking: bool = True
) -> _CheckpointEntry:
    """Let ``accelerator.save_state`` and ``load_state`` carry the estimator, every rank's rows included.

    accelerate writes what is registered with its own method of this name on the main process only, and gives that to
    every rank. Here each rank writes its own rows with :func:`compopt.save` into ``<output_dir>/<name>``, and
    accelerate keeps only which checkpoint that was; ``load_state`` loads this very one, on any number of ranks.

    Args:
        est: the estimator.
        accelerator: the ``accelerate.Accelerator``.
        name: folder inside the checkpoint; another one for every estimator.
        blocking: ``False``: ``save_state`` returns while threads write the rows, and its folder is complete once
            ``wait()`` of what this returns has come back; see :func:`compopt.save`.

    Returns:
        An object with ``wait()``, which waits for the rows of the last ``save_state`` and raises what went wrong.

    Raises:
        FileNotFoundError, ValueError: at ``load_state``: rows of another save, damaged, or of another configuration;
            estimators registered in another order.
        OSError, RuntimeError: at ``save_state``, see :func:`compopt.save`.

    Communicates: collective when saving and loading, see :func:`compopt.save`.

    Example:
        >>> import tempfile, accelerate, compopt
        >>> from compopt.integrations.accelerate import register_for_checkpointing
        >>> accelerator, est = accelerate.Accelerator(cpu=True), compopt.SogCLREstimator(10)
        >>> rows = register_for_checkpointing(est, accelerator)
        >>> folder = accelerator.save_state(tempfile.mkdtemp())
        >>> accelerator.load_state(folder)
    """
    rows = _CheckpointEntry(est, name, blocking)
    accelerator.register_save_state_pre_hook(rows.save)
    accelerator.register_load_state_pre_hook(rows.locate)
    accelerator.register_for_checkpointing(rows)
    return rows


class _CheckpointEntry:
    """Entry of accelerate's pickle: the name of the checkpoint of rows that belongs to it."""

    def __init__(self, est: Estimator, name: str, blocking: bool) -> None:
        self._est, self._name, self._blocking = est, name, blocking
        self._folder = self._saved = ""
        self._handle: SaveHandle | None = None

    def wait(self) -> None:
        """Wait until the rows of the last ``save_state`` are complete; raise what went wrong."""
        if self._handle is not None:
            self._handle.wait()

    def save(self, models: list[Any], weights: list[Any], output_dir: str | os.PathLike[str]) -> None:
        # accelerate calls this on every rank before state_dict; rows of an earlier save into this folder stay, for a
        # run that is killed before accelerate has written its own files
        folder = Path(output_dir) / self._name
        if self._blocking:
            self._saved = save(self._est, folder).name
        else:
            self._handle = save(self._est, folder, blocking=False)
            self._saved = Path(self._handle.path).name

    def locate(self, models: list[Any], input_dir: str | os.PathLike[str]) -> None:
        # accelerate calls this on every rank before load_state_dict
        self._folder = os.fspath(input_dir)

    def state_dict(self) -> dict[str, str]:
        return {"name": self._name, "checkpoint": self._saved}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        if state_dict.get("name") != self._name:
            raise ValueError(
                f"the checkpoint has {state_dict.get('name')!r} where {self._name!r} is registered; register the same "
                f"estimators in the same order as when it was saved"
            )
        load(self._est, Path(self._folder) / self._name / state_dict["checkpoint"])
