"""Checkpoints of a run: accelerate's, in two folders that take turns, so that a kill leaves one complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes import launch

if TYPE_CHECKING:
    from recipes.engine import Run

POINTER = "latest"


def latest(folder: Path) -> Path | None:
    """The complete checkpoint in ``folder``, None before the first."""
    pointer = folder / POINTER
    return folder / pointer.read_text().strip() if pointer.exists() else None


def save(run: Run, folder: Path) -> None:
    """On all ranks: write into the folder that is not the latest, then point to it."""
    current = latest(folder)
    target = folder / ("b" if current == folder / "a" else "a")
    launch.barrier()  # all have read the pointer
    if launch.is_main():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    launch.barrier()
    run.accelerator.save_state(os.fspath(target))
    launch.barrier()
    if launch.is_main():
        partial = folder / f"{POINTER}.partial"
        with open(partial, "w") as file:
            file.write(target.name)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / POINTER)
    launch.barrier()


def load(run: Run, folder: Path) -> None:
    """On all ranks: continue from the latest; accelerate unpickles, so trust the folder.

    Raises:
        ValueError: the checkpoint is one of another configuration; named before anything is loaded.
    """
    found = latest(folder)
    if found is not None:
        run.accelerator.load_state(os.fspath(found))


class Progress:
    """What a run knows beside model, optimizer and estimator; accelerate stores it with them."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        run = self._run
        schedule = run.gamma_schedule
        groups = run.optimizer.param_groups
        return {
            "config": dict(vars(run.config)),
            "scheduler": run.scheduler.state_dict(),
            # DeepSpeed restores its pieces of the moments, but not what the scheduler has written here
            "groups": [{k: v for k, v in group.items() if k not in ("params", "name")} for group in groups],
            "gamma_schedule": None if schedule is None else schedule.state_dict(),
            "batches": run.batches.state_dict(),
            "step": run.step,
            "seconds": run.seconds,
            "history": run.history,
            "loss": (run.loss_sum, run.loss_count),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        run = self._run
        for name, value in vars(run.config).items():
            found = state["config"].get(name)
            if found != value:
                raise ValueError(f"the checkpoint has {name}={found!r}, this run {name}={value!r}")
        run.scheduler.load_state_dict(state["scheduler"])
        for group, values in zip(run.optimizer.param_groups, state["groups"], strict=True):
            group.update(values)
        if run.gamma_schedule is not None:
            run.gamma_schedule.load_state_dict(state["gamma_schedule"])
        run.batches.load_state_dict(state["batches"])
        run.step, run.seconds, run.history = state["step"], state["seconds"], list(state["history"])
        run.loss_sum, run.loss_count = state["loss"]
