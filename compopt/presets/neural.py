"""Presets with a network or a queue that predicts each sample's normalizer: NeuCLIP, and our residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from typing_extensions import Unpack

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.component import takes_options
from compopt.estimator.groups import GroupSpec, sizes
from compopt.normalizers import NeuralNormalizer, ResidualNormalizer
from compopt.presets.options import Options
from compopt.presets.published import as_logarithm
from compopt.temperatures import FixedTemperature, TemperatureDual
from compopt.temperatures.dual import Parametrization


class NeuCLIPEstimator(ContrastiveEstimator):
    r"""NeuCLIP: a network predicts every sample's normalizer; nothing is stored per sample.

    .. math::
        \alpha_i = \log\Bigl(\epsilon + \tfrac{1}{m} \sum_{j=1}^m e^{(\cos(e_i, W_j) - s_{ii}) / \tau}\Bigr), \qquad
        w_{ij} = \tfrac{1}{|N_i|}\, e^{h_{ij} / \tau - \alpha_i}

    Args:
        dim: of the features.
        n: number of samples, or a list of sample groups; needed only for individual temperatures or for groups.
        tau: temperature, the first one where it is learned; 0.07 as in FastCLIP's code, the paper prints none.
        prototypes, lr, updates, restart_every: of the network, see :class:`~compopt.NeuralNormalizer`; the defaults are
            those of Table 4.
        eps: see there.
        optimizer, reset_optimizer, seed: of the network, too.
        through_alpha: of the network, too. ``True`` is Algorithm 1, line 11; against ``False`` it was level or better
            at batch 64 and better at 8 and 16 (``benchmarks/results/neuclip.md``, ``glyphs.jsonl``). Checkpoints of
            0.2.0's default need ``False``.
        rho: radius of the KL constraint of a learned temperature; must stay below ``log |N_i|``. Table 3 has 6.5 for
            CC3M and up to 11, see :func:`compopt.presets.settings`.
        tau_lr: step size of a learned temperature (Adam). Table 3 has 1.25e-4 for CC3M, 3.9e-5 to 6.25e-5 for others.
        learn_tau: ``False``; ``True`` or ``"global"``, one dual for all (Algorithm 1); ``"individual"``, one per sample
            and direction. The default is not the paper's, since ``rho`` must be chosen for data and batch: at batch
            64 on glyphs 6.5 took the temperature from 0.07 to 0.01 and R@1 from 52 to 36 %, while 3.0 left both; on
            words 3.0 took it there (``benchmarks/results/neuclip.md``).
        tau_min, tau_max, max_grad, betas: of a learned temperature, see :class:`~compopt.TemperatureDual`. 0.01 and 1
            are the bounds of FastCLIP's code.
        parametrization: of the global one: ``"log"`` is AdamW on ``log(1/tau)``, with a third of the rate while
            ``tau <= 0.03``, as in FastCLIP's code; ``"linear"`` is what earlier versions of this library did.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``W``, the queue of the newest features and AdaGrad's sums, ``(2, m, d)`` each (``(1, m, d)`` in unimodal
    mode and with one direction); a learned temperature adds its own.

    References:
        Wei et al., NeuCLIP, eq. 10 to 12, Algorithm 1, Table 4.

    Example:
        >>> import torch, compopt
        >>> est = compopt.NeuCLIPEstimator(dim=8, prototypes=32, restart_every=100)
        >>> z1, z2 = torch.randn(2, 16, 8, requires_grad=True).unbind()
        >>> est(z1, z2).backward()
        >>> est.step()
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
        reset_optimizer: bool = False,
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
            dim, prototypes, lr, updates, restart_every, eps, optimizer, reset_optimizer, through_alpha, seed, n=groups
        )
        super().__init__(network, temperature, sample_groups=n, **options)


class ResidualEstimator(ContrastiveEstimator):
    r"""Large-batch gradients from batches of 8 to 64: the newest features predict, the batch and the row correct.

    .. math::
        \alpha_i = \log \Bigl( \tfrac{1}{m} \sum_{j \in \text{queue}} e^{h_{ij} / \tau} \Bigr) + \log r_i, \qquad
        \nabla F_i = \sum_{j \in N_i} w_{ij} \nabla h_{ij}
        + \Bigl(1 - \sum_{j \in N_i} w_{ij}\Bigr) \sum_{j \in \text{queue}} p_{ij} \nabla h_{ij}

    with ``p_ij`` the softmax over the queue, whose features carry no gradient: every anchor's weights sum to one. See
    :class:`~compopt.ResidualNormalizer` for ``r_i``, why, and the sources.

    Args:
        dim: of the features.
        n: number of samples, or a list of sample groups; ``None`` keeps nothing per sample.
        gamma: in (0, 1]; weight of the batch's own estimate.
        tau: temperature.
        prototypes: length ``m`` of the queue; its oldest feature is ``m / B`` steps old.
        eps: added to the inner function.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: the queue, ``(2, m, d)`` (``(1, m, d)`` in unimodal mode and with one direction), twice; with ``n`` a
    logarithm and a count per sample and direction, 16 bytes a sample.

    Example:
        >>> import torch, compopt
        >>> est = compopt.ResidualEstimator(dim=16, n=1000, prototypes=64)
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()
    """

    @takes_options(ContrastiveEstimator, Options)
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
        normalizer = ResidualNormalizer(queue, None if n is None else sizes(n), gamma)
        super().__init__(normalizer, FixedTemperature(tau), sample_groups=n, **options)
