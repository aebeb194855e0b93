"""The published methods as compositions; nothing here but which parts and which defaults."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.groups import GroupSpec, parse, sizes
from compopt.normalizers import BatchNormalizer, MovingAverageEstimator
from compopt.ranks import ProcessGroup
from compopt.temperatures import FixedTemperature, TemperatureDual


class InfoNCEEstimator(ContrastiveEstimator):
    r"""The stateless baseline: SimCLR, InfoNCE, and CLIP with ``learn_tau=True, multiply_tau=False``.

    .. math:: \alpha_i = \log \tfrac{1}{|N_i|} \Big([1 +] \sum_{j \in N_i} e^{h_{ij}/\tau}\Big)

    Args:
        tau: temperature, a number or a 0-d tensor.
        include_positive: keep the positive in the denominator (the usual loss). ``False`` is the control that a
            stateful method must beat.
        learn_tau: learn ``log(1/tau)`` by the user's optimizer: give it ``est.parameters()``.
        mode, normalize, multiply_tau, chunk_size, process_group, offload, offload_dir, shard, dtype: see
            :class:`~compopt.ContrastiveEstimator`.

    State: none per sample, so ``index`` may be left out when no sample repeats.

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

    def __init__(
        self,
        tau: float | Tensor = 0.07,
        include_positive: bool = True,
        learn_tau: bool = False,
        mode: str = "bimodal",
        normalize: bool = True,
        multiply_tau: bool = True,
        chunk_size: int | None = None,
        process_group: ProcessGroup | None = None,
        offload: str | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            BatchNormalizer(include_positive),
            FixedTemperature(tau, learn=learn_tau, dtype=dtype),
            mode=mode,
            normalize=normalize,
            multiply_tau=multiply_tau,
            chunk_size=chunk_size,
            process_group=process_group,
            offload=offload,
            offload_dir=offload_dir,
            shard=shard,
            dtype=dtype,
        )


