"""The queue of the newest features and a residual per sample, as a composition: ours, for small batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.groups import GroupSpec, parse, sizes
from compopt.normalizers import NeuralNormalizer, ResidualNormalizer
from compopt.presets.options import Options, takes_options
from compopt.temperatures import FixedTemperature

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ResidualEstimator(ContrastiveEstimator):
    r"""Large-batch gradients from batches of 8 to 64: the newest features predict, the batch and the row correct.

    .. math::
        \alpha_i = \log \Bigl( \tfrac{1}{m} \sum_{j \in \text{queue}} e^{h_{ij} / \tau} \Bigr) + \log r_i, \qquad
        \nabla F_i = \sum_{j \in N_i} w_{ij} \nabla h_{ij}
        + \Bigl(1 - \sum_{j \in N_i} w_{ij}\Bigr) \sum_{j \in \text{queue}} p_{ij} \nabla h_{ij}

    with ``p_ij`` the softmax over the queue, whose features carry no gradient: every anchor's weights sum to one. See
    :class:`~compopt.ResidualNormalizer` for ``r_i`` and why.

    Args:
        dim: of the features.
        n: number of samples, or a list of sample groups; ``None`` keeps nothing per sample.
        gamma: in (0, 1]; weight of the batch's own estimate.
        tau: temperature.
        prototypes: length ``m`` of the queue; its oldest feature is ``m / B`` steps old.
        eps: added to the inner function.
        **options: see :class:`~compopt.ContrastiveEstimator`.

    State: the queue, ``(2, m, d)`` (``(1, m, d)`` in unimodal mode and with one direction), twice; with ``n`` a
    logarithm and a count per sample and direction, 16 bytes a sample.

    The call, communication, errors: see :class:`~compopt.ContrastiveEstimator`, :class:`~compopt.ResidualNormalizer`
    and :class:`~compopt.FixedTemperature`.

    References:
        Ours. MoCo (He et al., CVPR 2020) and cross-batch memory (Wang et al., CVPR 2020) keep a queue of features too,
        as further negatives; here it predicts the normalizer, and its features take the weight that the batch leaves.

    Example:
        >>> import torch, compopt
        >>> est = compopt.ResidualEstimator(dim=16, n=1000, prototypes=64)
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()
    """

    @takes_options()
    def __init__(
        self,
        dim: int,
        n: GroupSpec | None = None,
        gamma: float = 0.5,
        tau: float = 0.07,
        prototypes: int = 1024,
        eps: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        queue = NeuralNormalizer(dim, prototypes, updates=0, restart_every=1, eps=eps, through_alpha=True)
        super().__init__(
            ResidualNormalizer(queue, None if n is None else sizes(n), gamma),
            FixedTemperature(tau),
            sample_groups=None if n is None else parse(n),
            **options,
        )
