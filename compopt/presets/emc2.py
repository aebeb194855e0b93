"""EMC2 as a composition."""

from __future__ import annotations

from typing_extensions import Unpack

from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.component import takes_options
from compopt.estimator.groups import GroupSpec, sizes
from compopt.negatives.sampler import MCMCNegativeSampler, Proposals
from compopt.presets.options import Options
from compopt.temperatures import FixedTemperature


class EMC2Estimator(ContrastiveEstimator):
    r"""EMC2: negatives from the softmax of the whole data set, by a Markov chain per sample.

    .. math::
        w_{ij} = \frac{\text{visits of chain } i \text{ to } j}{R - P}

    Args:
        n: number of samples, or a list of sample groups such as ``[{"n": 1000, "burn_in": 0.9}, {"n": 500}]``.
        burn_in: ``P``, a count, or a fraction of the ``R`` proposals. Half of them: Table 3 has ``P = b - 1`` of
            ``R = 2b - 2`` proposals.
        tau: temperature, ``1 / beta`` of the paper. 0.2: Table 3, STL-10 at batch 256; the other runs have 1 / 14.28.
            The paper has no bimodal run.
        proposals, rescore, seed, draws: see :class:`~compopt.MCMCNegativeSampler`.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: ``chain``, ``score`` and ``count`` per sample, one each per direction in bimodal mode: 32 bytes a sample,
    16 in unimodal mode.

    References:
        Yau et al., EMC2: Efficient MCMC Negative Sampling for Contrastive Learning, ICML 2024, Algorithm 1.

    Example:
        >>> import torch, compopt
        >>> model, data = torch.nn.Linear(8, 4), torch.randn(2, 100, 8)
        >>> est = compopt.EMC2Estimator(n=100, tau=0.2)
        >>> index = torch.arange(16)
        >>> z1, z2 = model(data[:, index])
        >>> encode = lambda missing: tuple(model(data[:, missing]))  # samples at which chains are, outside the batch
        >>> est(z1, z2, index, encode=encode).backward()
        >>> est.step()
    """

    @takes_options(ContrastiveEstimator, Options)
    def __init__(
        self,
        n: GroupSpec,
        burn_in: int | float = 0.5,
        tau: float = 0.2,
        proposals: Proposals = "pool",
        rescore: bool = False,
        seed: int = 0,
        draws: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            MCMCNegativeSampler(sizes(n), burn_in, proposals, rescore, seed, draws),
            FixedTemperature(tau),
            sample_groups=n,
            **options,
        )
