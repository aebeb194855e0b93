"""Operations on a block of similarities: masks, positives, further candidates, exponentials, and a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compopt.functional import Scalar
from compopt.pairs import PairPolicy

# Similarity of entries that are not pairs. Finite, so that 0 * MASKED is 0 and not NaN; far below any s / tau.
MASKED = -1e30
SMALLEST_EXPONENT, SMALLEST = -46.0, 2e-20  # of exponentials in float32 on a CPU; exp(-46) is below 2e-20


class Exponentials(NamedTuple):
    """One block of ``exp((s_ij - shift_i) / tau_i)`` for the anchors of one side (matrix rows or columns).

    ``dot`` is the sum of ``s_ij exp(...)`` over the block's candidates, or ``None``; ``excluded`` is the number of
    candidates that are not negatives under a policy, or ``None`` without a policy.
    """

    exp: Tensor
    shift: Tensor | None
    dot: Tensor | None
    excluded: Tensor | None = None


def positives(z: Tensor, directions: int) -> Tensor:
    """Return ``s_ii`` of two modalities or views ``z``, ``(2, B, d)``, for each direction: ``(B, D)``."""
    return torch.linalg.vecdot(*z).unsqueeze(1).expand(-1, directions)


@dataclass(frozen=True)
class Extra:
    """Further candidates of the anchors of direction 1, in addition to the features of the batch.

    Attributes:
        features: features of this process, ``(M, d)``, no graph.
        everyone: features of all ranks, in the order of the ranks; with one process the same.
        positive: positions of the anchors' own positives, ``(B,)``, of all ranks.
        positions: positions of ``everyone`` in the second modality, ``(M,)`` int64; ``None``: none is a positive.
        own: slice of this process's candidates among all.
        guide, key: guide features and keys of ``everyone`` for a policy of pairs, ``(M, g)`` and ``(M,)``, or ``None``.
    """

    features: Tensor
    everyone: Tensor
    positive: Tensor
    positions: Tensor | None
    own: slice
    guide: Tensor | None = None
    key: Tensor | None = None

    def same(self, anchors: slice, candidates: slice = slice(None)) -> Tensor:
        """Return a mask of the candidates that are an anchor's positive, ``(anchors, candidates)``."""
        positive = self.positive[anchors, None]
        if self.positions is None:
            return positive.new_zeros(len(positive), len(self.everyone[candidates]), dtype=torch.bool)
        return positive == self.positions[None, candidates]


class Axis(NamedTuple):
    """Data of a policy for the features along the rows or the columns of a matrix of similarities.

    Attributes:
        guide: features of the guide, ``(Q, g)``, or ``None``.
        key: keys ``within=``; pairs with different keys are excluded, ``(Q,)``, or ``None``.
        inside: number of features of the batch, which come first; the others are further candidates.
    """

    guide: Tensor | None
    key: Tensor | None
    inside: int

    def part(self, start: int, stop: int) -> Axis:
        """Return the part with the features ``start`` to ``stop``."""
        guide, key = (None if value is None else value[start:stop] for value in self[:2])
        return Axis(guide, key, min(max(0, self.inside - start), stop - start))


class Matrix(NamedTuple):
    """Policy for one matrix of similarities.

    Attributes:
        policy: the options.
        rows, columns: data of the two axes.
        thresholds: thresholds of the anchors along the rows, ``(P, 1)``, and along the columns, ``(Q,)``; ``None``
            without the option ``false_negatives``, or for an axis without anchors.
    """

    policy: PairPolicy
    rows: Axis
    columns: Axis
    thresholds: tuple[Tensor | None, Tensor | None]

    def logits(self, s: Tensor, start: int, dim: int, scale: Scalar) -> Tensor:
        """Return ``s_ij + tau_i b_ij`` of a block, :data:`MASKED` for entries that are not pairs.

        Args:
            s: similarities of the rows from ``start`` on, masked for equal samples; not modified.
            start: first row of the block.
            dim: axis of the candidates; 1: the rows are anchors, 0: the columns are anchors.
            scale: ``1 / tau`` of the anchors, broadcastable to ``s``.
        """
        stop = start + s.shape[0]
        rows, (by_row, by_column) = self.rows.part(start, stop), self.thresholds
        candidates = self.columns if dim == 1 else rows
        threshold = by_column if dim == 0 else None if by_row is None else by_row[start:stop]
        hardness = self.policy.hardness
        result = s.clone() if hardness is None else s * (hardness / scale + 1)
        if threshold is not None:
            seen = s
            if rows.guide is not None and self.columns.guide is not None:
                seen = rows.guide @ self.columns.guide.T
                result += 0 * seen  # NaN for a guide that is not finite, whose comparison would be False
            found = seen > threshold
            if self.policy.spare_extra:
                found.narrow(dim, candidates.inside, s.shape[dim] - candidates.inside).fill_(False)
            result.masked_fill_(found, MASKED)
        if rows.key is not None and self.columns.key is not None:
            result.masked_fill_(rows.key[:, None] != self.columns.key, MASKED)
        return result


def exp_(x: Tensor) -> Tensor:
    """Exponentiate in place; in float32 on a CPU, set results of at most :data:`SMALLEST` to zero.

    On a CPU an exponential that underflows, also one of :data:`MASKED`, takes up to 90 times as long as another one,
    and products with subnormal numbers are as slow. The arguments are logarithms of terms relative to the largest of
    their sum, or of pair weights, which add up to about 1: terms this small are below the rounding of their sum.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return x.exp_()
    return torch.threshold_(x.clamp_(min=SMALLEST_EXPONENT).exp_(), SMALLEST, 0.0)


def exponentials(
    logits: Tensor, s: Tensor | None, scale: Scalar, dim: int, shift: Tensor | None = None, out: Tensor | None = None
) -> Exponentials:
    """Return exponentials of a block's logits, and their moments if ``s`` is not ``None``.

    Args:
        logits: result of :meth:`Matrix.logits`.
        s: similarities without weights, for the moments.
        scale: ``1 / tau`` of the anchors, broadcastable to ``logits``.
        dim: axis of the candidates.
        shift: maximum of the anchors over earlier blocks.
        out: memory for the result.
    """
    excluded = (logits <= MASKED).sum(dim)  # before the exponentials overwrite ``out``, which may be ``logits``
    top = logits.amax(dim) if shift is None else torch.maximum(shift, logits.amax(dim))
    e = exp_(torch.sub(logits, top.unsqueeze(dim), out=out).mul_(scale))
    dot = None if s is None else (e * s).sum(dim)
    return Exponentials(e, top, dot, excluded)
