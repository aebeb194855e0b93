"""Preset with a memory of features, and the estimator to begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.ranks import ProcessGroup
from compopt.normalizers import MemoryNormalizer
from compopt.presets.batch import DCLEstimator
from compopt.presets.options import Options, takes_options
from compopt.temperatures import FixedTemperature

if TYPE_CHECKING:
    from typing_extensions import Unpack

LENGTH = 128  # samples in the memory
LARGE = 1024  # from here on so many more change little
TAU = 0.07


class MemoryEstimator(ContrastiveEstimator):
    r"""DCL whose negatives are the batch's and the newest features of past batches, which follow the encoders' drift.

    .. math::
        \nabla F_i = \sum_{j \in N_i} w_{ij} \nabla h_{ij} + \sum_q w_{iq} \nabla_{z_i} h_{iq}, \qquad
        w \propto e^{h / \tau}, \quad \sum_j w_{ij} + \sum_q w_{iq} = 1

    The second sum moves the anchor only. See :class:`~compopt.MemoryNormalizer` for the queue, and why it needs both.

    Args:
        dim: of the features.
        length: samples whose features are kept.
        tau: temperature, a number or a 0-d tensor.
        **options: see :class:`~compopt.ContrastiveEstimator`.

    State: the queue, ``(2, length, dim)``, and three integers and a flag per slot; nothing per sample, so ``index``
    may be left out when no sample repeats within a batch or the queue.

    Calls, communication and errors: see :class:`~compopt.ContrastiveEstimator` and the parts.

    References:
        Cross-batch memory (Wang et al., CVPR 2020) with the positive left out (DCL, Yeh et al., ECCV 2022) and the
        queue moved to the mean of now (Ajanthan et al., Adaptive Cross Batch Normalization, 2023); the balance is ours.

    Example:
        >>> import torch, compopt
        >>> est = compopt.MemoryEstimator(dim=16, length=64)
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()
        >>> est.state_dict()["extra"]["normalizer"]["kept"].sum().item()
        8
    """

    @takes_options()
    def __init__(
        self,
        dim: int,
        length: int = 128,
        tau: float | Tensor = 0.07,
        **options: Unpack[Options],
    ) -> None:
        temperature = FixedTemperature(tau, dtype=options.get("dtype", torch.float32))
        super().__init__(MemoryNormalizer(dim, length), temperature, **options)


def recommended(
    dim: int,
    n: int | None = None,
    batch_size: int | None = None,
    mode: Literal["bimodal", "unimodal"] = "bimodal",
    directions: Literal["both", "forward"] = "both",
    chunk_size: int | None = None,
    process_group: ProcessGroup | None = None,
) -> ContrastiveEstimator:
    """Return the estimator to begin with, which needs no tuning.

    A :class:`~compopt.MemoryEstimator` of 128 samples at temperature 0.07. A :class:`~compopt.DCLEstimator` for calls
    of 1,024 samples and more, where a memory of this size adds little, and with ``directions="forward"``, where
    the memory takes from the candidates what they learn from. Neither keeps anything per sample. Why:
    ``docs/which.md``.

    Args:
        dim: of the features.
        n: number of training samples, if it is known. Of a small data set the memory holds at most a quarter. Like
            ``batch_size`` it decides what is built: give both as before to resume from a checkpoint.
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
