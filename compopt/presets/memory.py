"""The batch and the newest features in one softmax, as a composition: for batches of 8 to 256."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compopt.contrastive import ContrastiveEstimator
from compopt.normalizers import MemoryNormalizer
from compopt.presets.options import Options, takes_options
from compopt.temperatures import FixedTemperature

if TYPE_CHECKING:
    from typing_extensions import Unpack


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

    The call, communication, errors: see :class:`~compopt.ContrastiveEstimator`, :class:`~compopt.MemoryNormalizer` and
    :class:`~compopt.FixedTemperature`.

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
