"""Presets without state per sample: InfoNCE (SimCLR, CLIP) and decoupled contrastive learning."""

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


class InfoNCEEstimator(ContrastiveEstimator):
    r"""Stateless baseline: SimCLR, InfoNCE, and CLIP with ``learn_tau=True, multiply_tau=False``.

    .. math:: \alpha_i = \log \tfrac{1}{|N_i|} \Bigl([1 +] \sum_{j \in N_i} e^{h_{ij}/\tau}\Bigr)

    Args:
        tau: temperature, a number or a 0-d tensor.
        include_positive: keep the positive in the denominator (the usual loss). ``False`` is decoupled contrastive
            learning, :class:`~compopt.DCLEstimator`, the control that a stateful method must beat.
        learn_tau: learn ``log(1/tau)`` by the user's optimizer: give it ``est.parameters()``.
        **options: see :class:`~compopt.ContrastiveEstimator`.

    State: none per sample, so ``index`` may be left out when no sample repeats.

    Calls, communication and errors: see :class:`~compopt.ContrastiveEstimator` and the parts.

    References:
        van den Oord et al., 2018; Chen et al., SimCLR, 2020; Radford et al., CLIP, 2021.

    Example:
        >>> import torch, compopt
        >>> est = compopt.InfoNCEEstimator(tau=0.1)
        >>> z = torch.nn.functional.normalize(torch.randn(2, 4, 8), dim=-1)
        >>> labels = torch.arange(4)
        >>> logits = z[0] @ z[1].T / 0.1
        >>> ce = torch.nn.functional.cross_entropy
        >>> expected = (ce(logits, labels) + ce(logits.T, labels)) / 2 - torch.tensor(3.0).log()
        >>> torch.allclose(est(z[0], z[1]), 0.1 * expected, atol=1e-5)
        True
    """

    @takes_options()
    def __init__(
        self,
        tau: float | Tensor = 0.07,
        include_positive: bool = True,
        learn_tau: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            BatchNormalizer(include_positive),
            FixedTemperature(tau, learn=learn_tau, dtype=options.get("dtype", torch.float32)),
            **options,
        )


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

    Calls, communication and errors: see :class:`~compopt.ContrastiveEstimator` and the parts.

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
