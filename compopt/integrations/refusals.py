"""Checks and messages shared by the integrations."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from compopt.checkpoint import load
from compopt.estimator.base import Estimator


def refuse_ranks(est: Estimator, ranks: int, where: str) -> None:
    """Raise if the estimator was built before the process group: each rank would store rows of its own."""
    if ranks > 1 and est._ranks.group is None:
        raise ValueError(
            f"{ranks} processes train, and the estimator was built before their process group: each would train on "
            f"its own samples alone; build it {where}"
        )


def warn_alone(ranks: int, remedy: str) -> None:
    """Warn if a launcher started several processes but the trainer uses one process."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and ranks == 1:
        warnings.warn(
            f"WORLD_SIZE is {launched}, but the trainer has one process: every process trains alone, on all of the "
            f"data; {remedy}",
            stacklevel=3,
        )


def refuse_last_batch(ranks: int, drop_last: bool, remedy: str) -> None:
    """Raise for smaller last batches on several ranks, since they repeat samples or differ between ranks."""
    if ranks > 1 and not drop_last:
        raise ValueError(
            f"{ranks} processes share the data, and the last, smaller batch is kept: trainers fill it up with samples "
            f"that come twice, or give it to some of the processes only; set {remedy}"
        )


def load_rows(est: Estimator, rows: Path, remedy: str) -> None:
    """Load the rows of a trainer's checkpoint; if rows are missing, add ``remedy`` to the error."""
    try:
        load(est, rows)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{rows} is not there or not complete ({error}); {remedy}") from error
