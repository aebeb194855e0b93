"""FastCLIP v0 to v3 as compositions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.groups import GroupSpec, parse, sizes
from compopt.normalizers import MovingAverageEstimator
from compopt.presets.options import CommonOptions, takes_options
from compopt.temperatures import FixedTemperature, TemperatureDual

if TYPE_CHECKING:
    from typing_extensions import Unpack

FASTCLIP_EPS = 1e-14
FASTCLIP_VERSIONS = ("v0", "v1", "v2", "v3")


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

    All versions use ``compopt.schedules.CosineGamma(est, decay_steps)``, stepped once per update; the preset
    cannot know the length of the run. The authors' code sets gamma once per epoch.

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
        **options: see :class:`~compopt.ContrastiveEstimator`.

    State: ``log_u`` and ``count`` per sample and direction; v2 also ``tau`` and Adam's two moments; v0 and v3
    four numbers: ``tau``, Adam's moments and the number of updates.

    The call, communication, errors: see :class:`~compopt.ContrastiveEstimator`,
    :class:`~compopt.MovingAverageEstimator` and :class:`~compopt.TemperatureDual`.

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

    @takes_options(CommonOptions)
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
        **options: Unpack[CommonOptions],
    ) -> None:
        checks.one_of("version", version, FASTCLIP_VERSIONS)
        self.version = version
        checks.non_negative("rho", rho)  # of the versions that have none, too
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
        super().__init__(
            MovingAverageEstimator(sizes(n), gamma, reference, eps),
            temperature,
            multiply_tau=version != "v0",
            sample_groups=parse(n),
            **options,
        )
