"""Hugging Face accelerate: commits, and rows in ``save_state``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from compopt.checkpoint import loading, saving
from compopt.estimator.base import Estimator
from compopt.integrations import amp


def attach(est: Estimator, optimizer: Any, accelerator: Any) -> RemovableHandle | amp.Handles:
    """Commit after each real update that accelerate makes; a skipped one discards. Call it after ``prepare``.

    Knows which of the accelerator's parts can tell: DeepSpeed's engine, which counts skips (the update, and so the
    commit, then happens inside ``accelerator.backward``); the gradient scaler of ``mixed_precision="fp16"``; the
    optimizer. Micro-batches inside ``accelerator.accumulate`` join one commit.

    Args:
        est: the estimator; built after the ``Accelerator``, so that it sees the process group.
        optimizer: what ``accelerator.prepare`` returned.
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
    _check_group(accelerator)
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is not None:
        return est.attach(wrapped.engine)
    scaler = getattr(accelerator, "scaler", None)
    if scaler is not None:
        return amp.attach(est, optimizer, scaler)
    return est.attach(optimizer)


def _check_group(accelerator: Any) -> None:
    """On a machine without accelerators accelerate reads torchrun's variables with ``cpu=True`` only."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and accelerator.num_processes == 1:
        warnings.warn(
            f"WORLD_SIZE is {launched}, but accelerator.num_processes is 1: every process trains alone, on all of the "
            f"data. On a machine without accelerators build Accelerator(cpu=True), or start with accelerate launch "
            f"--cpu",
            stacklevel=3,
        )


def register_for_checkpointing(est: Estimator, accelerator: Any, name: str = "compopt") -> None:
    """Let ``accelerator.save_state`` and ``load_state`` carry the estimator, every rank's rows included.

    accelerate writes what is registered with its own method of this name on the main process only, and gives that to
    every rank. Here each rank writes its own rows with :func:`compopt.save` into ``<output_dir>/<name>``, and
    accelerate keeps only which checkpoint that was; ``load_state`` loads this very one, on any number of ranks.

    Args:
        est: the estimator.
        accelerator: the ``accelerate.Accelerator``.
        name: folder inside the checkpoint; another one for every estimator.

    Raises:
        FileNotFoundError, ValueError: at ``load_state``: rows of another save, damaged, or of another configuration;
            estimators registered in another order.
        OSError, RuntimeError: at ``save_state``, see :func:`compopt.save`.

    Communicates: collective when saving and loading, see :func:`compopt.save`.

    Example:
        >>> import tempfile, accelerate, compopt
        >>> from compopt.integrations.accelerate import register_for_checkpointing
        >>> accelerator, est = accelerate.Accelerator(cpu=True), compopt.SogCLREstimator(10)
        >>> register_for_checkpointing(est, accelerator)
        >>> folder = accelerator.save_state(tempfile.mkdtemp())
        >>> accelerator.load_state(folder)
    """
    rows = _Rows(est, name)
    accelerator.register_save_state_pre_hook(rows.save)
    accelerator.register_load_state_pre_hook(rows.locate)
    accelerator.register_for_checkpointing(rows)


class _Rows:
    """What accelerate keeps in its pickle: which checkpoint of rows belongs to it."""

    def __init__(self, est: Estimator, name: str) -> None:
        self._est, self._name = est, name
        self._folder = self._saved = ""

    def save(self, models: list[Any], weights: list[Any], output_dir: str | os.PathLike[str]) -> None:
        """On every rank, before accelerate calls :meth:`state_dict`; the rows of an overwritten save stay loadable."""
        del models, weights
        self._saved = saving.save(self._est, Path(output_dir) / self._name).name

    def locate(self, models: list[Any], input_dir: str | os.PathLike[str]) -> None:
        """On every rank, before accelerate calls :meth:`load_state_dict`."""
        del models
        self._folder = os.fspath(input_dir)

    def state_dict(self) -> dict[str, str]:
        return {"name": self._name, "checkpoint": self._saved}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """On every rank."""
        if state_dict.get("name") != self._name:
            raise ValueError(
                f"the checkpoint has {state_dict.get('name')!r} where {self._name!r} is registered; register the same "
                f"estimators in the same order as when it was saved"
            )
        loading.load(self._est, Path(self._folder) / self._name / state_dict["checkpoint"])
