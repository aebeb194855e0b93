"""Presets with a state: rows per sample (SogCLR, iSogCLR, FastCLIP v0 to v3, EMC2), a network (NeuCLIP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from typing_extensions import Unpack

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.groups import GroupSpec, sizes
from compopt.estimator.options import takes_options
from compopt.kernel.features import Encode
from compopt.negatives.sampler import MCMCNegativeSampler, Proposals
from compopt.normalizers import MovingAverageEstimator, NeuralNormalizer
from compopt.normalizers.moving_average import Reference
from compopt.presets.options import CommonOptions, Options
from compopt.presets.published import SETTINGS, as_logarithm, by_mode
from compopt.temperatures import FixedTemperature, TemperatureDual
from compopt.temperatures.dual import Parametrization

Version = Literal["v0", "v1", "v2", "v3"]


class SogCLREstimator(ContrastiveEstimator):
    r"""SogCLR: per-sample moving averages, one fixed temperature.

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

    .. math::
        u_i \leftarrow (1-\gamma) u_i + \gamma\, \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{s_{ij}/\tau}, \qquad
        w_{ij} = \frac{e^{s_{ij}/\tau}}{|N_i|\, u_i}

    The gradient of an anchor is ``-grad s_ii + sum_j w_ij grad s_ij`` (eq. 10): the positive has weight 1. With
    ``reference="positive"`` its weight is ``sum_j w_ij``, as in iSogCLR.

    Args:
        n: number of samples, or a list of sample groups such as ``[{"n": 1000, "gamma": 0.5}, {"n": 500}]``.
        gamma: in (0, 1]; weight of the newest value. 1 keeps no history. ``None``: 0.8 in unimodal mode
            (section 5.3; the best values of Table 8 are 0.7 and 0.8), 0.9 in bimodal mode (LibAUC's; section 5.2 tunes
            gamma in 0.6 to 0.99 and states no value). In ``benchmarks/results/visits.md``, on digits and glyphs, 0.3 to
            0.5 was level or better at batch 4 with 20 visits per row, and 0.5 was better at 8 and 16 with 40; on icons
            0.5 was worse from batch 16 on.
        tau: temperature, > 0. ``None``: 0.1 in unimodal mode (section 5.1), 0.07 in bimodal mode (section 5.2).
        reference: see :class:`~compopt.MovingAverageEstimator`; ``"none"`` is the form of the paper.
        eps: added to the inner function, >= 0.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``log_u`` and ``count`` per sample, one each per direction in bimodal mode: 16 bytes a sample.

    References:
        Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022, Algorithm 1.
    """

    @takes_options(ContrastiveEstimator, Options)
    def __init__(
        self,
        n: GroupSpec,
        gamma: float | None = None,
        tau: float | None = None,
        reference: Reference = "none",
        eps: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        gamma, tau = by_mode(gamma, options, 0.9, 0.8), by_mode(tau, options, 0.07, 0.1)
        normalizer = MovingAverageEstimator(sizes(n), gamma, reference, eps)
        super().__init__(normalizer, FixedTemperature(tau), sample_groups=n, **options)


class ISogCLREstimator(ContrastiveEstimator):
    r"""iSogCLR: per-sample moving averages and per-sample temperatures.

    Example:
        >>> import torch, compopt
        >>> est = compopt.ISogCLREstimator(n=100, rho=1.0, tau_init=0.07)
        >>> z1, z2 = torch.randn(2, 16, 8, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(16)).backward()
        >>> est.step()

    .. math::
        u_i &\leftarrow (1-\gamma) u_i + \gamma\, \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{h_{ij}/\tau_i}, \qquad
        w_{ij} = \frac{e^{h_{ij}/\tau_i}}{|N_i|\, u_i} \\
        G(\tau_i) &= \log u_i + \rho - \sum_j w_{ij} h_{ij}/\tau_i, \qquad
        \tau_i \leftarrow \Pi\,(\tau_i - \text{lr}\; m_i)

    Args:
        n, gamma, reference: see :class:`~compopt.MovingAverageEstimator`. The default of ``gamma`` is that of
            :class:`SogCLREstimator`; the paper tunes 0.7 to 0.9.
        rho, tau_init, tau_min, tau_max, max_grad, optimizer: see :class:`~compopt.TemperatureDual`, also for the
            values of ``None`` and their sources.
        lr, beta: see :class:`~compopt.TemperatureDual`; ``None``: 0.03 and 0.5 in unimodal mode (the authors' code),
            0.01 and 0.9 in bimodal mode (LibAUC's). The authors' bimodal code uses ``lr`` 0.03; in
            ``benchmarks/results/glyphs.md`` 0.002 is better than 0.01.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State, per sample and direction: ``log_u`` and ``count`` of the normalizer, ``tau``, ``tau_exp_avg`` and ``count``
    of the temperature: 16 and 32 bytes a sample in bimodal mode, 16 and 16 in unimodal mode.

    References:
        Qiu et al., Not All Semantics are Created Equal, ICML 2023, Algorithms 1 and 2.
    """

    @takes_options(ContrastiveEstimator, Options)
    def __init__(
        self,
        n: GroupSpec,
        gamma: float | None = None,
        rho: float | None = None,
        lr: float | None = None,
        tau_init: float | None = None,
        tau_min: float | None = None,
        tau_max: float | None = None,
        max_grad: float | None = None,
        optimizer: Literal["momentum", "adam"] = "momentum",
        beta: float | None = None,
        reference: Reference = "positive",
        **options: Unpack[Options],
    ) -> None:
        gamma, lr, beta = (
            by_mode(given, options, *values)
            for given, *values in ((gamma, 0.9, 0.8), (lr, 0.01, 0.03), (beta, 0.9, 0.5))
        )
        temperature = TemperatureDual(
            sizes(n), rho, lr, tau_init, tau_min, tau_max, max_grad, optimizer=optimizer, beta=beta
        )
        super().__init__(MovingAverageEstimator(sizes(n), gamma, reference), temperature, sample_groups=n, **options)


class FastCLIPEstimator(ContrastiveEstimator):
    r"""FastCLIP: moving averages with a cosine schedule of gamma, and a choice of temperatures.

    Example:
        >>> import compopt
        >>> est = compopt.FastCLIPEstimator(n=100, version="v3", rho=1.0)
        >>> schedule = compopt.schedules.CosineGamma(est, decay_steps=10)
        >>> schedule.step()  # beside optimizer.step()

    ``alpha_i = log u_i`` as in :class:`~compopt.MovingAverageEstimator` with ``reference="positive"``:

    ========  ==============================================  ======================
    version   temperature                                     objective
    ========  ==============================================  ======================
    ``v0``    one, learned (global dual, no rho)              ``alpha``
    ``v1``    one, constant                                   ``tau alpha``
    ``v2``    one per sample (individual dual)                ``tau (alpha + rho)``
    ``v3``    one, learned (global dual)                      ``tau (alpha + rho)``
    ========  ==============================================  ======================

    All versions use ``compopt.schedules.CosineGamma(est, decay_steps)``, stepped once per update (in the authors' code
    once per epoch).

    Args:
        n: number of samples, or a list of sample groups.
        version: ``"v0"`` to ``"v3"``.
        gamma: initial value; the schedule begins at 1.
        tau: the constant temperature, or the initial value of a learned temperature; ``None``: 0.07, v2 0.03.
        rho: radius of the KL constraint (v2, v3); ``None``: v3 6.5, v2 7. The authors use 6.5 to 16 at batches of 1,024
            to 5,120; with weights that sum to one ``rho`` must stay below ``log |N_i|``.
        lr: step size of the learned temperature (Adam); ``None``: v0 1e-3, v2 0.0133, v3 2e-4. These and the other
            defaults are those of the authors' code and its script for CC3M; for others see
            :func:`compopt.presets.settings`.
        tau_min, tau_max: bounds of the temperature; ``None``: a default that depends on the mode.
        max_grad: bound of the gradient of a learned temperature. ``None``: no bound with ``parametrization="log"``
            (v0, v3), otherwise a default that depends on the mode (v2: 5 in bimodal mode, as the authors).
        betas: decay rates of Adam.
        parametrization: variable of the learned temperature of v0 and v3, see :class:`~compopt.TemperatureDual`.
            ``"log"`` is the authors' AdamW on ``log(1/tau)``, for v3 with a third of the rate while ``tau <= 0.03``;
            ``"linear"`` is the form of earlier versions of this library, where the same ``lr`` means a ``1 / tau``
            times larger step.
        reference, eps: see :class:`~compopt.MovingAverageEstimator`.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``log_u`` and ``count`` per sample and direction; v2 also ``tau`` and Adam's two moments; v0 and v3
    four numbers: ``tau``, Adam's moments and the number of updates. Checkpoints of ``parametrization="linear"``
    can be loaded, see :class:`~compopt.TemperatureDual`; their ``lr`` and bounds are loaded with them.

    References:
        Wei et al., FastCLIP, 2024; NeuCLIP, eq. 3, 4 and 13, Algorithm 2.
    """

    @takes_options(ContrastiveEstimator, CommonOptions)
    def __init__(
        self,
        n: GroupSpec,
        version: Version = "v3",
        gamma: float = 1.0,
        tau: float | None = None,
        rho: float | None = None,
        lr: float | None = None,
        tau_min: float | None = 0.01,
        tau_max: float | None = 1.0,
        max_grad: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        reference: Reference = "positive",
        eps: float = 1e-14,
        parametrization: Parametrization = "log",
        **options: Unpack[CommonOptions],
    ) -> None:
        checks.one_of("version", version, get_args(Version))
        checks.one_of("parametrization", parametrization, get_args(Parametrization))
        self.version = version
        known = SETTINGS[f"fastclip-{version}"]["cc3m"]
        given = {"tau": tau, "rho": rho, "lr": lr}
        tau, rho, lr = (known.get(key, 0.0) if value is None else value for key, value in given.items())
        checks.non_negative("rho", rho)  # also for versions that do not use it
        temperature: FixedTemperature | TemperatureDual = FixedTemperature(tau)
        if version != "v1":
            mode: Literal["individual", "global"] = "individual" if version == "v2" else "global"
            radius = 0.0 if version == "v0" else rho
            form = {} if mode == "individual" else as_logarithm(parametrization, switch=version == "v3")
            temperature = TemperatureDual(
                sizes(n), radius, lr, tau, tau_min, tau_max, max_grad, mode, optimizer="adam", betas=betas, **form
            )
        normalizer = MovingAverageEstimator(sizes(n), gamma, reference, eps)
        super().__init__(normalizer, temperature, multiply_tau=version != "v0", sample_groups=n, **options)


class EMC2Estimator(ContrastiveEstimator):
    r"""EMC2: negatives sampled from the softmax over the whole data set, by a Markov chain per sample.

    Example:
        >>> import torch, compopt
        >>> model, data = torch.nn.Linear(8, 4), torch.randn(2, 100, 8)
        >>> encode = lambda missing: tuple(model(data[:, missing]))  # chains outside the batch
        >>> est = compopt.EMC2Estimator(n=100, tau=0.2, encode=encode)
        >>> index = torch.arange(16)
        >>> est(*model(data[:, index]), index).backward()
        >>> est.step()

    .. math::
        w_{ij} = \frac{\text{visits of chain } i \text{ to } j}{R - P}

    Args:
        n: number of samples, or a list of sample groups such as ``[{"n": 1000, "burn_in": 0.9}, {"n": 500}]``.
        burn_in: ``P``, a count, or a fraction of the ``R`` proposals. The default is half of them: Table 3 uses
            ``P = b - 1`` of ``R = 2b - 2`` proposals.
        tau: temperature, ``1 / beta`` of the paper. The default is that of Table 3, STL-10 at batch 256; other runs use
            1 / 14.28. The paper has no bimodal run.
        proposals, seed, draws, encode: see :class:`~compopt.MCMCNegativeSampler`; ``est.normalizer.encode`` may be set
            later.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``chain``, ``score`` and ``count`` per sample, one each per direction in bimodal mode: 32 bytes a sample,
    16 in unimodal mode.

    References:
        Yau et al., EMC2: Efficient MCMC Negative Sampling for Contrastive Learning, ICML 2024, Algorithm 1.
    """

    @takes_options(ContrastiveEstimator, Options)
    def __init__(
        self,
        n: GroupSpec,
        burn_in: int | float = 0.5,
        tau: float = 0.2,
        proposals: Proposals = "pool",
        seed: int = 0,
        draws: int | None = None,
        encode: Encode | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            MCMCNegativeSampler(sizes(n), burn_in, proposals, seed, draws, encode),
            FixedTemperature(tau),
            sample_groups=n,
            **options,
        )


class NeuCLIPEstimator(ContrastiveEstimator):
    r"""NeuCLIP: a network predicts the normalizer of every sample; nothing is stored per sample.

    Example:
        >>> import torch, compopt
        >>> est = compopt.NeuCLIPEstimator(dim=8, prototypes=32, restart_every=100)
        >>> z1, z2 = torch.randn(2, 16, 8, requires_grad=True).unbind()
        >>> est(z1, z2).backward()
        >>> est.step()

    .. math::
        \alpha_i = \log\Bigl(\epsilon + \tfrac{1}{m} \sum_{j=1}^m e^{(\cos(e_i, W_j) - s_{ii}) / \tau}\Bigr), \qquad
        w_{ij} = \tfrac{1}{|N_i|}\, e^{h_{ij} / \tau - \alpha_i}

    Args:
        dim: dimension of the features.
        n: number of samples, or a list of sample groups; needed only for individual temperatures or for groups.
        tau: temperature, or its initial value if learned; 0.07 as in FastCLIP's code, since the paper states none.
        prototypes, lr, updates, restart_every: options of the network, see :class:`~compopt.NeuralNormalizer`; the
            defaults are those of Table 4.
        eps, optimizer, seed: further options of the network, see :class:`~compopt.NeuralNormalizer`.
        through_alpha: option of the network. ``True`` is Algorithm 1, line 11; compared with ``False`` it was equal or
            better at batch 64 and better at 8 and 16 (``benchmarks/results/neuclip.md``).
        rho: radius of the KL constraint of a learned temperature; must stay below ``log |N_i|``. Table 3 uses 6.5 for
            CC3M and up to 11, see :func:`compopt.presets.settings`.
        tau_lr: step size of a learned temperature (Adam). Table 3 uses 1.25e-4 for CC3M, 3.9e-5 to 6.25e-5 for others.
        learn_tau: ``False``; ``True`` or ``"global"``, one dual for all samples (Algorithm 1); ``"individual"``, one
            per sample and direction. The default differs from the paper, since ``rho`` must be chosen for data and
            batch: at batch 64 on glyphs, 6.5 changed the temperature from 0.07 to 0.01 and lowered R@1 by 18 points,
            while 3.0 changed neither; on words 3.0 also changed it to 0.01 (``benchmarks/results/neuclip.md``).
        tau_min, tau_max, max_grad, betas: options of a learned temperature, see :class:`~compopt.TemperatureDual`.
            0.01 and 1 are the bounds of FastCLIP's code.
        parametrization: variable of a global learned temperature. ``"log"`` is AdamW on ``log(1/tau)``, with a third of
            the rate while ``tau <= 0.03``, as in FastCLIP's code; ``"linear"`` is the form of earlier versions of this
            library.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``W``, the queue of the newest features and AdaGrad's sums, ``(2, m, d)`` each (``(1, m, d)`` in unimodal
    mode and with one direction), and the state of a learned temperature.

    References:
        Wei et al., NeuCLIP, eq. 10 to 12, Algorithm 1, Table 4.
    """

    @takes_options(ContrastiveEstimator, Options)
    def __init__(
        self,
        dim: int,
        n: GroupSpec | None = None,
        tau: float = 0.07,
        prototypes: int = 4096,
        lr: float = 1.0,
        updates: int = 10,
        restart_every: int | None = 500,
        rho: float = 6.5,
        tau_lr: float = 1.25e-4,
        learn_tau: bool | Literal["global", "individual"] = False,
        eps: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adagrad,
        through_alpha: bool = True,
        seed: int = 0,
        tau_min: float | None = 0.01,
        tau_max: float | None = 1.0,
        max_grad: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        parametrization: Parametrization = "log",
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(learn_tau, bool):
            checks.one_of("learn_tau", learn_tau, ("global", "individual"))
        checks.non_negative("rho", rho)
        checks.one_of("parametrization", parametrization, get_args(Parametrization))
        groups = None if n is None else sizes(n)
        temperature: FixedTemperature | TemperatureDual = FixedTemperature(tau)
        if learn_tau:
            mode: Literal["individual", "global"] = "individual" if learn_tau == "individual" else "global"
            form = {} if mode == "individual" else as_logarithm(parametrization)
            temperature = TemperatureDual(
                groups, rho, tau_lr, tau, tau_min, tau_max, max_grad, mode, optimizer="adam", betas=betas, **form
            )
        network = NeuralNormalizer(
            dim, prototypes, lr, updates, restart_every, eps, optimizer, through_alpha, seed, n=groups
        )
        super().__init__(network, temperature, sample_groups=n, **options)
