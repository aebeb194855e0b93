"""Arguments and results of the hooks of parts: a call, its setting, and the estimate of a normalizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compopt.batch import Batch
from compopt.distributed.ranks import Ranks
from compopt.estimator.groups import Hyper
from compopt.functional import Scalar
from compopt.kernel.features import Encoder
from compopt.kernel.pairs import PairStatistics, SampledPairs
from compopt.pairs import PairPolicy


@dataclass
class Call:
    """One forward pass, as a component sees it.

    Attributes:
        batch: the samples of all ranks, their features ``(B, d)`` each and their committed rows.
        pairs: the statistics of all pairs of anchor and negative, ``(B, A)`` each: ``log_ghat``, ``log_sum`` (in nats),
            ``positive``, ...; ``A`` directions of anchors, or ordered pairs of more than two views.
        tau: temperatures of this call, a number, 0-d, ``(B, 1)`` or, of two views, ``(B, A)``, without a graph.
        hyper: the component's hyper-parameters for these rows.
        chunk_size: anchors that may be held at a time, or ``None``.
        encoder: features of samples outside the batch, if the caller can give them.
        t: commits so far.
        window: calls since the last commit.
        unimodal: rows are shared by both views.
        policy: of pairs, or ``None``.
    """

    batch: Batch
    pairs: PairStatistics
    tau: float | Tensor
    hyper: Hyper
    chunk_size: int | None
    encoder: Encoder | None
    t: int
    window: int
    unimodal: bool
    policy: PairPolicy | None = None

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """Committed columns by name, ``(B, 2)``, or ``(B, 1)`` in unimodal mode and with one direction."""
        return self.batch.columns

    @property
    def count(self) -> Tensor:
        """Visits so far, int32, in the shape of the columns."""
        return self.batch.count

    def unseen(self, column: str) -> Tensor:
        """Return where the part that keeps a column was never visited, in the shape of the columns."""
        return self.batch.unseen(column)

    @property
    def training(self) -> bool:
        """True if proposals may be committed."""
        return self.batch.depositing


@dataclass(frozen=True)
class Setting:
    """Facts of the estimator that a component becomes a part of.

    Attributes:
        owner: the estimator.
        mode: ``"bimodal"``, ``"unimodal"`` or ``"single"``.
        dtype: of the rows.
        normalize: features are L2-normalised.
        ranks: whose batches form the global batch.
        directions: how many have anchors: 1, or 2 (of unimodal mode: views).
    """

    owner: object
    mode: str
    dtype: torch.dtype
    normalize: bool
    ranks: Ranks
    directions: int = 2


@dataclass
class Estimate:
    """Result of a normalizer.

    Attributes:
        alpha: log-normalizers, ``(B, A)`` for ``A`` directions of anchors, or ``(B, 1)``.
        proposals: new values of its columns.
        target: ``log(eps + ghat)``, ``(B, A)``, where ``alpha`` is no average of it and the gradient ``G`` of a
            temperature depends on how far it is away.
        weight_alpha: what stands for ``alpha`` in the weights of the pairs, where candidates from outside the batch
            have a share of an anchor's weights.
        outside_wh: ``sum w h`` over candidates from outside the batch, ``(B, A)``; for the gradient of temperatures.
        weights: of the pairs, where they are not ``exp(h_ij / tau_i - alpha_i) / |N_i|``.
        positive_weight: of each anchor's positive, a number or ``(B, A)``, where it is not ``sum_j w_ij``.
        through_alpha: from the derivative of the value with respect to ``alpha``, ``(B, A)``, to gradients of the whole
            batch's features, ``(B, d)`` each or ``(V, B, d)``; ``None``: ``alpha`` is held constant.
        learned: parameters of the normalizer, 0-d, and the derivatives of ``alpha`` with respect to them, ``(B, A)``.
        metrics: 0-d tensors to show, or what computes them when somebody asks (it must be picklable).
    """

    alpha: Tensor
    proposals: dict[str, Tensor] = field(default_factory=dict)
    target: Tensor | None = None
    weight_alpha: Tensor | None = None
    outside_wh: Tensor | None = None
    weights: SampledPairs | None = None
    positive_weight: Scalar | None = None
    through_alpha: Callable[[Tensor], Tensor | tuple[Tensor, ...]] | None = None
    learned: Sequence[tuple[Tensor, Tensor]] = ()
    metrics: Mapping[str, Tensor | Callable[[], Tensor]] = field(default_factory=dict)
