"""What the callbacks of both trainers refuse before they train."""

from __future__ import annotations

import os
import warnings

from compopt.estimator.base import Estimator


def refuse_ranks(est: Estimator, ranks: int, where: str) -> None:
    """Several processes train, and the estimator was built before their group was: each would keep rows of its own."""
    if ranks > 1 and est._engine.ranks.group is None:
        raise ValueError(
            f"{ranks} processes train, and the estimator was built before their process group: each would train on "
            f"its own samples alone; build it {where}"
        )


def warn_alone(ranks: int, remedy: str) -> None:
    """A launcher started several processes, and the trainer knows of one."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and ranks == 1:
        warnings.warn(
            f"WORLD_SIZE is {launched}, but the trainer has one process: every process trains alone, on all of the "
            f"data; {remedy}",
            stacklevel=3,
        )


def refuse_last_batch(ranks: int, drop_last: bool, remedy: str) -> None:
    """With several processes the last batches of an epoch repeat samples, or differ between ranks."""
    if ranks > 1 and not drop_last:
        raise ValueError(
            f"{ranks} processes share the data, and the last, smaller batch is kept: trainers fill it up with samples "
            f"that come twice, or give it to some of the processes only; set {remedy}"
        )
