"""What to use when one does not want to choose."""

from __future__ import annotations

from compopt import checks
from compopt.checks import Directions, Mode
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.ranks import ProcessGroup
from compopt.presets.dcl import DCLEstimator
from compopt.presets.memory import MemoryEstimator

LENGTH = 128  # samples in the memory
LARGE = 1024  # from here on so many more change little
TAU = 0.07


def recommended(
    dim: int,
    n: int | None = None,
    batch_size: int | None = None,
    mode: Mode = "bimodal",
    directions: Directions = "both",
    chunk_size: int | None = None,
    process_group: ProcessGroup | None = None,
) -> ContrastiveEstimator:
    """The estimator to begin with, nothing to be tuned.

    A :class:`~compopt.MemoryEstimator` of 128 samples at temperature 0.07. A :class:`~compopt.DCLEstimator` for calls
    of 1,024 samples and more, where so small a memory adds little, and with ``directions="forward"``, where the memory
    takes from the candidates what they learn from. Neither keeps anything per sample. Why: ``docs/which.md``.

    Args:
        dim: of the features.
        n: number of training samples, if it is known. Of a small data set the memory holds at most a quarter. Like
            ``batch_size`` it decides what is built, and a checkpoint wants the same: give both as before to resume.
        batch_size: samples of a call, of all ranks together; with gradient accumulation those of one micro-batch.
            ``None``: not known, taken to be small.
        mode: ``"bimodal"`` or ``"unimodal"``.
        directions, chunk_size, process_group: see :class:`~compopt.ContrastiveEstimator`.

    Returns:
        The estimator. Communicates nothing here; what its calls do, see there.

    Raises:
        ValueError: dim, n or batch_size < 1, an unknown mode.
        TypeError: dim, n or batch_size is no integer.

    Example:
        >>> import compopt
        >>> type(compopt.recommended(512, batch_size=64)).__name__
        'MemoryEstimator'
        >>> type(compopt.recommended(512, batch_size=4096)).__name__
        'DCLEstimator'
    """
    checks.count("dim", dim)
    length = LENGTH if n is None else max(1, min(LENGTH, checks.count("n", n) // 4))
    large = batch_size is not None and checks.count("batch_size", batch_size) >= LARGE
    if large or directions == "forward":
        return DCLEstimator(TAU, mode=mode, directions=directions, chunk_size=chunk_size, process_group=process_group)
    return MemoryEstimator(
        dim, length, TAU, mode=mode, directions=directions, chunk_size=chunk_size, process_group=process_group
    )
