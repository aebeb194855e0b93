"""The stateless baseline: SimCLR, InfoNCE, CLIP."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from compopt.contrastive import ContrastiveEstimator
from compopt.normalizers import BatchNormalizer
from compopt.ranks import ProcessGroup
from compopt.temperatures import FixedTemperature


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
