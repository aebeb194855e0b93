"""Callback of the trainers of transformers and sentence-transformers that stops a run as an interruption does."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopAfter(TrainerCallback):
    """Stop a run after some of its epochs, with the schedule of the whole run; ``resume_from_checkpoint`` continues it.

    Args:
        epochs: number of epochs; ``None``: do not stop.
    """

    def __init__(self, epochs: int | None) -> None:
        self.epochs = epochs

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert state.epoch is not None
        control.should_training_stop |= round(state.epoch) == self.epochs
