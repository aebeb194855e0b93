"""Sigmoid per pair: no pair's weight depends on another pair."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from compopt import checks
from compopt.estimator.component import Call, Estimate, Normalizer, Setting
from compopt.estimator.groups import Hyper, SampleGroups
from compopt.kernel.pairs import effective_number
from compopt.kernel.sigmoid import SigmoidPairs
from compopt.pairs import NO_POLICY, PairPolicy
from compopt.stores.layout import Column


class SigmoidNormalizer(Normalizer):
    r"""Pairwise sigmoid loss (SigLIP): every pair of an anchor and a candidate is a binary classification.

    .. math::
        \alpha_i = \log(1 + e^{-s_{ii} / \tau_i - b}) + \sum_{j \in N_i} \log(1 + e^{s_{ij} / \tau_i + b}), \qquad
        w_{ij} = \sigma(s_{ij} / \tau_i + b)

    The positive is pulled with the weight ``sigma(-s_ii / tau_i - b)``. Nothing is normalised; ``alpha_i`` is what the
    mean is over, the loss of all pairs of an anchor. ``N_i`` has the samples of other index and labels, so that known
    duplicates are no negatives; an anchor that has none left contributes nothing, as under every normalizer. With
    ``multiply_tau=False`` the value is that of the paper.

    Args:
        bias: ``b``; -10: few pairs of a large batch are positive.
        learn: ``b`` is a parameter that ``est.parameters()`` hands to the user's optimizer.
        dtype: of that parameter.

    Hyper-parameters: ``bias``, unless it is learned.

    State: the parameter ``bias``, 0-d, with ``learn=True``. Communicates one all-gather of 3 floats per sample and
    direction; with several ranks each gets the whole gradient of a learned bias.

    Metrics: ``effective_negatives``, of the weights ``w_ij`` of this rank's anchors.

    Cost: similarities are computed once by the kernel, once per direction for the sums and twice for the gradients, in
    blocks of ``chunk_size`` rows, or 1,024.

    Raises:
        TypeError: ``bias`` is no number, ``learn`` neither True nor False.
        ValueError: a policy of pairs, a :class:`~compopt.TemperatureDual`; at the call ``extra``.

    References:
        Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023, eq. 1 and Algorithm 1.

    Example:
        >>> import torch, compopt
        >>> sigmoid, tau = compopt.SigmoidNormalizer(bias=-2.0), compopt.FixedTemperature(0.1)
        >>> est = compopt.ContrastiveEstimator(sigmoid, tau, multiply_tau=False)
        >>> est(*torch.randn(2, 8, 4, requires_grad=True)).backward()
    """

    def __init__(self, bias: float = -10.0, learn: bool = False, dtype: torch.dtype = torch.float32) -> None:
        checks.flag("learn", learn)
        super().__init__(None, {} if learn else {"bias": bias})
        if learn:
            value = torch.tensor(checks.number("bias", bias), dtype=dtype, device="cpu")
            self.learnable = torch.nn.Module()
            self.learnable.bias = torch.nn.Parameter(value)

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """Learned bias, 0-d; ``None`` if nothing is learned."""
        return None if self.learnable is None else cast(torch.nn.Parameter, self.learnable.bias)

    def described(self) -> dict[str, Any]:
        return {} if self.bias is None else {"bias": f"{self.bias.item():.6g} (learned)"}

    def check(self, group: Mapping[str, Any]) -> None:
        if "bias" in self.own_defaults:
            checks.number("bias", group["bias"])

    def check_extra(self) -> None:
        raise ValueError("extra= must be left out: SigmoidNormalizer has the samples of the batch alone as candidates")

    def check_pairs(self, policy: PairPolicy) -> None:
        if policy != NO_POLICY:
            raise ValueError(
                f"pairs={policy} weights the terms of a normalizer, and a sigmoid per pair has none; leave it out, and "
                f"pass labels= for duplicates"
            )

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        temperature = getattr(setting.owner, "temperature", None)
        if temperature is not None and temperature.learns:  # before this is a part of it
            raise ValueError(
                f"{type(temperature).__name__} bounds the divergence of weights that a normalizer divides, and a "
                f"sigmoid per pair has none; take FixedTemperature(learn=True)"
            )
        super().joined(groups, setting)
        self._ranks = setting.ranks

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return []

    def estimate(self, call: Call) -> Estimate:
        call.pairs.release()  # its gradients are not asked for
        batch, bias = call.batch, call.hyper("bias") if self.bias is None else self.bias
        gather = lambda values: self._ranks.gather([values], batch.sizes)[0]  # noqa: E731
        weights = SigmoidPairs(call.pairs, batch.features, batch.own, call.tau, bias, call.chunk_size, gather)
        learned = [] if self.bias is None else [(self.bias, weights.slope)]
        effective = partial(effective_number, weights.total, weights.squares)
        return Estimate(weights.alpha, weights=weights, learned=learned, metrics={"effective_negatives": effective})

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        raise ValueError("SigmoidNormalizer estimates no log-normalizer that could be compared with the exact one")
