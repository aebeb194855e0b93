"""SogCLR as a composition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.groups import GroupSpec, parse, sizes
from compopt.normalizers import MovingAverageEstimator
from compopt.presets.options import Options, takes_options
from compopt.temperatures import FixedTemperature

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SogCLREstimator(ContrastiveEstimator):
    r"""SogCLR: per-sample moving averages, one fixed temperature.

    .. math::
        u_i \leftarrow (1-\gamma) u_i + \gamma\, \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{s_{ij}/\tau}, \qquad
        w_{ij} = \frac{e^{s_{ij}/\tau}}{|N_i|\, u_i}

    The gradient of an anchor is ``-grad s_ii + sum_j w_ij grad s_ij`` (eq. 10): the positive has weight 1. With
    ``reference="positive"`` it has ``sum_j w_ij``, as in iSogCLR.

    Args:
        n: number of samples, or a list of sample groups such as ``[{"n": 1000, "gamma": 0.5}, {"n": 500}]``.
        gamma: in (0, 1]; weight of the newest value. 1 is the stateless control.
        tau: temperature, > 0.
        reference: see :class:`~compopt.MovingAverageEstimator`; ``"none"`` is the paper's.
        eps: added to the inner function, >= 0.
        **options: see :class:`~compopt.ContrastiveEstimator`.

    State: ``log_u`` and ``count`` per sample, one each per direction in bimodal mode: 16 bytes a sample.

    The call, communication, errors: see :class:`~compopt.ContrastiveEstimator`,
    :class:`~compopt.MovingAverageEstimator` and :class:`~compopt.FixedTemperature`.

    References:
        Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022, Algorithm 1.

    Example:
        >>> import torch, compopt
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> est = compopt.SogCLREstimator(n=100, gamma=0.9, tau=0.07)
        >>> handle = est.attach(optimizer)
        >>> x1, x2 = torch.randn(2, 16, 8)
        >>> est(model(x1), model(x2), torch.arange(16)).backward()
        >>> optimizer.step()
        >>> est.read(torch.tensor([0, 50]))["count"].tolist()
        [1, 0]
    """

    @takes_options()
    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        tau: float = 0.07,
        reference: str = "none",
        eps: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            MovingAverageEstimator(sizes(n), gamma, reference, eps),
            FixedTemperature(tau),
            sample_groups=parse(n),
            **options,
        )
