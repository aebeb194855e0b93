"""iSogCLR as a composition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.groups import GroupSpec, parse, sizes
from compopt.normalizers import MovingAverageEstimator
from compopt.presets.options import Options, takes_options
from compopt.temperatures import TemperatureDual

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ISogCLREstimator(ContrastiveEstimator):
    r"""iSogCLR: per-sample moving averages and per-sample temperatures.

    .. math::
        u_i &\leftarrow (1-\gamma) u_i + \gamma\, \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{h_{ij}/\tau_i}, \qquad
        w_{ij} = \frac{e^{h_{ij}/\tau_i}}{|N_i|\, u_i} \\
        G(\tau_i) &= \log u_i + \rho - \sum_j w_{ij} h_{ij}/\tau_i, \qquad
        \tau_i \leftarrow \Pi\,(\tau_i - \text{lr}\; m_i)

    Eq. 13 and 14 of the paper print the previous average (``s_i^t``) where this class uses the updated one, as its
    authors' code does.

    Args:
        n, gamma, reference: see :class:`~compopt.MovingAverageEstimator`.
        rho, lr, tau_init, tau_min, tau_max, max_grad, optimizer, beta: see :class:`~compopt.TemperatureDual`;
            ``None`` is filled by mode.
        **options: see :class:`~compopt.ContrastiveEstimator`.

    State: ``log_u``, ``tau``, ``tau_exp_avg``, ``count`` per sample and direction: 32 bytes a sample in
    bimodal mode, 16 in unimodal.

    The call, communication, errors: see :class:`~compopt.ContrastiveEstimator`,
    :class:`~compopt.MovingAverageEstimator` and :class:`~compopt.TemperatureDual`.

    References:
        Qiu et al., Not All Semantics are Created Equal, ICML 2023, Algorithms 1 and 2.

    Example:
        >>> import torch, compopt
        >>> est = compopt.ISogCLREstimator(n=100, rho=1.0, tau_init=0.07)
        >>> z1, z2 = torch.randn(2, 16, 8, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(16)).backward()
        >>> est.step()
        >>> tuple(est.read(torch.arange(3))["tau"].shape)
        (3, 2)
    """

    @takes_options()
    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        rho: float | None = None,
        lr: float = 1e-2,
        tau_init: float | None = None,
        tau_min: float | None = None,
        tau_max: float | None = None,
        max_grad: float | None = None,
        optimizer: str = "momentum",
        beta: float = 0.9,
        reference: str = "positive",
        **options: Unpack[Options],
    ) -> None:
        temperature = TemperatureDual(
            sizes(n), rho, lr, tau_init, tau_min, tau_max, max_grad, optimizer=optimizer, beta=beta
        )
        super().__init__(
            MovingAverageEstimator(sizes(n), gamma, reference),
            temperature,
            sample_groups=parse(n),
            **options,
        )
