"""Effect of a policy of pairs on a block of similarities: some pairs are left out, others weigh more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from compopt.functional import Scalar
from compopt.kernel.blocks import MASKED, Exponentials, Extra, positives
from compopt.pairs import PairPolicy


class Axis(NamedTuple):
    """Features along the rows or the columns of a matrix of similarities, as a policy sees them.

    Attributes:
        guide: the guide's features, ``(Q, g)``, or ``None``.
        key: which candidates belong together, ``(Q,)``, or ``None``.
        name: of samples their position ``i`` in the batch, of what was mined for them ``~i``, ``(Q,)``, or ``None``.
        inside: how many are of the batch, the first ones; the others are further candidates.
    """

    guide: Tensor | None
    key: Tensor | None
    name: Tensor | None
    inside: int

    def part(self, start: int, stop: int) -> Axis:
        """Features ``start`` to ``stop``."""
        guide, key, name = (None if value is None else value[start:stop] for value in self[:3])
        return Axis(guide, key, name, min(max(0, self.inside - start), stop - start))


@dataclass(frozen=True)
class Selection:
    """A policy and what a call brings for it, of all ranks.

    Attributes:
        policy: the options.
        guide: features by which false negatives are found, by modality or view, ``(B, g)`` each; empty: the own ones.
        key: of ``within=``, ``(B,)``, or ``None``.
        extra: further candidates.
        threshold: of the anchors, ``(B, a)``, where it is not told by the positives of these features.
    """

    policy: PairPolicy
    guide: Sequence[Tensor] = ()
    key: Tensor | None = None
    extra: Extra | None = None
    threshold: Tensor | None = None

    @classmethod
    def of(cls, policy: PairPolicy, values: Mapping[str, Tensor], extra: Extra | None) -> Selection:
        """Return the selection of a call from what it brought, gathered and by name: ``guide1``, ..., ``within1``."""
        guide = [value for name, value in values.items() if name.startswith("guide")]
        return cls(policy, guide, values.get("within1"), extra)

    def thresholds(self, z: Sequence[Tensor], directions: int) -> Tensor | None:
        """Similarity above which a candidate of an anchor is a false negative, ``(B, a)``; ``z``: ``(B, d)`` each."""
        if self.threshold is not None or self.policy.false_negatives is None:
            return self.threshold
        return self.policy.threshold(
            mean_positive(positives(torch.stack([*(self.guide or z)]), directions), directions)
        )

    def of_sides(self, sides: Sequence[int]) -> Selection:
        """Return the selection for other modalities along the rows and the columns, without hardness."""
        return replace(self.without_hardness(), guide=[self.guide[view] for view in sides] if self.guide else ())

    def without_hardness(self) -> Selection:
        """Return the same with equal weights."""
        return replace(self, policy=replace(self.policy, hardness=None, importance="plain"))

    @property
    def guides(self) -> list[Tensor]:
        """All features of the guide."""
        return [*self.guide, *([] if self.extra is None or self.extra.guide is None else [self.extra.guide])]

    def axis(self, views: Sequence[int], own: slice, outside: slice | None = None) -> Axis:
        """Some views one after the other, of the samples ``own``, and then the further candidates ``outside``."""
        guides = [self.guide[view][own] for view in views] if self.guide else []
        keys = [] if self.key is None else [self.key[own]] * len(views)
        names: list[Tensor] = []
        if self.extra is not None and self.extra.owner is not None:
            names = [torch.arange(own.start, own.stop, device=self.extra.owner.device)] * len(views)
        if self.extra is not None and outside is not None:
            guides += [] if self.extra.guide is None else [self.extra.guide[outside]]
            keys += [] if self.extra.key is None else [self.extra.key[outside]]
            names += [] if self.extra.owner is None else [~self.extra.owner[outside]]
        guide, key, name = (torch.cat(parts) if parts else None for parts in (guides, keys, names))
        return Axis(guide, key, name, len(views) * (own.stop - own.start))


class Matrix(NamedTuple):
    """A policy on one matrix of similarities.

    Attributes:
        policy: the options.
        rows, columns: what is along the two axes.
        thresholds: of the anchors along the rows, ``(P, 1)``, and along the columns, ``(Q,)``; ``None`` without
            false negatives, or where there are no anchors.
    """

    policy: PairPolicy
    rows: Axis
    columns: Axis
    thresholds: tuple[Tensor | None, Tensor | None]

    def logits(self, s: Tensor, start: int, dim: int, scale: Scalar) -> Tensor:
        """``s_ij + tau_i b_ij`` of a block, :data:`MASKED` where there is no pair.

        Args:
            s: similarities of the rows from ``start`` on, masked where samples are the same; kept.
            start: first row of the block.
            dim: axis of the candidates: 1, the rows are anchors; 0, the columns are.
            scale: ``1 / tau`` of the anchors, broadcastable to ``s``.
        """
        stop = start + s.shape[0]
        rows, (by_row, by_column) = self.rows.part(start, stop), self.thresholds
        candidates = self.columns if dim == 1 else rows
        threshold = by_column if dim == 0 else None if by_row is None else by_row[start:stop]
        if self.policy.owned and rows.name is not None and self.columns.name is not None:
            mined = rows.name[:, None] == ~self.columns.name
            others, own = (s * (beta / scale + 1) for beta in self.policy.strengths)
            result = torch.where(mined, own, others)
        else:
            result = _hardened(s, self.policy.strengths, candidates.inside, dim, scale)
        if threshold is not None:
            seen = s
            if rows.guide is not None and self.columns.guide is not None:
                seen = rows.guide @ self.columns.guide.T
                result += 0 * seen  # a bad guide must not decide in silence
            found = seen > threshold
            if self.policy.spare_extra:
                found.narrow(dim, candidates.inside, s.shape[dim] - candidates.inside).fill_(False)
            result.masked_fill_(found, MASKED)
        if rows.key is not None and self.columns.key is not None:
            result.masked_fill_(rows.key[:, None] != self.columns.key, MASKED)
        return result


def mean_positive(positive: Tensor, directions: int) -> Tensor:
    """Mean similarity of each anchor to its positives, ``(B, A)`` -> ``(B, a)``; with two views to the only one."""
    return positive if positive.shape[1] == directions else positive.unflatten(1, (-1, directions)).mean(1)


def _hardened(s: Tensor, strengths: tuple[float, float], inside: int, dim: int, scale: Scalar) -> Tensor:
    """``s_ij (1 + beta_j tau_i)``, with another ``beta`` for the candidates from ``inside`` on."""
    if not any(strengths):
        return s.clone()
    parts = s.split([inside, s.shape[dim] - inside], dim)
    return torch.cat([part * (beta / scale + 1) for part, beta in zip(parts, strengths, strict=True)], dim)


def exponentials(
    logits: Tensor, s: Tensor | None, scale: Scalar, dim: int, shift: Tensor | None = None, out: Tensor | None = None
) -> Exponentials:
    """Return exponentials of a block's logits, and their moments if ``s`` is given.

    Args:
        logits: from :meth:`Matrix.logits`.
        s: similarities without weights, for the moments.
        scale: of the anchors, broadcastable to ``logits``.
        dim: axis of the candidates.
        shift: maximum of the anchors over earlier blocks.
        out: memory for the result.
    """
    excluded = (logits <= MASKED).sum(dim)  # before ``out``, which may be their memory
    top = logits.amax(dim) if shift is None else torch.maximum(shift, logits.amax(dim))
    e = torch.sub(logits, top.unsqueeze(dim), out=out).mul_(scale).exp_()
    dot = None if s is None else (e * s).sum(dim)
    return Exponentials(e, top, dot, excluded)
