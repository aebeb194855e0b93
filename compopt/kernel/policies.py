"""Statistics of pairs under a policy: one sweep, or several, with what is done to their sums."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from compopt.functional import Scalar
from compopt.kernel.corrected import DebiasedPairs, NormalizedPairs, WeightedPositives
from compopt.kernel.joined import JoinedPairs
from compopt.kernel.pairs import PairOptions, PairStatistics, scale_of
from compopt.kernel.source import Source
from compopt.kernel.targets import TargetPairs, Targets
from compopt.pairs import PairPolicy


def swept(
    source: Source, options: PairOptions, policy: PairPolicy, targets: Targets | None, prior: Tensor | None
) -> PairStatistics:
    """Sweep what a policy asks for; ``targets`` where its positives are expectations, ``prior`` where it is given."""
    if targets is not None:
        return TargetPairs(source, options, targets)
    pairs = JoinedPairs.of_policy(source, options) if policy.also else source.pairs(options)
    if policy.importance != "plain":
        pairs = _normalized(pairs, source, options, policy)
    scale = scale_of(source.tau, pairs.positive, *pairs.positive.shape)
    if policy.prior is not None:
        share = cast(Scalar, policy.prior) if prior is None else prior[:, None]
        pairs = DebiasedPairs(pairs, share, scale)
    if policy.mises_fisher is not None:
        pairs = WeightedPositives(pairs, policy.mises_fisher, scale)
    return pairs


def _normalized(pairs: PairStatistics, source: Source, options: PairOptions, policy: PairPolicy) -> PairStatistics:
    """Divide importance weights by their mean, which is a sum at the temperature ``1 / beta``."""
    assert options.selection is not None  # there is a hardness
    beta, _ = policy.strengths
    plain = options._replace(selection=options.selection.without_hardness(), moments=False)
    weights = source.pairs(plain, tau=1 / beta)
    return NormalizedPairs(pairs, weights, beta, source.tau, policy.importance == "differentiated")
