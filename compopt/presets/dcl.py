"""Decoupled contrastive learning: InfoNCE without the positive in its denominator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compopt.contrastive import ContrastiveEstimator
from compopt.normalizers import BatchNormalizer
from compopt.presets.options import Options, takes_options
from compopt.temperatures import FixedTemperature

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DCLEstimator(ContrastiveEstimator):
    r"""Decoupled contrastive learning: the positive pair is left out of the denominator.

    .. math::
        -s_{ii} + \tau \log \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{s_{ij}/\tau}, \qquad
        w_{ij} = \frac{e^{s_{ij}/\tau}}{\sum_{k \in N_i} e^{s_{ik}/\tau}}

    With the positive in the denominator (InfoNCE) all weights of an anchor shrink together once its positive is easy,
    the more so the fewer negatives the batch holds. Without it they sum to one. It keeps no state: what a stateful
    method gains should be stated against it. The same as ``InfoNCEEstimator(include_positive=False)``.

    Args:
        tau: temperature, a number or a 0-d tensor.
        learn_tau: learn ``log(1/tau)`` by the user's optimizer: give it ``est.parameters()``.
        **options: see :class:`~compopt.ContrastiveEstimator`.

    State: none per sample, so ``index`` may be left out when no sample repeats.

    The call, communication, errors: see :class:`~compopt.ContrastiveEstimator`, :class:`~compopt.BatchNormalizer` and
    :class:`~compopt.FixedTemperature`.

    References:
        Yeh et al., Decoupled Contrastive Learning, ECCV 2022: DCL (not DCLW, which weights the positives too).

    Example:
        >>> import torch, compopt
        >>> est = compopt.DCLEstimator(tau=0.1)
        >>> z1, z2 = torch.randn(2, 4, 8, requires_grad=True).unbind()
        >>> est(z1, z2).backward()
    """

    @takes_options()
    def __init__(self, tau: float | Tensor = 0.07, learn_tau: bool = False, **options: Unpack[Options]) -> None:
        temperature = FixedTemperature(tau, learn=learn_tau, dtype=options.get("dtype", torch.float32))
        super().__init__(BatchNormalizer(include_positive=False), temperature, **options)
