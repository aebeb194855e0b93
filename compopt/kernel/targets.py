r"""Positives that are expectations: several samples of one label, or candidates by the weights of a teacher.

.. math::
    \bar s_i = \sum_j T_{ij} s_{ij}, \qquad \sum_j T_{ij} = 1, \qquad h_{ij} = s_{ij} - \bar s_i

All other features are candidates, positives too. Since ``s_ij`` is linear in both features, only the mean positive
``sum_j T_ij z_j`` is kept of each anchor; blocks of ``T`` are computed twice, and none outlives its product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compopt.functional import Scalar
from compopt.kernel.corrected import CorrectedPairs
from compopt.kernel.pairs import PairOptions, scale_of
from compopt.kernel.source import Source
from compopt.pairs import PairPolicy

BLOCK_ROWS = 1024  # of T, where the caller has set no chunk_size


class Side(NamedTuple):
    """Samples along an axis of ``T``: teacher's features ``(Q, g)``, labels and keys ``(Q,)``, as far as there are."""

    teacher: Tensor | None
    label: Tensor | None
    key: Tensor | None


@dataclass(frozen=True)
class Targets:
    """The weights of candidates in an anchor's positive.

    Attributes:
        tau: temperature of a softmax over the teacher's similarities; ``None``: weights are proportional to these.
        teacher: its features by modality or view, ``(B, g)`` each; empty: labels decide.
        label: of all samples, ``(B,)``, or ``None``.
        key: of ``within=``, ``(B,)``, or ``None``: none belong together that differ in it.
        dtype: of the weights.
        inside: the positive is the log-mean-exp of similarities, whose weights are their softmax.
    """

    tau: float | None = None
    teacher: Sequence[Tensor] = ()
    label: Tensor | None = None
    key: Tensor | None = None
    dtype: torch.dtype = torch.float32
    inside: bool = False

    @classmethod
    def of(cls, policy: PairPolicy, values: Mapping[str, Tensor], keys: Mapping[str, Tensor]) -> Targets:
        """Return the targets of a call from what it brought, gathered and by name."""
        key, dtype = values.get("within1"), values["z1"].dtype
        if policy.targets is None:
            return cls(None, (), keys["labels"], key, dtype, policy.inside)
        tau = None if isinstance(policy.targets, str) else policy.targets
        teacher = [value for name, value in values.items() if name.startswith("teacher")]
        views = sum(name.startswith("z") for name in values)  # soft labels are those of all
        return cls(tau, teacher * views if tau is None else teacher, None, key, dtype)

    def side(self, views: Sequence[int], part: slice) -> Side:
        """Some views one after the other, of the samples ``part``."""
        teacher = torch.cat([self.teacher[view][part] for view in views]) if self.teacher else None
        label, key = (None if x is None else x[part].repeat(len(views)) for x in (self.label, self.key))
        return Side(teacher, label, key)

    def logits(self, rows: Side, columns: Side) -> Tensor:
        """``log T_ij`` up to a number per row, ``(P, Q)``."""
        if rows.teacher is None or columns.teacher is None:
            assert rows.label is not None and columns.label is not None
            result = rows.label.new_zeros(len(rows.label), len(columns.label), dtype=self.dtype)
            result.masked_fill_(rows.label[:, None] != columns.label, -torch.inf)
        else:
            result = rows.teacher @ columns.teacher.T
            result = result.log() if self.tau is None else result / self.tau
        if rows.key is not None and columns.key is not None:
            result.masked_fill_(rows.key[:, None] != columns.key, -torch.inf)
        return result


