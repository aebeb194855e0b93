"""Stateless baseline: log-normalizers from the batch only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from compopt import checks
from compopt.checks.context import warn
from compopt.estimator.parts import Call, Estimate, Normalizer
from compopt.functional import add_positive

FEW_NEGATIVES = 3  # negatives of an anchor, among which weights that sum to one hardly distinguish


class BatchNormalizer(Normalizer):
    r"""Normalizer computed from the batch alone, without state: SimCLR, InfoNCE, CLIP, DCL.

    Example:
        >>> import torch, compopt
        >>> est = compopt.ContrastiveEstimator(compopt.BatchNormalizer(), compopt.FixedTemperature(0.1))
        >>> est(*torch.randn(2, 8, 4, requires_grad=True)).backward()

    .. math::
        \alpha_i = \log \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{h_{ij}/\tau_i}
        \qquad\text{or, with the positive,}\qquad
        \alpha_i = \log \tfrac{1}{|N_i|} \Bigl(c_i + \sum_{j \in N_i} e^{h_{ij}/\tau_i}\Bigr)

    With the positive and ``c = 1``, ``w_ij`` is the usual softmax of the cross-entropy and the objective is InfoNCE
    minus the constant ``tau log |N_i|``; without the positive the weights of each anchor sum to one. With
    ``candidates=K`` the negatives are taken as a sample of ``K`` ones, ``c_i = min(1, |N_i| / K)``: an anchor loses its
    weight only if its positive is ahead of ``K`` such negatives, not of the few in the batch.

    Args:
        include_positive: count the positive pair in the denominator.
        candidates: ``K``, with ``include_positive``; ``None``: ``|N_i|``.

    Hyper-parameters: ``include_positive``, which may differ between sample groups.

    State: none. In unimodal mode ``alpha`` is computed per view (objective V1 of SogCLR, section 3.1). Communicates
    nothing itself.

    Raises:
        TypeError: ``include_positive`` is neither True nor False, candidates is not an integer.
        ValueError: candidates < 1.

    Warns:
        UserWarning: once, without the positive and with at most 3 negatives per anchor.

    References:
        Chen et al., SimCLR, ICML 2020; van den Oord et al., 2018 (InfoNCE); Radford et al., CLIP, 2021. Without the
        positive: Yeh et al., Decoupled Contrastive Learning, ECCV 2022. ``candidates``: the correction of a sampled
        softmax (Jean et al., ACL 2015) for uniformly drawn negatives.
    """

    def __init__(self, include_positive: bool = False, candidates: int | None = None) -> None:
        self.candidates = None if candidates is None else checks.positive_int("candidates", candidates)
        self._warned = False  # of few negatives
        super().__init__(None, {"include_positive": include_positive})

    def shared_options(self) -> dict[str, Any]:
        return {"candidates": self.candidates}

    def described(self) -> dict[str, Any]:
        return {} if self.candidates is None else self.shared_options()

    def check(self, group: Mapping[str, Any]) -> None:
        checks.flag("include_positive", group["include_positive"])

    def estimate(self, call: Call) -> Estimate:
        include = call.hyper.choose("include_positive", {True: 1.0, False: 0.0})
        if isinstance(include, float) and include == 0.0:  # the weights of an anchor sum to one
            self._warn_few_negatives(call.pairs.least)
            return Estimate(call.pairs.log_ghat, positive_weight=None if call.pairs.moments else 1.0)
        log_sum = call.pairs.log_sum
        if self.candidates is None:
            total = F.softplus(log_sum, threshold=60.0)  # log(1 + exp x)
        else:
            total = add_positive(log_sum, call.pairs.log_count, self.candidates)
        total = total.where(include > 0, log_sum) if isinstance(include, Tensor) else total
        return Estimate(total - call.pairs.log_count)

    def _warn_few_negatives(self, least: int) -> None:
        """Warn, once, of so few negatives that their weights hardly differ."""
        if 0 < least <= FEW_NEGATIVES and not self._warned:
            self._warned = True
            warn(
                f"batches with {least} negatives per anchor: weights without the positive sum to 1 (DCL), however "
                f"similar these few are; use InfoNCEEstimator, a memory (recommended), or larger batches"
            )
