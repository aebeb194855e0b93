"""What to use when one does not want to choose."""

from __future__ import annotations

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.ranks import ProcessGroup
from compopt.presets.dcl import DCLEstimator
from compopt.presets.memory import MemoryEstimator

LENGTH = 128  # samples in the memory
LARGE = 1024  # batches from here on gain little from so many more
PART = 16  # of a small data set, batch and memory together are at most its sixteenth part
TAU = 0.07


def recommended(
    dim: int,
    n: int | None = None,
    batch_size: int | None = None,
    mode: str = "bimodal",
    directions: str = "both",
    chunk_size: int | None = None,
    process_group: ProcessGroup | None = None,
) -> ContrastiveEstimator:
    """The estimator to begin with, nothing to be tuned.

    A :class:`~compopt.MemoryEstimator` of 128 samples at temperature 0.07, of fewer where batch and memory would be
    more than a sixteenth of the data set. A :class:`~compopt.DCLEstimator` where that leaves none, for calls of 1,024
    samples and more, where so small a memory adds little, and with ``directions="forward"``, where the memory takes
    from the candidates what they learn from. Neither keeps anything per sample. Why: ``docs/which.md``.

    Args:
        dim: of the features.
        n: number of training samples, if it is known. Small data sets are seen many times, and a memory of a large part
            of them is learned by heart.
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
        >>> compopt.recommended(512, n=2000, batch_size=64).normalizer.length
        61
        >>> type(compopt.recommended(512, batch_size=4096)).__name__
        'DCLEstimator'
    """
    checks.count("dim", dim)
    batch = 0 if batch_size is None else checks.count("batch_size", batch_size)
    length = LENGTH if n is None else min(LENGTH, checks.count("n", n) // PART - batch)
    if batch >= LARGE or length < 1 or directions == "forward":
        return DCLEstimator(TAU, mode=mode, directions=directions, chunk_size=chunk_size, process_group=process_group)
    return MemoryEstimator(
        dim, length, TAU, mode=mode, directions=directions, chunk_size=chunk_size, process_group=process_group
    )
