"""Hugging Face accelerate: commits, and rows in the checkpoints of ``save_state``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from compopt.checkpoint import SaveHandle, load, save
from compopt.checks.values import entries
from compopt.estimator.base import Estimator
from compopt.integrations import amp
from compopt.integrations.refusals import warn_alone


def attach(est: Estimator, optimizer: Any, accelerator: Any) -> RemovableHandle:
    """Commit after each update by accelerate, and discard at a skipped update. Call it after ``prepare``.

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

    The hook is registered with the object that reports skipped updates: the engine of DeepSpeed (the update, and thus
    the commit, is then part of ``accelerator.backward``), or the optimizer and the scaler of
    ``mixed_precision="fp16"``. Micro-batches inside ``accelerator.accumulate`` are committed together.

    Args:
        est: the estimator; it must be built after the ``Accelerator``, which creates the process group.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        accelerator: the ``accelerate.Accelerator``.

    Returns:
        A handle with ``remove()``.

    Raises:
        TypeError: ``optimizer`` is not, and does not wrap, a torch optimizer.

    Communicates: nothing.

    Warns:
        UserWarning: a launcher started several processes, but accelerate created no process group: each process
            trains alone; DeepSpeed was asked for, and the accelerator does not use it.
    """
    warn_alone(
        accelerator.num_processes,
        "on a machine without accelerators build Accelerator(cpu=True) and start with torchrun, or with accelerate "
        "launch --multi_gpu (accelerate launch --cpu starts one process)",
    )
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is not None:
        return est.attach(wrapped.engine)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1"):
        warnings.warn(
            "DeepSpeed was asked for (ACCELERATE_USE_DEEPSPEED), and this accelerator trains without it: build it "
            "without cpu=True, and call attach() after prepare()",
            stacklevel=2,
        )
    return amp.attach(est, optimizer, getattr(accelerator, "scaler", None))


def register_for_checkpointing(
    est: Estimator, accelerator: Any, name: str = "compopt", blocking: bool = True
) -> _CheckpointEntry:
    """Include the estimator in ``accelerator.save_state`` and ``load_state``.

    Example:
        >>> import tempfile, accelerate, compopt
        >>> from compopt.integrations.accelerate import register_for_checkpointing
        >>> accelerator, est = accelerate.Accelerator(cpu=True), compopt.SogCLREstimator(10)
        >>> rows = register_for_checkpointing(est, accelerator)
        >>> folder = accelerator.save_state(tempfile.mkdtemp())
        >>> accelerator.load_state(folder)

    The method of accelerate with this name writes objects on the main process only, and loads them on every rank. This
    function makes each rank write its own rows with :func:`compopt.save` into ``<output_dir>/<name>``, and registers
    only the name of that checkpoint with accelerate; ``load_state`` loads exactly this checkpoint, on any number of
    ranks.

    Args:
        est: the estimator.
        accelerator: the ``accelerate.Accelerator``.
        name: folder inside the checkpoint; must be different for each estimator.
        blocking: ``False``: ``save_state`` returns while threads write the rows, and its folder is complete when
            ``wait()`` of the returned object returns; see :func:`compopt.save`.

    Returns:
        An object with ``wait()``, which waits for the rows of the last ``save_state`` and raises errors of the writer.

    Raises:
        FileNotFoundError, ValueError: in ``load_state``: the rows are missing, damaged, or of another configuration;
            estimators were registered in another order.
        OSError, RuntimeError: in ``save_state``, see :func:`compopt.save`.

    Communicates: collective when saving and loading, see :func:`compopt.save`.
    """
    rows = _CheckpointEntry(est, name, blocking)
    accelerator.register_save_state_pre_hook(rows.save)
    accelerator.register_load_state_pre_hook(rows.locate)
    accelerator.register_for_checkpointing(rows)
    return rows


class _CheckpointEntry:
    """Object that accelerate pickles: the name of the checkpoint of rows."""

    def __init__(self, est: Estimator, name: str, blocking: bool) -> None:
        self._est, self._name, self._blocking = est, name, blocking
        self._folder = self._saved = ""
        self._handle: SaveHandle | None = None

    def wait(self) -> None:
        """Wait until the rows of the last ``save_state`` are complete; raise errors of the writer."""
        if self._handle is not None:
            self._handle.wait()

    def save(self, models: list[Any], weights: list[Any], output_dir: str | os.PathLike[str]) -> None:
        # accelerate calls this on every rank before state_dict. Rows of an earlier save in this folder are not removed:
        # the run may be killed before accelerate has written its own files.
        folder = Path(output_dir) / self._name
        if self._blocking:
            self._saved = save(self._est, folder).name
        else:
            self._handle = save(self._est, folder, blocking=False)
            self._saved = self._handle.path.name

    def locate(self, models: list[Any], input_dir: str | os.PathLike[str]) -> None:
        # accelerate calls this on every rank before load_state_dict
        self._folder = os.fspath(input_dir)

    def state_dict(self) -> dict[str, str]:
        return {"name": self._name, "checkpoint": self._saved}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        entries("state_dict", state_dict, ("name", "checkpoint"))
        if state_dict["name"] != self._name:
            raise ValueError(
                f"the checkpoint has {state_dict['name']!r} where {self._name!r} is registered; register the same "
                f"estimators in the same order as when it was saved"
            )
        load(self._est, Path(self._folder) / self._name / state_dict["checkpoint"])