class SogCLREstimator(ContrastiveEstimator):
    r"""SogCLR: per-sample moving averages, one fixed temperature.

    .. math::
        u_i \leftarrow (1-\gamma) u_i + \gamma\, \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{s_{ij}/\tau}, \qquad
        w_{ij} = \frac{e^{s_{ij}/\tau}}{|N_i|\, u_i}

    Args:
        n: number of samples, or a list of sample groups such as ``[{"n": 1000, "gamma": 0.5}, {"n": 500}]``.
        gamma: in (0, 1]; weight of the newest value. 1 is the stateless control.
        tau: temperature.
        reference: see :class:`~compopt.MovingAverageEstimator`; ``"none"`` is the paper's.
        eps: added to the inner function.
        mode, normalize, multiply_tau, chunk_size, process_group, offload, offload_dir, shard, dtype: see
            :class:`~compopt.ContrastiveEstimator`.

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

    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        tau: float = 0.07,
        reference: str = "none",
        eps: float = 0.0,
        mode: str = "bimodal",
        normalize: bool = True,
        multiply_tau: bool = True,
        chunk_size: int | None = None,
        process_group: ProcessGroup | None = None,
        offload: str | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._given_groups = parse(n)
        super().__init__(
            MovingAverageEstimator(sizes(n), gamma, reference, eps),
            FixedTemperature(tau),
            mode=mode,
            normalize=normalize,
            multiply_tau=multiply_tau,
            chunk_size=chunk_size,
            process_group=process_group,
            offload=offload,
            offload_dir=offload_dir,
            shard=shard,
            dtype=dtype,
        )


class ISogCLREstimator(ContrastiveEstimator):
    r"""iSogCLR: per-sample moving averages and per-sample temperatures.

    .. math::
        G(\tau_i) = \log u_i + \rho - \sum_j w_{ij} h_{ij}/\tau_i, \qquad
        \tau_i \leftarrow \Pi\,(\tau_i - \text{lr}\; m_i)

    Args:
        n, gamma, reference: see :class:`~compopt.MovingAverageEstimator`.
        rho, lr, tau_init, tau_min, tau_max, max_grad, optimizer, beta: see :class:`~compopt.TemperatureDual`;
            ``None`` is filled by mode.
        mode, normalize, multiply_tau, chunk_size, process_group, offload, offload_dir, shard, dtype: see
            :class:`~compopt.ContrastiveEstimator`.

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
        >>> tuple(est.read(torch.arange(3))["tau"].shape)
        (3, 2)
    """

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
        mode: str = "bimodal",
        normalize: bool = True,
        multiply_tau: bool = True,
        chunk_size: int | None = None,
        process_group: ProcessGroup | None = None,
        offload: str | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        temperature = TemperatureDual(
            sizes(n), rho, lr, tau_init, tau_min, tau_max, max_grad, optimizer=optimizer, beta=beta
        )
        self._given_groups = parse(n)
        super().__init__(
            MovingAverageEstimator(sizes(n), gamma, reference),
            temperature,
            mode=mode,
            normalize=normalize,
            multiply_tau=multiply_tau,
            chunk_size=chunk_size,
            process_group=process_group,
            offload=offload,
            offload_dir=offload_dir,
            shard=shard,
            dtype=dtype,
        )


FASTCLIP_EPS = 1e-14
FASTCLIP_VERSIONS = ("v0", "v1", "v2", "v3")


class FastCLIPEstimator(ContrastiveEstimator):
    r"""FastCLIP: moving averages with a cosine schedule of gamma, and a choice of temperatures.

    ========  ==============================================  ======================
    version   temperature                                     objective
    ========  ==============================================  ======================
    ``v0``    one, learned (global dual, no rho)              ``alpha``
    ``v1``    one, constant                                   ``tau alpha``
    ``v2``    one per sample (individual dual)                ``tau (alpha + rho)``
    ``v3``    one, learned (global dual)                      ``tau (alpha + rho)``
    ========  ==============================================  ======================

    All versions use ``compopt.schedules.CosineGamma(est, decay_steps)``, stepped once per update; the preset
    cannot know the length of the run.

    Args:
        n: number of samples, or a list of sample groups.
        version: ``"v0"`` to ``"v3"``.
        gamma: start value; the schedule begins at 1.
        tau: the constant, or the initial value of a learned temperature.
        rho: radius of the KL constraint (v2, v3). The papers use 6.5 to 11 at batches of 1024 and more; with
            weights that sum to one it must stay below ``log |N_i|``.
        lr: step size of the learned temperature (Adam).
        tau_min, tau_max, max_grad: bounds; ``None`` is filled by mode.
        reference, eps: see :class:`~compopt.MovingAverageEstimator`.
        mode, normalize, chunk_size, process_group, offload, offload_dir, shard, dtype: see
            :class:`~compopt.ContrastiveEstimator`.

    State: ``log_u`` and ``count`` per sample and direction; v2 also ``tau`` and Adam's two moments; v0 and v3
    three numbers.

    References:
        Wei et al., FastCLIP, 2024; NeuCLIP, eq. 3, 4 and 13, Algorithm 2.

    Example:
        >>> import compopt
        >>> est = compopt.FastCLIPEstimator(n=100, version="v3", rho=1.0)
        >>> schedule = compopt.schedules.CosineGamma(est, decay_steps=10)
        >>> for _ in range(5):
        ...     schedule.step()  # beside optimizer.step()
        >>> round(est.sample_groups[0]["gamma"], 3)
        0.6
    """

    def __init__(
        self,
        n: GroupSpec,
        version: str = "v3",
        gamma: float = 1.0,
        tau: float = 0.07,
        rho: float = 6.5,
        lr: float = 1e-4,
        tau_min: float | None = None,
        tau_max: float | None = None,
        max_grad: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        reference: str = "positive",
        eps: float = FASTCLIP_EPS,
        mode: str = "bimodal",
        normalize: bool = True,
        chunk_size: int | None = None,
        process_group: ProcessGroup | None = None,
        offload: str | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        checks.one_of("version", version, FASTCLIP_VERSIONS)
        self.version = version
        temperature: FixedTemperature | TemperatureDual = FixedTemperature(tau)
        if version != "v1":
            temperature = TemperatureDual(
                sizes(n),
                rho=0.0 if version == "v0" else rho,
                lr=lr,
                tau_init=tau,
                tau_min=tau_min,
                tau_max=tau_max,
                max_grad=max_grad,
                mode="individual" if version == "v2" else "global",
                optimizer="adam",
                betas=betas,
            )
        self._given_groups = parse(n)
        super().__init__(
            MovingAverageEstimator(sizes(n), gamma, reference, eps),
            temperature,
            mode=mode,
            normalize=normalize,
            multiply_tau=version != "v0",
            chunk_size=chunk_size,
            process_group=process_group,
            offload=offload,
            offload_dir=offload_dir,
            shard=shard,
            dtype=dtype,
        )
