"""Presets that keep a moving average per sample: SogCLR, iSogCLR, FastCLIP v0 to v3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.groups import GroupSpec, sizes
from compopt.estimator.options import CommonOptions, Options, takes_options
from compopt.normalizers import MovingAverageEstimator
from compopt.temperatures import FixedTemperature, TemperatureDual

if TYPE_CHECKING:
    from typing_extensions import Unpack

Reference = Literal["none", "positive"]
Version = Literal["v0", "v1", "v2", "v3"]


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
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``log_u`` and ``count`` per sample, one each per direction in bimodal mode: 16 bytes a sample.

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

    @takes_options(ContrastiveEstimator, Options)
    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        tau: float = 0.07,
        reference: Reference = "none",
        eps: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        normalizer = MovingAverageEstimator(sizes(n), gamma, reference, eps)
        super().__init__(normalizer, FixedTemperature(tau), sample_groups=n, **options)


class ISogCLREstimator(ContrastiveEstimator):
    r"""iSogCLR: per-sample moving averages and per-sample temperatures.

    .. math::
        u_i &\leftarrow (1-\gamma) u_i + \gamma\, \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{h_{ij}/\tau_i}, \qquad
        w_{ij} = \frac{e^{h_{ij}/\tau_i}}{|N_i|\, u_i} \\
        G(\tau_i) &= \log u_i + \rho - \sum_j w_{ij} h_{ij}/\tau_i, \qquad
        \tau_i \leftarrow \Pi\,(\tau_i - \text{lr}\; m_i)

    Args:
        n, gamma, reference: see :class:`~compopt.MovingAverageEstimator`.
        rho, lr, tau_init, tau_min, tau_max, max_grad, optimizer, beta: see :class:`~compopt.TemperatureDual`;
            ``None`` is filled by mode.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``log_u``, ``tau``, ``tau_exp_avg``, ``count`` per sample and direction: 32 bytes a sample in
    bimodal mode, 16 in unimodal.

    References:
        Qiu et al., Not All Semantics are Created Equal, ICML 2023, Algorithms 1 and 2.

    Example:
        >>> import torch, compopt
        >>> est = compopt.ISogCLREstimator(n=100, rho=1.0, tau_init=0.07)
        >>> z1, z2 = torch.randn(2, 16, 8, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(16)).backward()
        >>> est.step()
    """

    @takes_options(ContrastiveEstimator, Options)
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
        optimizer: Literal["momentum", "adam"] = "momentum",
        beta: float = 0.9,
        reference: Reference = "positive",
        **options: Unpack[Options],
    ) -> None:
        temperature = TemperatureDual(
            sizes(n), rho, lr, tau_init, tau_min, tau_max, max_grad, optimizer=optimizer, beta=beta
        )
        super().__init__(MovingAverageEstimator(sizes(n), gamma, reference), temperature, sample_groups=n, **options)


class FastCLIPEstimator(ContrastiveEstimator):
    r"""FastCLIP: moving averages with a cosine schedule of gamma, and a choice of temperatures.

    ``alpha_i = log u_i`` as in :class:`~compopt.MovingAverageEstimator` with ``reference="positive"``:

    ========  ==============================================  ======================
    version   temperature                                     objective
    ========  ==============================================  ======================
    ``v0``    one, learned (global dual, no rho)              ``alpha``
    ``v1``    one, constant                                   ``tau alpha``
    ``v2``    one per sample (individual dual)                ``tau (alpha + rho)``
    ``v3``    one, learned (global dual)                      ``tau (alpha + rho)``
    ========  ==============================================  ======================

    All versions use ``compopt.schedules.CosineGamma(est, decay_steps)``, stepped once per update (by the authors' code
    once per epoch).

    Args:
        n: number of samples, or a list of sample groups.
        version: ``"v0"`` to ``"v3"``.
        gamma: start value; the schedule begins at 1.
        tau: the constant, or the initial value of a learned temperature.
        rho: radius of the KL constraint (v2, v3). The papers use 6.5 to 11 at batches of 1024 and more; with
            weights that sum to one it must stay below ``log |N_i|``.
        lr: step size of the learned temperature (Adam).
        tau_min, tau_max, max_grad: bounds; ``None`` is filled by mode.
        betas: of Adam.
        reference, eps: see :class:`~compopt.MovingAverageEstimator`.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``log_u`` and ``count`` per sample and direction; v2 also ``tau`` and Adam's two moments; v0 and v3
    four numbers: ``tau``, Adam's moments and the number of updates.

    References:
        Wei et al., FastCLIP, 2024; NeuCLIP, eq. 3, 4 and 13, Algorithm 2.

    Example:
        >>> import compopt
        >>> est = compopt.FastCLIPEstimator(n=100, version="v3", rho=1.0)
        >>> schedule = compopt.schedules.CosineGamma(est, decay_steps=10)
        >>> schedule.step()  # beside optimizer.step()
    """

    @takes_options(ContrastiveEstimator, CommonOptions)
    def __init__(
        self,
        n: GroupSpec,
        version: Version = "v3",
        gamma: float = 1.0,
        tau: float = 0.07,
        rho: float = 6.5,
        lr: float = 1e-4,
        tau_min: float | None = None,
        tau_max: float | None = None,
        max_grad: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        reference: Reference = "positive",
        eps: float = 1e-14,
        **options: Unpack[CommonOptions],
    ) -> None:
        checks.one_of("version", version, get_args(Version))
        self.version = version
        checks.non_negative("rho", rho)  # of the versions that have none, too
        temperature: FixedTemperature | TemperatureDual = FixedTemperature(tau)
        if version != "v1":
            mode: Literal["individual", "global"] = "individual" if version == "v2" else "global"
            radius = 0.0 if version == "v0" else rho
            temperature = TemperatureDual(
                sizes(n), radius, lr, tau, tau_min, tau_max, max_grad, mode, optimizer="adam", betas=betas
            )
        normalizer = MovingAverageEstimator(sizes(n), gamma, reference, eps)
        super().__init__(normalizer, temperature, multiply_tau=version != "v0", sample_groups=n, **options)