class TargetPairs(CorrectedPairs):
    """Statistics of all pairs, whose positives are expectations under :class:`Targets`.

    Args:
        source: features of two modalities or views.
        options: of the pairs.
        targets: the weights.

    Communicates: one all-gather of ``2 a`` floats per sample, beside that of the pairs.
    """

    def __init__(self, source: Source, options: PairOptions, targets: Targets) -> None:
        if targets.inside and options.moments:
            raise ValueError("inside=True takes temperatures that do not learn; leave it out, or fix tau")
        self._source, self._everyone, self._targets = source, source.everyone, targets
        self._rows = options.chunk_size or BLOCK_ROWS
        scale = scale_of(source.tau, source.own, len(source.everyone[0]), options.directions)
        scale = scale if isinstance(scale, Tensor) else source.own.new_full((), scale)
        self._scale = scale.expand(len(source.everyone[0]), options.directions)
        anchors = range(options.directions)
        views = range(len(source.everyone))
        self._candidates = [views if options.unimodal else (1 - view,) for view in anchors]
        expected, self._means, norms = zip(*map(self._expect, anchors), strict=True)
        shared = source.gather(torch.stack([*expected, *norms], dim=1))
        positive, self._log_norm = shared.split(options.directions, dim=1)
        positive = positive.repeat(1, len(views) - 1)  # the same for all ordered pairs of an anchor
        super().__init__(source.pairs(options._replace(positive=positive, whole=True)))
        self.log_sum = self._pairs.log_sum

    def _blocks(self, view: int, rows: slice, others: int, columns: slice) -> Iterator[tuple[slice, Tensor]]:
        """Parts of ``rows``, anchors of a view, and ``log T`` up to a number per row for candidates of another."""
        for start in range(rows.start, rows.stop, self._rows):
            part = slice(start, min(start + self._rows, rows.stop))
            logits = self._targets.logits(self._targets.side((view,), part), self._targets.side((others,), columns))
            if self._targets.inside:
                s = self._everyone[view][part] @ self._everyone[others][columns].T
                logits = logits + s * self._scale[part, view, None]
            offset = start - columns.start
            if view == others and -len(logits) < offset < logits.shape[1]:
                logits.diagonal(offset).fill_(-torch.inf)  # no feature is a candidate of itself
            yield part, logits

    def _expect(self, view: int) -> tuple[Tensor, Tensor, Tensor]:
        """Positives of the own anchors of a view, ``(b,)``.

        Returns:
            The similarity that stands for ``s_ii``; the mean ``sum_j T_ij z_j``, ``(b, d)``; the logarithm of what the
            weights were divided by.
        """
        everyone, place = slice(0, len(self._everyone[0])), self._source.place
        candidates = self._candidates[view]
        y = torch.cat([self._everyone[other] for other in candidates])
        by_view = [self._blocks(view, place, other, everyone) for other in candidates]
        means, norms, numbers = [y[:0]], [y[:0, 0]], [y[:0, 0]]
        for blocks in zip(*by_view, strict=True):
            logits = torch.cat([block for _, block in blocks], dim=1)
            norms.append(logits.logsumexp(1))
            means.append(logits.softmax(1) @ y)
            numbers.append((logits != -torch.inf).sum(1, dtype=y.dtype))
        mean, norm = torch.cat(means), torch.cat(norms)
        if self._targets.inside:
            return (norm - torch.cat(numbers).log()) / self._scale[place, view], mean, norm
        return torch.linalg.vecdot(self._source.own[view], mean), mean, norm

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        gradient, outside = self._pairs.gradients(alpha, coefficient, 0.0)
        pull = self.factor(coefficient) * positive_weight * torch.ones_like(self.positive)
        pull = self.sum_over_positives(pull).unsqueeze(2)
        for view, mean in enumerate(self._means):
            gradient[view] -= pull[self._source.place, view] * mean
            pulled = pull[:, view] * self._everyone[view]
            for other in self._candidates[view]:  # as candidates of everybody's anchors
                for rows, logits in self._blocks(view, slice(0, len(pulled)), other, self._source.place):
                    t = (logits - self._log_norm[rows, view, None]).exp()
                    gradient[other] -= t.T @ pulled[rows]
        return gradient, outside
